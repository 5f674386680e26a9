// All gradients of one chunk and value head but the gate's sum, BK columns of K at a time: what
// passes between the stages stays in scratch.
#include "device/cpu/kda_state_backward.hpp"
#include "gradient/kda_wy_dqkg/cpu_layout.hpp"

using Backward = StateBackward<Spec>;
constexpr kda_wy_dqkg::ScratchLayout kScratch{Spec{}};

WYVERN_BLOCK {
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, e, seq_offsets, chunk_index);
  if (chunk.rows <= 0) return;
  const int64 hv = block[0], at = chunk.token * HV + hv;
  const Backward::Inputs in =
      Backward::Inputs{q, k, v, v_new, beta, Tinv, Gk, q_rstd, k_rstd, h, dh, dO, du}.at(
          chunk, block[1], hv);

  const Backward state = Backward::at<kScratch.state>(memory);
  const auto work = intra_scratch_at<kScratch.work>(memory);
  const auto d = product_gradients_at<kScratch.d>(memory);
  float* ones = vector_at<kScratch.ones>(memory);
  float* row_sums = vector_at<kScratch.row_sums>(memory);
  for (int r = 0; r < BT; ++r) ones[r] = 1.0F;
  fill_column(row_sums, 0.0F, in.rows * kLanes);

  state.begin(in, dv + at * V);
  state.products(in.rows, e.scale, d.dAqk.data, d.dA.data, d.dA.kStride);
  take_diagonal(d, in.rows);
  for (int c = 0; c < K; c += BK) {
    const int columns = K - c < BK ? K - c : BK;
    state.tile(in, c, columns, e.scale);
    IntraBackward<BT, BK, SAFE_GATE>{state.tiles, work,     d,       state.rate,
                                     ones,        row_sums, in.rows, columns}
        .run();
    store_tile(state.tiles.dq, in.rows, columns, dq + at * K + c, Backward::kKeys);
    store_tile(state.tiles.dk, in.rows, columns, dk + at * K + c, Backward::kKeys);
    store_tile(state.tiles.dG, in.rows, columns, dGk + at * K + c, Backward::kKeys);
  }
  for (int r = 0; r < in.rows; ++r)
    store_part(dbeta + at + r * HV,
               splat((state.dbeta[r] + sum(load(row_sums + r * kLanes))) *
                     beta_slope<BETA_SIGMOID, NEG_EIGVAL>(state.rate[r])),
               1);
}
