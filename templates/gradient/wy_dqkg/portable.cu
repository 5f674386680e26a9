// Every gradient of a chunk and value head from the state's gradients, one block each: bwd_dqkwg
// and wy_bwd in one, so that the states are read once. With X = Tinv^T dU in shared memory beside
// dO and V', Tinv^T dW is -X S^T, and dW is never formed.
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

/// What stays in shared memory, behind the stages; v is in their place until the first comes.
struct Resident {
  static constexpr int kStart = larger(num_stages * Stage::kBytes, Values::kBytes);

  Values v, dO, v_new, x;
  Square P;         ///< scale dO V'^T exp(G_r - G_s) below the diagonal, scaled
  Square N;         ///< Tinv, then inside(beta_r) dA exp(G_r - G_s), scaled
  float* diagonal;  ///< scale dO_r V'_r
  float* beta;
  float* values;  ///< rowsum(X V), a part for each warp
  Columns columns;
  RowSums gate, keys;
  BlockSum end;

  WYVERN_DEVICE explicit Resident(SharedAllocator shared)
      : v(SharedAllocator().tile<Values>()),
        dO(shared.tile<Values>()),
        v_new(shared.tile<Values>()),
        x(shared.tile<Values>()),
        P(shared.tile<Square>()),
        N(shared.tile<Square>()),
        diagonal(shared.take<float>(BT)),
        beta(shared.take<float>(BT)),
        values(shared.take<float>(num_warps * BT)),
        columns(shared),
        gate(shared),
        keys(shared),
        end(shared) {}
};

/// A lane's sums over all tiles.
struct Sums {
  float gate[2] = {};  ///< rowsum(dQ Q) - rowsum(dK K) of its rows, without the terms with beta
  float keys[2] = {};  ///< inside(beta) rowsum((exp(G) Y + (dA decay) K) * K)
  float end = 0.0f;    ///< sum of exp(G_C - G) K (V' dS'^T)
  float state = 0.0f;  ///< sum of S dS'
};

/// Writes dQ and dK of a tile, whose accumulators hold them but for the diagonal.
WYVERN_DEVICE void finish(const Stage& stage, const Resident& chunk, const OwnRows& own, int tile,
                          int rows, Part& dq, Part& y, Part& dk, DTYPE* to_q, DTYPE* to_k) {
  const float diagonal[2] = {chunk.diagonal[own_row(0)], chunk.diagonal[own_row(1)]};
  scale_rows(dq, {1.0f / own.q_unit[0], 1.0f / own.q_unit[1]});
  add_scaled_rows(dq, stage.k, {diagonal[0] * own.k_scale[0], diagonal[1] * own.k_scale[1]});
  store_part(to_q, tile, dq, rows);

  add_rows(dk, y, {beside(chunk.beta[own_row(0)]), beside(chunk.beta[own_row(1)])});
  scale_rows(dk, {1.0f / own.k_unit[0], 1.0f / own.k_unit[1]});
  add_scaled_rows(dk, stage.q, {diagonal[0] * own.q_scale[0], diagonal[1] * own.q_scale[1]});
  store_part(to_k, tile, dk, rows);
}

WYVERN_DEVICE void process(const Stage& stage, const Resident& chunk, const OwnRows& own,
                           float scale, int tile, int rows, Sums& sums, DTYPE* to_q, DTYPE* to_k) {
  Part by_state[2];  // dQ, inside(beta) (exp(G) Y + (dA decay) K)
  Part dk[1];
  accumulate_states(by_state, {chunk.dO, chunk.x}, stage.h);
  accumulate_states(dk, {chunk.v_new}, stage.dh);
  scale_rows(by_state[0], {scale * own.since_start[0] * own.q_unit[0],
                           scale * own.since_start[1] * own.q_unit[1]});
  scale_rows(by_state[1], {-own.since_start[0] * own.k_unit[0] * inside(chunk.beta[own_row(0)]),
                           -own.since_start[1] * own.k_unit[1] * inside(chunk.beta[own_row(1)])});
  scale_rows(dk[0], {own.until_end[0] * own.k_unit[0], own.until_end[1] * own.k_unit[1]});
  if constexpr (SCALAR_GATE) {
    float end[2] = {};
    add_row_products(end, 1.0f, dk[0], stage.k);
    sums.end += end[0] + end[1];
    sums.state += sum_of_products(stage.h, stage.dh);
  }
  accumulate_lower(by_state, {chunk.P, chunk.N}, stage.k);
  accumulate_transposed<false>(dk[0], chunk.P, stage.q);
  accumulate_transposed<true>(dk[0], chunk.N, stage.k, chunk.beta);
  add_row_products(sums.keys, 1.0f, by_state[1], stage.k);
  if constexpr (SCALAR_GATE) {
    add_row_products(sums.gate, 1.0f, by_state[0], stage.q);
    add_row_products(sums.gate, -1.0f, dk[0], stage.k);
  }
  finish(stage, chunk, own, tile, rows, by_state[0], by_state[1], dk[0], to_q, to_k);
}

