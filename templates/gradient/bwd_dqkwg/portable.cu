// dQ, the part of dK that attention and state make, dW and their part of the gate's gradient, one
// block a chunk and value head. dO, V' and dU stay in shared memory; tiles of BK columns of K pass
// by once.
#include "device/cuda/backward.cuh"
#include "gradient/bwd_dqkwg/layout.hpp"

constexpr bwd_dqkwg::SharedLayout kLayout{Spec{}};
constexpr gradient::StateBufferLayout kBuffer{Spec{}};

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

  /// What stays in shared memory, behind the buffers.
  struct Resident {
    Values dO, v_new, du;
    Square P;         ///< scale dO V'^T exp(G_r - G_s) below the diagonal, scaled
    float* diagonal;  ///< scale dO_r V'_r
    float* pairs;     ///< scale dO_r V'_s of rows of one token
    Columns columns;
    RowSums gate;
    BlockSum end;

    WYVERN_DEVICE explicit Resident(unsigned char* shared)
        : dO(tile_at<kLayout.dO>(shared)),
          v_new(tile_at<kLayout.v_new>(shared)),
          du(tile_at<kLayout.du>(shared)),
          P(tile_at<kLayout.P>(shared)),
          diagonal(array_at<kLayout.diagonal>(shared)),
          pairs(array_at<kLayout.pairs>(shared)),
          columns{array_at<kLayout.columns.G>(shared), array_at<kLayout.columns.q_rstd>(shared),
                  array_at<kLayout.columns.k_rstd>(shared)},
          gate{array_at<kLayout.gate>(shared)},
          end{array_at<kLayout.end>(shared)} {}
  };

  /// Results of one tile, of which rows of dw and others begin at the chunk.
  WYVERN_DEVICE static void process(const Buffer& tiles, const Resident& chunk, const OwnRows& own,
                                    const Extents& e, const Units& units, int tile, int rows,
                                    GateSums& sums, T* dq, float* dk_qk, T* dw) {
    Part by_state[2];  // dQ, then dW
    Part dk[1];
    accumulate_states(by_state, {chunk.dO, chunk.du}, tiles.h);
    accumulate_states(dk, {chunk.v_new}, tiles.dh);
    scale_rows(by_state[1], {-units.both, -units.both});
    store_part(dw, tile, by_state[1], e, rows);

    Part& q_rows = by_state[0];
    scale_rows(q_rows, {e.scale * units.state * own.since_start[0] * own.q_unit[0],
                        e.scale * units.state * own.since_start[1] * own.q_unit[1]});
    scale_rows(dk[0], {units.both * own.until_end[0] * own.k_unit[0],
                       units.both * own.until_end[1] * own.k_unit[1]});
    if constexpr (SCALAR_GATE) {
      add_row_products(sums.end, 1.0f, dk[0], tiles.k);
      sums.state += units.both * sum_of_products(tiles.h, tiles.dh);
    }
    accumulate_lower(by_state, {chunk.P}, tiles.k);
    accumulate_transposed<false>(dk[0], chunk.P, tiles.q);
    if constexpr (SCALAR_GATE) {
      add_row_products(sums.q, 1.0f, q_rows, tiles.q);
      add_row_products(sums.k, -1.0f, dk[0], tiles.k);
    }

    const float on_diagonal[2] = {chunk.diagonal[own_row(0)], chunk.diagonal[own_row(1)]};
    scale_rows(q_rows, {1.0f / own.q_unit[0], 1.0f / own.q_unit[1]});
    add_scaled_rows(q_rows, tiles.k,
                    {on_diagonal[0] * own.k_scale[0], on_diagonal[1] * own.k_scale[1]});
    add_pairs<true>(q_rows, chunk.pairs, tiles.k,
                    [&](int, int s) { return chunk.columns.scale_of_k(s); });
    store_part(dq, tile, q_rows, e, rows);
    scale_rows(dk[0], {1.0f / own.k_unit[0], 1.0f / own.k_unit[1]});
    add_scaled_rows(dk[0], tiles.q,
                    {on_diagonal[0] * own.q_scale[0], on_diagonal[1] * own.q_scale[1]});
    add_pairs<false>(dk[0], chunk.pairs, tiles.q,
                     [&](int r, int) { return chunk.columns.scale_of_q(r); });
    store_part(dk_qk, tile, dk[0], e, rows);
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
  load_tile<Kernel::kThreads, V>(chunk.dO, dO_chunk, at.rows, V);
  load_tile<Kernel::kThreads, V>(chunk.v_new, v_new + row * V, e.HV * V, at.rows, V);
  load_tile<Kernel::kThreads, V>(chunk.du, du + row * V, e.HV * V, at.rows, V);
  copy_async_commit();
  for (int i = 0; i < num_stages; ++i) load(i);
  chunk.columns.load_gate(G + row, e, at.rows);
  chunk.columns.load_scale(chunk.columns.q_rstd, q_rstd + row_k, e, at.rows);
  chunk.columns.load_scale(chunk.columns.k_rstd, k_rstd + row_k, e, at.rows);
  copy_async_wait<num_stages>();
  sync_block();

  const Kernel::OwnRows own(chunk.columns);
  const Kernel::Tokens tokens(at.token, at.rows);
  {
    const Kernel::Blocks P(chunk.dO, chunk.v_new);
    const auto scale = [&](int) { return e.scale * units.state; };
    P.store_decayed(chunk.P, tokens, scale, chunk.columns, chunk.columns.q_rstd);
    P.store_diagonal(chunk.diagonal, e.scale * units.state);
    P.store_pairs(chunk.pairs, tokens, scale);
  }
  Kernel::GateSums sums;
#pragma unroll 1
  for (int tile = 0; tile < Kernel::kTilesK; ++tile) {
    copy_async_wait<num_stages - 1>();
    sync_block();
    Kernel::process(Kernel::Buffer(tile), chunk, own, e, units, tile, at.rows, sums, dq + row * K,
                    dk_qk + row * K, dw + row * K);
    if (tile + num_stages < Kernel::kTilesK) sync_block();
    load(tile + num_stages);
  }

  if constexpr (SCALAR_GATE) {
    sums.put(chunk.gate, chunk.end, tokens, chunk.columns);
    sync_block();
    for (int r = thread_index(); r < at.rows; r += Kernel::kThreads)
      dG_qk[row + r * e.HV] =
          chunk.gate.get(r) * Kernel::kUnbalance + (r == at.rows - 1 ? chunk.end.get() : 0.0f);
  }
}
