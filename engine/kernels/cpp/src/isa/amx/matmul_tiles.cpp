// Matrix products by tile registers: weights of any format but float32 are bfloat16s, activations two
// of them each, which leaves 2^-17 of an activation at most.
//
// A sum grows step by step, of 32 inputs, by what the upper halves give and then the lower ones;
// what a product of tiles does to a row doesn't depend on the others. So a row's bits don't
// depend on its tile.
#include "matmul_panels.h"
#include "tiles.h"
#include "weight_tiles.h"

namespace taut {
namespace TAUT_SET {

namespace {

constexpr int kSums = kTileRows * kPanel;  // floats of a tile of sums
// Steps to look ahead, so that four panels fill a third of the nearest cache.
template <int format>
constexpr int kAhead = format == TAUT_BF16 ? 4 : 8;
constexpr int kChunk = 6;                  // steps that are decoded at a time

int steps_of(const Matmul &m) { return (m.blocks + 1) / 2; }
int tiles_of(const Matmul &m) { return (m.rows + kTileRows - 1) / kTileRows; }
// Rows of a tile: as many as of any other, but for the last one.
int height_of(const Matmul &m) { return (m.rows + tiles_of(m) - 1) / tiles_of(m); }

int rows_of(const Matmul &m, int tile) {
  const int height = height_of(m), left = m.rows - tile * height;
  return left < height ? left : height;
}

// Of a tile of rows: steps, each the upper halves and the lower ones, then the powers of two that
// are to come back to the rows' sums.
int64_t tile_bytes(const Matmul &m) { return int64_t{2} * kTileBytes * steps_of(m) + kLine; }

const char *tile_of(const Matmul &m, int tile) {
  return static_cast<const char *>(m.packed) + tile * tile_bytes(m);
}

float *powers_of(const Matmul &m, int tile) {
  return reinterpret_cast<float *>(const_cast<char *>(tile_of(m, tile + 1)) - kLine);
}

template <int format>
void pack(const Matmul &m, int tile) {
  const int ins = m.weight->ins;
  for (int r = 0; r < rows_of(m, tile); ++r) {
    const float *x = m.x + (tile * height_of(m) + r) * m.x_stride;
    char *out = const_cast<char *>(tile_of(m, tile)) + r * kLine;
    const float lift = kLow<format> ? lift_of(x, ins) : 0.0f;
    powers_of(m, tile)[r] = -kDown - lift;
    int i = 0;
    for (; i + kStep <= ins; i += kStep, out += 2 * kTileBytes) {
      split<format>(load(x + i), load(x + i + kLanes), lift, out, out + kTileBytes);
    }
    if (i == ins) continue;
    const int left = ins - i;
    const F32 a = load_part(x + i, left < kLanes ? left : kLanes);
    const F32 b = left > kLanes ? load_part(x + i + kLanes, left - kLanes) : zero();
    split<format>(a, b, lift, out, out + kTileBytes);
  }
}

// sums [panels][16][16] of one tile of rows.
template <int panels>
void store_sums(float *sums) {
  unroll<panels>([&](auto p) TAUT_INLINE { tile_store<p.value>(sums + p.value * kSums); });
}

template <int format>
void finish_sums(const Matmul &m, float *sums, int panel, int panels, int tile) {
  const float *powers = powers_of(m, tile);
  for (int i = 0; kLow<format> && i < panels * kTileRows; ++i) {
    float *const row = sums + i * kPanel;
    store(row, shifted(load(row), powers[i % kTileRows]));
  }
  for (int p = 0; p < panels; p += 2) {
    finish(m, sums + p * kSums, kTileRows, panel + p, panels - p < 2 ? 1 : 2,
           tile * height_of(m), rows_of(m, tile));
  }
}

// f(Index<panels>(), p) for `panels` panels, up to four at a time, from p on.
template <class F>
void by_fours(int panels, const F &f) {
  int p = 0;
  for (; p + 4 <= panels; p += 4) f(Index<4>(), p);
  for (; p + 2 <= panels; p += 2) f(Index<2>(), p);
  if (p < panels) f(Index<1>(), p);
}

// One tile of rows with `panels` panels: a step's weights are decoded beside the products of the
// step before.
template <int format, int panels>
void one_tile(const Matmul &m, const WeightTiles<format> &weights, int panel) {
  alignas(64) char decoded[2][panels][kTileBytes];
  const bool ready = weights.ready();
  const int steps = steps_of(m);
  const char *x = tile_of(m, 0);
  unroll<panels>([&](auto p) TAUT_INLINE {
    tile_zero<p.value>();
    if (!ready) weights.write(panel + p.value, 0, decoded[0][p.value]);
  });
  for (int k = 0; k < steps; ++k, x += 2 * kTileBytes) {
    tile_load<4>(x);
    tile_load<5>(x + kTileBytes);
    unroll<panels>([&](auto p) TAUT_INLINE {
      constexpr int b = 6 + p.value % 2;
      const char *tile = decoded[k % 2][p.value];
      const int ahead = k + kAhead<format>;  // of the next panels, at the end of these
      weights.fetch(panel + p.value + (ahead < steps ? 0 : panels), ahead % steps);
      if (ready) {
        tile = weights.stored(panel + p.value) + int64_t{k} * kTileBytes;
      } else if (k + 1 < steps) {
        weights.write(panel + p.value, k + 1, decoded[(k + 1) % 2][p.value]);
      }
      tile_load<b>(tile);
      tile_product<p.value, 4, b>();
      tile_product<p.value, 5, b>();
    });
  }
  alignas(64) float sums[panels * kSums];
  store_sums<panels>(sums);
  finish_sums<format>(m, sums, panel, panels, 0);
}

// Adds to sums what some steps of one tile of rows give with `panels` panels, whose tiles are
// `stride` bytes apart.
template <int panels>
void add_steps(const char *x, const char *weights, int64_t stride, int steps, float *sums) {
  unroll<panels>([&](auto p) TAUT_INLINE { tile_load<p.value>(sums + p.value * kSums); });
  for (int k = 0; k < steps; ++k, x += 2 * kTileBytes, weights += kTileBytes) {
    tile_load<4>(x);
    tile_load<5>(x + kTileBytes);
    unroll<panels>([&](auto p) TAUT_INLINE {
      constexpr int b = 6 + p.value % 2;
      tile_load<b>(weights + p.value * stride);
      tile_product<p.value, 4, b>();
      tile_product<p.value, 5, b>();
    });
  }
  store_sums<panels>(sums);
}

// Several tiles of rows: a chunk of some panels is decoded once for all of them, and stays in the
// nearest cache, as a chunk of all tiles does in the next one for all panels.
template <int format>
void run_many(const Matmul &m, int first, int panels, float *work) {
  alignas(64) char decoded[4 * kChunk * kTileBytes];
  const WeightTiles<format> weights(m);
  const int steps = steps_of(m), tiles = tiles_of(m);
  memset(work, 0, sizeof(float) * panels * tiles * kSums);
  for (int k = 0; k < steps; k += kChunk) {
    const int count = steps - k < kChunk ? steps - k : kChunk;
    by_fours(panels, [&](auto some, int p) {
      constexpr int now = decltype(some)::value;
      const char *chunk = decoded;
      int64_t stride = kChunk * kTileBytes;
      if (weights.ready()) {
        chunk = weights.stored(first + p) + int64_t{k} * kTileBytes;
        stride = int64_t{steps} * kTileBytes;
      } else {
        for (int i = 0; i < now * count; ++i) {
          const int panel = i / count, step = i % count;
          weights.write(first + p + panel, k + step, decoded + panel * stride + step * kTileBytes);
        }
      }
      for (int t = 0; t < tiles; ++t) {
        add_steps<now>(tile_of(m, t) + int64_t{2} * k * kTileBytes, chunk, stride, count,
                       work + (p * tiles + t * now) * kSums);
      }
    });
  }
  by_fours(panels, [&](auto some, int p) {
    constexpr int now = decltype(some)::value;
    for (int t = 0; t < tiles; ++t) {
      finish_sums<format>(m, work + (p * tiles + t * now) * kSums, first + p, now, t);
    }
  });
}

template <int format>
void run_format(const Matmul &m, int first, int panels, float *work) {
  if (m.rows > kTileRows) return run_many<format>(m, first, panels, work);
  const WeightTiles<format> weights(m);
  by_fours(panels, [&](auto some, int p) {
    one_tile<format, decltype(some)::value>(m, weights, first + p);
  });
}

// f(Index<format>()) for the weight's.
template <class F>
void with_format(const Matmul &m, const F &f) {
  switch (m.weight->format) {
    case TAUT_BF16:
      return f(Index<TAUT_BF16>());
    case TAUT_INT8:
      return f(Index<TAUT_INT8>());
    case TAUT_NVFP4:
      return f(Index<TAUT_NVFP4>());
  }
}

void pack_tile(const Matmul &m, int32_t tile) {
  with_format(m, [&](auto format) { pack<decltype(format)::value>(m, tile); });
}

int64_t work_bytes(const Matmul &m, int32_t panels) {
  if (m.rows <= kTileRows) return 0;
  return int64_t{panels} * tiles_of(m) * kSums * static_cast<int64_t>(sizeof(float));
}

void run(const Matmul &m, int32_t first, int32_t panels, void *work) {
  const Tiles tiles(height_of(m));
  with_format(m, [&](auto format) {
    run_format<decltype(format)::value>(m, first, panels, static_cast<float *>(work));
  });
}

}  // namespace

extern const MatmulKernels kMatmulTiles;
const MatmulKernels kMatmulTiles = {kTileRows, tile_bytes, pack_tile, work_bytes, run};

}  // namespace TAUT_SET
}  // namespace taut
