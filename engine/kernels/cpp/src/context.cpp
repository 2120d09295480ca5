#include "context.h"

#include <cstdlib>
#include <new>

#ifdef TAUT_HAS_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "taut.h"

namespace {

#ifdef TAUT_HAS_AMX
// The set before it, but for products that tiles serve.
const taut::Kernels kAmx = [](taut::Kernels kernels) {
  kernels.name = "amx";
  kernels.matmul_narrow = &taut::amx::kMatmulTiles;
  return kernels;
}(taut::bf16::kTable);
#endif

// Index: TAUT_ISA_PORTABLE and so on. Null where the library was built without a set.
const taut::Kernels *const kTables[] = {
    &taut::portable::kTable,
#ifdef TAUT_HAS_AVX2
    &taut::avx2::kTable, &taut::avx512::kTable, &taut::vnni::kTable, &taut::bf16::kTable,
#endif
#ifdef TAUT_HAS_AMX
    &kAmx,
#endif
};
constexpr int kSets = sizeof kTables / sizeof *kTables;

#ifdef TAUT_HAS_AMX
// Tile registers have to be asked for, once for a process: the kernel then saves room for them.
bool tiles_granted() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kNeeded = 1u << 22 | 1u << 23 | 1u << 24;  // AMX-BF16, AVX512-FP16, AMX-TILE
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kNeeded) != kNeeded) return false;
  constexpr long kAsk = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
}
#endif

bool has(int set) {
#ifdef TAUT_HAS_AVX2
  switch (set) {
    case TAUT_ISA_PORTABLE:
      return true;
    case TAUT_ISA_AVX2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case TAUT_ISA_AVX512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case TAUT_ISA_VNNI:
      return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
    case TAUT_ISA_BF16:
      return __builtin_cpu_supports("avx512bf16");
#ifdef TAUT_HAS_AMX
    case TAUT_ISA_AMX:
      return tiles_granted();
#endif
  }
  return false;
#else
  return set == TAUT_ISA_PORTABLE;
#endif
}

}  // namespace

void taut_context::Free::operator()(void *memory) const { std::free(memory); }

void *taut_context::memory(Purpose purpose, std::size_t bytes) {
  Piece &piece = pieces_[purpose];
  if (piece.bytes < bytes) {
    const std::size_t rounded = (bytes + bytes / 2 + 63) / 64 * 64;
    piece.memory.reset(std::aligned_alloc(64, rounded));
    if (!piece.memory) throw std::bad_alloc();
    piece.bytes = rounded;
  }
  return piece.memory.get();
}

int32_t taut_abi(void) { return TAUT_ABI; }

int32_t taut_best_set(void) {
  int32_t best = TAUT_ISA_PORTABLE;
  while (best + 1 < kSets && has(best + 1)) ++best;
  return best;
}

taut_context *taut_open(int32_t threads, int32_t set) {
  return new taut_context(threads, *kTables[set]);
}

void taut_close(taut_context *context) { delete context; }
