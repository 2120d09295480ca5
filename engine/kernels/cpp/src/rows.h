// What the kernels for rows of a residual stream, of a projection and of logits take.
#pragma once

#include <stdint.h>

#include "taut.h"

namespace taut {

// The arguments of taut_rotate_append.
struct Rotation {
  const float *heads;
  int32_t q_heads;
  int32_t kv_heads;
  const float *qk_norm;
  float eps;
  const float *cos, *sin;
  float *q;
  const taut_cells *cells;
  const int64_t *at;
};

// What a piece of a row of logits amounts to.
struct RowPiece {
  float greatest;
  int32_t at;       // its index in the piece; -1 if there is a NaN
  double total;     // sum of e^(x - greatest)
  double weighted;  // sum of e^(x - greatest) (x - greatest)
};

}  // namespace taut
