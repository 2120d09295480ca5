// Attention's work as its kernels see it: a block of one kv head's queries, and some of its cells.
#pragma once

#include <stdint.h>

#include "taut.h"

namespace taut {

constexpr int32_t kPage = 16;
constexpr int32_t kPackedPage = 64;
// Cells that are weighed together; what comes after them is joined by an online softmax. A result's
// bits depend on this number, so it is the same whatever else runs. A packed page is a split too.
constexpr int32_t kSplit = 128;
// Queries of a block, times the query heads that share a kv head: the cells are read once for all.
constexpr int32_t kBlockRows = 72;

// Row r is query r / group and, of the kv head's query heads, the one numbered r % group.
struct AttendTask {
  const taut_cells *cells;
  const int32_t *table;   // the kv head's plain pages
  int32_t held;           // its plain cells
  const int32_t *packed;  // its packed pages, which come first,
  const int32_t *fills;   // the cells that each has,
  int32_t groups;         // and how many there are
  int32_t from, to;       // splits to read
  int32_t queries;
  int32_t group;
  const int32_t *q_pos;  // [queries]
  const float *q;        // the first query's first head of the group
  float *out;            // likewise
  int64_t stride;        // floats from a query to the next, in both
};

// The state of an online softmax over cells read so far, in one piece of memory.
struct AttendState {
  float *out;    // [rows, dim], to be divided by total
  float *peak;   // [rows]: the greatest logit
  float *total;  // [rows]
};

// In floats; filled up so that whole registers of rows may be read.
static inline int64_t attend_state_size(int32_t rows, int32_t dim) {
  const int64_t full = (rows + 15) / 16 * 16;
  return full * (dim + 2);
}

static inline AttendState attend_state(float *memory, int32_t rows, int32_t dim) {
  const int64_t full = (rows + 15) / 16 * 16;
  return {memory, memory + full * dim, memory + full * (dim + 1)};
}

// Floats of a packed page's grids: steps and minima of keys, or of values for 16 channels at least.
static inline int64_t attend_grids(int32_t dim) { return 2 * kPackedPage / 16 * dim; }

// Floats that the kernel needs to work in.
static inline int64_t attend_work_size(int32_t rows, int32_t dim) {
  const int64_t full = (rows + 15) / 16 * 16;
  return attend_state_size(rows, dim) + full * (dim + kSplit + 4) +
         (kPackedPage + kSplit) * dim + attend_grids(dim);
}

}  // namespace taut
