// All gradients of a chunk and value head but the gate's sum, one block for each: dO, V' and
// X = Tinv^T dU stay in shared memory, and so do dAqk and dA, while tiles of K stream past them.
#include "device/cuda/kda_backward.cuh"
#include "gradient/kda_wy_dqkg/layout.hpp"

constexpr kda_wy_dqkg::SharedLayout kLayout{Spec{}};
using Products = TileAt<kLayout.dA>;
using Factor = Products::Element;
using Backward = kda::StateBackward<Spec>;
using Intra = kda::IntraBackward<DTYPE, Factor, precision, BT, BK, SAFE_GATE, QK_L2NORM,
                                 Backward::Rates::Type>;

/// Puts 16 x 16 elements of dAqk or dA to shared memory, with dAqk's diagonal by itself.
WYVERN_DEVICE void put_products(const Intra& intra, float* diagonal, int i, int j, bool is_dA,
                                const Accumulator& left, const Accumulator& right) {
  const Products& to = is_dA ? intra.dA : intra.dAqk;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = i * 16 + accumulator_row(2 * half);
      const int s = j * 16 + n * 8 + accumulator_col(0);
      const float* const x = (n == 0 ? left : right).x + 2 * half;
      *reinterpret_cast<Vector<Factor, 2>*>(to.at(r, s)) = Vector<Factor, 2>{
          {from_float<Factor>(r == s ? 0.0f : x[0]), from_float<Factor>(r == s + 1 ? 0.0f : x[1])}};
      if (!is_dA && r == s) diagonal[r] = x[0];
      if (!is_dA && r == s + 1) diagonal[r] = x[1];
    }
}

WYVERN_KERNEL(Backward::kThreads, min_blocks) {
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
  Intra intra;
  intra.rows = block.inter.rows;
  intra.dAqk = tile_at<kLayout.dAqk>(shared_memory());
  intra.dA = tile_at<kLayout.dA>(shared_memory());
  float* const diagonal = array_at<kLayout.diagonal>(shared_memory());
  intra.diagonal = diagonal;
  float dbeta_sum = block.begin(in, dv + row * V, dwrite + row * V);
  kda::gradients_of_products<precision, num_warps>(
      block.inter.dO, block.inter.X, block.inter.values, e.scale * in.unit, -in.unit * in.d_unit,
      [&](int i, int j, bool is_dA, const Accumulator& left, const Accumulator& right) {
        put_products(intra, diagonal, i, j, is_dA, left, right);
      });

  const int strip = warp_index() % Backward::kStrips;
  const int first_col = warp_index() / Backward::kStrips * Backward::kCols;
  const int rows = chunk.rows - strip * 16;
  Backward::Rates::Gradients d_rates = {};
#pragma unroll 1
  for (int tile = 0; tile < Backward::kTilesK; ++tile) {
    kda::KeyGradients d[Backward::kCols / 16];
    kda::begin_columns(d_rates);
    block.set(d, d_rates, tile, in, e.scale);
    intra.tile = block.inter.tile;
    intra.rates = block.rates(tile);
#pragma unroll
    for (int pair = 0; pair < Backward::kCols / 16; ++pair) {
      const int col = tile * BK + first_col + pair * 16;
      if (col >= K) break;
      intra.add(d[pair], kda::gradients_of(d_rates, pair), strip, first_col + pair * 16);
      const int64 at = (row + int64{strip} * 16 * e.HV) * K + col;
      const int64 stride = e.HV * K;
      store_pair<K>(dq + at, stride, d[pair].dq[0], d[pair].dq[1], rows, K - col);
      store_pair<K>(dk + at, stride, d[pair].dk[0], d[pair].dk[1], rows, K - col);
      store_pair<K>(dGk + at, stride, d[pair].dG[0], d[pair].dG[1], rows, K - col);
      kda::store_rates<K>(derase + at, stride, d_rates, pair, rows, K - col);
    }
    sync_block();
    block.load(in, tile + num_stages);
  }
  if constexpr (ERASE_WRITE) return;
  dbeta_sum += block.join(d_rates);
  if (thread_index() < chunk.rows) {
    dbeta_sum *= kda::beta_slope<BETA_SIGMOID, NEG_EIGVAL>(block.inter.rows.beta[thread_index()]);
    dbeta[row + int64{thread_index()} * e.HV] = from_float<BETA_DTYPE>(dbeta_sum);
  }
}
