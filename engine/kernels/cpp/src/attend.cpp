// Attention's tasks: blocks of a kv head's queries, and for long blocks the splits of their cells.
#include "attend.h"

#include <atomic>
#include <cstdint>
#include <new>

#include "context.h"
#include "taut.h"

namespace {

using taut::AttendTask;

struct Block {
  AttendTask task;
  int64_t part = -1;               // floats: where the states of its splits begin, if it is cut
  std::atomic<int32_t> left{0};    // splits to be read before they are joined
};

struct Item {
  Block *block;
  int32_t split;  // -1: all
};

// A block is cut where it is more than this part of a thread's share: its results don't tell.
constexpr int64_t kShare = 4;

class Plan {
 public:
  Plan(taut_context *context, const taut_cells &cells, const taut_rows &rows, int32_t q_heads,
       const float *q, float *out)
      : context_(context), dim_(cells.dim), group_(q_heads / rows.heads) {
    const int32_t size = group_ < taut::kBlockRows ? taut::kBlockRows / group_ : 1;
    int64_t most = 0;
    for (int32_t r = 0; r < rows.rows; ++r) {
      most += int64_t{(rows.first[r + 1] - rows.first[r] + size - 1) / size} * rows.heads;
    }
    blocks_ = context->scratch<Block>(kAttendBlocks, static_cast<std::size_t>(most));
    const int64_t stride = int64_t{q_heads} * dim_;
    for (int32_t r = 0; r < rows.rows; ++r) {
      for (int32_t h = 0; h < rows.heads; ++h) {
        const int32_t held = rows.lengths[rows.length_at[r] + h];
        const int32_t *table = rows.table + rows.table_at[r] + h * rows.width;
        const int32_t *packed = nullptr, *fills = nullptr;
        int32_t groups = 0;
        if (cells.packed != nullptr) {
          const int64_t at = rows.group_at[r] + h * rows.groups;
          packed = rows.packed + at;
          fills = rows.fills + at;
          while (groups < rows.groups && fills[groups] > 0) ++groups;
        }
        const int32_t splits = groups + (held + taut::kSplit - 1) / taut::kSplit;
        // from the last block on, which in a causal chunk sees the most cells
        for (int32_t end = rows.first[r + 1]; end > rows.first[r];) {
          const int32_t begin = end - rows.first[r] < size ? rows.first[r] : end - size;
          const int64_t at = begin * stride + int64_t{h} * group_ * dim_;
          AttendTask task = {&cells, table, held, packed, fills, groups, 0, splits, end - begin,
                             group_, rows.pos + begin, q + at, out + at, stride};
          add(task);
          end = begin;
        }
      }
    }
    cut();
  }

  void run() {
    const taut::Kernels &kernels = context_->kernels;
    const int64_t bytes = taut::attend_work_size(rows_, dim_);
    float *memory = context_->scratch<float>(
        kAttendWork, static_cast<std::size_t>(bytes * context_->pool.threads()));
    context_->pool.run(items_count_, [&](int32_t index, int worker) {
      const Item &item = items_[index];
      Block &block = *item.block;
      float *const work = memory + worker * bytes;
      if (item.split < 0) {
        kernels.attend(block.task, nullptr, work);
        return;
      }
      AttendTask task = block.task;
      task.from = item.split;
      task.to = item.split + 1;
      float *const parts = parts_ + block.part;
      kernels.attend(task, parts + item.split * part_size(block.task), work);
      if (block.left.fetch_sub(1) == 1) kernels.attend_join(block.task, parts, block.task.to, work);
    });
  }

 private:
  void add(const AttendTask &task) {
    Block *block = new (blocks_ + count_++) Block;
    block->task = task;
    total_ += cost(task);
    const int32_t rows = task.queries * group_;
    rows_ = rows > rows_ ? rows : rows_;
  }

  static int64_t cost(const AttendTask &task) { return int64_t{task.queries} * task.to; }

  int64_t part_size(const AttendTask &task) const {
    return taut::attend_state_size(task.queries * group_, dim_);
  }

  bool long_block(const AttendTask &task) const {
    const int64_t threads = context_->pool.threads();
    return threads > 1 && task.to > 1 && cost(task) * kShare * threads > total_;
  }

  // Whole blocks first, as they take longest.
  void cut() {
    int64_t floats = 0, items = 0;
    for (int64_t b = 0; b < count_; ++b) {
      Block &block = blocks_[b];
      items += 1;
      if (!long_block(block.task)) continue;
      items += block.task.to - 1;
      block.part = floats;
      block.left = block.task.to;
      floats += block.task.to * part_size(block.task);
    }
    parts_ = context_->scratch<float>(kAttendParts, static_cast<std::size_t>(floats));
    items_ = context_->scratch<Item>(kAttendItems, static_cast<std::size_t>(items));
    for (int64_t b = 0; b < count_; ++b) {
      if (blocks_[b].part < 0) items_[items_count_++] = {blocks_ + b, -1};
    }
    for (int64_t b = 0; b < count_; ++b) {
      if (blocks_[b].part < 0) continue;
      for (int32_t s = 0; s < blocks_[b].task.to; ++s) items_[items_count_++] = {blocks_ + b, s};
    }
  }

  taut_context *context_;
  int32_t dim_;
  int32_t group_;
  Block *blocks_ = nullptr;
  int64_t count_ = 0;
  int32_t rows_ = 0;   // of the largest block
  int64_t total_ = 0;  // cost
  float *parts_ = nullptr;
  Item *items_ = nullptr;
  int32_t items_count_ = 0;
};

}  // namespace

int32_t taut_attend(taut_context *context, const taut_cells *cells, const taut_rows *rows,
                    int32_t q_heads, const float *q, float *out) {
  const std::lock_guard<std::recursive_mutex> turn(context->mutex);
  try {
    Plan(context, *cells, *rows, q_heads, q, out).run();
    return 0;
  } catch (const std::bad_alloc &) {
    return -1;
  }
}
