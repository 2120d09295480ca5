// What attention's loops share: memory to work in, and which cells are worked on.
#pragma once

#include "attend.h"
#include "simd_rows.h"

namespace taut {
namespace TAUT_SET {

constexpr int kTileRows = 6;

#if defined(TAUT_LANES_512)
constexpr int kManyPages = 4;  // that a tile of rows holds sums of, where there are several tiles
#else
constexpr int kManyPages = 1;
#endif

template <int N>
struct Int {
  static constexpr int value = N;
};

// body(Int<rows of the tile>, its first row), tiles as even as they can be.
template <typename Body>
inline void tiles(int rows, const Body &body) {
  const int count = (rows + kTileRows - 1) / kTileRows;
  for (int tile = 0, first = 0; tile < count; ++tile) {
    const int size = rows / count + (tile < rows % count);
    switch (size) {
      case 1: body(Int<1>(), first); break;
      case 2: body(Int<2>(), first); break;
      case 3: body(Int<3>(), first); break;
      case 4: body(Int<4>(), first); break;
      case 5: body(Int<5>(), first); break;
      case 6: body(Int<6>(), first); break;
    }
    first += size;
  }
}

// A split's outputs into those before it.
inline void join(float *out, F32 added, float keep, float gain) {
  store(out, fma(added, splat(gain), load(out) * splat(keep)));
}

// Memory to work in, of attend_work_size.
struct Work {
  Work(float *memory, int rows, int dim) {
    const int64_t full = (rows + 15) / 16 * 16;
    const auto take = [&](int64_t floats) {
      float *piece = memory;
      memory += floats;
      return piece;
    };
    state = take(attend_state_size(rows, dim));
    q = take(full * dim);
    logits = take(full * kSplit);
    peak = take(full);
    total = take(full);
    keep = take(full);
    gain = take(full);
    keys = take(int64_t{kPackedPage} * dim);
    values = take(int64_t{kSplit} * dim);
    grids = take(attend_grids(dim));
  }

  float *state;
  float *q;              // [rows, dim], scaled
  float *logits;         // [rows, kSplit]; then their weights
  float *peak, *total;   // [rows], of this split
  float *keep, *gain;    // [rows]: what the sums before it and its own are multiplied with
  float *keys;           // [pages, dim, 16], of as many pages as are worked on at once
  float *values;         // [kSplit, dim]
  float *grids;          // steps and minima of a packed page's keys, or values
};

// The cells of a split in pages of 16, up to the last one that any of the queries sees.
struct Split {
  int32_t pages;
  int32_t cells;
  alignas(64) int32_t pos[kSplit];  // past every query's where no cell is held
  const char *k[kSplit / kPage + kManyPages];  // those after the split's are fetched ahead
  const char *v[kSplit / kPage];
  const float *bias[kSplit / kPage];
};

}  // namespace TAUT_SET
}  // namespace taut
