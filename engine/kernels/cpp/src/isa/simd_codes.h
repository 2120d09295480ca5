// Lanes of small integers: codes of weights, and sums of products of bytes.
#pragma once

#include "simd.h"

namespace taut {
namespace TAUT_SET {

// 2 * E2M1 + kCodeShift of each of the 16 codes, a byte without a sign.
constexpr int kCodeShift = 12;
alignas(16) static const uint8_t kTwice[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                               12, 11, 10, 9,  8,  6,  4,  0};
alignas(64) static const float kE2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                            -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

#if defined(__AVX2__)
static inline __m128i twice() { return _mm_load_si128(reinterpret_cast<const __m128i *>(kTwice)); }
#endif

#if defined(TAUT_LANES_512)

static inline I32 operator-(I32 a, I32 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
static inline I32 operator^(I32 a, I32 b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int bits>
static inline I32 right_signed(I32 a) { return {_mm512_srai_epi32(a.v, bits)}; }
// 16 bytes without a sign.
static inline I32 load_u8(const uint8_t *p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)))};
}
static inline void store_i8(int8_t *p, I32 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtepi32_epi8(a.v));
}
static inline int32_t sum_i(I32 a) { return _mm512_reduce_add_epi32(a.v); }
static inline int32_t greatest_i(I32 a) { return _mm512_reduce_max_epi32(a.v); }

// E2M1 of the codes in the lanes' lowest four bits; other bits don't count.
static inline F32 e2m1(I32 code) {
  return {_mm512_permutexvar_ps(code.v, _mm512_load_ps(kE2m1))};
}

#elif defined(TAUT_SET_AVX2)

static inline I32 operator-(I32 x, I32 y) {
  return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)};
}
static inline I32 operator^(I32 x, I32 y) {
  return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)};
}
template <int bits>
static inline I32 right_signed(I32 x) {
  return {_mm256_srai_epi32(x.a, bits), _mm256_srai_epi32(x.b, bits)};
}
static inline I32 load_u8(const uint8_t *p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(bytes, bytes))};
}
static inline void store_i8(int8_t *p, I32 x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  const __m128i bytes =
      _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i *>(p), bytes);
}

static inline F32 e2m1(I32 code) {
  const __m256 table = _mm256_load_ps(kE2m1);  // by three bits, the fourth is the sign
  const I32 sign = left<28>(code) & splat_i(INT32_MIN);
  const I32 size{_mm256_castps_si256(_mm256_permutevar8x32_ps(table, code.a)),
                 _mm256_castps_si256(_mm256_permutevar8x32_ps(table, code.b))};
  return as_float(size ^ sign);
}

#else

static inline I32 operator-(I32 a, I32 b) { TAUT_EACH(I32, a.v[i] - b.v[i]); }
static inline I32 operator^(I32 a, I32 b) { TAUT_EACH(I32, a.v[i] ^ b.v[i]); }
template <int bits>
static inline I32 right_signed(I32 a) { TAUT_EACH(I32, a.v[i] >> bits); }
static inline I32 load_u8(const uint8_t *p) { TAUT_EACH(I32, p[i]); }
static inline void store_i8(int8_t *p, I32 a) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(a.v[i]);
}
static inline F32 e2m1(I32 code) {
  TAUT_EACH(F32, kE2m1[code.v[i] & 15]);
}

#endif

#if !defined(TAUT_LANES_512)

static inline int32_t sum_i(I32 a) {
  int32_t v[kLanes], all = 0;
  store_i(v, a);
  for (int i = 0; i < kLanes; ++i) all += v[i];
  return all;
}
static inline int32_t greatest_i(I32 a) {
  int32_t v[kLanes];
  store_i(v, a);
  int32_t most = v[0];
  for (int i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
  return most;
}

#endif

// E4M3 scales without a sign, times `factor`, a power of 2.
static inline F32 e4m3(const uint8_t *p, float factor) {
  return as_float(left<20>(load_u8(p))) * splat(0x1p120f * factor);
}

// The same four bytes in each lane.
static inline I32 splat_bytes(const int8_t *p) {
  int32_t four;
  memcpy(&four, p, sizeof four);
  return splat_i(four);
}

// -- dot products of four bytes in each lane ------------------------------------------------------

// Weights from 0 to 24 (Narrow), or any code + 128 (Wide); `dot` adds each lane's sum of weight *
// activation, four activations for all lanes. It counts a weight as too great by kShift, which the
// caller subtracts.
#if defined(TAUT_LANES_512)

struct Narrow {
  static constexpr int kShift = kCodeShift;
  __m512i v;
};

static inline Narrow narrow(I32 nibbles) {
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(twice()), nibbles.v)};
}

