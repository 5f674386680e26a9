// W, qg, kg and U from the inverse, one block a tile of BK columns of the first three or BV columns
// of U.
#include "device/cuda/kda_wy.cuh"
#include "device/state_unit.hpp"
#include "intra/kda_recompute_w_u/layout.hpp"

constexpr int kThreads = num_warps * 32;
constexpr int kTilesW = ceil_div(K, BK);
constexpr int kTilesU = ceil_div(V, BV);

constexpr kda_recompute_w_u::SharedLayout kLayout{Spec{}};
using Inverse = TileAt<kLayout.inverse>;

/// U for one tile of V: `from`, `gate` and `to` start at its first element.
WYVERN_DEVICE void write_values(const Inverse& inverse, const kda::RowFactors& rows,
                                const TokenRows<const DTYPE>& from,
                                const TokenRows<const BETA_DTYPE>& gate, U_DTYPE* to,
                                const Extents& e, int chunk_rows, int cols) {
  const auto x = kda::values_at<kLayout.values>(shared_memory());
  kda::load_values<kThreads, V>(x, from, gate, chunk_rows, cols);
  copy_async_commit();
  copy_async_wait<1>();
  sync_block();
  const kda::InverseOperand<DTYPE, BT> operand(inverse, rows.beta);
  copy_async_wait<0>();
  sync_block();
  for (int col = warp_index() * 16; col < smaller(BV, cols); col += num_warps * 16)
    kda::write_values<precision, V>(operand, x, col, to + col, e.HV * V, chunk_rows, cols - col,
                                    kValueUnit<Spec>);
}

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
  const auto beta_chunk = rows_in(chunk, beta, beta_stride, head);
  const auto erase_chunk = rows_in(chunk, erase, erase_stride, head * K);
  const auto write_chunk = rows_in(chunk, write, write_stride, head * V);

  const auto inverse = tile_at<kLayout.inverse>(shared_memory());
  const auto rows = kda::rows_at<kLayout.rows>(shared_memory());
  load_tile<kThreads, BT>(inverse, Tinv + row * BT, e.HV * BT, chunk.rows, BT);
  copy_async_commit();
  kda::load_row_factors<kThreads, BT, QK_L2NORM>(
      rows, q_rstd + row_k, k_rstd + row_k, e.H, chunk.rows,
      [&](int r) { return kda::row_rate<Spec>(beta_chunk, r); });
  if (tile >= kTilesW) {
    const int col = (tile - kTilesW) * BV;
    write_values(inverse, rows, v_chunk.at(0, col), write_chunk.at(0, col), u + row * V + col, e,
                 chunk.rows, V - col);
    return;
  }

  const auto keys = kda::keys_at<kLayout.keys>(shared_memory());
  const int first = tile * BK;
  load_tile<kThreads, K>(keys.q, q_chunk.at(0, first), chunk.rows, K - first);
  load_tile<kThreads, K>(keys.k, k_chunk.at(0, first), chunk.rows, K - first);
  load_tile<kThreads, K>(keys.G, Gk + row * K + first, e.HV * K, chunk.rows, K - first);
  kda::load_erase_gate<kThreads, K>(keys, erase_chunk.at(0, first), chunk.rows, K - first);
  copy_async_commit();
  copy_async_wait<0>();
  sync_block();
  const kda::InverseOperand<DTYPE, BT> operand(inverse, rows.beta);
  const kda::KeyOutputs<DTYPE> to{w + row * K, qg + row * K, kg + row * K, e.HV * K};
  for (int col = warp_index() * 16; col < smaller(BK, K - first); col += num_warps * 16)
    kda::write_keys<precision, QK_L2NORM, K>(operand, keys, rows, to, first + col, col, chunk.rows,
                                             K - first - col);
}
