// Weights as tiles of bfloat16, one step of 32 inputs after the other, and the activations that meet
// them, in the same order of inputs.
//
// Every weight is a bfloat16: an int8 code has 7 bits, an NVFP4 code times its block's scale 6. Codes
// become half floats, which the scale multiplies; their bits three places down are those of a
// bfloat16 of 2^-112 times the value. A row of activations is lifted by a power of two to make up
// for it as far as it goes, its sums for the rest: no power of two rounds anything.
#pragma once

#include "matmul_panels.h"
#include "simd_codes.h"
#include "simd_rows.h"

namespace taut {
namespace TAUT_SET {

constexpr int kStep = 2 * kBlock;  // inputs of a tile
constexpr int kBlockTile = 512;    // bytes of a tile that one block fills

template <int format>
constexpr bool kLow = format != TAUT_BF16;  // whether tiles hold 2^kDown times the weights
constexpr int kDown = -112;

// x * 2^power, of any size between.
static inline F32 shifted(F32 x, float power) {
  return {_mm512_scalef_ps(x.v, splat(power).v)};
}

// The power of two that a row is lifted by: 64, or less if its greatest number is beyond 2^36.
static inline float lift_of(const float *x, int ins) {
  I32 most = splat_i(0);
  for (int i = 0; i < ins; i += kLanes) {
    const F32 part = load_part(x + i, ins - i < kLanes ? ins - i : kLanes);
    most = max_i(most, as_int(part) & splat_i(INT32_MAX));
  }
  const int exponent = (greatest_i(most) >> 23) - 127;
  return static_cast<float>(exponent > 36 ? 100 - exponent : 64);
}

static inline __m512i bf16_of_half(__m512h half) {
  const __m512i moved = _mm512_srai_epi16(_mm512_castph_si512(half), 3);
  return _mm512_and_si512(moved, _mm512_set1_epi16(static_cast<int16_t>(0x8fff)));
}

// A block of 16 inputs of one panel -> eight lines of 16 pairs, from `out` on.
template <int format>
struct BlockTile;

template <>
struct BlockTile<TAUT_BF16> {
  // Which input is at the i-th place of every eight.
  static constexpr int kOrder[8] = {0, 1, 2, 3, 4, 5, 6, 7};
  static inline void write(const uint8_t *values, const uint8_t *, char *out) {
    for (int line = 0; line < 8; ++line) store_i(out + 64 * line, load_i(values + 64 * line));
  }
};

template <>
struct BlockTile<TAUT_INT8> {
  static constexpr int kOrder[8] = {0, 2, 1, 3, 4, 6, 5, 7};
  static inline void write(const uint8_t *values, const uint8_t *, char *out) {
    // 1024 + a byte, as a half float, is 0x6400 | the byte
    const __m512i thousand = _mm512_set1_epi16(0x6400), low = _mm512_set1_epi16(0xff);
    const __m512h zero = _mm512_castsi512_ph(_mm512_set1_epi16(0x6480));  // 1024 + kCodeOffset
    for (int quad = 0; quad < 4; ++quad) {
      const __m512i codes = load_i(values + 64 * quad).v;
      const __m512i even = _mm512_ternarylogic_epi32(codes, low, thousand, 0xea);
      const __m512i odd = _mm512_or_si512(_mm512_srli_epi16(codes, 8), thousand);
      char *const lines = out + 128 * quad;
      store_i(lines, {bf16_of_half(_mm512_sub_ph(_mm512_castsi512_ph(even), zero))});
      store_i(lines + 64, {bf16_of_half(_mm512_sub_ph(_mm512_castsi512_ph(odd), zero))});
    }
  }
};

// 256 times E2M1 of each code, as half floats; a fifth bit of the index doesn't count.
alignas(64) static const uint16_t kE2m1Half[32] = {
    0x0000, 0x5800, 0x5c00, 0x5e00, 0x6000, 0x6200, 0x6400, 0x6600,
    0x8000, 0xd800, 0xdc00, 0xde00, 0xe000, 0xe200, 0xe400, 0xe600,
    0x0000, 0x5800, 0x5c00, 0x5e00, 0x6000, 0x6200, 0x6400, 0x6600,
    0x8000, 0xd800, 0xdc00, 0xde00, 0xe000, 0xe200, 0xe400, 0xe600};

template <>
struct BlockTile<TAUT_NVFP4> {
  static constexpr int kOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  static inline void write(const uint8_t *values, const uint8_t *scales, char *out) {
    // an E4M3's bits, moved up, are those of a half float of a 256th of it
    const I32 bytes = load_u8(scales);
    const __m512i twice = _mm512_or_si512(left<7>(bytes).v, left<23>(bytes).v);
    const __m512h scale = _mm512_castsi512_ph(twice);
    const __m512i table = _mm512_load_si512(kE2m1Half);
    const auto line = [&](__m512i codes) TAUT_INLINE {
      const __m512i half = _mm512_permutexvar_epi16(codes, table);
      store_i(out, {bf16_of_half(_mm512_mul_ph(_mm512_castsi512_ph(half), scale))});
      out += 64;
    };
    for (int eight = 0; eight < 2; ++eight) {
      const __m512i codes = load_i(values + 64 * eight).v;
      line(codes);
      line(_mm512_srli_epi16(codes, 4));
      line(_mm512_srli_epi16(codes, 8));
      line(_mm512_srli_epi16(codes, 12));
    }
  }
};

template <int format>
struct WeightTiles {
  const uint8_t *values;
  const uint8_t *scales;
  int64_t blocks;

