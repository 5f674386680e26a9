// dQ, the part of dK that attention and state make, dW and their part of the gate's gradient, one
// block a chunk and value head. dO, V' and dU stay in shared memory; tiles of BK columns of K pass
// by once.
#include "device/cuda/backward.cuh"

/// One of the buffers that tiles of BK columns of q and k, and BK rows of the states, pass through.
struct Stage {
  static constexpr int kBytes = 2 * Keys::kBytes + 2 * States::kBytes;

  Keys q, k;
  States h, dh;

  WYVERN_DEVICE explicit Stage(int tile) {
    SharedAllocator shared(tile % num_stages * kBytes);
    q = shared.tile<Keys>();
    k = shared.tile<Keys>();
    h = shared.tile<States>();
    dh = shared.tile<States>();
  }
};

/// What stays in shared memory, behind the stages.
struct Resident {
  Values dO, v_new, du;
  Square P;         ///< scale dO V'^T exp(G_r - G_s) below the diagonal, scaled
  float* diagonal;  ///< scale dO_r V'_r
  Columns columns;
  RowSums gate;
  BlockSum end;

  WYVERN_DEVICE explicit Resident(SharedAllocator shared)
      : dO(shared.tile<Values>()),
        v_new(shared.tile<Values>()),
        du(shared.tile<Values>()),
        P(shared.tile<Square>()),
        diagonal(shared.take<float>(BT)),
        columns(shared),
        gate(shared),
        end(shared) {}
};

/// A lane's sums over all tiles.
struct Sums {
  float gate[2] = {};  ///< rowsum(dQ Q) - rowsum(dK K) of its rows
  float keys = 0.0f;   ///< sum of exp(G_C - G) K (V' dS'^T)
  float state = 0.0f;  ///< sum of S dS'
};

/// Results of one tile, of which rows of dw and others begin at the chunk.
WYVERN_DEVICE void process(const Stage& stage, const Resident& chunk, const OwnRows& own,
                           float scale, int tile, int rows, Sums& sums, DTYPE* dq, float* dk_qk,
                           DTYPE* dw) {
  Part by_state[2];  // dQ, then dW
  Part dk[1];
  accumulate_states(by_state, {chunk.dO, chunk.du}, stage.h);
  accumulate_states(dk, {chunk.v_new}, stage.dh);
  scale_rows(by_state[1], {-1.0f, -1.0f});
  store_part(dw, tile, by_state[1], rows);

  Part& q_rows = by_state[0];
  scale_rows(q_rows, {scale * own.since_start[0] * own.q_unit[0],
                      scale * own.since_start[1] * own.q_unit[1]});
  scale_rows(dk[0], {own.until_end[0] * own.k_unit[0], own.until_end[1] * own.k_unit[1]});
  if constexpr (SCALAR_GATE) {
    float end[2] = {};
    add_row_products(end, 1.0f, dk[0], stage.k);
    sums.keys += end[0] + end[1];
    sums.state += sum_of_products(stage.h, stage.dh);
  }
  accumulate_lower(by_state, {chunk.P}, stage.k);
  accumulate_transposed<false>(dk[0], chunk.P, stage.q);
  if constexpr (SCALAR_GATE) {
    add_row_products(sums.gate, 1.0f, q_rows, stage.q);
    add_row_products(sums.gate, -1.0f, dk[0], stage.k);
  }

  const float on_diagonal[2] = {chunk.diagonal[own_row(0)], chunk.diagonal[own_row(1)]};
  scale_rows(q_rows, {1.0f / own.q_unit[0], 1.0f / own.q_unit[1]});
  add_scaled_rows(q_rows, stage.k,
                  {on_diagonal[0] * own.k_scale[0], on_diagonal[1] * own.k_scale[1]});
  store_part(dq, tile, q_rows, rows);
  scale_rows(dk[0], {1.0f / own.k_unit[0], 1.0f / own.k_unit[1]});
  add_scaled_rows(dk[0], stage.q,
                  {on_diagonal[0] * own.q_scale[0], on_diagonal[1] * own.q_scale[1]});
  store_part(dk_qk, tile, dk[0], rows);
}

WYVERN_KERNEL(kThreads, 0) {
  const int head = block_index() % HV;
  const int slot = block_index() / HV;
  const Chunk at = locate_chunk<VARLEN, BT>(slot, e, seq_offsets, chunk_index);
  if (at.rows <= 0) return;
  const int64 row = at.token * HV + head;
  const int64 row_k = at.token * H + head / (HV / H);
  const int64 states = (int64{slot} * HV + head) * K * V;
  const Resident chunk{SharedAllocator(num_stages * Stage::kBytes)};

  const auto load = [&](int tile) {
    if (tile < kTilesK) {
      const Stage stage(tile);
      const int col = tile * BK;
      load_tile<kThreads, K>(stage.q, q + row_k * K + col, H * K, at.rows, K - col);
      load_tile<kThreads, K>(stage.k, k + row_k * K + col, H * K, at.rows, K - col);
      load_tile<kThreads, V>(stage.h, h + states + int64{col} * V, V, K - col, V);
      load_tile<kThreads, V>(stage.dh, dh + states + int64{col} * V, V, K - col, V);
    }
    copy_async_commit();
  };
  load_tile<kThreads, V>(chunk.dO, dO + row * V, HV * V, at.rows, V);
  load_tile<kThreads, V>(chunk.v_new, v_new + row * V, HV * V, at.rows, V);
  load_tile<kThreads, V>(chunk.du, du + row * V, HV * V, at.rows, V);
  copy_async_commit();
  for (int i = 0; i < num_stages; ++i) load(i);
  chunk.columns.load_gate(G + row, at.rows);
  chunk.columns.load_scale(chunk.columns.q_rstd, q_rstd + row_k, at.rows);
  chunk.columns.load_scale(chunk.columns.k_rstd, k_rstd + row_k, at.rows);
  copy_async_wait<num_stages>();
  sync_block();

  const OwnRows own(chunk.columns);
  {
    const Blocks P(chunk.dO, chunk.v_new);
    P.store_decayed(chunk.P, [&](int) { return e.scale; }, chunk.columns, chunk.columns.q_rstd);
    P.store_diagonal(chunk.diagonal, e.scale);
  }
  Sums sums;
#pragma unroll 1
  for (int tile = 0; tile < kTilesK; ++tile) {
    copy_async_wait<num_stages - 1>();
    sync_block();
    process(Stage(tile), chunk, own, e.scale, tile, at.rows, sums, dq + row * K, dk_qk + row * K,
            dw + row * K);
    if (tile + num_stages < kTilesK) sync_block();
    load(tile + num_stages);
  }

  if constexpr (SCALAR_GATE) {
    chunk.gate.put(sums.gate);
    chunk.end.put(sums.keys * kUnbalance + decay(chunk.columns.G[BT - 1]) * sums.state);
    sync_block();
    for (int r = thread_index(); r < at.rows; r += kThreads)
      dG_qk[row + r * HV] =
          chunk.gate.get(r) * kUnbalance + (r == at.rows - 1 ? chunk.end.get() : 0.0f);
  }
}
