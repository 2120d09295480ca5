// Whole decoder layers in one call: at one stream, calls from Python would cost more than the work.
#include <cstring>
#include <new>

#include "context.h"
#include "taut.h"

namespace {

// Where a step's tokens belong, the same for all layers but for the tables' offsets.
class Plan {
 public:
  Plan(taut_context *context, const taut_shape &shape, const taut_step &step)
      : shape_(shape), step_(step), rows_(step.rows) {
    first_ = context->scratch<int32_t>(kRowFirst, rows_ + 1);
    first_[0] = 0;
    for (int32_t r = 0; r < rows_; ++r) first_[r + 1] = first_[r] + int32_t(step.counts[r]);
    pos_ = context->scratch<int32_t>(kTokenPos, tokens());
    lengths_ = context->scratch<int32_t>(kRowLengths, std::size_t(rows_) * shape.kv_heads);
    table_at_ = context->scratch<int64_t>(kRowTables, rows_);
    length_at_ = context->scratch<int64_t>(kRowLengthAt, rows_);
    group_at_ = context->scratch<int64_t>(kRowGroups, rows_);
    at_ = context->scratch<int64_t>(kTokenCells, std::size_t(tokens()) * shape.kv_heads);
    for (int32_t r = 0; r < rows_; ++r) {
      length_at_[r] = int64_t{r} * shape.kv_heads;
      for (int32_t t = first_[r]; t < first_[r + 1]; ++t) {
        pos_[t] = int32_t(step.starts[r]) + t - first_[r];
      }
    }
  }

  int32_t tokens() const { return first_[rows_]; }

  // Cells [tokens, kv_heads] of a layer for the step's tokens, their positions written.
  const int64_t *append(int32_t layer) {
    const int32_t heads = shape_.kv_heads;
    for (int32_t r = 0; r < rows_; ++r) {
      const int64_t row = (step_.slots[r] * step_.layers + layer) * heads;
      table_at_[r] = row * step_.width;
      group_at_[r] = row * step_.groups;
      for (int32_t h = 0; h < heads; ++h) {
        const int32_t held = step_.lengths[row + h];
        const int32_t *pages = step_.table + table_at_[r] + h * step_.width;
        for (int32_t t = first_[r]; t < first_[r + 1]; ++t) {
          const int32_t index = held + t - first_[r];
          const int64_t cell = int64_t{pages[index / kPage]} * kPage + index % kPage;
          at_[int64_t{t} * heads + h] = cell;
          step_.pos[cell] = pos_[t];
        }
        lengths_[length_at_[r] + h] = held + first_[r + 1] - first_[r];
      }
    }
    return at_;
  }

  // The rows as attention takes them, after `append` of the layer.
  taut_rows rows() const {
    return {rows_,        shape_.kv_heads, first_,    pos_,        step_.table,
            table_at_,    step_.width,     lengths_,  length_at_,  step_.packed,
            step_.fills,  group_at_,       step_.groups};
  }

 private:
  static constexpr int32_t kPage = 16;

  const taut_shape &shape_;
  const taut_step &step_;
  int32_t rows_;
  int32_t *first_;
  int32_t *pos_;
  int32_t *lengths_;
  int64_t *table_at_;
  int64_t *length_at_;
  int64_t *group_at_;
  int64_t *at_;
};

void remember(const taut_step &step, int32_t layer, int32_t tokens, int64_t width, const float *q) {
  if (step.ring == nullptr) return;
  float *ring = step.ring + layer * step.ring_layer;
  for (int32_t t = 0; t < tokens; ++t) {
    if (step.ring_at[t] < 0) continue;
    std::memcpy(ring + step.ring_at[t] * width, q + t * width, std::size_t(width) * sizeof(float));
  }
}

int32_t run(taut_context *context, const taut_shape &shape, const taut_layer *layers,
            int32_t first, int32_t last, const taut_step &step, const float *cos, const float *sin,
            const float *norm, float *x) {
  Plan plan(context, shape, step);
  const int32_t tokens = plan.tokens();
  const int64_t hidden = shape.hidden, inner = shape.inner, dim = step.cells.dim;
  const int64_t queries = shape.q_heads * dim, all = queries + 2 * shape.kv_heads * dim;
  float *normed = context->scratch<float>(kNormed, std::size_t(tokens * hidden));
  float *heads = context->scratch<float>(kHeads, std::size_t(tokens * all));
  float *q = context->scratch<float>(kQueries, std::size_t(tokens * queries));
  float *seen = context->scratch<float>(kSeen, std::size_t(tokens * queries));
  float *acts = context->scratch<float>(kInner, std::size_t(tokens * inner));
  int32_t status = 0;
  const auto matmul = [&](const taut_weight *weight, const float *in, int64_t in_stride, float *out,
                          int64_t out_stride, int32_t then) {
    status |= taut_matmul(context, weight, in, in_stride, tokens, out, out_stride, then, shape.bits);
  };
  for (int32_t l = first; l < last && status == 0; ++l) {
    const taut_layer &layer = layers[l];
    taut_rms_norm(context, x, tokens, shape.hidden, layer.attn_norm, shape.eps, normed);
    matmul(layer.qkv, normed, hidden, heads, all, TAUT_STORE);
    const int64_t *at = plan.append(l);
    taut_rotate_append(context, heads, tokens, shape.q_heads, shape.kv_heads, layer.qk_norm,
                       shape.eps, cos, sin, q, &step.cells, at);
    remember(step, l, tokens, queries, q);
    const taut_rows rows = plan.rows();
    status |= taut_attend(context, &step.cells, &rows, shape.q_heads, q, seen);
    matmul(layer.out, seen, queries, x, hidden, TAUT_ADD);
    taut_rms_norm(context, x, tokens, shape.hidden, layer.mlp_norm, shape.eps, normed);
    matmul(layer.gate_up, normed, hidden, acts, inner, TAUT_SWIGLU);
    matmul(layer.down, acts, inner, x, hidden, TAUT_ADD);
  }
  if (norm != nullptr) taut_rms_norm(context, x, tokens, shape.hidden, norm, shape.eps, x);
  return status;
}

}  // namespace

int32_t taut_layers(taut_context *context, const taut_shape *shape, const taut_layer *layers,
                    int32_t first, int32_t last, const taut_step *step, const float *cos,
                    const float *sin, const float *norm, float *x) {
  const std::lock_guard<std::recursive_mutex> turn(context->mutex);
  try {
    return run(context, *shape, layers, first, last, *step, cos, sin, norm, x);
  } catch (const std::bad_alloc &) {
    return -1;
  }
}
