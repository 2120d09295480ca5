// Matrix products with activations rounded to integers, of one byte or two.
//
// A row's activations have a scale for each block of 16: the greatest magnitude over 127, or 127 *
// 256. Sums of a block are exact; they become floats and are added in order of the blocks, so a
// row's bits don't depend on the tile that it is in.
#include "matmul_panels.h"
#include "simd_codes.h"

namespace taut {
namespace TAUT_SET {

namespace {

#if defined(TAUT_LANES_512)
#define TAUT_TILES 1, 2, 4, 8
constexpr int kTile = 8;
constexpr int kAcross = 2;  // panels at a time
constexpr int kTurns = 2;   // rows whose products are summed up beside each other
#else
#define TAUT_TILES 1, 2, 4
constexpr int kTile = 4;
constexpr int kAcross = 1;
constexpr int kTurns = 2;
#endif

constexpr int kQuads = kBlock / 4;
constexpr int kAhead = 1024;  // bytes to look ahead

// A block of one panel: four inputs at a time, and the scale of sums.
template <int format>
struct Block;

template <>
struct Block<TAUT_INT8> {
  using Weights = Wide;
  static constexpr bool kScaled = false;
  static void read(const uint8_t *values, const uint8_t *, Weights *w, F32 *) {
    unroll<kQuads>([&](auto q) TAUT_INLINE {
      __builtin_prefetch(values + 64 * q.value + kAhead);
      w[q.value] = wide(load_i(values + 64 * q.value));
    });
  }
};

template <>
struct Block<TAUT_NVFP4> {
  using Weights = Narrow;
  static constexpr bool kScaled = true;
  static void read(const uint8_t *values, const uint8_t *scales, Weights *w, F32 *scale) {
    const I32 low = splat_i(0x0f0f0f0f);
    unroll<kQuads / 2>([&](auto q) TAUT_INLINE {
      __builtin_prefetch(values + 64 * q.value + kAhead);
      const I32 pairs = load_i(values + 64 * q.value);
      w[2 * q.value] = narrow(pairs & low);
      w[2 * q.value + 1] = narrow(right<4>(pairs) & low);
    });
    *scale = e4m3(scales, 0.5f);  // lanes hold twice the code
  }
};

// Rows of a tile in one block of inputs: bytes [rows][limbs][16], the greater limb first, then the
// rows' scales, then what corrects their sums for kShift.
template <int rows, int limbs>
struct Rows {
  int8_t bytes[rows][limbs][kBlock];
  float scales[rows];
  int32_t starts[rows];
};

// What a block of some panels' weights gives with `count` rows, in each lane: rows take turns, as a
// row's next product waits for its last one, and panels share what is loaded of a row.
template <int across, int count>
struct Wholes {
  I32 of[across][count];
};

template <int across, int count, class Weights>
inline TAUT_INLINE void add_dots(Wholes<across, count> &whole, const Weights (*w)[kQuads],
                                 const int8_t *x, int stride) {
  unroll<kQuads>([&](auto q) TAUT_INLINE {
    unroll<count>([&](auto r) TAUT_INLINE {
      const I32 four = splat_bytes(x + r.value * stride + 4 * q.value);
      I32 &first = whole.of[0][r.value];
      first = dot(first, w[0][q.value], four);
      if constexpr (across == 2) {
        I32 &second = whole.of[1][r.value];
        second = dot(second, w[1][q.value], four);
      }
    });
  });
}

template <int across, int rows>
struct Sums {
  F32 of[across][rows];
};

// Adds to sums what a block of weights gives with rows `first` to `first` + count - 1.
template <int count, class Here, int across, int limbs, int rows>
inline TAUT_INLINE void add_rows(Sums<across, rows> &sums,
                                 const typename Here::Weights (*weights)[kQuads],
                                 const F32 *scales, const Rows<rows, limbs> &x, int first) {
  Wholes<across, count> whole;
  unroll<count>([&](auto r) TAUT_INLINE {
    const I32 start = splat_i(limbs == 1 ? x.starts[first + r.value] : 0);
    unroll<across>([&](auto p) TAUT_INLINE { whole.of[p.value][r.value] = start; });
  });
  add_dots(whole, weights, x.bytes[first][0], limbs * kBlock);
  if constexpr (limbs == 2) {
    unroll<count>([&](auto r) TAUT_INLINE {
      const I32 start = splat_i(x.starts[first + r.value]);
      unroll<across>([&](auto p) TAUT_INLINE {
        whole.of[p.value][r.value] = left<8>(whole.of[p.value][r.value]) + start;
      });
    });
    add_dots(whole, weights, x.bytes[first][1], limbs * kBlock);
  }
  unroll<count>([&](auto r) TAUT_INLINE {
    const F32 factor = splat(x.scales[first + r.value]);
    unroll<across>([&](auto p) TAUT_INLINE {
      const F32 here = to_float(whole.of[p.value][r.value]);
      F32 &sum = sums.of[p.value][first + r.value];
      sum = Here::kScaled ? fma(here * factor, scales[p.value], sum) : fma(here, factor, sum);
    });
  });
}

// sums [across][rows][16]: of `across` panels, from `panel` on, with all of x.
template <int format, int limbs, int rows, int across>
void strip(const Matmul &m, int panel, const Rows<rows, limbs> *x, float *sums) {
  using Here = Block<format>;
  constexpr int count = rows < kTurns ? rows : kTurns;
  const int64_t stride = int64_t{m.blocks} * kBlockBytes[format];
  const int64_t scale_stride = int64_t{m.blocks} * kPanel;
  const uint8_t *values = static_cast<const uint8_t *>(m.weight->values) + panel * stride;
  const uint8_t *scales = m.weight->blocks + panel * scale_stride;
  Sums<across, rows> sum;
  unroll<across>([&](auto p) TAUT_INLINE {
    unroll<rows>([&](auto r) TAUT_INLINE { sum.of[p.value][r.value] = zero(); });
  });
  for (int b = 0; b < m.blocks; ++b, values += kBlockBytes[format], scales += kPanel, ++x) {
    typename Here::Weights weights[across][kQuads];
    F32 scale[across];
    unroll<across>([&](auto p) TAUT_INLINE {
      Here::read(values + p.value * stride, scales + p.value * scale_stride, weights[p.value],
                 &scale[p.value]);
    });
    unroll<rows / count>([&](auto turn) TAUT_INLINE {
      add_rows<count, Here>(sum, weights, scale, *x, turn.value * count);
    });
  }
  unroll<across>([&](auto p) TAUT_INLINE {
    unroll<rows>([&](auto r) TAUT_INLINE {
      store(sums + (p.value * rows + r.value) * kPanel, sum.of[p.value][r.value]);
    });
  });
}

int rows_of(const Matmul &m, int tile) {
  return m.rows - tile * kTile < kTile ? m.rows - tile * kTile : kTile;
}

int64_t tile_bytes(const Matmul &m) {
  return m.blocks * static_cast<int64_t>(m.bits == 8 ? sizeof(Rows<kTile, 1>)
                                                     : sizeof(Rows<kTile, 2>));
}

template <int rows, int limbs>
Rows<rows, limbs> *tile_of(const Matmul &m, int tile) {
  return reinterpret_cast<Rows<rows, limbs> *>(static_cast<char *>(m.packed) +
                                               tile * tile_bytes(m));
}

template <int format, int limbs>
void run_format(const Matmul &m, int32_t first, int32_t panels) {
  for (int tile = 0; tile * kTile < m.rows; ++tile) {
    with_size<TAUT_TILES>(rows_of(m, tile), [&](auto size) {
      constexpr int rows = decltype(size)::value;
      const Rows<rows, limbs> *x = tile_of<rows, limbs>(m, tile);
      alignas(64) float sums[2 * rows * kPanel];
      for (int p = first; p < first + panels; p += 2) {
        const int now = first + panels - p < 2 ? 1 : 2;
        if (kAcross == 2 && now == 2) {
          strip<format, limbs, rows, kAcross>(m, p, x, sums);
        } else {
          for (int i = 0; i < now; ++i) {
            strip<format, limbs, rows, 1>(m, p + i, x, sums + i * rows * kPanel);
          }
        }
        finish(m, sums, rows, p, now, tile * kTile, rows_of(m, tile));
      }
    });
  }
}

void run(const Matmul &m, int32_t first, int32_t panels, void *) {
  if (m.weight->format == TAUT_INT8) {
    m.bits == 8 ? run_format<TAUT_INT8, 1>(m, first, panels)
                : run_format<TAUT_INT8, 2>(m, first, panels);
  } else {
    m.bits == 8 ? run_format<TAUT_NVFP4, 1>(m, first, panels)
                : run_format<TAUT_NVFP4, 2>(m, first, panels);
  }
}

int64_t work_bytes(const Matmul &, int32_t) { return 0; }

// What the blocks of a row are multiplied with to be rounded, and their scales, from the bits of
// their greatest magnitudes. A block with a NaN or infinity has it for a scale and becomes zeros,
// so that whatever is made of it is NaN; one that is next to nothing is 0.
template <int limbs>
void scale_blocks(const int32_t *most_bits, float *factors, float *scales) {
  constexpr float kLevels = limbs == 1 ? 127.0f : 127.0f * 256.0f;
  float most[kLanes];
  memcpy(most, most_bits, sizeof most);
  for (int i = 0; i < kLanes; ++i) {
    const bool nothing = most[i] < 1e-30f;
    const bool rounded = !nothing && most_bits[i] < 0x7f800000;
    factors[i] = rounded ? kLevels / most[i] : 0.0f;
    scales[i] = nothing ? 0.0f : rounded ? most[i] / kLevels : most[i];
  }
}

template <int limbs>
int32_t round_block(F32 x, float factor, int8_t (*bytes)[kBlock]) {
  if (factor == 0.0f) {
    memset(bytes, 0, limbs * kBlock);
    return 0;
  }
  const I32 whole = to_int(x * splat(factor));
  if constexpr (limbs == 1) {
    store_i8(bytes[0], whole);
  } else {
    const I32 upper = right_signed<8>(whole + splat_i(128));
    store_i8(bytes[0], upper);
    store_i8(bytes[1], whole - left<8>(upper));
  }
  return sum_i(whole);
}

// Row `r` of a tile, 16 blocks after 16: each step is done for all of them.
template <int limbs, int rows>
void round_row(const float *x, int32_t ins, int32_t blocks, int shift, int r,
               Rows<rows, limbs> *out) {
  float last[kBlock] = {};  // filled up
  memcpy(last, x + (ins - ins % kBlock), sizeof(float) * (ins % kBlock));
  const auto block = [&](int b) { return load(b == ins / kBlock ? last : x + b * kBlock); };
  for (int b = 0; b < blocks; b += kLanes) {
    const int count = blocks - b < kLanes ? blocks - b : kLanes;
    int32_t most[kLanes] = {};
    float factors[kLanes], scales[kLanes];
    for (int i = 0; i < count; ++i) {
      most[i] = greatest_i(as_int(block(b + i)) & splat_i(INT32_MAX));
    }
    scale_blocks<limbs>(most, factors, scales);
    for (int i = 0; i < count; ++i) {
      Rows<rows, limbs> &here = out[b + i];
      here.scales[r] = scales[i];
      here.starts[r] = -shift * round_block<limbs>(block(b + i), factors[i], here.bytes[r]);
    }
  }
}

template <int limbs, int rows>
void round_tile(const Matmul &m, int tile, int shift) {
  Rows<rows, limbs> *out = tile_of<rows, limbs>(m, tile);
  const int own = rows_of(m, tile);
  if (own < rows) memset(out, 0, m.blocks * sizeof *out);
  for (int r = 0; r < own; ++r) {
    round_row<limbs, rows>(m.x + (tile * kTile + r) * m.x_stride, m.weight->ins, m.blocks, shift,
                           r, out);
  }
}

void pack_tile(const Matmul &m, int32_t tile) {
  const int shift = m.weight->format == TAUT_INT8 ? Wide::kShift : Narrow::kShift;
  with_size<TAUT_TILES>(rows_of(m, tile), [&](auto size) {
    constexpr int rows = decltype(size)::value;
    m.bits == 8 ? round_tile<1, rows>(m, tile, shift) : round_tile<2, rows>(m, tile, shift);
  });
}

}  // namespace

extern const MatmulKernels kMatmulInt;
const MatmulKernels kMatmulInt = {kTile, tile_bytes, pack_tile, work_bytes, run};

}  // namespace TAUT_SET
}  // namespace taut