#if defined(TAUT_DOT_I8)

struct Wide {
  static constexpr int kShift = 128;
  __m512i v;
};

static inline Wide wide(I32 stored) { return {stored.v}; }
template <class Weights>
static inline I32 dot(I32 sum, Weights w, I32 four) {
  return {_mm512_dpbusd_epi32(sum.v, w.v, four.v)};
}

#else

struct Wide {
  static constexpr int kShift = 0;
  __m512i v;  // as signed bytes
};

static inline Wide wide(I32 stored) {
  return {_mm512_xor_si512(stored.v, _mm512_set1_epi8(-128))};
}
static inline I32 add_pairs(I32 sum, __m512i a, __m512i b) {
  const __m512i pairs = _mm512_maddubs_epi16(a, b);
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
}
static inline I32 dot(I32 sum, Narrow w, I32 four) { return add_pairs(sum, w.v, four.v); }
// |x| * (w with x's sign): two such products fit into 16 bits.
static inline I32 dot(I32 sum, Wide w, I32 four) {
  const __m512i turned =
      _mm512_mask_sub_epi8(w.v, _mm512_movepi8_mask(four.v), _mm512_setzero_si512(), w.v);
  return add_pairs(sum, _mm512_abs_epi8(four.v), turned);
}

#endif

#elif defined(TAUT_SET_AVX2)

struct Narrow {
  static constexpr int kShift = kCodeShift;
  __m256i a, b;
};
struct Wide {
  static constexpr int kShift = 0;
  __m256i a, b;  // as signed bytes
};

static inline Narrow narrow(I32 nibbles) {
  const __m256i table = _mm256_broadcastsi128_si256(twice());
  return {_mm256_shuffle_epi8(table, nibbles.a), _mm256_shuffle_epi8(table, nibbles.b)};
}
static inline Wide wide(I32 stored) {
  const __m256i flip = _mm256_set1_epi8(-128);
  return {_mm256_xor_si256(stored.a, flip), _mm256_xor_si256(stored.b, flip)};
}
static inline __m256i products(__m256i a, __m256i b) {
  return _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1));
}
static inline I32 dot(I32 sum, Narrow w, I32 four) {
  return sum + I32{products(w.a, four.a), products(w.b, four.b)};
}
// |x| * (w with x's sign): two such products fit into 16 bits.
static inline I32 dot(I32 sum, Wide w, I32 four) {
  return sum + I32{products(_mm256_abs_epi8(four.a), _mm256_sign_epi8(w.a, four.a)),
                   products(_mm256_abs_epi8(four.b), _mm256_sign_epi8(w.b, four.b))};
}

#else

struct Narrow {
  static constexpr int kShift = kCodeShift;
  uint8_t v[4 * kLanes];
};
struct Wide {
  static constexpr int kShift = 128;
  uint8_t v[4 * kLanes];
};

static inline Narrow narrow(I32 nibbles) {
  Narrow out;
  memcpy(out.v, nibbles.v, sizeof out.v);
  for (uint8_t &code : out.v) code = kTwice[code];
  return out;
}
static inline Wide wide(I32 stored) {
  Wide out;
  memcpy(out.v, stored.v, sizeof out.v);
  return out;
}
template <class Weights>
static inline I32 dot(I32 sum, Weights w, I32 four) {
  int8_t x[4 * kLanes];
  memcpy(x, four.v, sizeof x);
  for (int i = 0; i < kLanes; ++i) {
    for (int b = 0; b < 4; ++b) sum.v[i] += w.v[4 * i + b] * x[b];
  }
  return sum;
}

#endif

}  // namespace TAUT_SET
}  // namespace taut
