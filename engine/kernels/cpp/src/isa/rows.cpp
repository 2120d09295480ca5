// Rows of a residual stream, of a q, k, v projection, and of logits.
#include "rows.h"

#include "cells.h"

namespace taut {
namespace TAUT_SET {

namespace {

// 1 / rms. Four sums, as one would wait for itself; always in the same order.
float inverse_rms(const float *x, int width, float eps) {
  F32 sums[4] = {zero(), zero(), zero(), zero()};
  int i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
    for (int n = 0; n < 4; ++n) {
      const F32 v = load(x + i + n * kLanes);
      sums[n] = fma(v, v, sums[n]);
    }
  }
  for (; i < width; i += kLanes) {
    const F32 v = load_part(x + i, width - i < kLanes ? width - i : kLanes);
    sums[0] = fma(v, v, sums[0]);
  }
  const float mean = sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<float>(width);
  return 1.0f / sqrtf(mean + eps);
}

void norm_row(const float *x, int width, const float *weight, float eps, float *y) {
  const F32 scale = splat(inverse_rms(x, width, eps));
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) store(y + i, load(x + i) * scale * load(weight + i));
  if (i < width) {
    const int count = width - i;
    store_part(y + i, load_part(x + i, count) * scale * load_part(weight + i, count), count);
  }
}

// Turns x [dim] in place by the angles of its position.
void rotate(float *x, int dim, const float *cos, const float *sin) {
  const int half = dim / 2;
  for (int i = 0; i < half; i += kLanes) {
    const int count = half - i < kLanes ? half - i : kLanes;
    const F32 c = load_part(cos + i, count), s = load_part(sin + i, count);
    const F32 a = load_part(x + i, count), b = load_part(x + half + i, count);
    store_part(x + i, a * c - b * s, count);
    store_part(x + half + i, b * c + a * s, count);
  }
}

F32 finite_or_zero(F32 x) {
  return where_le(as_int(x) & splat_i(0x7fffffff), splat_i(0x7f7fffff), x, zero());
}

template <class Cells>
void save_key(char *pool, int64_t cell, const float *x, int dim) {
  for (int i = 0; i < dim; i += kLanes) Cells::save(pool, cell * dim + i, load(x + i), kLanes);
}

template <class Cells>
void save_value(char *pool, int64_t cell, const float *x, int dim) {
  for (int i = 0; i < dim; i += kLanes) {
    Cells::save(pool, cell * dim + i, finite_or_zero(load(x + i)), kLanes);
  }
}

template <class Cells>
void rotate_append_as(const Rotation &args, int32_t from, int32_t to) {
  constexpr int kMost = 256;
  const int dim = args.cells->dim, half = dim / 2;
  const int rotated = args.q_heads + args.kv_heads, all = rotated + args.kv_heads;
  char *const k = static_cast<char *>(args.cells->k);
  char *const v = static_cast<char *>(args.cells->v);
  float turned[kMost];
  for (int64_t token = from; token < to; ++token) {
    const float *x = args.heads + token * all * dim;
    const int64_t *at = args.at + token * args.kv_heads;
    for (int head = 0; head < rotated; ++head, x += dim) {
      const bool query = head < args.q_heads;
      float *const y = query ? args.q + (token * args.q_heads + head) * dim : turned;
      if (args.qk_norm != nullptr) {
        norm_row(x, dim, args.qk_norm + head * dim, args.eps, y);
      } else {
        memcpy(y, x, static_cast<size_t>(dim) * sizeof(float));
      }
      rotate(y, dim, args.cos + token * half, args.sin + token * half);
      if (!query) save_key<Cells>(k, at[head - args.q_heads], turned, dim);
    }
    for (int head = 0; head < args.kv_heads; ++head, x += dim) {
      save_value<Cells>(v, at[head], x, dim);
    }
  }
}

}  // namespace

void rms_norm(const float *x, int32_t rows, int32_t width, const float *weight, float eps,
              float *y) {
  for (int64_t row = 0; row < rows; ++row) {
    norm_row(x + row * width, width, weight, eps, y + row * width);
  }
}

void rotate_append(const Rotation &args, int32_t from, int32_t to) {
  if (args.cells->format == TAUT_BF16) {
    rotate_append_as<CellsBF16>(args, from, to);
  } else {
    rotate_append_as<CellsF32>(args, from, to);
  }
}

}  // namespace TAUT_SET
}  // namespace taut
