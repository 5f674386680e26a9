// The gradients behind W, U and A, added to what bwd_dqkwg made: dK, dV, dbeta and dG, one block a
// chunk and value head. X = Tinv^T dU takes dU's place in shared memory; Y = Tinv^T dW is made of
// each tile of BK columns as it passes.
#include "device/cuda/backward.cuh"
#include "gradient/wy_bwd/layout.hpp"

constexpr wy_bwd::SharedLayout kLayout{Spec{}};
constexpr wy_bwd::BufferLayout kBuffer{Spec{}};

using gradient::beside;
using gradient::inside;

struct Kernel : gradient::ChunkBackward<Spec> {
  /// One of the buffers that tiles of BK columns pass through.
  struct Buffer {
    Keys k, dw;

    WYVERN_DEVICE explicit Buffer(int tile) {
      unsigned char* const start = shared_memory() + tile % num_stages * kBuffer.bytes;
      k = tile_at<kBuffer.k>(start);
      dw = tile_at<kBuffer.dw>(start);
    }
  };

  /// What stays in shared memory, behind the buffers; v is in their place until the first comes.
  struct Resident {
    Values v, v_new, x;
    Square Tinv;
    Square N;      ///< inside(beta_r) dA exp(G_r - G_s), scaled
    float* pairs;  ///< -inside(beta_r) X_r V'_s of rows of one token
    float* beta;
    float* values;  ///< rowsum(X V), a part for each warp
    Columns columns;
    RowSums gate, keys, all_keys;

    WYVERN_DEVICE explicit Resident(unsigned char* shared)
        : v(tile_at<kLayout.v>(shared)),
          v_new(tile_at<kLayout.v_new>(shared)),
          x(tile_at<kLayout.x>(shared)),
          Tinv(tile_at<kLayout.Tinv>(shared)),
          N(tile_at<kLayout.N>(shared)),
          pairs(array_at<kLayout.pairs>(shared)),
          beta(array_at<kLayout.beta>(shared)),
          values(array_at<kLayout.values>(shared)),
          columns{array_at<kLayout.columns.G>(shared), array_at<kLayout.columns.q_rstd>(shared),
                  array_at<kLayout.columns.k_rstd>(shared)},
          gate{array_at<kLayout.gate>(shared)},
          keys{array_at<kLayout.keys>(shared)},
          all_keys{array_at<kLayout.all_keys>(shared)} {}
  };

  /// A lane's sums over all tiles, of its two rows.
  struct Sums {
    float gate[2] = {};      ///< -rowsum((M decay)^T K * K)
    float keys[2] = {};      ///< inside(beta) rowsum((exp(G) Y + (dA decay) K) * K)
    float all_keys[2] = {};  ///< the same with pairs of rows of one token
  };

  /// Adds this lane's part of dk_qk to dk.
  WYVERN_DEVICE static void add_given(Part& dk, const float* dk_qk, const Extents& e, int tile,
                                      int rows) {
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int r = own_row(j / 2);
        const int col = tile * BK + own_col() + n * 8 + accumulator_col(j);
        if (r < rows && col < K) dk[n].x[j] += dk_qk[r * (int64{e.HV} * K) + col];
      }
  }

  WYVERN_DEVICE static void process(const Buffer& tiles, const Resident& chunk, const OwnRows& own,
                                    const Extents& e, int tile, int rows, Sums& sums,
                                    const float* dk_qk, T* dk) {
    Part y[1];
    accumulate_transposed<false>(y[0], chunk.Tinv, tiles.dw);
    scale_rows(y[0], {own.since_start[0] * own.k_unit[0] * inside(chunk.beta[own_row(0)]),
                      own.since_start[1] * own.k_unit[1] * inside(chunk.beta[own_row(1)])});
    accumulate_lower(y, {chunk.N}, tiles.k);
    Part result;
    accumulate_transposed<true>(result, chunk.N, tiles.k, chunk.beta);
    add_row_products(sums.keys, 1.0f, y[0], tiles.k);
    if constexpr (SCALAR_GATE) add_row_products(sums.gate, -1.0f, result, tiles.k);
    add_inverse_pairs(y[0], chunk.pairs, tiles.k, chunk.columns, sums.all_keys);
    add_rows(result, y[0], {beside(chunk.beta[own_row(0)]), beside(chunk.beta[own_row(1)])});
    scale_rows(result, {1.0f / own.k_unit[0], 1.0f / own.k_unit[1]});
    add_pairs<false>(result, chunk.pairs, tiles.k, [&](int r, int) {
      return beside(chunk.beta[r]) * chunk.columns.scale_of_k(r);
    });
    add_given(result, dk_qk, e, tile, rows);
    store_part(dk, tile, result, e, rows);
  }
};

