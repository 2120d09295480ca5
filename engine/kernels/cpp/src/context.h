// What a call runs with: threads, memory to work in, and the kernels of an instruction set.
#pragma once

#include <cstddef>
#include <memory>

#include "kernels.h"
#include "pool.h"

struct taut_context {
  taut_context(int threads, const taut::Kernels &kernels) : pool(threads), kernels(kernels) {}

  // At least `bytes` of memory, aligned to 64, valid until the next call for the same `purpose`.
  template <typename T>
  T *scratch(int purpose, std::size_t count) {
    return static_cast<T *>(memory(purpose, count * sizeof(T)));
  }

  taut::Pool pool;
  const taut::Kernels &kernels;

 private:
  struct Free {
    void operator()(void *memory) const;
  };
  struct Piece {
    std::unique_ptr<void, Free> memory;
    std::size_t bytes = 0;
  };
  static constexpr int kPurposes = 16;

  void *memory(int purpose, std::size_t bytes);

  Piece pieces_[kPurposes];
};
