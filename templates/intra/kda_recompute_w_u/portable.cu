// W, qg, kg and U from the inverse, one block a tile of BK columns of the first three or BV columns
// of U.
#include "device/cuda/kda.cuh"

constexpr int kThreads = num_warps * 32;
constexpr int kTilesW = ceil_div(K, BK);
constexpr int kTilesU = ceil_div(V, BV);

using Inverse = Tile<DTYPE, BT, BT>;

/// U for one tile of V: `from` and `to` point at its first element.
WYVERN_DEVICE void write_values(SharedAllocator shared, const Inverse& inverse,
                                const RowFactors& rows, const DTYPE* from, U_DTYPE* to,
                                int chunk_rows, int cols) {
  const auto x = shared.tile<Tile<DTYPE, BT, BV>>();
  load_tile<kThreads, V>(x, from, int64{HV} * V, chunk_rows, cols);
  copy_async_commit();
  copy_async_wait<1>();
  sync_block();
  const InverseOperand<DTYPE, BT> operand(inverse, rows.beta);
  copy_async_wait<0>();
  sync_block();
  for (int col = warp_index() * 16; col < smaller(BV, cols); col += num_warps * 16)
    operand.template apply<precision, V>(x, col, to + col, int64{HV} * V, chunk_rows, cols - col);
}

WYVERN_KERNEL(kThreads, 0) {
  const int tile = block_index() % (kTilesW + kTilesU);
  const int head = block_index() / (kTilesW + kTilesU) % HV;
  const int slot = block_index() / (kTilesW + kTilesU) / HV;
  const Chunk chunk = locate_chunk<VARLEN, BT>(slot, e, seq_offsets, chunk_index);
  if (chunk.rows <= 0) return;
  const int64 row = chunk.token * HV + head;
  const int64 row_k = chunk.token * H + head / (HV / H);

  SharedAllocator shared;
  const auto inverse = shared.tile<Inverse>();
  RowFactors rows{shared.take<float>(BT), nullptr, nullptr};
  if constexpr (QK_L2NORM) rows = {rows.beta, shared.take<float>(BT), shared.take<float>(BT)};
  load_tile<kThreads, BT>(inverse, Tinv + row * BT, HV * BT, chunk.rows, BT);
  copy_async_commit();
  load_row_factors<kThreads, BT, QK_L2NORM>(
      rows, q_rstd + row_k, k_rstd + row_k, H, chunk.rows,
      [&](int r) { return activate_beta<BETA_SIGMOID, NEG_EIGVAL>(beta[row + r * HV]); });
  if (tile >= kTilesW) {
    const int col = (tile - kTilesW) * BV;
    write_values(shared, inverse, rows, v + row * V + col, u + row * V + col, chunk.rows, V - col);
    return;
  }

  const auto queries = shared.tile<Tile<DTYPE, BT, BK>>();
  const auto keys = shared.tile<Tile<DTYPE, BT, BK>>();
  const auto gates = shared.tile<Tile<float, BT, BK>>();
  const int first = tile * BK;
  load_tile<kThreads, K>(queries, q + row_k * K + first, H * K, chunk.rows, K - first);
  load_tile<kThreads, K>(keys, k + row_k * K + first, H * K, chunk.rows, K - first);
  load_tile<kThreads, K>(gates, Gk + row * K + first, int64{HV} * K, chunk.rows, K - first);
  copy_async_commit();
  copy_async_wait<0>();
  sync_block();
  const InverseOperand<DTYPE, BT> operand(inverse, rows.beta);
  const KeyOutputs<DTYPE> to{w + row * K, qg + row * K, kg + row * K, int64{HV} * K};
  for (int col = warp_index() * 16; col < smaller(BK, K - first); col += num_warps * 16)
    write_keys<precision, QK_L2NORM, K>(operand, queries, keys, gates, rows, to, first + col, col,
                                        chunk.rows, K - first - col);
}
