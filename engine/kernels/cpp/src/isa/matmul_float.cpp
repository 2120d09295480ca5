// Matrix products with float32 activations: every weight becomes a float on the way.
//
// Inputs are added up in order within a span of one block (with its scale) or four, and spans in
// order to the rest: so does each kernel here, and a row's bits don't depend on its tile.
#include "matmul_panels.h"
#include "simd_codes.h"

namespace taut {
namespace TAUT_SET {

namespace {

#if defined(TAUT_LANES_512)
#define TAUT_TILES 1, 2, 4, 8
constexpr int kTile = 8;
constexpr int kAcross = 3;  // panels at a time, of several rows: 24 sums in registers
#else
#define TAUT_TILES 1, 2, 4, 6
constexpr int kTile = 6;
constexpr int kAcross = 1;
#endif
constexpr int kTogether = 6;  // panels whose sums are kept apart, a multiple of kAcross
constexpr int kChunk = 4;  // blocks that are decoded at a time
constexpr int kAhead = 8;  // blocks to look ahead

// Where weights come from: a span of one panel gives its inputs' values, 16 outputs each, and the
// scale of their sum. kUnit: inputs that are taken at a time, of one load. kSpan: blocks of a span.
// kAlone: panels at a time for one row, so that sums are added up beside each other.
template <bool scaled>
struct Floats {
  static constexpr bool kScaled = scaled;
  static constexpr int kUnit = 4;
  static constexpr int kSpan = scaled ? 1 : 4;
  static constexpr int kAlone = 1;
  const float *values;
  const float *scales;
  int64_t blocks;  // of a panel

  struct Block {
    const float *values;
    const float *scales;
    template <int k>
    F32 value(int unit) const { return load(values + (unit * kUnit + k) * kPanel); }
    F32 scale() const { return load(scales); }
  };
  Block block(int panel, int block) const {
    const int64_t at = panel * blocks + block;
    return {values + at * kBlock * kPanel, scales + at * kPanel};
  }
};

template <int format>
struct Packed {
  static constexpr bool kScaled = format == TAUT_NVFP4;
  static constexpr int kUnit = kBlock * 64 / kBlockBytes[format];
  static constexpr int kSpan = kScaled ? 1 : 4;
  static constexpr int kAlone = format == TAUT_INT8 ? 2 : 1;
  const uint8_t *values;
  const uint8_t *scales;
  int64_t blocks;

  struct Block {
    const uint8_t *values;
    const uint8_t *scales;

