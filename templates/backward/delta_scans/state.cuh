// delta_scans' consumers: 64 columns of V of a state S, or of its gradient dS', transposed in fp32
// registers, through the chunks of a block.
#pragma once

#include "backward/delta_scans/prepare.cuh"
#include "device/cuda/sm90/scan_state.cuh"

using Columns = sm90::Accumulator<kRows>;  // of V, one for each row of a chunk
using StateFragment = sm90::FragmentA<DTYPE, K>;
using RowFragment = sm90::FragmentA<DTYPE, kRows>;

/// Calls visit(j, factor) for this thread's columns 8 j and on of `Columns`, with the factors of
/// those rows, each read while the one before is in use.
template <class Visit>
WYVERN_DEVICE void for_row_factors(const float* factors, Visit&& visit) {
  Float2 next = load<2>(factors + Columns::col(0));
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    const Float2 now = next;
    if (j + 1 < kRows / 8) next = load<2>(factors + Columns::col(4 * (j + 1)));
    visit(j, now);
  }
}

/// x as a left operand, columns times factors of rows.
WYVERN_DEVICE void pack_scaled(RowFragment& to, const Columns& x, const float* factors) {
  for_row_factors(factors, [&](int j, const Float2& f) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      to.x[j / 2][j % 2 * 2 + i] =
          pack<DTYPE>(x.x[4 * j + 2 * i] * f.at[0], x.x[4 * j + 2 * i + 1] * f.at[1]);
  });
}

/// x = y + f x in each column, f the factor of its row.
WYVERN_DEVICE void multiply_add(Columns& x, const RowFragment& y, const float* factors) {
  for_row_factors(factors, [&](int j, const Float2& f) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32 pair = y.x[j / 2][j % 2 * 2 + i];
      float* const to = x.x + 4 * j + 2 * i;
      to[0] = fused_multiply_add(f.at[0], to[0], sm90::low_half<DTYPE>(pair));
      to[1] = fused_multiply_add(f.at[1], to[1], sm90::high_half<DTYPE>(pair));
    }
  });
}

/// What both directions have.
template <bool Reverse>
struct Consumer : sm90::ScanState<Spec, Block<Reverse>> {
  using Base = sm90::ScanState<Spec, Block<Reverse>>;
  using Base::b, Base::consumer, Base::state, Base::x;

  WYVERN_DEVICE void wait_keys(const Position& at) const {
    sm90::barrier_wait(b.template barrier<kLayout.tiles_full>(at.buffer), at.parity);
  }
  WYVERN_DEVICE void wait_values(int step) const {
    sm90::barrier_wait(b.template barrier<kLayout.values_full>(step % kValueStages),
                       sm90::parity_of<kValueStages>(step));
  }
  /// After the last read of a chunk's v or do.
  WYVERN_DEVICE void free_values(int step) const {
    sm90::hand_over(b.template barrier<kLayout.values_empty>(step % kValueStages));
  }
  WYVERN_DEVICE void wait_chunk(int step) const {
    sm90::barrier_wait(b.template barrier<kLayout.chunk_full>(step % kSlots),
                       sm90::parity_of<kSlots>(step));
  }

  /// x = state k^T of the rounded state, which is stored too if there is an output. Meanwhile the
  /// state decays if Decays, and meanwhile() is called.
  template <bool Decays, class Params, class Meanwhile>
  WYVERN_DEVICE void multiply_keys(const Position& at, int step, const Params& p,
                                   Meanwhile&& meanwhile) {
    if constexpr (kSharesState) {
      stage_state();
      sm90::start_product<K>(x, sm90::rows_of(b.staged_state(consumer)),
                             sm90::rows_of(b.keys(at.buffer)));
      if constexpr (kOutput) this->send_state(step, p);
      if constexpr (Decays) decay(at);
      meanwhile();
      sm90::end_products<0>(x);
    } else {
      StateFragment packed(state);
      this->template multiply_state<kOutput>(packed, b.keys(at.buffer), step, p);
      if constexpr (Decays) decay(at);
      meanwhile();
      sm90::end_products<0>(x, packed);
    }
  }
  /// Rounds the state to the staging tile, for products to read it there.
  WYVERN_DEVICE void stage_state() const {
    this->wait_staging();
#pragma unroll
    for (int j = 0; j < K / 16; ++j) {
      uint32 packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        packed[i] = pack<DTYPE>(state.x[8 * j + 2 * i], state.x[8 * j + 2 * i + 1]);
      sm90::store_matrix_x4(sm90::fragment_at(b.staged_state(consumer), 16 * j), packed);
    }
    sm90::fence_proxy_async();
    this->sync();
  }
  WYVERN_DEVICE void decay(const Position& at) {
    const float factor = array_at<kLayout.decay>(b.shared)[at.buffer];
#pragma unroll
    for (int i = 0; i < sm90::Accumulator<K>::kCount; ++i) state.x[i] *= factor;
  }
};

