// The gradients through states and the WY representation, one block a chunk and value head: dO, V'
// and X = Tinv^T dU stay in shared memory while tiles of K stream past them.
#include "device/cuda/kda_backward.cuh"

using Backward = kda::StateBackward<Spec>;

WYVERN_KERNEL(Backward::kThreads, 0) {
  const int head = block_index() % e.HV;
  const int slot = block_index() / e.HV;
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
  const auto dO_chunk = rows_in(chunk, dO, dO_stride, head * V);
  const int64 state = (int64{slot} * e.HV + head) * K * V;
  const Backward::Inputs in{q_chunk,
                            k_chunk,
                            v_chunk,
                            dO_chunk,
                            beta_chunk,
                            erase_chunk,
                            write_chunk,
                            v_new + row * V,
                            Tinv + row * BT,
                            Gk + row * K,
                            q_rstd + row_k,
                            k_rstd + row_k,
                            h + state,
                            dh + state,
                            du + row * V,
                            Backward::unit_at(state_unit, int64{slot} * e.HV + head),
                            Backward::unit_at(dstate_unit, int64{slot} * e.HV + head),
                            chunk.rows,
                            e};

  Backward block(shared_memory());
  float dbeta = block.begin(in, dv + row * V, dwrite + row * V);
  kda::gradients_of_products<precision, num_warps>(
      block.inter.dO, block.inter.X, block.inter.values, e.scale * in.unit, -in.unit * in.d_unit,
      [&](int i, int j, bool is_dA, const Accumulator& left, const Accumulator& right) {
        store_pair<BT>((is_dA ? dA : dAqk) + (row + int64{i} * 16 * e.HV) * BT + j * 16, e.HV * BT,
                       left, right, chunk.rows - i * 16, 16);
      });

  const int first_row = warp_index() % Backward::kStrips * 16;
  const int first_col = warp_index() / Backward::kStrips * Backward::kCols;
  const int rows = chunk.rows - first_row;
  Backward::Rates::Gradients d_rates = {};
#pragma unroll 1
  for (int tile = 0; tile < Backward::kTilesK; ++tile) {
    kda::KeyGradients d[Backward::kCols / 16];
    kda::begin_columns(d_rates);
    block.set(d, d_rates, tile, in, e.scale);
    block.load(in, tile + num_stages);
#pragma unroll
    for (int pair = 0; pair < Backward::kCols / 16; ++pair) {
      const int col = tile * BK + first_col + pair * 16;
      if (col >= K) break;
      const int64 at = (row + int64{first_row} * e.HV) * K + col;
      const int64 stride = e.HV * K;
      store_pair<K>(dq_inter + at, stride, d[pair].dq[0], d[pair].dq[1], rows, K - col);
      store_pair<K>(dk_inter + at, stride, d[pair].dk[0], d[pair].dk[1], rows, K - col);
      store_pair<K>(dGk_inter + at, stride, d[pair].dG[0], d[pair].dG[1], rows, K - col);
      kda::store_rates<K>(derase_inter + at, stride, d_rates, pair, rows, K - col);
    }
  }
  if constexpr (ERASE_WRITE) return;
  dbeta += block.join(d_rates);
  if (thread_index() < chunk.rows) dbeta_inter[row + int64{thread_index()} * e.HV] = dbeta;
}
