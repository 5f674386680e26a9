// Every gradient of a chunk and value head from the state's gradients, one block each: bwd_dqkwg
// and wy_bwd in one, so that the states are read once. With X = Tinv^T dU in shared memory beside
// dO and V', Tinv^T dW is -X S^T, and dW is never formed.
#include "device/cuda/backward.cuh"
#include "gradient/wy_dqkg/layout.hpp"

constexpr wy_dqkg::SharedLayout kLayout{Spec{}};
constexpr gradient::StateBufferLayout kBuffer{Spec{}};

using gradient::beside;
using gradient::inside;

struct Kernel : gradient::ChunkBackward<Spec> {
  /// One of the buffers that tiles of BK columns of q and k, and BK rows of the states, pass
  /// through.
  struct Buffer {
    Keys q, k;
    States h, dh;

    WYVERN_DEVICE explicit Buffer(int tile) {
      unsigned char* const start = shared_memory() + tile % num_stages * kBuffer.bytes;
      q = tile_at<kBuffer.q>(start);
      k = tile_at<kBuffer.k>(start);
      h = tile_at<kBuffer.h>(start);
      dh = tile_at<kBuffer.dh>(start);
    }
  };

  /// What stays in shared memory, behind the buffers; v is in their place until the first comes.
  struct Resident {
    Values v, dO, v_new, x;
    Square P;                  ///< scale dO V'^T exp(G_r - G_s) below the diagonal, scaled
    Square N;                  ///< Tinv, then inside(beta_r) dA exp(G_r - G_s), scaled
    float* diagonal;           ///< scale dO_r V'_r
    float *pairs_P, *pairs_N;  ///< P and N of rows of one token, not scaled
    float* beta;
    float* values;  ///< rowsum(X V), a part for each warp
    Columns columns;
    RowSums gate, keys, all_keys;
    BlockSum end;

    WYVERN_DEVICE explicit Resident(unsigned char* shared)
        : v(tile_at<kLayout.v>(shared)),
          dO(tile_at<kLayout.dO>(shared)),
          v_new(tile_at<kLayout.v_new>(shared)),
          x(tile_at<kLayout.x>(shared)),
          P(tile_at<kLayout.P>(shared)),
          N(tile_at<kLayout.N>(shared)),
          diagonal(array_at<kLayout.diagonal>(shared)),
          pairs_P(array_at<kLayout.pairs_P>(shared)),
          pairs_N(array_at<kLayout.pairs_N>(shared)),
          beta(array_at<kLayout.beta>(shared)),
          values(array_at<kLayout.values>(shared)),
          columns{array_at<kLayout.columns.G>(shared), array_at<kLayout.columns.q_rstd>(shared),
                  array_at<kLayout.columns.k_rstd>(shared)},
          gate{array_at<kLayout.gate>(shared)},
          keys{array_at<kLayout.keys>(shared)},
          all_keys{array_at<kLayout.all_keys>(shared)},
          end{array_at<kLayout.end>(shared)} {}
  };

  /// A lane's sums over all tiles; those of the gate's without the terms with beta.
  struct Sums {
    GateSums gate;
    float keys[2] = {};      ///< inside(beta) rowsum((exp(G) Y + (dA decay) K) * K)
    float all_keys[2] = {};  ///< the same with pairs of rows of one token
  };

  /// Writes dQ and dK of a tile, whose accumulators hold them but for the diagonal.
  WYVERN_DEVICE static void finish(const Buffer& tiles, const Resident& chunk, const OwnRows& own,
                                   const Extents& e, int tile, int rows, Part& dq, Part& y,
                                   Part& dk, T* to_q, T* to_k) {
    const Columns& columns = chunk.columns;
    const float diagonal[2] = {chunk.diagonal[own_row(0)], chunk.diagonal[own_row(1)]};
    scale_rows(dq, {1.0f / own.q_unit[0], 1.0f / own.q_unit[1]});
    add_scaled_rows(dq, tiles.k, {diagonal[0] * own.k_scale[0], diagonal[1] * own.k_scale[1]});
    add_pairs<true>(dq, chunk.pairs_P, tiles.k, [&](int, int s) { return columns.scale_of_k(s); });
    store_part(to_q, tile, dq, e, rows);

    add_rows(dk, y, {beside(chunk.beta[own_row(0)]), beside(chunk.beta[own_row(1)])});
    scale_rows(dk, {1.0f / own.k_unit[0], 1.0f / own.k_unit[1]});
    add_scaled_rows(dk, tiles.q, {diagonal[0] * own.q_scale[0], diagonal[1] * own.q_scale[1]});
    add_pairs<false>(dk, chunk.pairs_P, tiles.q, [&](int r, int) { return columns.scale_of_q(r); });
    add_pairs<false>(dk, chunk.pairs_N, tiles.k,
                     [&](int r, int) { return beside(chunk.beta[r]) * columns.scale_of_k(r); });
    store_part(to_k, tile, dk, e, rows);
  }

