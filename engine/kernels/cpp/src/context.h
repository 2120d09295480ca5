// What a call runs with: threads, memory to work in, and the kernels of an instruction set.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>

#include "kernels.h"
#include "pool.h"

// What memory to work in is for: each has its own, so that one call's survives the calls it makes.
enum Purpose {
  kRowFirst,
  kRowLengths,
  kRowTables,
  kRowLengthAt,
  kRowGroups,
  kTokenPos,
  kTokenCells,
  kNormed,
  kHeads,
  kQueries,
  kSeen,
  kInner,
  kAttendBlocks,
  kAttendItems,
  kAttendParts,
  kAttendWork,
  kRowPieces,
  kPackedRows,
  kProducts,
  kPurposes
};

struct taut_context {
  taut_context(int threads, const taut::Kernels &kernels) : pool(threads), kernels(kernels) {}

  // At least `bytes` of memory, aligned to 64, valid until the next call for the same `purpose`.
  // Throws std::bad_alloc.
  template <typename T>
  T *scratch(Purpose purpose, std::size_t count) {
    return static_cast<T *>(memory(purpose, count * sizeof(T)));
  }

  taut::Pool pool;
  const taut::Kernels &kernels;
  std::recursive_mutex mutex;  // held through every call: others wait for their turn

 private:
  struct Free {
    void operator()(void *memory) const;
  };
  struct Piece {
    std::unique_ptr<void, Free> memory;
    std::size_t bytes = 0;
  };
  void *memory(Purpose purpose, std::size_t bytes);

  Piece pieces_[kPurposes];
};