    template <int k>
    F32 value(int unit) const {
      const uint8_t *at = values + unit * 64;
      if (k == 0) __builtin_prefetch(at + kAhead * kBlockBytes[format]);
      const I32 words = load_i(at);
      if constexpr (format == TAUT_F32) {
        return as_float(words);
      } else if constexpr (format == TAUT_BF16) {
        return as_float(k ? words & splat_i(static_cast<int32_t>(0xffff0000)) : left<16>(words));
      } else if constexpr (format == TAUT_INT8) {
        const I32 codes = words ^ splat_i(static_cast<int32_t>(0x80808080));
        return to_float(right_signed<24>(left<24 - 8 * k>(codes)));
      } else {
        return e2m1(right<4 * (2 * (k % 4) + k / 4)>(words));
      }
    }
    F32 scale() const { return e4m3(scales, 1.0f); }
  };
  Block block(int panel, int block) const {
    const int64_t at = panel * blocks + block;
    return {values + at * kBlockBytes[format], scales + at * kPanel};
  }
};

template <int across, int rows>
struct Sums {
  F32 of[across][rows];
};

// One input of all: a weight of each panel, an activation of each row.
template <int across, int rows>
inline TAUT_INLINE void add_products(Sums<across, rows> &sums, const F32 *weights,
                                            const float *x) {
  unroll<rows>([&](auto r) TAUT_INLINE {
    const F32 same = splat(x[r.value]);
    unroll<across>([&](auto p) TAUT_INLINE {
      sums.of[p.value][r.value] = fma(weights[p.value], same, sums.of[p.value][r.value]);
    });
  });
}

// sums [rows][16] += a span's, times its scale.
template <int rows, class Block>
inline TAUT_INLINE void add_span(const F32 *here, const Block &block, bool scaled,
                                         float *sums) {
  const F32 scale = scaled ? block.scale() : zero();
  unroll<rows>([&](auto r) TAUT_INLINE {
    const F32 before = load(sums + r.value * kPanel);
    store(sums + r.value * kPanel,
          scaled ? fma(here[r.value], scale, before) : before + here[r.value]);
  });
}

// Adds to sums [across][rows][16] what some blocks of `across` panels give with x [inputs][rows].
template <int across, int rows, class Source>
void strip(const Source &source, int panel, int first, int blocks, const float *x, float *sums) {
  for (int b = first; b < first + blocks; b += Source::kSpan) {
    const int left = first + blocks - b;
    const int units = (left < Source::kSpan ? left : Source::kSpan) * (kBlock / Source::kUnit);
    typename Source::Block block[across];
    Sums<across, rows> here;
    unroll<across>([&](auto p) TAUT_INLINE {
      block[p.value] = source.block(panel + p.value, b);
      unroll<rows>([&](auto r) TAUT_INLINE { here.of[p.value][r.value] = zero(); });
    });
    for (int unit = 0; unit < units; ++unit, x += Source::kUnit * rows) {
      unroll<Source::kUnit>([&](auto k) TAUT_INLINE {
        F32 weights[across];
        unroll<across>([&](auto p) TAUT_INLINE {
          weights[p.value] = block[p.value].template value<decltype(k)::value>(unit);
        });
        add_products<across, rows>(here, weights, x + k.value * rows);
      });
    }
    unroll<across>([&](auto p) TAUT_INLINE {
      add_span<rows>(here.of[p.value], block[p.value], Source::kScaled,
                      sums + p.value * rows * kPanel);
    });
  }
}

// The same of `panels` panels, as many at a time as registers hold.
template <int rows, class Source>
void strips(const Source &source, int panel, int panels, int first, int blocks, const float *x,
            float *sums) {
  constexpr int across = rows == 1 ? Source::kAlone : kAcross;
  int p = 0;
  for (; p + across <= panels; p += across) {
    strip<across, rows>(source, panel + p, first, blocks, x, sums + p * rows * kPanel);
  }
  if constexpr (across > 2) {
    for (; p + 2 <= panels; p += 2) {
      strip<2, rows>(source, panel + p, first, blocks, x, sums + p * rows * kPanel);
    }
  }
  if constexpr (across > 1) {
    for (; p < panels; ++p) {
      strip<1, rows>(source, panel + p, first, blocks, x, sums + p * rows * kPanel);
    }
  }
}

const float *tile_of(const Matmul &m, int tile) {
  return static_cast<const float *>(m.packed) + int64_t{tile} * kTile * kBlock * m.blocks;
}

int rows_of(const Matmul &m, int tile) {
  return m.rows - tile * kTile < kTile ? m.rows - tile * kTile : kTile;
}

// One tile: weights are decoded in registers.
template <class Source>
void run_one(const Matmul &m, const Source &source, int first, int panels) {
  with_size<TAUT_TILES>(m.rows, [&](auto size) {
    constexpr int rows = decltype(size)::value;
    alignas(64) float sums[kTogether * rows * kPanel];
    for (int p = 0; p < panels; p += kTogether) {
      const int now = panels - p < kTogether ? panels - p : kTogether;
      memset(sums, 0, sizeof sums);
      strips<rows>(source, first + p, now, 0, m.blocks, tile_of(m, 0), sums);
      for (int i = 0; i < now; i += 2) {
        finish(m, sums + i * rows * kPanel, rows, first + p + i, now - i < 2 ? 1 : 2, 0, m.rows);
      }
    }
  });
}

// Decoded values [panels][blocks][16][16] and scales [panels][blocks][16].
template <class Source>
void decode(const Source &source, int panel, int panels, int first, int blocks, float *values,
            float *scales) {
  for (int i = 0; i < panels * blocks; ++i) {
    const auto block = source.block(panel + i / blocks, first + i % blocks);
    for (int unit = 0; unit < kBlock / Source::kUnit; ++unit) {
      unroll<Source::kUnit>([&](auto k) TAUT_INLINE {
        store(values, block.template value<decltype(k)::value>(unit));
        values += kPanel;
      });
    }
    if constexpr (Source::kScaled) store(scales + i * kPanel, block.scale());
  }
}

// Several tiles: a chunk of some panels is decoded once for all tiles, and stays in the nearest
// cache for them, as a chunk of all tiles' rows does in the next one for all panels.
template <class Source>
void run_many(const Matmul &m, const Source &source, int first, int panels, float *work) {
  alignas(64) float values[kTogether * kChunk * kBlock * kPanel];
  alignas(64) float scales[kTogether * kChunk * kPanel];
  const int tiles = (m.rows + kTile - 1) / kTile;
  const int64_t tile_sums = int64_t{panels} * kTile * kPanel;
  memset(work, 0, tiles * tile_sums * sizeof(float));
  for (int b = 0; b < m.blocks; b += kChunk) {
    const int count = m.blocks - b < kChunk ? m.blocks - b : kChunk;
    for (int p = 0; p < panels; p += kTogether) {
      const int now = panels - p < kTogether ? panels - p : kTogether;
      decode(source, first + p, now, b, count, values, scales);
      const Floats<Source::kScaled> decoded{values, scales, count};
      for (int tile = 0; tile < tiles; ++tile) {
        with_size<TAUT_TILES>(rows_of(m, tile), [&](auto size) {
          constexpr int rows = decltype(size)::value;
          strips<rows>(decoded, 0, now, 0, count, tile_of(m, tile) + b * kBlock * rows,
                       work + tile * tile_sums + p * rows * kPanel);
        });
      }
    }
  }
  for (int tile = 0; tile < tiles; ++tile) {
    with_size<TAUT_TILES>(rows_of(m, tile), [&](auto size) {
      constexpr int rows = decltype(size)::value;
      for (int p = 0; p < panels; p += 2) {
        finish(m, work + tile * tile_sums + p * rows * kPanel, rows, first + p,
               panels - p < 2 ? 1 : 2, tile * kTile, rows_of(m, tile));
      }
    });
  }
}

template <int format>
void run_format(const Matmul &m, int first, int panels, void *work) {
  const Packed<format> source{static_cast<const uint8_t *>(m.weight->values), m.weight->blocks,
                              m.blocks};
  if (m.rows <= kTile) {
    run_one(m, source, first, panels);
  } else {
    run_many(m, source, first, panels, static_cast<float *>(work));
  }
}

void run(const Matmul &m, int32_t first, int32_t panels, void *work) {
  switch (m.weight->format) {
    case TAUT_F32:
      return run_format<TAUT_F32>(m, first, panels, work);
    case TAUT_BF16:
      return run_format<TAUT_BF16>(m, first, panels, work);
    case TAUT_INT8:
      return run_format<TAUT_INT8>(m, first, panels, work);
    case TAUT_NVFP4:
      return run_format<TAUT_NVFP4>(m, first, panels, work);
  }
}

int64_t work_bytes(const Matmul &m, int32_t panels) {
  if (m.rows <= kTile) return 0;
  const int64_t tiles = (m.rows + kTile - 1) / kTile;
  return tiles * kTile * panels * kPanel * static_cast<int64_t>(sizeof(float));
}

int64_t tile_bytes(const Matmul &m) {
  return int64_t{kTile} * kBlock * m.blocks * static_cast<int64_t>(sizeof(float));
}

// [inputs][rows], filled up with zeros.
void pack_tile(const Matmul &m, int32_t tile) {
  with_size<TAUT_TILES>(rows_of(m, tile), [&](auto size) {
    constexpr int rows = decltype(size)::value;
    const float *row[rows];
    for (int r = 0; r < rows; ++r) {  // those past the last are computed and left
      row[r] = m.x + (tile * kTile + (r < rows_of(m, tile) ? r : 0)) * m.x_stride;
    }
    float *out = const_cast<float *>(tile_of(m, tile));
    for (int32_t i = 0; i < m.weight->ins; ++i, out += rows) {
      for (int r = 0; r < rows; ++r) out[r] = row[r][i];
    }
    memset(out, 0, sizeof(float) * rows * (m.blocks * kBlock - m.weight->ins));
  });
}

}  // namespace

extern const MatmulKernels kMatmulFloat;
const MatmulKernels kMatmulFloat = {kTile, tile_bytes, pack_tile, work_bytes, run};

}  // namespace TAUT_SET
}  // namespace taut
