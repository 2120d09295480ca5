// Weights to NVFP4: what engine/kernels/nvfp4.py defines, bit for bit. Any instruction set computes
// the same, and the compiler makes lanes of these loops with the least of them.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "formats.h"
#include "taut.h"

namespace {

using taut::kBlock;

float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

void read(const void *values, int32_t format, int64_t block, float *out) {
  if (format == TAUT_BF16) {
    const uint16_t *halves = static_cast<const uint16_t *>(values) + block * kBlock;
    for (int i = 0; i < kBlock; ++i) out[i] = float_of(uint32_t{halves[i]} << 16);
  } else {
    std::memcpy(out, static_cast<const float *>(values) + block * kBlock, kBlock * sizeof *out);
  }
}

// x from 0 on -> E4M3, nearest, ties to even, 448 at most.
uint8_t e4m3_of(float x) {
  x = std::min(x, 448.0f);
  if (x < 0x1p-6f) return static_cast<uint8_t>(std::lrint(x * 512.0f));
  const uint32_t bits = bits_of(x);
  return static_cast<uint8_t>(((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - ((127 - 7) << 3));
}

float of_e4m3(uint8_t byte) { return float_of(uint32_t{byte} << 20) * 0x1p120f; }

// E2M1, nearest, ties to even, 6 beyond.
int32_t e2m1_of(float x) {
  const float size = std::fabs(x);
  const int32_t code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) +
                       (size > 2.5f) + (size >= 3.5f) + (size > 5.0f);
  return code | static_cast<int32_t>(bits_of(x) >> 28 & 8);
}

}  // namespace

void taut_nvfp4_peaks(const void *values, int32_t format, int64_t blocks, float *peaks) {
  for (int64_t b = 0; b < blocks; ++b) {
    float x[kBlock];
    read(values, format, b, x);
    int32_t most = 0;  // bits but the sign's are ordered as integers, those of NaN last
    for (int i = 0; i < kBlock; ++i) {
      const int32_t size = static_cast<int32_t>(bits_of(x[i]) & 0x7fffffff);
      most = size > most ? size : most;
    }
    peaks[b] = float_of(static_cast<uint32_t>(most));
  }
}

void taut_nvfp4_encode(const void *values, int32_t format, int64_t blocks, const float *peaks,
                       float inverse, float tensor, uint8_t *scales, uint8_t *codes) {
  for (int64_t b = 0; b < blocks; ++b, codes += kBlock / 2) {
    float x[kBlock];
    int32_t four[kBlock];
    read(values, format, b, x);
    scales[b] = std::max<uint8_t>(e4m3_of(peaks[b] / 6.0f * inverse), 1);
    const float scale = of_e4m3(scales[b]) * tensor;
    for (int i = 0; i < kBlock; ++i) four[i] = e2m1_of(x[i] / scale);
    for (int i = 0; i < kBlock / 2; ++i) {
      codes[i] = static_cast<uint8_t>(four[2 * i] | four[2 * i + 1] << 4);
    }
  }
}
