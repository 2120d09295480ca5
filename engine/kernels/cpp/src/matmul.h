// A matrix product on its way from taut_matmul to the kernels.
#pragma once

#include <stdint.h>

#include "formats.h"
#include "taut.h"

namespace taut {

// Rows go in tiles, whose size is the instruction set's, and panels in pairs (for TAUT_SWIGLU).
// Rows are packed first: every tile as its kernel reads it, from start to end.
struct Matmul {
  const taut_weight *weight;
  int32_t bits;      // of activations; 0: float32
  int32_t blocks;    // of inputs
  int32_t panels;
  int32_t rows;
  const float *x;
  int64_t x_stride;
  void *packed;
  float *y;
  int64_t y_stride;
  int32_t then;
};

// What one instruction set does in a product, with float32 or with integer activations.
struct MatmulKernels {
  int tile;  // rows, at most
  int64_t (*tile_bytes)(const Matmul &matmul);
  void (*pack_tile)(const Matmul &matmul, int32_t tile);
  // Bytes of memory that `run` wants for so many panels.
  int64_t (*work_bytes)(const Matmul &matmul, int32_t panels);
  void (*run)(const Matmul &matmul, int32_t first, int32_t panels, void *work);
};

}  // namespace taut
