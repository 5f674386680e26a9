// All gradients of one chunk and value head but the gate's sum, BK columns of K at a time: what
// passes between the stages stays in scratch.
#include "device/cpu/kda_state_backward.hpp"

WYVERN_BLOCK {
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, e, seq_offsets, chunk_index);
  if (chunk.rows <= 0) return;
  const int64 hv = block[0], at = chunk.token * HV + hv;
  const Inputs in =
      Inputs{q, k, v, v_new, beta, Tinv, Gk, q_rstd, k_rstd, h, dh, dO, du}.at(chunk, block[1], hv);

  Scratch scratch(memory);
  const StateBackward state(scratch);
  const IntraScratch work = take_intra_scratch<BT, BK>(scratch);
  const ProductGradients d{scratch.tile(BT, BT), scratch.tile(BT, BT), scratch.vector(BT)};
  float* ones = scratch.vector(BT);
  float* row_sums = scratch.vector(BT * 16);
  for (int r = 0; r < BT; ++r) ones[r] = 1.0F;
  clear_rows(row_sums, kLanes, 0, in.rows, kLanes);

  state.begin(in, dv + at * V);
  state.products(in.rows, e.scale, d.dAqk, d.dA, kSquare);
  take_diagonal<BT>(d, in.rows);
  for (int c = 0; c < K; c += BK) {
    const int columns = K - c < BK ? K - c : BK;
    state.tile(in, c, columns, e.scale);
    IntraBackward<BT, BK, SAFE_GATE>{state.tiles, work,     d,       state.rate,
                                     ones,        row_sums, in.rows, columns}
        .run();
    store_tile(state.tiles.dq, kKeyRow, in.rows, columns, dq + at * K + c, kKeys);
    store_tile(state.tiles.dk, kKeyRow, in.rows, columns, dk + at * K + c, kKeys);
    store_tile(state.tiles.dG, kKeyRow, in.rows, columns, dGk + at * K + c, kKeys);
  }
  for (int r = 0; r < in.rows; ++r)
    store_part(dbeta + at + r * HV,
               splat((state.dbeta[r] + sum(load(row_sums + r * kLanes))) *
                     beta_slope<BETA_SIGMOID, NEG_EIGVAL>(state.rate[r])),
               1);
}
