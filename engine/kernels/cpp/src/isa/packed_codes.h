// Codes of packed cells, to floats.
//
// A number is minimum + step * code. The product is exact in float32, so the floats are the
// definition's own (engine/kernels/packed.py), bit for bit.
#pragma once

#include "simd_codes.h"

namespace taut {
namespace TAUT_SET {

// 16 numbers of float16, and 16 of 16 bits without a sign.
#if defined(TAUT_LANES_512)
static inline F32 load_f16(const uint16_t *p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)))};
}
static inline I32 load_u16(const uint8_t *p) {
  return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)))};
}
#elif defined(TAUT_SET_AVX2)
static inline F32 load_f16(const uint16_t *p) {
  const __m128i *q = reinterpret_cast<const __m128i *>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
static inline I32 load_u16(const uint8_t *p) {
  const __m128i *q = reinterpret_cast<const __m128i *>(p);
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), _mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1))};
}
#else
static inline I32 load_u16(const uint8_t *p) {
  uint16_t v[kLanes];
  memcpy(v, p, sizeof v);
  TAUT_EACH(I32, v[i]);
}
static inline F32 load_f16(const uint16_t *p) {  // finite ones
  const I32 half = load_u16(reinterpret_cast<const uint8_t *>(p));
  const F32 size = as_float(left<13>(half & splat_i(0x7fff))) * splat(0x1p112f);
  return as_float(as_int(size) + left<16>(half & splat_i(0x8000)));
}
#endif

// Four codes in each lane, the first in its lowest bits.
template <int bits>
static inline I32 load_codes(const uint8_t *p) {
  if (bits == 8) return load_i(p);
  return bits == 4 ? load_u16(p) : load_u8(p);
}

alignas(64) static const float kCodes2[16] = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3};
alignas(64) static const float kCodes4[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                              8, 9, 10, 11, 12, 13, 14, 15};

// The numbers of a grid by the codes in the lanes' lowest bits; other bits don't count.
template <int bits>
struct Levels {
#if defined(TAUT_LANES_512)
  static constexpr bool kTable = bits <= 4;
#else
  static constexpr bool kTable = false;
#endif

  // Of one step and one minimum.
  Levels(float step, float least) : step(splat(step)), least(splat(least)) {
    if (kTable) table = fma(load(bits == 2 ? kCodes2 : kCodes4), this->step, this->least);
  }

  // Of each lane's `which`-th code.
  template <int which>
  F32 at(I32 codes) const {
    const I32 own = right<which * bits>(codes);
#if defined(TAUT_LANES_512)
    if (kTable) return {_mm512_permutexvar_ps(own.v, table.v)};
#endif
    return fma(to_float(own & splat_i((1 << bits) - 1)), step, least);
  }

  F32 step, least;
  F32 table;  // the number of the code in an index' lowest bits
};

}  // namespace TAUT_SET
}  // namespace taut
