// How cells are stored: what attention and append know of a format. A page is [16][dim] numbers.
#pragma once

#include "simd_rows.h"

namespace taut {
namespace TAUT_SET {

// Four lines of memory that are soon needed.
static inline void fetch(const char *p) {
  for (int line = 0; line < 4; ++line) __builtin_prefetch(p + 64 * line, 0, 3);
}

// Each format has the bytes of a number, and
//   turn   16 keys, [16][dim], to floats [dim][16], fetching the page at `ahead` on the way
//   load   16 numbers from the index-th on
//   save   `count` numbers, at most 16, to the index-th on; NaN and infinity stay what they are
struct CellsF32 {
  static constexpr int kBytes = 4;

  static inline void turn(const char *keys, int dim, float *out, const char *ahead) {
    for (int d = 0; d < dim; d += 4) {
      fetch(ahead + d * kLanes * kBytes);
      I32 four[4];
      columns(keys + 4 * d, int64_t{4} * dim, four);
      for (int i = 0; i < 4; ++i) store(out + (d + i) * kLanes, as_float(four[i]));
    }
  }
  static inline F32 load(const char *numbers, int64_t index) {
    return taut::TAUT_SET::load(reinterpret_cast<const float *>(numbers) + index);
  }
  static inline void save(char *numbers, int64_t index, F32 x, int count) {
    store_part(reinterpret_cast<float *>(numbers) + index, x, count);
  }
};

struct CellsBF16 {
  static constexpr int kBytes = 2;

  static inline void turn(const char *keys, int dim, float *out, const char *ahead) {
    for (int d = 0; d < dim; d += 8) {
      fetch(ahead + d * kLanes * kBytes);
      I32 pairs[4];
      columns(keys + 2 * d, int64_t{2} * dim, pairs);
      for (int i = 0; i < 4; ++i) {
        float *two = out + (d + 2 * i) * kLanes;
        store(two, as_float(left<16>(pairs[i])));
        store(two + kLanes, as_float(pairs[i] & splat_i(static_cast<int32_t>(0xffff0000u))));
      }
    }
  }
  static inline F32 load(const char *numbers, int64_t index) {
    return load_bf16(reinterpret_cast<const uint16_t *>(numbers) + index);
  }
  static inline void save(char *numbers, int64_t index, F32 x, int count) {
    const I32 bits = as_int(x);
    const I32 odd = right<16>(bits) & splat_i(1);
    const F32 rounded = as_float(bits + splat_i(0x7fff) + odd);  // nearest, ties to even
    const I32 size = bits & splat_i(0x7fffffff);
    const F32 kept = where_le(size, splat_i(0x7f800000), rounded, splat(NAN));
    store_bf16(reinterpret_cast<uint16_t *>(numbers) + index, as_int(kept), count);
  }
};

}  // namespace TAUT_SET
}  // namespace taut
