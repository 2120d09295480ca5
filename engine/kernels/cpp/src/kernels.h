// The kernels of one instruction set, as a table of functions: tasks of the calls in taut.h, each
// run by one thread.
#pragma once

#include "attend.h"
#include "rows.h"

namespace taut {

struct MatmulKernels;  // matmul.h

struct Kernels {
  const char *name;

  // Into task.out, or, where there is a `part`, into that state.
  void (*attend)(const AttendTask &task, float *part, float *work);
  // task.out from the states of its splits, which lie one after the other.
  void (*attend_join)(const AttendTask &task, float *parts, int32_t count, float *work);

  void (*rms_norm)(const float *x, int32_t rows, int32_t width, const float *weight, float eps,
                   float *y);
  void (*rotate_append)(const Rotation &args, int32_t from, int32_t to);  // tokens
  RowPiece (*row_piece)(const float *x, int32_t width, bool weigh);

  const MatmulKernels *matmul_float;   // float32 weights
  const MatmulKernels *matmul_narrow;  // others, with float32 activations
  const MatmulKernels *matmul_int;     // with activations in integers
};

#define TAUT_TABLE(set) \
  namespace set {       \
  extern const Kernels kTable; \
  }
TAUT_TABLE(portable)
TAUT_TABLE(avx2)
TAUT_TABLE(avx512)
TAUT_TABLE(vnni)
TAUT_TABLE(bf16)
#undef TAUT_TABLE

namespace amx {
extern const MatmulKernels kMatmulTiles;
}

}  // namespace taut
