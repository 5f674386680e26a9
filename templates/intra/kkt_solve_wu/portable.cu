// W and U straight from k, v, beta and G, one block a chunk and value head. A and its inverse stay
// in shared memory. Half of the warps then compute W, the other half U, tile by tile of BV columns.
#include "device/cuda/wy.cuh"
#include "device/state_unit.hpp"
#include "intra/kkt_solve_wu/layout.hpp"

constexpr int kThreads = num_warps * 32;
constexpr int kTilesV = ceil_div(V, BV);
constexpr kkt_solve_wu::SharedLayout kLayout{Spec{}};

/// With beta up to 2 neither the state nor its accumulated errors need decay.
constexpr int kInverseParts = kHalf<DTYPE> && NEG_EIGVAL ? 2 : 1;

WYVERN_KERNEL(kThreads, 0) {
  const int head = block_index() % e.HV;
  const Chunk chunk = locate_chunk<VARLEN, BT>(block_index() / e.HV, e, seq_offsets, chunk_index);
  if (chunk.rows <= 0) return;
  const int64 row = chunk.token * e.HV + head;
  const int key = e.key_head(head);
  const int64 row_k = chunk.token * e.H + key;
  const auto k_chunk = rows_in(chunk, k, k_stride, key * K);
  const auto v_chunk = rows_in(chunk, v, v_stride, head * V);
  const auto beta_chunk = rows_in(chunk, beta, beta_stride, head);

  unsigned char* const shared = shared_memory();
  const auto keys = tile_at<kLayout.keys>(shared);
  const auto values = tile_at<kLayout.values>(shared);
  const auto x = tile_at<kLayout.x>(shared);
  float* const G_tile = array_at<kLayout.G>(shared);
  float* const beta_tile = array_at<kLayout.beta>(shared);
  float* const scale_w = array_at<kLayout.scale_w>(shared);
  float* const rstd_tile = array_at<kLayout.k_rstd>(shared);

  const auto load_values = [&](int tile) {
    load_tile<kThreads, V>(values, v_chunk.at(0, tile * BV), chunk.rows, V - tile * BV);
    copy_async_commit();
  };
  load_tile<kThreads, K>(keys, k_chunk, chunk.rows, K);
  copy_async_commit();
  load_values(0);
  for (int r = thread_index(); r < BT; r += kThreads) {
    // Past the end beta is 0 and G stays constant, so that A's rows are 0 there.
    const float G_r = SCALAR_GATE ? G[row + smaller(r, chunk.rows - 1) * e.HV] : 0.0f;
    const float beta_r = r < chunk.rows ? beta_of_values<Spec>(*beta_chunk.row(r)) : 0.0f;
    G_tile[r] = G_r;
    beta_tile[r] = beta_r;
    scale_w[r] = beta_r * decay(G_r);
    if constexpr (QK_L2NORM) {
      const float rstd_r = r < chunk.rows ? k_rstd[row_k + r * e.H] : 0.0f;
      rstd_tile[r] = rstd_r;
      scale_w[r] *= rstd_r;
    }
  }
  copy_async_wait<1>();
  sync_block();

  Strips<BT, num_warps> gram;
  accumulate_gram<precision>(gram, keys);
  for_each_decayed<QK_L2NORM>(gram, G_tile, beta_tile, rstd_tile,
                              [&](int r, int s, float a, float b) {
                                *reinterpret_cast<Float2*>(x.at(r, s)) = Float2{{a, b}};
                              });
  sync_block();
  invert_unit_lower<precision>(x);
  if constexpr (KEEP_INVERSE) store_inverse<kThreads>(x, Tinv + row * BT, e.HV * BT, chunk.rows);

  constexpr int kSide = num_warps / 2;
  const bool computes_w = warp_index() < kSide;
  const int first = warp_index() % kSide * 16;
  const LowerOperand<DTYPE, BT, kInverseParts> inverse(x, computes_w ? scale_w : beta_tile);
  if (computes_w)
    for (int col = first; col < K; col += kSide * 16)
      inverse.template apply<precision, K>(keys, col, w + row * K + col, e.HV * K, chunk.rows,
                                           K - col, 1.0f);
  for (int tile = 0; tile < kTilesV; ++tile) {
    copy_async_wait<0>();
    sync_block();
    const int cols = smaller(V - tile * BV, BV);
    if (!computes_w)
      for (int col = first; col < cols; col += kSide * 16)
        inverse.template apply<precision, V>(values, col, u + row * V + tile * BV + col, e.HV * V,
                                             chunk.rows, cols - col, kValueUnit<Spec>);
    if (tile + 1 < kTilesV) {
      sync_block();
      load_values(tile + 1);
    }
  }
}
