// A, one block a chunk and value head: the gram matrix of the chunk's keys, summed over tiles of BK
// columns, then scaled by beta and the decay.
#include "device/cuda/wy.cuh"
#include "intra/scaled_dot_kkt/layout.hpp"

constexpr int kThreads = num_warps * 32;
constexpr int kTiles = ceil_div(K, BK);
constexpr scaled_dot_kkt::SharedLayout kLayout{Spec{}};

WYVERN_KERNEL(kThreads, 0) {
  const int head = block_index() % e.HV;
  const Chunk chunk = locate_chunk<VARLEN, BT>(block_index() / e.HV, e, seq_offsets, chunk_index);
  if (chunk.rows <= 0) return;
  const int64 row = chunk.token * e.HV + head;
  const int key = e.key_head(head);
  const auto k_chunk = rows_in(chunk, k, k_stride, key * K);
  const auto beta_chunk = rows_in(chunk, beta, beta_stride, head);

  unsigned char* const shared = shared_memory();
  const auto keys = [&](int tile) {
    auto buffer = tile_at<kLayout.keys>(shared);
    buffer.data += tile % num_stages * (buffer.kBytes / static_cast<int>(sizeof(DTYPE)));
    return buffer;
  };
  float* const G_tile = array_at<kLayout.G>(shared);
  float* const beta_tile = array_at<kLayout.beta>(shared);
  float* const rstd_tile = array_at<kLayout.k_rstd>(shared);

  const auto load = [&](int tile) {
    if (tile < kTiles)
      load_tile<kThreads, K>(keys(tile), k_chunk.at(0, tile * BK), chunk.rows, K - tile * BK);
    copy_async_commit();
  };
  load_gates<SCALAR_GATE, kThreads, BT>(G_tile, G + row, e.HV, chunk.rows);
  if constexpr (QK_L2NORM)
    load_column<kThreads, BT>(rstd_tile, k_rstd + chunk.token * e.H + key, e.H, chunk.rows);
  for (int i = 0; i < num_stages; ++i) load(i);
  for (int r = thread_index(); r < BT; r += kThreads)
    beta_tile[r] = r < chunk.rows ? beta_of_values<Spec>(*beta_chunk.row(r)) : 0.0f;

  Strips<BT, num_warps> gram;
  for (int tile = 0; tile < kTiles; ++tile) {
    copy_async_wait<num_stages - 1>();
    sync_block();
    accumulate_gram<precision>(gram, keys(tile));
    if (tile + 1 < kTiles) sync_block();
    load(tile + num_stages);
  }

  float* const A_chunk = A + row * BT;
  for_each_decayed<QK_L2NORM>(
      gram, G_tile, beta_tile, rstd_tile, [&](int r, int s, float x, float y) {
        if (r < chunk.rows) store_vector(A_chunk + r * (e.HV * int64{BT}) + s, Float2{{x, y}});
      });
  constexpr int kBlocks = BT / 16;
  for (int i = thread_index(); i < BT * kBlocks; i += kThreads) {
    const int r = i / kBlocks;
    const int block = i % kBlocks;
    if (r >= chunk.rows || block * 16 <= r) continue;
    for (int s = block * 16; s < block * 16 + 16; s += 4)
      store_vector(A_chunk + r * (e.HV * int64{BT}) + s, Vector<float, 4>{});
  }
}
