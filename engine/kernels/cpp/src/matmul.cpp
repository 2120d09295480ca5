#include "matmul.h"

#include <algorithm>
#include <new>

#include "context.h"

namespace taut {

namespace {

constexpr int kRowsAtOnce = 192;         // rows of a pass: they stay in cache for all panels
constexpr int kPairsAtOnce = 6;          // pairs of panels of a task, if several tiles share them
constexpr int kTasksEach = 4;           // tasks of each thread: one held up is no delay
constexpr int64_t kTaskCost = 1 << 15;   // bytes of weights or products of a task, at least
constexpr int64_t kPackAlone = 1 << 14;  // activations below which one thread packs them

void pack_rows(taut_context &context, const MatmulKernels &kernels, const Matmul &matmul,
               int32_t tiles) {
  const auto pack = [&](int32_t tile, int) { kernels.pack_tile(matmul, tile); };
  if (int64_t{matmul.rows} * matmul.weight->ins < kPackAlone) {
    for (int32_t tile = 0; tile < tiles; ++tile) pack(tile, 0);
  } else {
    context.pool.run(tiles, pack);
  }
}

int32_t tasks_of(const MatmulKernels &kernels, const Matmul &matmul, int32_t pairs, int threads) {
  const int64_t cost = int64_t{2} * pairs * matmul.blocks *
                       (kBlockBytes[matmul.weight->format] + 16 * int64_t{matmul.rows});
  const int64_t worth = std::min<int64_t>(cost / kTaskCost, int64_t{kTasksEach} * threads);
  const bool shared = matmul.rows > kernels.tile;
  const int64_t needed = shared ? (pairs + kPairsAtOnce - 1) / kPairsAtOnce : 1;
  return static_cast<int32_t>(std::clamp<int64_t>(worth, needed, pairs));
}

void run(taut_context &context, const MatmulKernels &kernels, Matmul matmul) {
  const int32_t tiles = (matmul.rows + kernels.tile - 1) / kernels.tile;
  matmul.packed = context.scratch<char>(kPackedRows, tiles * kernels.tile_bytes(matmul));
  pack_rows(context, kernels, matmul, tiles);

  const int threads = context.pool.threads();
  const int32_t pairs = (matmul.panels + 1) / 2;
  const int32_t tasks = tasks_of(kernels, matmul, pairs, threads);
  const int32_t most = (pairs + tasks - 1) / tasks * 2;  // panels of one task
  const int64_t bytes = (kernels.work_bytes(matmul, most) + 63) / 64 * 64;
  char *work = context.scratch<char>(kProducts, threads * bytes);
  context.pool.run(tasks, [&](int32_t task, int worker) {
    const int32_t first = static_cast<int32_t>(int64_t{pairs} * task / tasks) * 2;
    const int32_t end = static_cast<int32_t>(int64_t{pairs} * (task + 1) / tasks) * 2;
    kernels.run(matmul, first, std::min(end, matmul.panels) - first, work + worker * bytes);
  });
}

}  // namespace

}  // namespace taut

int32_t taut_matmul(taut_context *context, const taut_weight *weight, const float *x,
                    int64_t x_stride, int32_t rows, float *y, int64_t y_stride, int32_t then,
                    int32_t bits) {
  const std::lock_guard<std::recursive_mutex> turn(context->mutex);
  const bool whole = bits > 0 && weight->format >= TAUT_INT8;
  const taut::Kernels &all = context->kernels;
  const taut::MatmulKernels &kernels = whole                          ? *all.matmul_int
                                       : weight->format == TAUT_F32 ? *all.matmul_float
                                                                    : *all.matmul_narrow;
  const int32_t panels = then == TAUT_SWIGLU ? 2 * taut::panels_of(weight->outs / 2)
                                             : taut::panels_of(weight->outs);
  if (panels == 0) return 0;
  try {
    const int32_t pass = taut::kRowsAtOnce / kernels.tile * kernels.tile;
    for (int32_t row = 0; row < rows; row += pass) {
      taut::run(*context, kernels,
                {weight, bits, taut::blocks_of(weight->ins), panels,
                 std::min(pass, rows - row), x + row * x_stride, x_stride, nullptr,
                 y + row * y_stride, y_stride, then});
    }
  } catch (const std::bad_alloc &) {
    return -1;
  }
  return 0;
}
