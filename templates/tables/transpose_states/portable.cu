// States with their value columns first, one block a square of one chunk slot's state of one value
// head.
#include "device/cuda/tile.cuh"
#include "tables/transpose_states/layout.hpp"

constexpr int kThreads = num_warps * 32;
constexpr int kSquare = transpose_states::kSquare;
constexpr transpose_states::SharedLayout kLayout{Spec{}};
constexpr int kTilesK = ceil_div(K, kSquare);
constexpr int kTilesV = ceil_div(V, kSquare);

WYVERN_KERNEL(kThreads, 0) {
  const int first_v = block_index() % kTilesV * kSquare;
  const int first_k = block_index() / kTilesV % kTilesK * kSquare;
  const int64 start = int64{block_index() / kTilesV / kTilesK} * K * V;
  const auto square = tile_at<kLayout.square>(shared_memory());
  load_tile<kThreads, V>(square, h + start + int64{first_k} * V + first_v, V, K - first_k,
                         V - first_v);
  copy_async_commit();
  copy_async_wait<0>();
  sync_block();
  for (int i = thread_index(); i < kSquare * kSquare; i += kThreads) {
    const int k = i % kSquare;
    const int v = i / kSquare;
    if (first_k + k < K && first_v + v < V)
      h_v_first[start + int64{first_v + v} * K + first_k + k] = *square.at(k, v);
  }
}
