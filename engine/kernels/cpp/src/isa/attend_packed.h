// Packed pages: codes of a split's cells to floats, in registers for few rows of queries, and for
// more in memory to work in, once for all of them.
#pragma once

#include "attend_split.h"
#include "packed_codes.h"

namespace taut {
namespace TAUT_SET {

// A packed page's keys as floats [dim, 16] for each 16 cells; grids as load_grids leaves them.
template <int bits>
void turn_codes(const uint8_t *codes, const float *grids, int dim, float *keys) {
  for (int d = 0; d < dim; ++d) {
    const Levels<bits> levels(grids[d], grids[dim + d]);
    const I32 four = load_codes<bits>(codes + d * kLanes * bits / 2);
    float *to = keys + d * kLanes;
    store(to, levels.template at<0>(four));
    store(to + dim * kLanes, levels.template at<1>(four));
    store(to + 2 * dim * kLanes, levels.template at<2>(four));
    store(to + 3 * dim * kLanes, levels.template at<3>(four));
  }
}

// Four cells' values of a run of channels, [4, dim]; as many bytes at `ahead` are fetched.
template <int bits>
void unpack_four(const uint8_t *codes, const float *steps, const float *least, int channels,
                 int dim, float *values, const uint8_t *ahead) {
  const Levels<bits> levels[4] = {
      {steps[0], least[0]}, {steps[1], least[1]}, {steps[2], least[2]}, {steps[3], least[3]}};
  for (int d = 0; d < channels; d += kLanes) {
    const int at = d * bits / 2;
    __builtin_prefetch(ahead + at, 0, 3);
    const I32 four = load_codes<bits>(codes + at);
    store(values + d, levels[0].template at<0>(four));
    store(values + dim + d, levels[1].template at<1>(four));
    store(values + 2 * dim + d, levels[2].template at<2>(four));
    store(values + 3 * dim + d, levels[3].template at<3>(four));
  }
}

// body(Int<bits>).
template <typename Body>
inline void of_bits(int bits, const Body &body) {
  switch (bits) {
    case 2: body(Int<2>()); break;
    case 4: body(Int<4>()); break;
    case 8: body(Int<8>()); break;
  }
}

// A page's codes in the pool of keys, or of values.
static inline const uint8_t *packed_codes(const taut_packed &pool, const uint8_t *codes, int64_t id,
                                          int dim) {
  return codes + id * kPackedPage * dim * pool.bits / 8;
}

// Its grids to floats: steps, then minima.
static inline void load_grids(const uint16_t *pool, int64_t id, int each, float *grids) {
  const uint16_t *grid = pool + id * 2 * each;
  for (int i = 0; i < 2 * each; i += kLanes) store(grids + i, load_f16(grid + i));
}

// Where the keys' codes of the page after the group-th are; its own where there is none.
static inline const uint8_t *next_keys(const AttendTask &task, int32_t group, int dim) {
  const taut_packed &pool = *task.cells->packed;
  const int32_t next = group + 1 < task.groups ? group + 1 : group;
  return packed_codes(pool, pool.k, task.packed[next], dim);
}

// The `group`-th packed page, but for its values: unpack_packed gives them.
static inline void look_packed(const AttendTask &task, int32_t group, int32_t latest, Split *out) {
  const taut_packed &pool = *task.cells->packed;
  const int32_t held = task.fills[group];
  const int64_t first = int64_t{task.packed[group]} * kPackedPage;
  out->pages = 0;
  for (int32_t page = 0; page < kPackedPage / kPage; ++page) {
    int32_t earliest = INT32_MAX;
    for (int32_t c = page * kPage; c < (page + 1) * kPage; ++c) {
      out->pos[c] = c < held ? pool.pos[first + c] : INT32_MAX;
      earliest = out->pos[c] < earliest ? out->pos[c] : earliest;
    }
    if (earliest <= latest) out->pages = page + 1;
    out->bias[page] = pool.bias == nullptr ? nullptr : pool.bias + first + page * kPage;
  }
  out->cells = held < out->pages * kPage ? held : out->pages * kPage;
}

// The page's keys into work.keys.
static inline void turn_packed(const AttendTask &task, int32_t group, int dim, const Work &work) {
  const taut_packed &pool = *task.cells->packed;
  const int64_t id = task.packed[group];
  load_grids(pool.k_grid, id, dim, work.grids);
  of_bits(pool.bits, [&](auto bits) {
    turn_codes<decltype(bits)::value>(packed_codes(pool, pool.k, id, dim), work.grids, dim,
                                      work.keys);
  });
}

// Its values into work.values, to which `split` points then; the next page's keys are fetched.
static inline void unpack_packed(const AttendTask &task, int32_t group, int dim, const Work &work,
                                 Split *split) {
  const taut_packed &pool = *task.cells->packed;
  const int64_t id = task.packed[group];
  const int all = pool.runs * kPackedPage, channels = dim / pool.runs;
  const uint8_t *codes = packed_codes(pool, pool.v, id, dim);
  const uint8_t *ahead = next_keys(task, group, dim);
  load_grids(pool.v_grid, id, all, work.grids);
  of_bits(pool.bits, [&](auto bits) {
    for (int cell = 0; cell < split->cells; cell += 4) {
      for (int run = 0; run < pool.runs; ++run) {
        constexpr int kBits = decltype(bits)::value;
        const float *steps = work.grids + run * kPackedPage + cell;
        const int at = run * channels, byte = (cell / 4 * dim + at) * kBits / 2;
        unpack_four<kBits>(codes + byte, steps, steps + all, channels, dim,
                           work.values + cell * dim + at, ahead + byte);
      }
    }
  });
  for (int page = 0; page < split->pages; ++page) {
    split->v[page] = reinterpret_cast<const char *>(work.values + page * kPage * dim);
  }
}

#if defined(TAUT_LANES_512)

// Rows that read codes themselves: up to two tiles, as there are the registers for it.
constexpr int kCodeRows = 2 * kTileRows;

// Logits of R rows, from a packed page's codes: the same sums as those of turned keys. Fetches the
// bytes of 64 values at `ahead` for a channel.
template <int bits, int R>
void code_logit_tile(const uint8_t *codes, const float *grids, const float *q, int dim,
                     float *logits, const uint8_t *ahead) {
  F32 sums[R][4];
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < 4; ++p) sums[r][p] = zero();
  }
  for (int d = 0; d < dim; ++d) {
    const int at = d * kLanes * bits / 2;
    __builtin_prefetch(ahead + at, 0, 3);
    const Levels<bits> levels(grids[d], grids[dim + d]);
    const I32 four = load_codes<bits>(codes + at);
    const F32 key[4] = {levels.template at<0>(four), levels.template at<1>(four),
                        levels.template at<2>(four), levels.template at<3>(four)};
    for (int r = 0; r < R; ++r) {
      const F32 x = splat(q[r * dim + d]);
      for (int p = 0; p < 4; ++p) sums[r][p] = fma(key[p], x, sums[r][p]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < 4; ++p) store(logits + r * kSplit + p * kLanes, sums[r][p]);
  }
}

template <int which, int bits, int R, int N>
inline void add_cell(const Levels<bits> &levels, const I32 *four, const float *weights,
                     F32 (&sums)[R][N]) {
  for (int n = 0; n < N; ++n) {
    const F32 value = levels.template at<which>(four[n]);
    for (int r = 0; r < R; ++r) sums[r][n] = fma(value, splat(weights[r * kSplit]), sums[r][n]);
  }
}

// Joins R rows' outputs, over N registers of channels that share a grid, with those of some cells.
template <int bits, int R, int N>
void code_value_tile(const uint8_t *codes, const float *steps, const float *least, int cells,
                     int dim, int first, const Work &work, float *out, const uint8_t *ahead) {
  const float *weights = work.logits + first * kSplit;
  F32 sums[R][N];
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) sums[r][n] = zero();
  }
  for (int cell = 0; cell < cells; cell += 4) {
    I32 four[N];
    for (int n = 0; n < N; ++n) {
      const int at = (cell / 4 * dim + n * kLanes) * bits / 2;
      four[n] = load_codes<bits>(codes + at);
      __builtin_prefetch(ahead + at, 0, 3);
    }
    const auto add = [&](auto which) {
      constexpr int i = decltype(which)::value;
      if (cell + i >= cells) return;
      const Levels<bits> levels(steps[cell + i], least[cell + i]);
      add_cell<i, bits, R, N>(levels, four, weights + cell + i, sums);
    };
    add(Int<0>());
    add(Int<1>());
    add(Int<2>());
    add(Int<3>());
  }
  for (int r = 0; r < R; ++r) {
    float *row = out + (first + r) * dim;
    for (int n = 0; n < N; ++n) {
      join(row + n * kLanes, sums[r][n], work.keep[first + r], work.gain[first + r]);
    }
  }
}

