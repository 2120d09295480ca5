// How weights and the rows that meet them lie in memory.
#pragma once

#include <stdint.h>

namespace taut {

// Outputs of a panel, and inputs that are filled up to whole blocks.
constexpr int kPanel = 16;
constexpr int kBlock = 16;

// Bytes of a panel's values in a block of inputs, by number format.
constexpr int kBlockBytes[] = {1024, 512, 256, 128};

// An int8 code is stored as code + kCodeOffset: products of bytes take one factor unsigned.
constexpr int kCodeOffset = 128;

inline int32_t blocks_of(int32_t ins) { return (ins + kBlock - 1) / kBlock; }
inline int32_t panels_of(int32_t outs) { return (outs + kPanel - 1) / kPanel; }

}  // namespace taut
