// Attention of a block of queries over splits of one kv head's cells.
//
// A page's keys are turned once, so that a register holds one dimension of sixteen cells: logits
// need no sums across lanes, and any number of queries share the work. Every logit is summed over
// the dimensions in order, every output over the cells in order: the tiles change no bit.
#include "attend.h"

#include "cells.h"

namespace taut {
namespace TAUT_SET {

namespace {

#if defined(TAUT_LANES_512)
constexpr int kFewPages = 2;   // that a tile of rows holds sums of
constexpr int kManyPages = 4;  // the same where there are several tiles
constexpr int kTileValues = 4;  // registers
#else
constexpr int kFewPages = 1;
constexpr int kManyPages = 1;
constexpr int kTileValues = 1;
#endif
constexpr int kTileRows = 6;

constexpr float kUnseen = -1e30f;   // finite: what shows nothing leaves the sums as they are
constexpr float kLowest = -1e29f;   // above it, so that e^(unseen - lowest) is 0

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
    keys = take(int64_t{kManyPages} * kPage * dim);
    values = take(int64_t{kSplit} * dim);
  }

  float *state;
  float *q;              // [rows, dim], scaled
  float *logits;         // [rows, kSplit]; then their weights
  float *peak, *total;   // [rows], of this split
  float *keep, *gain;    // [rows]: what the sums before it and its own are multiplied with
  float *keys;           // [kManyPages, dim, 16]
  float *values;         // [kSplit, dim]
};

// The cells of a split, up to the last page that any of the queries sees.
struct Split {
  int32_t pages;
  int32_t cells;
  alignas(64) int32_t pos[kSplit];  // past every query's where no cell is held
  const char *k[kSplit / kPage + kManyPages];  // those after the split's are fetched ahead
  const char *v[kSplit / kPage];
  const float *bias[kSplit / kPage];
};

template <class Cells>
void look(const AttendTask &task, int32_t split, int32_t latest, Split *out) {
  const taut_cells &cells = *task.cells;
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

// The first tile fetches the values: the pages' memory is kept busy while the keys are worked on.
template <class Cells, int P>
void page_logits(const Split &split, int page, int rows, int dim, const Work &work) {
  for (int p = page; p < page + P; ++p) {
    Cells::turn(split.k[p], dim, work.keys + (p - page) * dim * kLanes, split.k[p + P]);
  }
  const char *here[P];
  for (int p = 0; p < P; ++p) here[p] = reinterpret_cast<const char *>(work.keys);
  tiles(rows, [&](auto size, int first) {
    logit_tile<decltype(size)::value, P>(
        work.q + first * dim, work.keys, dim, work.logits + first * kSplit + page * kPage,
        first == 0 ? split.v + page : here, first == 0 ? kPage * Cells::kBytes : 0);
  });
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

inline void join(float *out, F32 added, float keep, float gain) {
  store(out, fma(added, splat(gain), load(out) * splat(keep)));
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
    look<Cells>(task, s, latest, &split);
    if (split.pages == 0) continue;
    all_logits<Cells>(split, rows, dim, work);
    // one loop after the other: a row's sum across lanes waits, the next row's logits needn't
    for (int r = 0; r < rows; ++r) {
      work.peak[r] = mask(split, task.q_pos[r / task.group], work.logits + r * kSplit);
    }
    for (int r = 0; r < rows; ++r) {
      work.total[r] = weigh(split, work.peak[r], work.logits + r * kSplit);
    }
    join_totals(state, rows, work.peak, work.total, work.keep, work.gain);
    if (Cells::kBytes < 4 && rows > 2 * kTileRows) {
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
