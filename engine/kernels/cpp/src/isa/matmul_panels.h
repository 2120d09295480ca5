// What both kinds of matrix kernels share: unrolling, tiles of several sizes, and what becomes of
// the sums.
#pragma once

#include "matmul.h"
#include "simd.h"

#define TAUT_INLINE __attribute__((always_inline))

namespace taut {
namespace TAUT_SET {

template <int k>
struct Index {
  static constexpr int value = k;
};

// f(Index<0>()) to f(Index<n - 1>()).
template <int n, int k = 0, class F>
static inline TAUT_INLINE void unroll(const F &f) {
  if constexpr (k < n) {
    f(Index<k>());
    unroll<n, k + 1>(f);
  }
}

// The sizes of tiles that kernels exist for: f(Index<size>()) with the first that holds `rows`.
template <int first, int... others, class F>
static inline void with_size(int rows, const F &f) {
  if constexpr (sizeof...(others) > 0) {
    if (rows > first) return with_size<others...>(rows, f);
  }
  f(Index<first>());
}

static inline F32 silu(F32 x) { return x / (splat(1.0f) + exp(zero() - x)); }

static inline void put(const Matmul &m, int row, int column, int columns, F32 value) {
  float *y = m.y + row * m.y_stride + column;
  const int count = columns - column;
  if (count >= kPanel) {
    store(y, m.then == TAUT_ADD ? load(y) + value : value);
    return;
  }
  float some[kPanel];
  store(some, value);
  for (int i = 0; i < count; ++i) y[i] = m.then == TAUT_ADD ? y[i] + some[i] : some[i];
}

// sums [one panel or two][size][16] of the rows from `row` on -> y.
__attribute__((noinline, noclone)) static void finish(const Matmul &m, const float *sums, int size,
                                                      int panel, int panels, int row, int rows) {
  const float *scales = m.weight->scales;
  const float *bias = m.weight->bias;
  for (int r = 0; r < rows; ++r) {
    F32 out[2];
    for (int p = 0; p < panels; ++p) {
      const int64_t at = int64_t{panel + p} * kPanel;
      out[p] = load(sums + (p * size + r) * kPanel);
      if (scales) out[p] = out[p] * load(scales + at);
      if (bias) out[p] = out[p] + load(bias + at);
    }
    if (m.then == TAUT_SWIGLU) {
      put(m, row + r, panel / 2 * kPanel, m.weight->outs / 2, silu(out[0]) * out[1]);
    } else {
      for (int p = 0; p < panels; ++p) {
        put(m, row + r, (panel + p) * kPanel, m.weight->outs, out[p]);
      }
    }
  }
}

}  // namespace TAUT_SET
}  // namespace taut
