// Weights into panels and back. In every format a panel is [..][16] words of four bytes, and an
// output's words are a row's own four bytes, rearranged at most: so it is a transposition of words.
#include <algorithm>
#include <cstring>

#include "context.h"
#include "formats.h"
#include "taut.h"

namespace taut {

namespace {

constexpr int kStrip = 64;  // words of each row that are moved at a time: 4 KiB of a panel

uint32_t float_of(uint16_t bf16) { return uint32_t{bf16} << 16; }

uint32_t bf16_of(uint32_t bits) {  // nearest, ties to even; a NaN stays one
  if ((bits & 0x7fffffff) > 0x7f800000) return (bits >> 16) | 0x40;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Eight nibbles in order <-> with those of 4 to 7 above those of 0 to 3: two steps, each its own
// inverse.
uint32_t swap_bytes(uint32_t x) {
  const uint32_t t = (x ^ (x >> 8)) & 0xff00;
  return x ^ t ^ (t << 8);
}
uint32_t swap_nibbles(uint32_t x) {
  const uint32_t t = (x ^ (x >> 4)) & 0x00f000f0;
  return x ^ t ^ (t << 4);
}

// Bytes of one input of a plain row, in half bytes.
int64_t halves_of(int format) { return 8 >> format; }

// `bytes` of a row from byte `at` on, the rest of the words zeros.
template <typename T>
void read(const char *row, int64_t bytes, int64_t at, T *out, int count) {
  const int64_t here = std::min<int64_t>(bytes - at, count * static_cast<int64_t>(sizeof(T)));
  std::memset(out, 0, count * sizeof(T));
  if (here > 0) std::memcpy(out, row + at, here);
}

// Words `word` to `word` + count of a row, as they are in panels.
void to_words(const taut_weight &weight, int plain, const char *row, int64_t bytes, int64_t word,
              uint32_t *out, int count) {
  uint32_t wide[2 * kStrip];
  uint16_t half[kStrip];
  if (weight.format == TAUT_F32 && plain == TAUT_BF16) {
    read(row, bytes, word * 2, half, count);
    for (int i = 0; i < count; ++i) out[i] = float_of(half[i]);
  } else if (weight.format == TAUT_BF16 && plain == TAUT_F32) {
    read(row, bytes, word * 8, wide, 2 * count);
    for (int i = 0; i < count; ++i) out[i] = bf16_of(wide[2 * i]) | bf16_of(wide[2 * i + 1]) << 16;
  } else {
    read(row, bytes, word * 4, out, count);
    if (weight.format == TAUT_INT8) {
      for (int i = 0; i < count; ++i) out[i] ^= 0x80808080;
    } else if (weight.format == TAUT_NVFP4) {
      for (int i = 0; i < count; ++i) out[i] = swap_nibbles(swap_bytes(out[i]));
    }
  }
}

void from_words(int format, uint32_t *words, int count, char *row, int64_t bytes, int64_t word) {
  if (format == TAUT_INT8) {
    for (int i = 0; i < count; ++i) words[i] ^= 0x80808080;
  } else if (format == TAUT_NVFP4) {
    for (int i = 0; i < count; ++i) words[i] = swap_bytes(swap_nibbles(words[i]));
  }
  const int64_t here = std::min<int64_t>(bytes - word * 4, int64_t{count} * 4);
  if (here > 0) std::memcpy(row + word * 4, words, here);
}

struct Move {
  const taut_weight &weight;
  const taut_plain &plain;
  int32_t first, from, step;

  // body(lane, row) for each output of a panel that is a row of `plain`.
  template <typename Body>
  void lanes(int32_t panel, const Body &body) const {
    for (int lane = 0; lane < kPanel; ++lane) {
      const int64_t row = int64_t{panel} * kPanel + lane - first;
      if (row >= 0 && row < plain.rows) body(lane, row);
    }
  }

  template <bool in>
  void panel(int32_t own) const {
    const int64_t panel = from + int64_t{own} * step;
    const int64_t blocks = blocks_of(weight.ins);
    const int64_t words = blocks * kBlockBytes[weight.format] / (4 * kPanel);
    const int64_t bytes = (weight.ins * halves_of(plain.format) + 1) / 2;
    uint32_t *values = static_cast<uint32_t *>(weight.values) + panel * words * kPanel;
    for (int64_t word = 0; word < words; word += kStrip) {
      const int count = static_cast<int>(std::min<int64_t>(kStrip, words - word));
      lanes(own, [&](int lane, int64_t row) {
        char *line = static_cast<char *>(plain.values) + row * bytes;
        uint32_t some[kStrip];
        uint32_t *cells = values + word * kPanel + lane;
        if (in) {
          to_words(weight, plain.format, line, bytes, word, some, count);
          for (int i = 0; i < count; ++i) cells[i * kPanel] = some[i];
        } else {
          for (int i = 0; i < count; ++i) some[i] = cells[i * kPanel];
          from_words(weight.format, some, count, line, bytes, word);
        }
      });
    }
    if (weight.format != TAUT_NVFP4) return;
    uint8_t *scales = weight.blocks + panel * blocks * kPanel;
    lanes(own, [&](int lane, int64_t row) {
      uint8_t *line = plain.blocks + row * blocks;
      for (int64_t b = 0; b < blocks; ++b) {
        if (in) scales[b * kPanel + lane] = line[b];
        else line[b] = scales[b * kPanel + lane];
      }
    });
  }
};

template <bool in>
void move(taut_context &context, const Move &move) {
  const int32_t begin = move.first / kPanel;
  const int32_t end = panels_of(move.first + move.plain.rows);
  context.pool.run(end - begin,
                   [&](int32_t task, int) { move.template panel<in>(begin + task); });
}

}  // namespace

}  // namespace taut

void taut_pack(taut_context *context, const taut_weight *weight, const taut_plain *plain,
               int32_t first, int32_t from, int32_t step) {
  const std::lock_guard<std::recursive_mutex> turn(context->mutex);
  taut::move<true>(*context, {*weight, *plain, first, from, step});
}

void taut_unpack(taut_context *context, const taut_weight *weight, const taut_plain *plain,
                 int32_t first, int32_t from, int32_t step) {
  const std::lock_guard<std::recursive_mutex> turn(context->mutex);
  taut::move<false>(*context, {*weight, *plain, first, from, step});
}
