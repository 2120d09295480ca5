// Norms, rotation with append, and statistics of logits: tasks are rows, a few at a time.
#include "rows.h"

#include <cmath>
#include <new>

#include "context.h"
#include "taut.h"

namespace {

constexpr int64_t kTaskFloats = 1 << 14;  // less isn't worth a thread's attention
constexpr int32_t kPiece = 1 << 14;       // of a row of logits; sums' bits depend on it

// body(from, to) over all rows, in tasks of at least kTaskFloats.
template <typename Body>
void by_rows(taut_context *context, int32_t rows, int64_t width, const Body &body) {
  const int32_t size = static_cast<int32_t>((kTaskFloats + width - 1) / width);
  const int32_t tasks = (rows + size - 1) / size;
  context->pool.run(tasks, [&](int32_t task, int) {
    const int32_t from = task * size, to = from + size;
    body(from, to < rows ? to : rows);
  });
}

// The pieces of a row, in order.
taut::RowPiece joined(const taut::RowPiece *pieces, int32_t count, int64_t *best) {
  taut::RowPiece all = pieces[0];
  *best = all.at;
  for (int32_t i = 1; i < count && *best >= 0; ++i) {
    taut::RowPiece next = pieces[i];
    if (next.at < 0) {
      all = next;
      *best = -1;
      continue;
    }
    const bool ahead = next.greatest > all.greatest;
    if (ahead) {
      *best = int64_t{i} * kPiece + next.at;
      const taut::RowPiece before = all;
      all = next;
      next = before;
    }
    if (next.total > 0.0) {
      const double step = double{next.greatest} - double{all.greatest};
      const double decay = std::exp(step);
      all.weighted += decay * (next.weighted + step * next.total);
      all.total += decay * next.total;
    }
  }
  return all;
}

void row_stats(taut_context *context, const float *logits, int32_t rows, int32_t width,
               int64_t *best, float *greatest, float *logsumexp, float *entropy) {
  const int32_t count = (width + kPiece - 1) / kPiece;
  const bool weigh = logsumexp != nullptr || entropy != nullptr;
  auto *pieces = context->scratch<taut::RowPiece>(kRowPieces, std::size_t(rows) * count);
  context->pool.run(rows * count, [&](int32_t task, int) {
    const int64_t row = task / count;
    const int32_t from = task % count * kPiece;
    const int32_t size = width - from < kPiece ? width - from : kPiece;
    pieces[task] = context->kernels.row_piece(logits + row * width + from, size, weigh);
  });
  for (int32_t row = 0; row < rows; ++row) {
    int64_t at = -1;
    const taut::RowPiece all = joined(pieces + int64_t{row} * count, count, &at);
    if (best != nullptr) best[row] = at;
    if (greatest != nullptr) greatest[row] = all.greatest;
    const double size = std::log(all.total);
    if (logsumexp != nullptr) logsumexp[row] = static_cast<float>(all.greatest + size);
    if (entropy != nullptr) entropy[row] = static_cast<float>(size - all.weighted / all.total);
  }
}

}  // namespace

void taut_rms_norm(taut_context *context, const float *x, int32_t rows, int32_t width,
                   const float *weight, float eps, float *y) {
  const std::lock_guard<std::recursive_mutex> turn(context->mutex);
  by_rows(context, rows, width, [&](int32_t from, int32_t to) {
    const int64_t at = int64_t{from} * width;
    context->kernels.rms_norm(x + at, to - from, width, weight, eps, y + at);
  });
}

void taut_rotate_append(taut_context *context, const float *heads, int32_t tokens, int32_t q_heads,
                        int32_t kv_heads, const float *qk_norm, float eps, const float *cos,
                        const float *sin, float *q, const taut_cells *cells, const int64_t *at) {
  const std::lock_guard<std::recursive_mutex> turn(context->mutex);
  const taut::Rotation args = {heads, q_heads, kv_heads, qk_norm, eps, cos, sin, q, cells, at};
  const int64_t width = int64_t{q_heads + 2 * kv_heads} * cells->dim;
  by_rows(context, tokens, width, [&](int32_t from, int32_t to) {
    context->kernels.rotate_append(args, from, to);
  });
}

int32_t taut_row_stats(taut_context *context, const float *logits, int32_t rows, int32_t width,
                       int64_t *best, float *greatest, float *logsumexp, float *entropy) {
  const std::lock_guard<std::recursive_mutex> turn(context->mutex);
  try {
    row_stats(context, logits, rows, width, best, greatest, logsumexp, entropy);
    return 0;
  } catch (const std::bad_alloc &) {
    return -1;
  }
}
