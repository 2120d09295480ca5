// Sixteen lanes, whatever the machine: one AVX-512 register, two of AVX2, or plain code.
//
// Everything is static and in the namespace of its instruction set: a function that two sets shared
// would be linked once, with the instructions of either. For the same reason the sources in here
// include nothing of C++'s library.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__)
#define TAUT_LANES_512
#endif
#if defined(__AVX512VNNI__)
#define TAUT_DOT_I8
#endif

namespace taut {
namespace TAUT_SET {

constexpr int kLanes = 16;

#if defined(TAUT_LANES_512)

struct F32 {
  __m512 v;
};
struct I32 {
  __m512i v;
};

static inline F32 zero() { return {_mm512_setzero_ps()}; }
static inline F32 splat(float x) { return {_mm512_set1_ps(x)}; }
static inline F32 load(const float *p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float *p, F32 x) { _mm512_storeu_ps(p, x.v); }
static inline F32 operator+(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline F32 operator-(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline F32 operator*(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline F32 operator/(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }

static inline I32 splat_i(int32_t x) { return {_mm512_set1_epi32(x)}; }
static inline I32 load_i(const void *p) { return {_mm512_loadu_si512(p)}; }
static inline void store_i(void *p, I32 x) { _mm512_storeu_si512(p, x.v); }
static inline I32 operator+(I32 a, I32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
static inline I32 operator&(I32 a, I32 b) { return {_mm512_and_si512(a.v, b.v)}; }
template <int bits>
static inline I32 left(I32 a) { return {_mm512_slli_epi32(a.v, bits)}; }
template <int bits>
static inline I32 right(I32 a) { return {_mm512_srli_epi32(a.v, bits)}; }  // zeros come in
static inline F32 as_float(I32 a) { return {_mm512_castsi512_ps(a.v)}; }
static inline I32 as_int(F32 a) { return {_mm512_castps_si512(a.v)}; }
static inline F32 to_float(I32 a) { return {_mm512_cvtepi32_ps(a.v)}; }
static inline I32 to_int(F32 a) { return {_mm512_cvtps_epi32(a.v)}; }  // nearest, ties to even

// 16 numbers of bfloat16.
static inline F32 load_bf16(const uint16_t *p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}

#elif defined(TAUT_SET_AVX2)

struct F32 {
  __m256 a, b;
};
struct I32 {
  __m256i a, b;
};

static inline F32 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline F32 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline F32 load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float *p, F32 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
static inline F32 operator+(F32 x, F32 y) {
  return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
static inline F32 operator-(F32 x, F32 y) {
  return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
static inline F32 operator*(F32 x, F32 y) {
  return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
static inline F32 operator/(F32 x, F32 y) {
  return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}
static inline F32 fma(F32 x, F32 y, F32 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
static inline F32 max(F32 x, F32 y) {
  return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
static inline F32 min(F32 x, F32 y) {
  return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)};
}

static inline I32 splat_i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline I32 load_i(const void *p) {
  const __m256i *q = static_cast<const __m256i *>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
static inline void store_i(void *p, I32 x) {
  __m256i *q = static_cast<__m256i *>(p);
  _mm256_storeu_si256(q, x.a);
  _mm256_storeu_si256(q + 1, x.b);
}
static inline I32 operator+(I32 x, I32 y) {
  return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
static inline I32 operator&(I32 x, I32 y) {
  return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)};
}
template <int bits>
static inline I32 left(I32 x) {
  return {_mm256_slli_epi32(x.a, bits), _mm256_slli_epi32(x.b, bits)};
}
template <int bits>
static inline I32 right(I32 x) {
  return {_mm256_srli_epi32(x.a, bits), _mm256_srli_epi32(x.b, bits)};
}
static inline F32 as_float(I32 x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
static inline I32 as_int(F32 x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
static inline F32 to_float(I32 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
static inline I32 to_int(F32 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }

static inline F32 load_bf16(const uint16_t *p) {
  const __m128i *q = reinterpret_cast<const __m128i *>(p);
  const __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128(q));
  const __m256i b = _mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1));
  return as_float(left<16>(I32{a, b}));
}

#else

struct F32 {
  float v[kLanes];
};
struct I32 {
  int32_t v[kLanes];
};

#define TAUT_EACH(Out, expression)                        \
  do {                                                    \
    Out out;                                              \
    for (int i = 0; i < kLanes; ++i) out.v[i] = expression; \
    return out;                                           \
  } while (0)

static inline F32 splat(float x) { TAUT_EACH(F32, x); }
static inline F32 zero() { return splat(0.0f); }
static inline F32 load(const float *p) { TAUT_EACH(F32, p[i]); }
static inline void store(float *p, F32 x) { memcpy(p, x.v, sizeof x.v); }
static inline F32 operator+(F32 a, F32 b) { TAUT_EACH(F32, a.v[i] + b.v[i]); }
static inline F32 operator-(F32 a, F32 b) { TAUT_EACH(F32, a.v[i] - b.v[i]); }
static inline F32 operator*(F32 a, F32 b) { TAUT_EACH(F32, a.v[i] * b.v[i]); }
static inline F32 operator/(F32 a, F32 b) { TAUT_EACH(F32, a.v[i] / b.v[i]); }
static inline F32 fma(F32 a, F32 b, F32 c) { TAUT_EACH(F32, a.v[i] * b.v[i] + c.v[i]); }
static inline F32 max(F32 a, F32 b) { TAUT_EACH(F32, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
static inline F32 min(F32 a, F32 b) { TAUT_EACH(F32, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }

static inline I32 splat_i(int32_t x) { TAUT_EACH(I32, x); }
static inline I32 load_i(const void *p) {
  I32 out;
  memcpy(out.v, p, sizeof out.v);
  return out;
}
static inline void store_i(void *p, I32 x) { memcpy(p, x.v, sizeof x.v); }
static inline I32 operator+(I32 a, I32 b) { TAUT_EACH(I32, a.v[i] + b.v[i]); }
static inline I32 operator&(I32 a, I32 b) { TAUT_EACH(I32, a.v[i] & b.v[i]); }
template <int bits>
static inline I32 left(I32 a) {
  TAUT_EACH(I32, static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) << bits));
}
template <int bits>
static inline I32 right(I32 a) {
  TAUT_EACH(I32, static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) >> bits));
}
static inline F32 as_float(I32 a) {
  F32 out;
  memcpy(out.v, a.v, sizeof out.v);
  return out;
}
static inline I32 as_int(F32 a) {
  I32 out;
  memcpy(out.v, a.v, sizeof out.v);
  return out;
}
static inline F32 to_float(I32 a) { TAUT_EACH(F32, static_cast<float>(a.v[i])); }
static inline I32 to_int(F32 a) { TAUT_EACH(I32, static_cast<int32_t>(nearbyintf(a.v[i]))); }

static inline F32 load_bf16(const uint16_t *p) {
  I32 bits;
  for (int i = 0; i < kLanes; ++i) bits.v[i] = static_cast<int32_t>(uint32_t{p[i]} << 16);
  return as_float(bits);
}

#endif

// Sums and maxima of the lanes, always in the same order: halves onto each other.
#if defined(TAUT_LANES_512)
static inline float sum(F32 x) { return _mm512_reduce_add_ps(x.v); }
static inline float greatest(F32 x) { return _mm512_reduce_max_ps(x.v); }
#else
static inline float sum(F32 x) {
  float v[kLanes];
  store(v, x);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) v[i] += v[i + half];
  }
  return v[0];
}

static inline float greatest(F32 x) {
  float v[kLanes];
  store(v, x);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) v[i] = v[i] > v[i + half] ? v[i] : v[i + half];
  }
  return v[0];
}
#endif

// exp within 2 units in the last place; 0 below -87.7, that of 88 above it. NaN stays NaN.
static inline F32 exp(F32 x) {
  const F32 clipped = max(splat(-88.0f), min(splat(88.0f), x));
  const I32 n = to_int(clipped * splat(1.44269504f));
  const F32 whole = to_float(n);
  // ln 2 in two parts, the first exact in its leading bits
  const F32 r = fma(whole, splat(2.12194440e-4f), fma(whole, splat(-0.693359375f), clipped));
  F32 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p * r, r, r + splat(1.0f));
  return p * as_float(left<23>(n + splat_i(127)));
}

}  // namespace TAUT_SET
}  // namespace taut
