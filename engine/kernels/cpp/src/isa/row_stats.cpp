// What a piece of a row of logits amounts to, its numbers read from memory once.
#include <math.h>

#include "rows.h"
#include "simd_rows.h"

namespace taut {
namespace TAUT_SET {

namespace {

constexpr int kChunk = 2048;  // stays in the first cache between its two passes

float largest(const float *x, int width, bool *nan) {
  F32 most = splat(-INFINITY);
  I32 size = splat_i(0);  // bits but the sign's are ordered as integers, those of NaN last
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const F32 v = load(x + i);
    most = max(most, v);
    size = max_i(size, as_int(v) & splat_i(0x7fffffff));
  }
  float out = greatest(most);
  int32_t sizes[kLanes];
  store_i(sizes, size);
  for (int lane = 0; lane < kLanes; ++lane) *nan = *nan || sizes[lane] > 0x7f800000;
  for (; i < width; ++i) {
    out = x[i] > out ? x[i] : out;
    *nan = *nan || isnan(x[i]);
  }
  return out;
}

// Adds up e^d and e^d d, d = x - greatest.
void add_weights(const float *x, int width, float greatest, double *total, double *weighted) {
  // below -100 e^d is 0, and d must not be infinite: 0 * infinity is none of the sum
  const F32 base = splat(greatest), least = splat(-100.0f);
  F32 sums = zero(), products = zero();
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const F32 d = max(least, load(x + i) - base);
    const F32 e = exp(d);
    sums = sums + e;
    products = fma(e, d, products);
  }
  if (i < width) {
    float rest[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      rest[lane] = i + lane < width ? x[i + lane] : -INFINITY;
    }
    const F32 d = max(least, load(rest) - base);
    const F32 e = exp(d);
    sums = sums + e;
    products = fma(e, d, products);
  }
  *total += sum(sums);
  *weighted += sum(products);
}

}  // namespace

RowPiece row_piece(const float *x, int32_t width, bool weigh) {
  RowPiece piece = {-INFINITY, 0, 0.0, 0.0};
  bool nan = false;
  int best = 0;  // the chunk with the greatest
  for (int start = 0; start < width; start += kChunk) {
    const int count = width - start < kChunk ? width - start : kChunk;
    const float most = largest(x + start, count, &nan);
    if (nan) return {NAN, -1, NAN, NAN};
    if (most > piece.greatest) {
      const double step = static_cast<double>(piece.greatest) - static_cast<double>(most);
      if (piece.total > 0.0) {
        const double decay = ::exp(step);
        piece.weighted = decay * (piece.weighted + step * piece.total);
        piece.total *= decay;
      }
      piece.greatest = most;
      best = start;
    }
    if (weigh && piece.greatest > -INFINITY) {
      add_weights(x + start, count, piece.greatest, &piece.total, &piece.weighted);
    }
  }
  for (piece.at = best; piece.at < width && x[piece.at] != piece.greatest;) ++piece.at;
  return piece;
}

}  // namespace TAUT_SET
}  // namespace taut