  explicit WeightTiles(const Matmul &m)
      : values(static_cast<const uint8_t *>(m.weight->values)),
        scales(m.weight->blocks),
        blocks(m.blocks) {}

  // Whether panels are tiles already.
  bool ready() const { return format == TAUT_BF16 && blocks % 2 == 0; }
  const char *stored(int panel) const {
    return reinterpret_cast<const char *>(values + panel * blocks * kBlockBytes[format]);
  }

  // What a step of a panel is made of, soon to be read.
  void fetch(int panel, int step) const {
    const int64_t at = panel * blocks + 2 * step;
    const uint8_t *here = values + at * kBlockBytes[format];
    for (int line = 0; line < 2 * kBlockBytes[format]; line += 64) __builtin_prefetch(here + line);
    if (format == TAUT_NVFP4) __builtin_prefetch(scales + at * kPanel);
  }

  void write(int panel, int step, char *out) const {
    const int64_t at = panel * blocks + 2 * step;
    block(at, out);
    if (2 * step + 1 < blocks) {
      block(at + 1, out + kBlockTile);
    } else {
      memset(out + kBlockTile, 0, kBlockTile);
    }
  }

 private:
  void block(int64_t at, char *out) const {
    BlockTile<format>::write(values + at * kBlockBytes[format], scales + at * kPanel, out);
  }
};

// 32 activations of a row -> the bfloat16 next to each, and the one next to what that leaves.
template <int format>
static inline void split(F32 a, F32 b, float lift, char *upper, char *lower) {
  alignas(64) static constexpr struct Order {
    uint16_t at[32];
    constexpr Order() : at() {
      for (int i = 0; i < 32; ++i) {
        at[i] = static_cast<uint16_t>(i / 8 * 8 + BlockTile<format>::kOrder[i % 8]);
      }
    }
  } order{};
  const __m512i places = _mm512_load_si512(order.at);
  const auto rounded = [](F32 x, F32 y) {
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(y.v, x.v));
  };
  if (kLow<format>) {
    a = shifted(a, lift);
    b = shifted(b, lift);
  }
  alignas(64) uint16_t near[32];
  const __m512i first = rounded(a, b);
  _mm512_store_si512(near, first);
  const __m512i second = rounded(a - load_bf16(near), b - load_bf16(near + kLanes));
  store_i(upper, {_mm512_permutexvar_epi16(places, first)});
  store_i(lower, {_mm512_permutexvar_epi16(places, second)});
}

}  // namespace TAUT_SET
}  // namespace taut
