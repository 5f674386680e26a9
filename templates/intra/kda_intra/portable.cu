// Aqk and A, one block a chunk and value head: products of queries and keys with keys, summed over
// tiles of BK columns. A warp owns a strip of sixteen rows, or shares it by columns with others.
#include "device/cuda/kda.cuh"
#include "intra/kda_intra/layout.hpp"

constexpr int kThreads = num_warps * 32;
constexpr int kTiles = ceil_div(K, BK);
constexpr int kStrips = BT / 16;
constexpr int kSplit = num_warps / kStrips;  // warps a strip

constexpr kda_intra::SharedLayout kLayout{Spec{}};
constexpr kda_intra::BufferLayout kBuffer{Spec{}};

/// The tile in one of the buffers of the pipeline.
WYVERN_DEVICE auto buffer(int tile) {
  return kda::keys_at<kBuffer.keys>(shared_memory() + tile % num_stages * kBuffer.bytes);
}

WYVERN_KERNEL(kThreads, 0) {
  const int head = block_index() % e.HV;
  const Chunk chunk = locate_chunk<VARLEN, BT>(block_index() / e.HV, e, seq_offsets, chunk_index);
  if (chunk.rows <= 0) return;
  const int64 row = chunk.token * e.HV + head;
  const int key = e.key_head(head);
  const int64 row_k = chunk.token * e.H + key;
  const auto q_chunk = rows_in(chunk, q, q_stride, key * K);
  const auto k_chunk = rows_in(chunk, k, k_stride, key * K);
  const auto beta_chunk = rows_in(chunk, beta, beta_stride, head);
  const auto erase_chunk = rows_in(chunk, erase, erase_stride, head * K);

  const auto load = [&](int tile) {
    if (tile < kTiles) {
      const auto to = buffer(tile);
      const int col = tile * BK;
      load_tile<kThreads, K>(to.q, q_chunk.at(0, col), chunk.rows, K - col);
      load_tile<kThreads, K>(to.k, k_chunk.at(0, col), chunk.rows, K - col);
      load_tile<kThreads, K>(to.G, Gk + row * K + col, e.HV * K, chunk.rows, K - col);
      kda::load_erase_gate<kThreads, K>(to, erase_chunk.at(0, col), chunk.rows, K - col);
    }
    copy_async_commit();
  };
  for (int i = 0; i < num_stages; ++i) load(i);

  const auto rows = kda::rows_at<kLayout.rows>(shared_memory());
  kda::load_row_factors<kThreads, BT, QK_L2NORM>(
      rows, q_rstd + row_k, k_rstd + row_k, e.H, chunk.rows,
      [&](int r) { return kda::row_rate<Spec>(beta_chunk, r); });

  const int strip = warp_index() % kStrips;
  const int share = warp_index() / kStrips;
  kda::IntraStrip<BT> sum;
  for (int tile = 0; tile < kTiles; ++tile) {
    copy_async_wait<num_stages - 1>();
    sync_block();
    const auto keys = buffer(tile);
    if (strip * 16 < chunk.rows)
      kda::accumulate_intra<precision, SAFE_GATE, kSplit>(sum, keys, strip, chunk.rows, share);
    if (tile + 1 < kTiles || kSplit > 1) sync_block();
    load(tile + num_stages);
  }
  kda::join_shares<kSplit>(sum, array_at<kLayout.shares>(shared_memory()), strip, share);
  if (share > 0) return;
  kda::for_each_intra<QK_L2NORM>(sum, rows, strip,
                                 [&](int r, int s, float P_0, float P_1, float A_0, float A_1) {
                                   if (r >= chunk.rows) return;
                                   const int64 at = (row + r * e.HV) * BT + s;
                                   store_vector(Aqk + at, Float2{{P_0, P_1}});
                                   store_vector(A + at, Float2{{A_0, A_1}});
                                 });
}