// Logits of few rows from the page's codes; those of its values are at `values`. False, and nothing
// done, where there are too many rows.
static inline bool code_logits(const AttendTask &task, int32_t group, int rows, int dim,
                               const Work &work, const uint8_t *values) {
  if (rows > kCodeRows) return false;
  const taut_packed &pool = *task.cells->packed;
  const int64_t id = task.packed[group];
  load_grids(pool.k_grid, id, dim, work.grids);
  of_bits(pool.bits, [&](auto bits) {
    tiles(rows, [&](auto size, int first) {
      code_logit_tile<decltype(bits)::value, decltype(size)::value>(
          packed_codes(pool, pool.k, id, dim), work.grids, work.q + first * dim, dim,
          work.logits + first * kSplit, values);
    });
  });
  return true;
}

// And their outputs; the next page's keys are fetched.
static inline bool code_values(const AttendTask &task, int32_t group, int cells, int rows, int dim,
                               const Work &work, float *out) {
  if (rows > kCodeRows) return false;
  const taut_packed &pool = *task.cells->packed;
  const int64_t id = task.packed[group];
  const int all = pool.runs * kPackedPage, channels = dim / pool.runs;
  const uint8_t *codes = packed_codes(pool, pool.v, id, dim);
  const uint8_t *ahead = next_keys(task, group, dim);
  load_grids(pool.v_grid, id, all, work.grids);
  of_bits(pool.bits, [&](auto bits) {
    constexpr int kBits = decltype(bits)::value;
    tiles(rows, [&](auto size, int first) {
      constexpr int R = decltype(size)::value;
      for (int at = 0; at < dim;) {
        const int left = channels - at % channels, byte = at * kBits / 2;
        const float *steps = work.grids + at / channels * kPackedPage;
        if (left >= 4 * kLanes) {
          code_value_tile<kBits, R, 4>(codes + byte, steps, steps + all, cells, dim, first, work,
                                       out + at, ahead + byte);
          at += 4 * kLanes;
        } else {
          code_value_tile<kBits, R, 1>(codes + byte, steps, steps + all, cells, dim, first, work,
                                       out + at, ahead + byte);
          at += kLanes;
        }
      }
    });
  });
  return true;
}

#else

static inline bool code_logits(const AttendTask &, int32_t, int, int, const Work &,
                               const uint8_t *) {
  return false;
}
static inline bool code_values(const AttendTask &, int32_t, int, int, int, const Work &, float *) {
  return false;
}

#endif

}  // namespace TAUT_SET
}  // namespace taut
