// The scheduler of persistent blocks, one a multiprocessor, over the chunks and heads of a launch.
#pragma once

#include "device/cuda/chunk.cuh"
#include "device/cuda/sm90/warp.cuh"
#include "device/cuda/warp.cuh"

namespace wyvern::cuda::sm90 {

/// A chunk and a query and key head.
struct ChunkItem {
  int token, rows;  ///< the chunk's
  int slot, head;
  int place;  ///< of both in a tensor [NT, H, ...]
};

/// A block's items in order. Neighbouring blocks have neighbouring heads of the same tokens.
template <int Rows, bool Packed>
class ChunkItems {
 public:
  WYVERN_DEVICE ChunkItems(const Extents& e, const int32* seq_offsets, const int32* chunk_index)
      : e_(e), seq_offsets_(seq_offsets), chunk_index_(chunk_index) {}

  /// The next item, by a whole warp; false where there is none. An unused slot of a
  /// packed batch has no rows.
  WYVERN_DEVICE bool next(ChunkItem& item) {
    const int all = static_cast<int>(e_.NT) * e_.H;
    const int at = block_index() + count_ * block_count();
    if (at >= all) return false;
    item.place = at;
    item.slot = at / e_.H;
    item.head = at % e_.H;
    if constexpr (Packed) {
      // Tables are read for 32 items at once, a lane each.
      if (count_ % 32 == 0) {
        const int ahead = at + lane_index() * block_count();
        if (ahead < all) read(ahead / e_.H);
      }
      item.token = from_lane(token_, count_ % 32);
      item.rows = from_lane(rows_, count_ % 32);
    } else {
      read(item.slot);
      item.token = token_;
      item.rows = rows_;
    }
    ++count_;
    return true;
  }
  /// The same, to the next that has rows.
  WYVERN_DEVICE bool next_used(ChunkItem& item) {
    while (next(item))
      if (!Packed || item.rows > 0) return true;
    return false;
  }

 private:
  WYVERN_DEVICE void read(int slot) {
    const Chunk chunk = locate_chunk<Packed, Rows>(slot, e_, seq_offsets_, chunk_index_);
    token_ = static_cast<int>(chunk.token);
    rows_ = chunk.rows;
  }

  const Extents& e_;
  const int32* seq_offsets_;
  const int32* chunk_index_;
  int count_ = 0;
  int token_ = 0, rows_ = 0;  ///< of this lane's item
};

}  // namespace wyvern::cuda::sm90
