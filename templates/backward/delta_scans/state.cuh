// What the consumer warpgroups of delta_scans have: 64 columns of V of a state S, or of its
// gradient dS', transposed in fp32 registers, and how what they find leaves for memory.
#pragma once

#include "backward/delta_scans/prepare.cuh"
#include "device/cuda/sm90/state.cuh"
#include "device/cuda/sm90/transposed_rows.cuh"

using Transposed = sm90::Accumulator<K>;
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

/// What both walks do alike. The first `consumer` of a block has its first 64 columns.
template <class B>
struct Consumer {
  const B& b;
  int consumer;
  Transposed state;
  Columns x;

  WYVERN_DEVICE int panel() const { return kPanels * b.tile + consumer; }

  /// Calls act(offset, x) for each element and its place in a state of K x Width, or of Width x K.
  template <int Width, bool VFirst, class Act>
  WYVERN_DEVICE void visit(Act&& act) {
    sm90::visit_state<Width, VFirst>(state, recalled(b).tile * BV + consumer * kColumns, act);
  }

  WYVERN_DEVICE void wait_keys(const Position& at) const {
    sm90::barrier_wait(b.template barrier<kLayout.loaded>(at.buffer), at.parity);
  }
  WYVERN_DEVICE void wait_values(int turn) const {
    sm90::barrier_wait(b.template barrier<kLayout.values_loaded>(turn % kValueStages),
                       parity_of<kValueStages>(turn));
  }
  /// After the last read of a chunk's v or do.
  WYVERN_DEVICE void free_values(int turn) const {
    sm90::hand_over(b.template barrier<kLayout.values_free>(turn % kValueStages));
  }
  WYVERN_DEVICE void wait_ready(int turn) const {
    sm90::barrier_wait(b.template barrier<kLayout.ready>(turn % kSlots), parity_of<kSlots>(turn));
  }
  WYVERN_DEVICE void sync() const { sm90::sync_named(1 + consumer, 128); }

  /// Where the rows are staged that leave after the state.
  WYVERN_DEVICE SquareTile staged_rows() const { return {b.staged_state(consumer).data}; }
  /// Until what was staged before has been read.
  WYVERN_DEVICE void wait_staging() const {
    if (thread_index() % 128 == 0) sm90::bulk_wait_read<0>();
    sync();
  }

  /// Writes sixteen channels of the rounded state to its staging tile.
  WYVERN_DEVICE void stage(const uint32 (&packed)[4], int j) const {
    const int lane = lane_index();
    sm90::store_matrix_x4(
        b.staged_state(consumer).at(warp_index() % 4 * 16 + lane % 16, 16 * j + lane / 16 * 8),
        packed);
  }
  WYVERN_DEVICE void send_state(int turn, const TensorMap& map) const {
    if (thread_index() % 128 != 0) return;
    const B block = recalled(b);
    sm90::tensor_store(map, {0, (kPanels * block.tile + consumer) * kColumns, 0, block.place(turn)},
                       b.staged_state(consumer).data);
    sm90::bulk_commit();
  }

  /// x = state k^T, the state rounded; which leaves for memory too where walks write. Meanwhile the
  /// state decays where `decays`, and meanwhile() is called.
  template <bool Decays, class Meanwhile>
  WYVERN_DEVICE void multiply_state(const Position& at, int turn, const TensorMap& map,
                                    Meanwhile&& meanwhile) {
    if constexpr (kSharesState) {
      wait_staging();
#pragma unroll
      for (int j = 0; j < K / 16; ++j) {
        uint32 packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          packed[i] = pack<DTYPE>(state.x[8 * j + 2 * i], state.x[8 * j + 2 * i + 1]);
        stage(packed, j);
      }
      sm90::fence_proxy_async();
      sync();
      sm90::start_product<K>(x, sm90::rows_of(b.staged_state(consumer)),
                             sm90::rows_of(b.keys(at.buffer)));
      if constexpr (kWrites) send_state(turn, map);
      if constexpr (Decays) decay(at);
      meanwhile();
      sm90::end_products<0>(x);
    } else {
      StateFragment packed(state);
      sm90::start_product(x, packed, sm90::rows_of(b.keys(at.buffer)));
      if constexpr (kWrites) {
        wait_staging();
#pragma unroll
        for (int j = 0; j < K / 16; ++j) stage(packed.x[j], j);
        sm90::fence_proxy_async();
        sync();
        send_state(turn, map);
      }
      if constexpr (Decays) decay(at);
      meanwhile();
      sm90::end_products<0>(x, packed);
    }
  }
  WYVERN_DEVICE void decay(const Position& at) {
    const float factor = array_at<kLayout.decay>(b.shared)[at.buffer];
#pragma unroll
    for (int i = 0; i < Transposed::kCount; ++i) state.x[i] *= factor;
  }

  /// x to its staging tile, for send_rows().
  WYVERN_DEVICE void stage_rows() const {
    wait_staging();
    sm90::store_transposed(staged_rows(), RowFragment(x));
    sm90::fence_proxy_async();
  }
};

// ---- forward: S, and Z = T (V - a K S) ----------------------------------------------------------