  WYVERN_DEVICE static void process(const Buffer& tiles, const Resident& chunk, const OwnRows& own,
                                    const Extents& e, const Units& units, int tile, int rows,
                                    Sums& sums, T* to_q, T* to_k) {
    Part by_state[2];  // dQ, inside(beta) (exp(G) Y + (dA decay) K)
    Part dk[1];
    accumulate_states(by_state, {chunk.dO, chunk.x}, tiles.h);
    accumulate_states(dk, {chunk.v_new}, tiles.dh);
    const float of_k[2] = {units.both * own.k_unit[0], units.both * own.k_unit[1]};
    scale_rows(by_state[0], {e.scale * units.state * own.since_start[0] * own.q_unit[0],
                             e.scale * units.state * own.since_start[1] * own.q_unit[1]});
    scale_rows(by_state[1], {-own.since_start[0] * of_k[0] * inside(chunk.beta[own_row(0)]),
                             -own.since_start[1] * of_k[1] * inside(chunk.beta[own_row(1)])});
    scale_rows(dk[0], {own.until_end[0] * of_k[0], own.until_end[1] * of_k[1]});
    if constexpr (SCALAR_GATE) {
      add_row_products(sums.gate.end, 1.0f, dk[0], tiles.k);
      sums.gate.state += units.both * sum_of_products(tiles.h, tiles.dh);
    }
    accumulate_lower(by_state, {chunk.P, chunk.N}, tiles.k);
    accumulate_transposed<false>(dk[0], chunk.P, tiles.q);
    accumulate_transposed<true>(dk[0], chunk.N, tiles.k, chunk.beta);
    add_row_products(sums.keys, 1.0f, by_state[1], tiles.k);
    if constexpr (SCALAR_GATE) {
      add_row_products(sums.gate.q, 1.0f, by_state[0], tiles.q);
      add_row_products(sums.gate.k, -1.0f, dk[0], tiles.k);
    }
    add_inverse_pairs(by_state[1], chunk.pairs_N, tiles.k, chunk.columns, sums.all_keys);
    finish(tiles, chunk, own, e, tile, rows, by_state[0], by_state[1], dk[0], to_q, to_k);
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
  const auto q_chunk = rows_in(at, q, q_stride, key * K);
  const auto k_chunk = rows_in(at, k, k_stride, key * K);
  const auto v_chunk = rows_in(at, v, v_stride, head * V);
  const auto beta_chunk = rows_in(at, beta, beta_stride, head);
  const auto dO_chunk = rows_in(at, dO, dO_stride, head * V);
  const int64 states = (int64{slot} * e.HV + head) * K * V;
  const Kernel::Resident chunk(shared_memory());
  const Kernel::Units units(state_unit, dstate_unit, int64{slot} * e.HV + head);

  const auto load = [&](int tile) {
    if (tile < Kernel::kTilesK) {
      const Kernel::Buffer to(tile);
      const int col = tile * BK;
      load_tile<Kernel::kThreads, K>(to.q, q_chunk.at(0, col), at.rows, K - col);
      load_tile<Kernel::kThreads, K>(to.k, k_chunk.at(0, col), at.rows, K - col);
      load_tile<Kernel::kThreads, V>(to.h, h + states + int64{col} * V, V, K - col, V);
      load_tile<Kernel::kThreads, V>(to.dh, dh + states + int64{col} * V, V, K - col, V);
    }
    copy_async_commit();
  };
  load_tile<Kernel::kThreads, V>(chunk.x, du + row * V, e.HV * V, at.rows, V);
  load_tile<Kernel::kThreads, BT>(chunk.N, Tinv + row * BT, e.HV * BT, at.rows, BT);
  load_tile<Kernel::kThreads, V>(chunk.v, v_chunk, at.rows, V);
  copy_async_commit();
  load_tile<Kernel::kThreads, V>(chunk.dO, dO_chunk, at.rows, V);
  load_tile<Kernel::kThreads, V>(chunk.v_new, v_new + row * V, e.HV * V, at.rows, V);
  copy_async_commit();
  chunk.columns.load_gate(G + row, e, at.rows);
  chunk.columns.load_scale(chunk.columns.q_rstd, q_rstd + row_k, e, at.rows);
  chunk.columns.load_scale(chunk.columns.k_rstd, k_rstd + row_k, e, at.rows);
  Kernel::load_beta<BETA_SIGMOID, NEG_EIGVAL>(chunk.beta, beta_chunk, at.rows);
  copy_async_wait<1>();
  sync_block();
  Kernel::make_x(chunk.N, chunk.x, chunk.v, chunk.beta, dv + row * V, e, at.rows, chunk.values,
                 units.gradient);
  copy_async_wait<0>();
  sync_block();

  for (int i = 0; i < num_stages; ++i) load(i);
  const Kernel::OwnRows own(chunk.columns);
  const Kernel::Tokens tokens(at.token, at.rows);
  {
    const Kernel::Blocks P(chunk.dO, chunk.v_new);
    const auto scale = [&](int) { return e.scale * units.state; };
    P.store_decayed(chunk.P, tokens, scale, chunk.columns, chunk.columns.q_rstd);
    P.store_diagonal(chunk.diagonal, e.scale * units.state);
    P.store_pairs(chunk.pairs_P, tokens, scale);
  }
  {
    const Kernel::Blocks N(chunk.x, chunk.v_new);
    const auto rate = [&](int r) { return -inside(chunk.beta[r]) * units.both; };
    N.store_decayed(chunk.N, tokens, rate, chunk.columns, chunk.columns.k_rstd);
    N.store_pairs(chunk.pairs_N, tokens, rate);
  }
  Kernel::Sums sums;
#pragma unroll 1
  for (int tile = 0; tile < Kernel::kTilesK; ++tile) {
    copy_async_wait<num_stages - 1>();
    sync_block();
    Kernel::process(Kernel::Buffer(tile), chunk, own, e, units, tile, at.rows, sums, dq + row * K,
                    dk + row * K);
    if (tile + num_stages < Kernel::kTilesK) sync_block();
    load(tile + num_stages);
  }

  chunk.keys.put(sums.keys);
  if constexpr (Kernel::kEarlier > 0) chunk.all_keys.put(sums.all_keys);
  if constexpr (SCALAR_GATE) sums.gate.put(chunk.gate, chunk.end, tokens, chunk.columns);
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
      dG[to] = chunk.gate.get(r) * Kernel::kUnbalance + beside(rate) * of_keys +
               (r == at.rows - 1 ? chunk.end.get() : 0.0f);
  }
}
