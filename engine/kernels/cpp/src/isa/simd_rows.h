// More of simd.h's lanes: parts of a register, selection, and sixteen rows turned into columns.
#pragma once

#include "simd.h"

namespace taut {
namespace TAUT_SET {

#if defined(TAUT_LANES_512)

static inline __mmask16 first_lanes(int count) {
  return static_cast<__mmask16>((1u << count) - 1);
}

// The first `count` numbers (up to 16) in the first lanes, zeros in the others.
static inline F32 load_part(const float *p, int count) {
  return {_mm512_maskz_loadu_ps(first_lanes(count), p)};
}
static inline void store_part(float *p, F32 x, int count) {
  _mm512_mask_storeu_ps(p, first_lanes(count), x.v);
}
// x where a <= b, otherwise y.
static inline F32 where_le(I32 a, I32 b, F32 x, F32 y) {
  return {_mm512_mask_blend_ps(_mm512_cmple_epi32_mask(a.v, b.v), y.v, x.v)};
}
static inline I32 max_i(I32 a, I32 b) { return {_mm512_max_epi32(a.v, b.v)}; }
// x, loaded once: compilers would rather load it again for each use.
static inline F32 held(F32 x) {
  asm("" : "+v"(x.v));
  return x;
}

// Four columns of 32 bits of 16 rows that are `stride` bytes apart: out[c] has a lane for each row.
static inline void columns(const char *p, int64_t stride, I32 *out) {
  __m512i rows[4];  // rows i, 4 + i, 8 + i, 12 + i side by side
  for (int i = 0; i < 4; ++i) {
    const auto at = [&](int row) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p + row * stride));
    };
    rows[i] = _mm512_castsi128_si512(at(i));
    rows[i] = _mm512_inserti32x4(rows[i], at(4 + i), 1);
    rows[i] = _mm512_inserti32x4(rows[i], at(8 + i), 2);
    rows[i] = _mm512_inserti32x4(rows[i], at(12 + i), 3);
  }
  const __m512i a = _mm512_unpacklo_epi32(rows[0], rows[1]);
  const __m512i b = _mm512_unpacklo_epi32(rows[2], rows[3]);
  const __m512i c = _mm512_unpackhi_epi32(rows[0], rows[1]);
  const __m512i d = _mm512_unpackhi_epi32(rows[2], rows[3]);
  out[0] = {_mm512_unpacklo_epi64(a, b)};
  out[1] = {_mm512_unpackhi_epi64(a, b)};
  out[2] = {_mm512_unpacklo_epi64(c, d)};
  out[3] = {_mm512_unpackhi_epi64(c, d)};
}

// The upper halves of the first `count` lanes.
static inline void store_bf16(uint16_t *p, I32 rounded, int count) {
  _mm256_mask_storeu_epi16(p, first_lanes(count), _mm512_cvtepi32_epi16(right<16>(rounded).v));
}

#elif defined(TAUT_SET_AVX2)

static inline F32 load_part(const float *p, int count) {
  float v[kLanes] = {};
  for (int i = 0; i < count; ++i) v[i] = p[i];
  return load(v);
}
static inline void store_part(float *p, F32 x, int count) {
  float v[kLanes];
  store(v, x);
  for (int i = 0; i < count; ++i) p[i] = v[i];
}
static inline F32 where_le(I32 a, I32 b, F32 x, F32 y) {
  const __m256 not_a = _mm256_castsi256_ps(_mm256_cmpgt_epi32(a.a, b.a));
  const __m256 not_b = _mm256_castsi256_ps(_mm256_cmpgt_epi32(a.b, b.b));
  return {_mm256_blendv_ps(x.a, y.a, not_a), _mm256_blendv_ps(x.b, y.b, not_b)};
}
static inline I32 max_i(I32 x, I32 y) {
  return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)};
}

static inline F32 held(F32 x) {
  asm("" : "+x"(x.a), "+x"(x.b));
  return x;
}

static inline void half_columns(const char *p, int64_t stride, __m256i *out) {
  __m256i rows[4];
  for (int i = 0; i < 4; ++i) {
    const auto at = [&](int row) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p + row * stride));
    };
    rows[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(at(i)), at(4 + i), 1);
  }
  const __m256i a = _mm256_unpacklo_epi32(rows[0], rows[1]);
  const __m256i b = _mm256_unpacklo_epi32(rows[2], rows[3]);
  const __m256i c = _mm256_unpackhi_epi32(rows[0], rows[1]);
  const __m256i d = _mm256_unpackhi_epi32(rows[2], rows[3]);
  out[0] = _mm256_unpacklo_epi64(a, b);
  out[1] = _mm256_unpackhi_epi64(a, b);
  out[2] = _mm256_unpacklo_epi64(c, d);
  out[3] = _mm256_unpackhi_epi64(c, d);
}
static inline void columns(const char *p, int64_t stride, I32 *out) {
  __m256i a[4], b[4];
  half_columns(p, stride, a);
  half_columns(p + 8 * stride, stride, b);
  for (int c = 0; c < 4; ++c) out[c] = {a[c], b[c]};
}

static inline void store_bf16(uint16_t *p, I32 rounded, int count) {
  int32_t v[kLanes];
  store_i(v, right<16>(rounded));
  for (int i = 0; i < count; ++i) p[i] = static_cast<uint16_t>(v[i]);
}

#else

static inline F32 load_part(const float *p, int count) {
  F32 out = zero();
  for (int i = 0; i < count; ++i) out.v[i] = p[i];
  return out;
}
static inline void store_part(float *p, F32 x, int count) {
  for (int i = 0; i < count; ++i) p[i] = x.v[i];
}
static inline F32 where_le(I32 a, I32 b, F32 x, F32 y) {
  TAUT_EACH(F32, a.v[i] <= b.v[i] ? x.v[i] : y.v[i]);
}
static inline I32 max_i(I32 a, I32 b) { TAUT_EACH(I32, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
static inline F32 held(F32 x) { return x; }

static inline void columns(const char *p, int64_t stride, I32 *out) {
  for (int row = 0; row < kLanes; ++row) {
    int32_t four[4];
    memcpy(four, p + row * stride, sizeof four);
    for (int c = 0; c < 4; ++c) out[c].v[row] = four[c];
  }
}

static inline void store_bf16(uint16_t *p, I32 rounded, int count) {
  for (int i = 0; i < count; ++i) {
    p[i] = static_cast<uint16_t>(static_cast<uint32_t>(rounded.v[i]) >> 16);
  }
}

#endif

}  // namespace TAUT_SET
}  // namespace taut