struct Forward : Consumer<Block<false>> {
  /// x = v - a x.
  WYVERN_DEVICE void subtract_from_values(const Position& at, const RowFragment& values) {
    for_row_factors(b.factors<kLayout.enter>(at.buffer), [&](int j, const Float2& f) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32 pair = values.x[j / 2][j % 2 * 2 + i];
        float* const to = x.x + 4 * j + 2 * i;
        to[0] = fused_multiply_add(f.at[0], to[0], sm90::low_half<DTYPE>(pair));
        to[1] = fused_multiply_add(f.at[1], to[1], sm90::high_half<DTYPE>(pair));
      }
    });
  }

  /// Rows of Z: those behind a sequence's end are 0, for so are their keys and values.
  WYVERN_DEVICE void send_rows(int turn, const TensorMap& z_map) const {
    sync();
    if (thread_index() % 128 == 0) {
      const Block<false> block = recalled(b);
      sm90::tensor_store(z_map, {0, block.place(turn) * kRows, kPanels * block.tile + consumer, 0},
                         staged_rows().data);
      sm90::bulk_commit();
    }
  }

  WYVERN_DEVICE void walk(const TensorMap& state_map, const TensorMap& z_map) {
    Position at;
#pragma unroll 1
    for (int turn = 0; turn < b.chunks; ++turn, at.advance()) {
      wait_keys(at);
      {
        RowFragment values;
        multiply_state<false>(at, turn, state_map, [&] {
          wait_values(turn);
          if (!kWrites && b.without_values)
            values = {};
          else
            sm90::load_transposed(values, b.values(turn, consumer));
          free_values(turn);
          wait_ready(turn);
        });
        subtract_from_values(at, values);
      }
      RowFragment u(x);
      sm90::start_product(x, u, sm90::rows_of(b.inverse(turn)), true);
      decay(at);
      sm90::end_products<0>(x, u);
      RowFragment update;
      pack_scaled(update, x, b.factors<kLayout.leave>(at.buffer));
      if constexpr (kWrites) stage_rows();
      sm90::start_product(state, update, sm90::columns_of(b.keys(at.buffer)), true);
      if constexpr (kWrites) send_rows(turn, z_map);
      sm90::barrier_arrive(b.barrier<kLayout.taken>(turn % kSlots));
      sm90::end_products<0>(state, update);
      sm90::barrier_arrive(b.barrier<kLayout.free>(at.buffer));
    }
  }
};

// ---- reverse: dS', and dV = T^T (P^T dO + d b (K dS')) ------------------------------------------

struct Reverse : Consumer<Block<true>> {
  /// Rounded dO^T P of the chunk in `at`, which needs no state.
  WYVERN_DEVICE RowFragment own_part(const Position& at, int turn) {
    wait_keys(at);
    wait_values(turn);
    wait_ready(turn);
    RowFragment gradients;
    sm90::load_transposed(gradients, b.values(turn, consumer));
    Columns y;
    sm90::start_product(y, gradients, sm90::columns_of(b.scores(turn)));
    sm90::end_products<0>(y, gradients);
    sm90::barrier_arrive(b.barrier<kLayout.scored>(turn % kScoreSlots));
    return RowFragment(y);
  }

  /// x = own + d b x.
  WYVERN_DEVICE void add_own(const Position& at, const RowFragment& own) {
    for_row_factors(b.factors<kLayout.leave>(at.buffer), [&](int j, const Float2& f) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32 pair = own.x[j / 2][j % 2 * 2 + i];
        float* const to = x.x + 4 * j + 2 * i;
        to[0] = fused_multiply_add(f.at[0], to[0], sm90::low_half<DTYPE>(pair));
        to[1] = fused_multiply_add(f.at[1], to[1], sm90::high_half<DTYPE>(pair));
      }
    });
  }

  /// dO^T with rows times scale a, as the state takes them up.
  WYVERN_DEVICE void load_scaled_gradients(RowFragment& to, const Position& at, int turn) const {
    sm90::load_transposed(to, b.values(turn, consumer));
    free_values(turn);
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

  /// Rows of dV: by a TMA store, or row by row where the sequence ends in the chunk.
  WYVERN_DEVICE void send_rows(int turn, const TensorMap& dv_map, DTYPE* dv) const {
    sync();
    const Block<true> block = recalled(b);
    const int at_panel = kPanels * block.tile + consumer;
    sm90::store_rows(dv_map, {dv, int64{block.heads} * V}, staged_rows(), block.first_row(turn),
                     block.rows(turn), at_panel, block.head, V);
  }

  WYVERN_DEVICE void walk(const TensorMap& state_map, const TensorMap& dv_map, DTYPE* dv) {
    Position at;
    RowFragment own = own_part(at, 0);
#pragma unroll 1
    for (int turn = 0; turn < b.chunks; ++turn) {
      multiply_state<true>(at, turn, state_map, [] {});
      add_own(at, own);
      RowFragment u(x);
      sm90::start_product(x, u, sm90::columns_of(b.inverse(turn)), true);
      RowFragment gradients;
      load_scaled_gradients(gradients, at, turn);
      sm90::end_products<0>(x, u);
      RowFragment update;
      pack_scaled(update, x, b.factors<kLayout.enter>(at.buffer));
      if constexpr (kWrites) stage_rows();
      sm90::begin_products(state);
      sm90::multiply(state, gradients, sm90::columns_of(b.queries(at.buffer)), true);
      sm90::multiply(state, update, sm90::columns_of(b.keys(at.buffer)), true);
      sm90::wgmma_commit();
      if constexpr (kWrites) send_rows(turn, dv_map, dv);
      sm90::barrier_arrive(b.barrier<kLayout.taken>(turn % kSlots));
      const Position before = at;
      at.advance();
      if (turn + 1 < b.chunks) own = own_part(at, turn + 1);
      sm90::end_products<0>(state, gradients, update);
      sm90::barrier_arrive(b.barrier<kLayout.free>(before.buffer));
    }
  }
};
