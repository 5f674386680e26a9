// All gradients of one chunk and value head but the gate's sum, BK columns of K at a time: tensors
// between the stages stay in scratch.
#include "device/cpu/kda_rate_backward.hpp"
#include "gradient/kda_wy_dqkg/cpu_layout.hpp"

using Backward = RateBackward<Spec>;
using State = Backward::State;
constexpr kda_wy_dqkg::ScratchLayout kScratch{Spec{}};

WYVERN_BLOCK {
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, e, seq_offsets, chunk_index);
  if (chunk.rows <= 0) return;
  const int64 hv = block[0], at = chunk.token * e.HV + hv;
  const State::Inputs in = State::Inputs{{q, q_stride},
                                         {k, k_stride},
                                         {dO, dO_stride},
                                         v_new,
                                         Tinv,
                                         Gk,
                                         q_rstd,
                                         k_rstd,
                                         h,
                                         dh,
                                         du,
                                         state_unit,
                                         dstate_unit,
                                         e}
                               .at(chunk, block[1], hv);

  const Backward backward = Backward::at<kScratch.backward>(memory);
  const State& state = backward.state;
  const auto work = intra_scratch_at<kScratch.work>(memory);
  const auto d = product_gradients_at<kScratch.d>(memory);
  float* ones = vector_at<kScratch.ones>(memory);
  float* row_sums = vector_at<kScratch.row_sums>(memory);
  for (int r = 0; r < BT; ++r) ones[r] = 1.0F;
  if constexpr (!ERASE_WRITE) fill_column(row_sums, 0.0F, in.rows * kLanes);

  const auto erase_chunk = rows_in(chunk, erase, erase_stride, hv * K);
  backward.begin(in, rows_in(chunk, v, v_stride, hv * V), rows_in(chunk, beta, beta_stride, hv),
                 rows_in(chunk, write, write_stride, hv * V), dv + at * V, dwrite + at * V);
  state.products(in.rows, e.scale, d.dAqk.data, d.dA.data, d.dA.kStride);
  take_diagonal(d, in.rows);
  for (int c = 0; c < K; c += BK) {
    const int columns = K - c < BK ? K - c : BK;
    backward.tile(in, erase_chunk, c, columns, e.scale);
    IntraBackward<BT, BK, SAFE_GATE, RatesOf<Spec>>{
        state.tiles, work, d, backward.intra_rates(row_sums), ones, in.rows, columns}
        .run();
    store_tile(state.tiles.dq, in.rows, columns, dq + at * K + c, in.key_stride());
    store_tile(state.tiles.dk, in.rows, columns, dk + at * K + c, in.key_stride());
    store_tile(state.tiles.dG, in.rows, columns, dGk + at * K + c, in.key_stride());
    if constexpr (ERASE_WRITE)
      store_tile(backward.gradients, in.rows, columns, derase + at * K + c, in.key_stride());
  }
  if constexpr (ERASE_WRITE) return;
  for (int r = 0; r < in.rows; ++r)
    store_part(dbeta + at + r * e.HV,
               splat((backward.dbeta[r] + sum(load(row_sums + r * kLanes))) *
                     beta_slope<BETA_SIGMOID, NEG_EIGVAL>(backward.rate[r])),
               1);
}