WYVERN_KERNEL(Kernel::kThreads, 0) {
  const int head = block_index() % e.HV;
  const int slot = block_index() / e.HV;
  const Chunk at = locate_chunk<VARLEN, BT>(slot, e, seq_offsets, chunk_index);
  if (at.rows <= 0) return;
  const int64 row = at.token * e.HV + head;
  const int key = e.key_head(head);
  const int64 row_k = at.token * e.H + key;
  const auto k_chunk = rows_in(at, k, k_stride, key * K);
  const auto v_chunk = rows_in(at, v, v_stride, head * V);
  const auto beta_chunk = rows_in(at, beta, beta_stride, head);
  const Kernel::Resident chunk(shared_memory());
  const Kernel::Units units(state_unit, dstate_unit, int64{slot} * e.HV + head);

  const auto load = [&](int tile) {
    if (tile < Kernel::kTilesK) {
      const Kernel::Buffer to(tile);
      const int col = tile * BK;
      load_tile<Kernel::kThreads, K>(to.k, k_chunk.at(0, col), at.rows, K - col);
      load_tile<Kernel::kThreads, K>(to.dw, dw + row * K + col, e.HV * K, at.rows, K - col);
    }
    copy_async_commit();
  };
  load_tile<Kernel::kThreads, V>(chunk.x, du + row * V, e.HV * V, at.rows, V);
  load_tile<Kernel::kThreads, V>(chunk.v, v_chunk, at.rows, V);
  load_tile<Kernel::kThreads, BT>(chunk.Tinv, Tinv + row * BT, e.HV * BT, at.rows, BT);
  copy_async_commit();
  load_tile<Kernel::kThreads, V>(chunk.v_new, v_new + row * V, e.HV * V, at.rows, V);
  copy_async_commit();
  chunk.columns.load_gate(G + row, e, at.rows);
  chunk.columns.load_scale(chunk.columns.k_rstd, k_rstd + row_k, e, at.rows);
  Kernel::load_beta<BETA_SIGMOID, NEG_EIGVAL>(chunk.beta, beta_chunk, at.rows);
  copy_async_wait<1>();
  sync_block();
  Kernel::make_x(chunk.Tinv, chunk.x, chunk.v, chunk.beta, dv + row * V, e, at.rows, chunk.values,
                 units.gradient);
  copy_async_wait<0>();
  sync_block();

  for (int i = 0; i < num_stages; ++i) load(i);
  const Kernel::OwnRows own(chunk.columns);
  {
    const Kernel::Tokens tokens(at.token, at.rows);
    const Kernel::Blocks N(chunk.x, chunk.v_new);
    const auto rate = [&](int r) { return -inside(chunk.beta[r]) * units.both; };
    N.store_decayed(chunk.N, tokens, rate, chunk.columns, chunk.columns.k_rstd);
    N.store_pairs(chunk.pairs, tokens, rate);
  }
  Kernel::Sums sums;
#pragma unroll 1
  for (int tile = 0; tile < Kernel::kTilesK; ++tile) {
    copy_async_wait<num_stages - 1>();
    sync_block();
    Kernel::process(Kernel::Buffer(tile), chunk, own, e, tile, at.rows, sums, dk_qk + row * K,
                    dk + row * K);
    if (tile + num_stages < Kernel::kTilesK) sync_block();
    load(tile + num_stages);
  }

  chunk.keys.put(sums.keys);
  if constexpr (Kernel::kEarlier > 0) chunk.all_keys.put(sums.all_keys);
  if constexpr (SCALAR_GATE) chunk.gate.put(sums.gate);
  sync_block();
  for (int r = thread_index(); r < at.rows; r += Kernel::kThreads) {
    const int64 to = row + r * e.HV;
    const float of_keys = chunk.keys.get(r) * Kernel::kUnbalance;
    const float all_keys =
        Kernel::kEarlier > 0 ? chunk.all_keys.get(r) * Kernel::kUnbalance : of_keys;
    const float rate = chunk.beta[r];
    dbeta[to] =
        from_float<BETA_DTYPE>((all_keys / inside(rate) + Kernel::sum_of_warps(chunk.values, r)) *
                               gradient::beta_slope<BETA_SIGMOID, NEG_EIGVAL>(*beta_chunk.row(r)));
    if constexpr (SCALAR_GATE)
      dG[to] = dG_qk[to] + chunk.gate.get(r) * Kernel::kUnbalance + beside(rate) * of_keys;
  }
}