template <bool Reverse>
struct ChunkStates;

// ---- forward: S, and Z = T (V - a K S) ----------------------------------------------------------

template <>
struct ChunkStates<false> : Consumer<false> {
  template <class Params>
  WYVERN_DEVICE void mainloop(const Params& p) {
    Position at;
#pragma unroll 1
    for (int step = 0; step < b.chunks; ++step, at.advance()) {
      wait_keys(at);
      {
        RowFragment values;
        multiply_keys<false>(at, step, p, [&] {
          wait_values(step);
          if (!kOutput && b.zero_v)
            values = {};
          else
            sm90::load_transposed(values, b.values(step, consumer));
          free_values(step);
          wait_chunk(step);
        });
        multiply_add(x, values, b.factors<kLayout.enter>(at.buffer));  // v - a x
      }
      RowFragment u(x);
      sm90::start_product(x, u, sm90::rows_of(b.inverse(step)), true);
      decay(at);
      sm90::end_products<0>(x, u);
      RowFragment update;
      pack_scaled(update, x, b.factors<kLayout.leave>(at.buffer));
      if constexpr (kOutput) stage_rows(x);
      sm90::start_product(state, update, sm90::columns_of(b.keys(at.buffer)), true);
      if constexpr (kOutput) send_rows(step, p);
      sm90::barrier_arrive(b.barrier<kLayout.inverse_empty>(step % kSlots));
      sm90::end_products<0>(state, update);
      sm90::barrier_arrive(b.barrier<kLayout.tiles_empty>(at.buffer));
    }
  }
};

// ---- reverse: dS', and dV = b T^T (P^T dO + d (K dS')) with beta on the rows of A ---------------

template <>
struct ChunkStates<true> : Consumer<true> {
  /// Rounded dO^T P of the chunk in `at`, which needs no state.
  WYVERN_DEVICE RowFragment own_part(const Position& at, int step) {
    wait_keys(at);
    wait_values(step);
    wait_chunk(step);
    RowFragment gradients;
    sm90::load_transposed(gradients, b.values(step, consumer));
    Columns y;
    sm90::start_product(y, gradients, sm90::columns_of(b.scores(step)));
    sm90::end_products<0>(y, gradients);
    sm90::barrier_arrive(b.barrier<kLayout.scores_empty>(step % kScoreSlots));
    return RowFragment(y);
  }

  /// dO^T with rows times scale a, as they enter the state's update.
  WYVERN_DEVICE void load_scaled_gradients(RowFragment& to, const Position& at, int step) const {
    sm90::load_transposed(to, b.values(step, consumer));
    free_values(step);
    const float* const factors = b.factors<kLayout.output>(at.buffer) + lane_index() % 4 * 2;
#pragma unroll
    for (int j = 0; j < kRows / 16; ++j) {
      const Float2 f[2] = {load<2>(factors + 16 * j), load<2>(factors + 16 * j + 8)};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        to.x[j][i] = pack<DTYPE>(sm90::low_half<DTYPE>(to.x[j][i]) * f[i / 2].at[0],
                                 sm90::high_half<DTYPE>(to.x[j][i]) * f[i / 2].at[1]);
    }
  }

  template <class Params>
  WYVERN_DEVICE void mainloop(const Params& p) {
    Position at;
    RowFragment own = own_part(at, 0);
#pragma unroll 1
    for (int step = 0; step < b.chunks; ++step) {
      multiply_keys<true>(at, step, p, [] {});
      multiply_add(x, own, b.factors<kLayout.leave>(at.buffer));  // own + d x
      RowFragment u(x);
      sm90::start_product(x, u, sm90::columns_of(b.inverse(step)), true);
      RowFragment gradients;
      load_scaled_gradients(gradients, at, step);
      sm90::end_products<0>(x, u);
      RowFragment update;
      pack_scaled(update, x, b.factors<kLayout.enter>(at.buffer));
      sm90::begin_products(state);
      sm90::multiply(state, gradients, sm90::columns_of(b.queries(at.buffer)), true);
      sm90::multiply(state, update, sm90::columns_of(b.keys(at.buffer)), true);
      sm90::wgmma_commit();
      if constexpr (kOutput) {
        RowFragment rows;
        pack_scaled(rows, x, b.factors<kLayout.rate>(at.buffer));
        stage_rows(rows);
        send_rows(step, p);
      }
      sm90::barrier_arrive(b.barrier<kLayout.inverse_empty>(step % kSlots));
      const Position before = at;
      at.advance();
      if (step + 1 < b.chunks) own = own_part(at, step + 1);
      sm90::end_products<0>(state, gradients, update);
      sm90::barrier_arrive(b.barrier<kLayout.tiles_empty>(before.buffer));
    }
  }
};
