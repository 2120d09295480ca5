// Attention of a block of queries over splits of one kv head's cells.
//
// A page's keys are turned once, so that a register holds one dimension of sixteen cells: logits
// need no sums across lanes, and any number of queries share the work. Every logit is summed over
// the dimensions in order, every output over the cells in order: the tiles change no bit.
#include "attend.h"

#include "attend_packed.h"
#include "attend_split.h"
#include "cells.h"

namespace taut {
namespace TAUT_SET {

namespace {

#if defined(TAUT_LANES_512)
constexpr int kFewPages = 2;    // that a tile of rows holds sums of, where it is the only one
constexpr int kTileValues = 4;  // registers
#else
constexpr int kFewPages = 1;
constexpr int kTileValues = 1;
#endif
constexpr float kUnseen = -1e30f;   // finite: what shows nothing leaves the sums as they are
constexpr float kLowest = -1e29f;   // above it, so that e^(unseen - lowest) is 0

template <class Cells>
void look(const AttendTask &task, int32_t split, int32_t latest, Split *out) {
  const taut_cells &cells = *task.cells;
  split -= task.groups;
  const int32_t *table = task.table + split * (kSplit / kPage);
  const int32_t left = task.held - split * kSplit, held = left < kSplit ? left : kSplit;
  const int64_t page_bytes = int64_t{kPage} * cells.dim * Cells::kBytes;
  const auto *const keys = static_cast<const char *>(cells.k);
  const auto *const values = static_cast<const char *>(cells.v);
  out->pages = 0;
  int32_t page = 0;
  for (; page * kPage < held; ++page) {
    const int64_t id = table[page];
    int32_t earliest = INT32_MAX;
    for (int32_t c = 0; c < kPage; ++c) {
      const int32_t pos = page * kPage + c < held ? cells.pos[id * kPage + c] : INT32_MAX;
      out->pos[page * kPage + c] = pos;
      earliest = pos < earliest ? pos : earliest;
    }
    if (earliest <= latest) out->pages = page + 1;
    out->k[page] = keys + id * page_bytes;
    out->v[page] = values + id * page_bytes;
    out->bias[page] = cells.bias == nullptr ? nullptr : cells.bias + id * kPage;
  }
  out->cells = held < out->pages * kPage ? held : out->pages * kPage;
  for (const int32_t end = page + kManyPages; page < end; ++page) {
    out->k[page] = page * kPage < left ? keys + table[page] * page_bytes : out->k[page - 1];
  }
}

// Fetches `step` bytes of each page at `ahead` for a dimension.
template <int R, int P>
void logit_tile(const float *q, const float *keys, int dim, float *logits,
                const char *const *ahead, int step) {
  F32 sums[R][P];
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) sums[r][p] = zero();
  }
  for (int d = 0; d < dim; ++d) {
    F32 key[P];
    for (int p = 0; p < P; ++p) {
      key[p] = held(load(keys + (p * dim + d) * kLanes));
      __builtin_prefetch(ahead[p] + d * step, 0, 2);
    }
    for (int r = 0; r < R; ++r) {
      const F32 x = splat(q[r * dim + d]);
      for (int p = 0; p < P; ++p) sums[r][p] = fma(key[p], x, sums[r][p]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) store(logits + r * kSplit + p * kLanes, sums[r][p]);
  }
}

// Of turned keys, for pages from `page` on. The first tile fetches their values, as in logit_tile:
// the pages' memory is kept busy while the keys are worked on.
template <int P>
void turned_logits(const float *keys, int page, int rows, int dim, const Work &work,
                   const char *const *values, int step) {
  const char *here[P];
  for (int p = 0; p < P; ++p) here[p] = reinterpret_cast<const char *>(keys);
  tiles(rows, [&](auto size, int first) {
    logit_tile<decltype(size)::value, P>(
        work.q + first * dim, keys, dim, work.logits + first * kSplit + page * kPage,
        first == 0 ? values : here, first == 0 ? step : 0);
  });
}

template <class Cells, int P>
void page_logits(const Split &split, int page, int rows, int dim, const Work &work) {
  for (int p = page; p < page + P; ++p) {
    Cells::turn(split.k[p], dim, work.keys + (p - page) * dim * kLanes, split.k[p + P]);
  }
  turned_logits<P>(work.keys, page, rows, dim, work, split.v + page, kPage * Cells::kBytes);
}

// Of a packed page: for few rows from its codes, for more from its keys turned once for all.
void packed_logits(const AttendTask &task, int32_t group, int rows, int dim, const Work &work) {
  const taut_packed &pool = *task.cells->packed;
  const uint8_t *values = packed_codes(pool, pool.v, task.packed[group], dim);
  if (code_logits(task, group, rows, dim, work, values)) return;
  turn_packed(task, group, dim, work);
  const int step = 2 * pool.bits;  // bytes of a channel of 16 values
  for (int page = 0; page < kPackedPage / kPage; page += kManyPages) {
    const char *ahead[kManyPages];
    for (int p = 0; p < kManyPages; ++p) {
      ahead[p] = reinterpret_cast<const char *>(values) + (page + p) * dim * step;
    }
    turned_logits<kManyPages>(work.keys + page * dim * kLanes, page, rows, dim, work, ahead, step);
  }
}

template <class Cells>
void all_logits(const Split &split, int rows, int dim, const Work &work) {
  int page = 0;
  if (rows > kTileRows) {
    for (; page + kManyPages <= split.pages; page += kManyPages) {
      page_logits<Cells, kManyPages>(split, page, rows, dim, work);
    }
  }
  for (; page + kFewPages <= split.pages; page += kFewPages) {
    page_logits<Cells, kFewPages>(split, page, rows, dim, work);
  }
  for (; page < split.pages; ++page) page_logits<Cells, 1>(split, page, rows, dim, work);
}

// Biases come in, cells that the row's query doesn't see go out: the greatest logit.
float mask(const Split &split, int32_t q_pos, float *logits) {
  const I32 own = splat_i(q_pos);
  F32 most = splat(kUnseen);
  for (int p = 0; p < split.pages; ++p) {
    F32 x = load(logits + p * kLanes);
    if (split.bias[p] != nullptr) x = x + load(split.bias[p]);
    x = where_le(load_i(split.pos + p * kLanes), own, x, splat(kUnseen));
    store(logits + p * kLanes, x);
    most = max(most, x);
  }
  return greatest(most);
}

// A row's logits become e^(logit - peak): their sum.
float weigh(const Split &split, float peak, float *logits) {
  const F32 base = splat(peak > kLowest ? peak : kLowest);
  F32 sums = zero();
  for (int p = 0; p < split.pages; ++p) {
    const F32 weight = exp(load(logits + p * kLanes) - base);
    store(logits + p * kLanes, weight);
    sums = sums + weight;
  }
  return sum(sums);
}

// Takes a split's peak and total into the state; its outputs are to be joined by keep and gain.
void join_totals(const AttendState &state, int rows, const float *peak, const float *total,
                 float *keep, float *gain) {
  for (int r = 0; r < rows; r += kLanes) {
    const F32 before = load(state.peak + r), now = load(peak + r), top = max(before, now);
    const F32 kept = exp(before - top), gained = exp(now - top);
    store(keep + r, kept);
    store(gain + r, gained);
    store(state.peak + r, top);
    store(state.total + r, fma(load(total + r), gained, load(state.total + r) * kept));
  }
}

template <class Cells, int R, int N>
void value_tile(const Split &split, int dim, int at, int first, const Work &work, float *out) {
  const float *weights = work.logits + first * kSplit;
  F32 sums[R][N];
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) sums[r][n] = zero();
  }
  for (int page = 0; page < split.pages; ++page) {
    const int left = split.cells - page * kPage, cells = left < kPage ? left : kPage;
    for (int c = 0; c < cells; ++c) {
      F32 value[N];
      for (int n = 0; n < N; ++n) {
        value[n] = held(Cells::load(split.v[page], c * dim + at + n * kLanes));
      }
      for (int r = 0; r < R; ++r) {
        const F32 weight = splat(weights[r * kSplit + page * kPage + c]);
        for (int n = 0; n < N; ++n) sums[r][n] = fma(value[n], weight, sums[r][n]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    float *row = out + (first + r) * dim + at;
    for (int n = 0; n < N; ++n) {
      join(row + n * kLanes, sums[r][n], work.keep[first + r], work.gain[first + r]);
    }
  }
}

template <class Cells>
void all_values(const Split &split, int rows, int dim, const Work &work, float *out) {
  tiles(rows, [&](auto size, int first) {
    constexpr int R = decltype(size)::value;
    int at = 0;
    for (; at + kTileValues * kLanes <= dim; at += kTileValues * kLanes) {
      value_tile<Cells, R, kTileValues>(split, dim, at, first, work, out);
    }
    for (; at < dim; at += kLanes) value_tile<Cells, R, 1>(split, dim, at, first, work, out);
  });
}

void packed_values(const AttendTask &task, int32_t group, Split *split, int rows, int dim,
                   const Work &work, float *out) {
  if (code_values(task, group, split->cells, rows, dim, work, out)) return;
  unpack_packed(task, group, dim, work, split);
  all_values<CellsF32>(*split, rows, dim, work, out);
}

// The split's values as floats, for more rows than two tiles: each tile reads them all.
template <class Cells>
void unpack_values(Split *split, int dim, float *values) {
  for (int page = 0; page < split->pages; ++page) {
    float *to = values + page * kPage * dim;
    const int left = split->cells - page * kPage, cells = left < kPage ? left : kPage;
    for (int i = 0; i < cells * dim; i += kLanes) store(to + i, Cells::load(split->v[page], i));
    split->v[page] = reinterpret_cast<const char *>(to);
  }
}

void clear(const AttendState &state, int rows, int dim) {
  for (int i = 0; i < rows * dim; i += kLanes) store(state.out + i, zero());
  for (int r = 0; r < rows; r += kLanes) {
    store(state.peak + r, splat(kUnseen));
    store(state.total + r, zero());
  }
}

void finish(const AttendTask &task, const AttendState &state) {
  const int dim = task.cells->dim;
  for (int query = 0, row = 0; query < task.queries; ++query) {
    float *out = task.out + query * task.stride;
    for (int head = 0; head < task.group; ++head, ++row, out += dim) {
      const float total = state.total[row];
      const F32 scale = splat(total == 0.0f ? 0.0f : 1.0f / total);
      for (int i = 0; i < dim; i += kLanes) {
        store(out + i, load(state.out + row * dim + i) * scale);
      }
    }
  }
}

template <class Cells>
void attend_as(const AttendTask &task, float *part, float *memory) {
  const int rows = task.queries * task.group, dim = task.cells->dim;
  const Work work(memory, rows, dim);
  const AttendState state = attend_state(part == nullptr ? work.state : part, rows, dim);
  clear(state, rows, dim);
  clear({nullptr, work.peak, work.total}, rows, 0);  // rows that fill up a register too
  const F32 scale = splat(1.0f / sqrtf(static_cast<float>(dim)));
  int32_t latest = INT32_MIN;
  for (int query = 0; query < task.queries; ++query) {
    for (int i = 0; i < task.group * dim; i += kLanes) {
      store(work.q + query * task.group * dim + i, load(task.q + query * task.stride + i) * scale);
    }
    latest = task.q_pos[query] > latest ? task.q_pos[query] : latest;
  }
  for (int32_t s = task.from; s < task.to; ++s) {
    Split split;
    const bool packed = s < task.groups;
    if (packed) {
      look_packed(task, s, latest, &split);
    } else {
      look<Cells>(task, s, latest, &split);
    }
    if (split.pages == 0) continue;
    if (packed) {
      packed_logits(task, s, rows, dim, work);
    } else {
      all_logits<Cells>(split, rows, dim, work);
    }
    // one loop after the other: a row's sum across lanes waits, the next row's logits needn't
    for (int r = 0; r < rows; ++r) {
      work.peak[r] = mask(split, task.q_pos[r / task.group], work.logits + r * kSplit);
    }
    for (int r = 0; r < rows; ++r) {
      work.total[r] = weigh(split, work.peak[r], work.logits + r * kSplit);
    }
    join_totals(state, rows, work.peak, work.total, work.keep, work.gain);
    if (packed) {
      packed_values(task, s, &split, rows, dim, work, state.out);
    } else if (Cells::kBytes < 4 && rows > 2 * kTileRows) {
      unpack_values<Cells>(&split, dim, work.values);
      all_values<CellsF32>(split, rows, dim, work, state.out);
    } else {
      all_values<Cells>(split, rows, dim, work, state.out);
    }
  }
  if (part == nullptr) finish(task, state);
}

}  // namespace

void attend(const AttendTask &task, float *part, float *work) {
  if (task.cells->format == TAUT_BF16) {
    attend_as<CellsBF16>(task, part, work);
  } else {
    attend_as<CellsF32>(task, part, work);
  }
}

void attend_join(const AttendTask &task, float *parts, int32_t count, float *memory) {
  const int rows = task.queries * task.group, dim = task.cells->dim;
  const Work work(memory, rows, dim);
  const AttendState state = attend_state(work.state, rows, dim);
  clear(state, rows, dim);
  for (int32_t s = 0; s < count; ++s) {
    const AttendState part = attend_state(parts + s * attend_state_size(rows, dim), rows, dim);
    join_totals(state, rows, part.peak, part.total, work.keep, work.gain);
    for (int r = 0; r < rows; ++r) {
      for (int i = 0; i < dim; i += kLanes) {
        const int at = r * dim + i;
        join(state.out + at, load(part.out + at), work.keep[r], work.gain[r]);
      }
    }
  }
  finish(task, state);
}

}  // namespace TAUT_SET
}  // namespace taut
