// The epilogue of gradients of a chunk's rows, 64 channels at a time.
#pragma once

#include "device/cuda/sm90/chunk_items.cuh"
#include "device/cuda/sm90/tile.cuh"

namespace wyvern::cuda::sm90 {

/// A slice of 64 channels of rows [tokens, heads, Width] from one warpgroup, by way of a tile in
/// shared memory.
template <class T, int Width>
struct SliceStore {
  static constexpr int kSize = 64;
  using SliceTile = SwizzledTile<T, kSize, kSize>;

  const TensorMap& map;
  T* to;
  unsigned char* shared;
  int name;  ///< of the warpgroup's named barrier
  int heads;

  /// Addresses in it are computed where they are used: in between registers are few.
  WYVERN_DEVICE SliceTile tile() const { return {shared + opaque(0)}; }

  /// Until the tile may be written.
  WYVERN_DEVICE void wait() const {
    if (thread_index() % 128 == 0) bulk_wait_read<0>();
    sync_named(name, 128);
  }
  /// Stores what all threads have written to the tile.
  WYVERN_DEVICE void store(const ChunkItem& item, int slice) const {
    fence_proxy_async();
    sync_named(name, 128);
    if (item.rows == kSize) {
      if (thread_index() % 128 > 0) return;
      tensor_store(map, {0, item.token, slice, item.head}, shared);
      bulk_commit();
      return;
    }
    const int thread = opaque(thread_index() % 128);
    const int column = thread % 8 * 8;
#pragma unroll 1
    for (int row = thread / 8; row < item.rows; row += 16) {
      const int64 place = (int64{item.token + row} * heads + item.head) * Width + slice * kSize;
      store_words(to + place + column,
                  *reinterpret_cast<const uint32(*)[4]>(tile().at(row, column)));
    }
  }
};

}  // namespace wyvern::cuda::sm90
