// W, qg, kg and U from the inverse, one block a tile of BK columns of the first three or BV columns
// of U.
#include "device/cuda/gdn2.cuh"
#include "gdn2/gdn2_recompute_w_u/layout.hpp"

constexpr int kThreads = num_warps * 32;
constexpr int kTilesW = ceil_div(K, BK);
constexpr int kTilesU = ceil_div(V, BV);

constexpr gdn2_recompute_w_u::SharedLayout kLayout{Spec{}};

WYVERN_KERNEL(kThreads, 0) {
  const int tile = block_index() % (kTilesW + kTilesU);
  const int head = block_index() / (kTilesW + kTilesU) % e.HV;
  const int slot = block_index() / (kTilesW + kTilesU) / e.HV;
  const Chunk chunk = locate_chunk<VARLEN, BT>(slot, e, seq_offsets, chunk_index);
  if (chunk.rows <= 0) return;
  const int64 row = chunk.token * e.HV + head;
  const int key = e.key_head(head);
  const int64 row_k = chunk.token * e.H + key;
  const auto q_chunk = rows_in(chunk, q, q_stride, key * K);
  const auto k_chunk = rows_in(chunk, k, k_stride, key * K);
  const auto v_chunk = rows_in(chunk, v, v_stride, head * V);
  const auto erase_chunk = rows_in(chunk, erase, erase_stride, head * K);
  const auto write_chunk = rows_in(chunk, write, write_stride, head * V);
  const bool is_u = tile >= kTilesW;
  const int first = is_u ? (tile - kTilesW) * BV : tile * BK;

  unsigned char* const shared = shared_memory();
  const auto inverse = tile_at<kLayout.inverse>(shared);
  const auto rows = kda::rows_at<kLayout.rows>(shared);
  const auto keys = gdn2::keys_at<kLayout.keys>(shared);
  const auto values = gdn2::values_at<kLayout.values>(shared);
  load_tile<kThreads, BT>(inverse, Tinv + row * BT, e.HV * BT, chunk.rows, BT);
  if (is_u)
    gdn2::load_values<kThreads, V>(values, v_chunk.at(0, first), write_chunk.at(0, first),
                                   chunk.rows, V - first);
  else
    gdn2::load_keys<kThreads, K>(keys, q_chunk.at(0, first), k_chunk.at(0, first),
                                 TokenRows<const float>{Gk + row * K + first, e.HV * K},
                                 erase_chunk.at(0, first), chunk.rows, K - first);
  copy_async_commit();
  kda::load_row_factors<kThreads, BT, QK_L2NORM>(rows, q_rstd + row_k, k_rstd + row_k, e.H,
                                                 chunk.rows, [](int) { return 1.0f; });
  copy_async_wait<0>();
  sync_block();

  const kda::InverseOperand<DTYPE, BT> operand(inverse, rows.beta);
  if (is_u) {
    for (int col = warp_index() * 16; col < smaller(BV, V - first); col += num_warps * 16)
      gdn2::write_values<precision, V>(operand, values, col, u + row * V + first + col, e.HV * V,
                                       chunk.rows, V - first - col);
    return;
  }
  const kda::KeyOutputs<DTYPE> to{w + row * K, qg + row * K, kg + row * K, e.HV * K};
  for (int col = warp_index() * 16; col < smaller(BK, K - first); col += num_warps * 16)
    kda::write_keys<precision, QK_L2NORM, K>(operand, keys, rows, to, first + col, col, chunk.rows,
                                             K - first - col);
}
