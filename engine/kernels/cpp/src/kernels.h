// The kernels of one instruction set, as a table of functions: tasks of the calls in taut.h, each
// run by one thread.
#pragma once

namespace taut {

struct MatmulKernels;  // matmul.h

struct Kernels {
  const char *name;
  const MatmulKernels *matmul_float;
  const MatmulKernels *matmul_int;
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

}  // namespace taut
