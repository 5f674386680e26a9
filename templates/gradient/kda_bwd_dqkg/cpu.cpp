// The gradients through states and the WY representation of one chunk and value head, BK columns of
// K at a time.
#include "device/cpu/kda_rate_backward.hpp"

using Backward = RateBackward<Spec>;
using State = Backward::State;
constexpr RateBackwardLayout<Spec> kScratch{Spec{}};

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

  const Backward backward = Backward::at<kScratch>(memory);
  const State& state = backward.state;
  const auto erase_chunk = rows_in(chunk, erase, erase_stride, hv * K);
  backward.begin(in, rows_in(chunk, v, v_stride, hv * V), rows_in(chunk, beta, beta_stride, hv),
                 rows_in(chunk, write, write_stride, hv * V), dv + at * V, dwrite + at * V);
  state.products(in.rows, e.scale, dAqk + at * BT, dA + at * BT, int64{e.HV} * BT);
  for (int c = 0; c < K; c += BK) {
    const int columns = K - c < BK ? K - c : BK;
    backward.tile(in, erase_chunk, c, columns, e.scale);
    store_tile(state.tiles.dq, in.rows, columns, dq_inter + at * K + c, in.key_stride());
    store_tile(state.tiles.dk, in.rows, columns, dk_inter + at * K + c, in.key_stride());
    store_tile(state.tiles.dG, in.rows, columns, dGk_inter + at * K + c, in.key_stride());
    if constexpr (ERASE_WRITE)
      store_tile(backward.gradients, in.rows, columns, derase_inter + at * K + c, in.key_stride());
  }
  if constexpr (ERASE_WRITE) return;
  for (int r = 0; r < in.rows; ++r) dbeta_inter[at + r * e.HV] = backward.dbeta[r];
}
