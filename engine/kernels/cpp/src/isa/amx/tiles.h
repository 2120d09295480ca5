// Tile registers: eight of up to 16 rows of 64 bytes, and the product of two of them.
//
// A product adds to C [rows][16] in float32 what A [rows][16 pairs] of bfloat16 makes with
// B [16 pairs][16 outputs]. A row of C has the same bits however many rows there are.
#pragma once

#include <stdint.h>

namespace taut {
namespace TAUT_SET {

constexpr int kTileRows = 16;
constexpr int kLine = 64;  // bytes of a row
constexpr int kTileBytes = kTileRows * kLine;

// From its construction to its end, this thread's registers are tiles: 0 to 5 of `rows` rows, for
// sums and activations, 6 and 7 of 16, for weights.
class Tiles {
 public:
  explicit Tiles(int rows) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int tile = 0; tile < 8; ++tile) {
      shape.bytes[tile] = kLine;
      shape.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : kTileRows);
    }
    asm volatile("ldtilecfg %0" : : "m"(shape));
  }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles &) = delete;
  Tiles &operator=(const Tiles &) = delete;
};

template <int tile>
static inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(tile));
}
template <int tile>
static inline void tile_load(const void *p) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(int64_t{kLine}), "i"(tile) : "memory");
}
template <int tile>
static inline void tile_store(void *p) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(int64_t{kLine}), "i"(tile) : "memory");
}
template <int c, int a, int b>
static inline void tile_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
}

}  // namespace TAUT_SET
}  // namespace taut
