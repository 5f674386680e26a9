// kda_scans' consumers: 64 columns of V of a state S, or of its gradient dS', transposed in fp32
// registers, through the chunks of a block.
#pragma once

#include "backward/kda_scans/load.cuh"
#include "device/cuda/sm90/scan_state.cuh"

using Columns = sm90::Accumulator<kRows>;  ///< of V, one for each row of a chunk
using StateFragment = sm90::FragmentA<DTYPE, K>;
using RowFragment = sm90::FragmentA<DTYPE, kRows>;

/// x += what was rounded.
WYVERN_DEVICE void add(Columns& x, const RowFragment& rounded) {
#pragma unroll
  for (int i = 0; i < Columns::kCount; i += 2) {
    const uint32 pair = rounded.x[i / 8][i % 8 / 2];
    x.x[i] += sm90::low_half<DTYPE>(pair);
    x.x[i + 1] += sm90::high_half<DTYPE>(pair);
  }
}

/// What both directions have.
template <bool Reverse>
struct Consumer : sm90::ScanState<Spec, Block<Reverse>> {
  using Base = sm90::ScanState<Spec, Block<Reverse>>;
  using Base::b, Base::state;

  WYVERN_DEVICE void wait_chunk(const Position& at) const {
    sm90::barrier_wait(b.template barrier<kLayout.decay_full>(at.buffer), at.parity);
    sm90::barrier_wait(b.template barrier<kLayout.tiles_full>(at.buffer), at.parity);
  }
  WYVERN_DEVICE void free_chunk(int stage) const {
    sm90::hand_over(b.template barrier<kLayout.empty>(stage));
  }
  WYVERN_DEVICE void decay(int stage) { sm90::scale_columns(state, b.decay(stage)); }
};

template <bool Reverse>
struct ChunkStates;

/// S, and Z = T (V - a K S).
template <>
struct ChunkStates<false> : Consumer<false> {
  template <class Params>
  WYVERN_DEVICE void mainloop(const Params& p) {
    Position at;
#pragma unroll 1
    for (int step = 0; step < b.chunks; ++step, at.advance()) {
      const int stage = at.buffer;
      wait_chunk(at);
      {
        StateFragment packed(state);
        multiply_state<true>(packed, b.entering(stage), step, p);
        RowFragment values;
        sm90::load_transposed(values, b.values(stage, consumer));
        sm90::end_products<0>(x, packed);
        add(x, values);
      }
      RowFragment u(x);
      sm90::start_product(x, u, sm90::rows_of(b.inverse(stage)), true);
      decay(stage);
      sm90::end_products<0>(x, u);
      RowFragment rows(x);
      stage_rows(rows);
      sm90::start_product(state, rows, sm90::columns_of(b.leaving(stage)), true);
      send_rows(step, p);
      sm90::end_products<0>(state, rows);
      free_chunk(stage);
    }
  }
};

/// dS', and dV = T^T (P^T dO + d b (K dS')).
template <>
struct ChunkStates<true> : Consumer<true> {
  /// Rounded dO^T P of the chunk in `at`, which needs no state.
  WYVERN_DEVICE RowFragment own_part(const Position& at) {
    wait_chunk(at);
    RowFragment gradients;
    sm90::load_transposed(gradients, b.values(at.buffer, consumer));
    Columns y;
    sm90::start_product(y, gradients, sm90::columns_of(b.scores(at.buffer)));
    sm90::end_products<0>(y, gradients);
    return RowFragment(y);
  }

  template <class Params>
  WYVERN_DEVICE void mainloop(const Params& p) {
    Position at;
    RowFragment own = own_part(at);
#pragma unroll 1
    for (int step = 0; step < b.chunks; ++step) {
      const int stage = at.buffer;
      {
        StateFragment packed(state);
        multiply_state<kOutput>(packed, b.leaving(stage), step, p);
        decay(stage);
        sm90::end_products<0>(x, packed);
        add(x, own);
      }
      RowFragment u(x);
      sm90::start_product(x, u, sm90::columns_of(b.inverse(stage)), true);
      RowFragment gradients;
      sm90::load_transposed(gradients, b.values(stage, consumer));
      sm90::end_products<0>(x, u);
      RowFragment rows(x);
      if constexpr (kOutput) stage_rows(rows);
      sm90::begin_products(state);
      sm90::multiply(state, gradients, sm90::columns_of(b.queries(stage)), true);
      sm90::multiply(state, rows, sm90::columns_of(b.entering(stage)), true);
      sm90::wgmma_commit();
      if constexpr (kOutput) send_rows(step, p);
      at.advance();
      if (step + 1 < b.chunks) own = own_part(at);
      sm90::end_products<0>(state, gradients, rows);
      free_chunk(stage);
    }
  }
};