WYVERN_KERNEL(kThreads, 0) {
  const int head = block_index() % HV;
  const int slot = block_index() / HV;
  const Chunk at = locate_chunk<VARLEN, BT>(slot, e, seq_offsets, chunk_index);
  if (at.rows <= 0) return;
  const int64 row = at.token * HV + head;
  const int64 row_k = at.token * H + head / (HV / H);
  const int64 states = (int64{slot} * HV + head) * K * V;
  const Resident chunk{SharedAllocator(Resident::kStart)};

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
  load_tile<kThreads, V>(chunk.x, du + row * V, HV * V, at.rows, V);
  load_tile<kThreads, BT>(chunk.N, Tinv + row * BT, HV * BT, at.rows, BT);
  load_tile<kThreads, V>(chunk.v, v + row * V, HV * V, at.rows, V);
  copy_async_commit();
  load_tile<kThreads, V>(chunk.dO, dO + row * V, HV * V, at.rows, V);
  load_tile<kThreads, V>(chunk.v_new, v_new + row * V, HV * V, at.rows, V);
  copy_async_commit();
  chunk.columns.load_gate(G + row, at.rows);
  chunk.columns.load_scale(chunk.columns.q_rstd, q_rstd + row_k, at.rows);
  chunk.columns.load_scale(chunk.columns.k_rstd, k_rstd + row_k, at.rows);
  load_beta<BETA_SIGMOID, NEG_EIGVAL>(chunk.beta, beta + row, at.rows);
  copy_async_wait<1>();
  sync_block();
  make_x(chunk.N, chunk.x, chunk.v, chunk.beta, dv + row * V, at.rows, chunk.values);
  copy_async_wait<0>();
  sync_block();

  for (int i = 0; i < num_stages; ++i) load(i);
  const OwnRows own(chunk.columns);
  {
    const Blocks P(chunk.dO, chunk.v_new);
    P.store_decayed(chunk.P, [&](int) { return e.scale; }, chunk.columns, chunk.columns.q_rstd);
    P.store_diagonal(chunk.diagonal, e.scale);
  }
  Blocks(chunk.x, chunk.v_new)
      .store_decayed(
          chunk.N, [&](int r) { return -inside(chunk.beta[r]); }, chunk.columns,
          chunk.columns.k_rstd);
  Sums sums;
#pragma unroll 1
  for (int tile = 0; tile < kTilesK; ++tile) {
    copy_async_wait<num_stages - 1>();
    sync_block();
    process(Stage(tile), chunk, own, e.scale, tile, at.rows, sums, dq + row * K, dk + row * K);
    if (tile + num_stages < kTilesK) sync_block();
    load(tile + num_stages);
  }

  chunk.keys.put(sums.keys);
  if constexpr (SCALAR_GATE) {
    chunk.gate.put(sums.gate);
    chunk.end.put(sums.end * kUnbalance + decay(chunk.columns.G[BT - 1]) * sums.state);
  }
  sync_block();
  for (int r = thread_index(); r < at.rows; r += kThreads) {
    const int64 to = row + r * HV;
    const float of_keys = chunk.keys.get(r) * kUnbalance;
    const float rate = chunk.beta[r];
    dbeta[to] = from_float<BETA_DTYPE>((of_keys / inside(rate) + sum_of_warps(chunk.values, r)) *
                                       beta_slope<BETA_SIGMOID, NEG_EIGVAL>(beta[to]));
    if constexpr (SCALAR_GATE)
      dG[to] = chunk.gate.get(r) * kUnbalance + beside(rate) * of_keys +
               (r == at.rows - 1 ? chunk.end.get() : 0.0f);
  }
}
