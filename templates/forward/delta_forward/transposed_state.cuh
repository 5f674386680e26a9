// The state as S^T in the registers of a consumer warpgroup, 64 columns of V x K.
#pragma once

#include "device/cuda/sm90/state.cuh"
#include "device/cuda/sm90/transposed_rows.cuh"
#include "forward/delta_forward/output.cuh"

using Transposed = sm90::Accumulator<K>;

/// Factors of the rows of a chunk, for this thread's columns of `Columns`.
struct RowFactors {
  Float2 x[8];

  WYVERN_DEVICE explicit RowFactors(const float* from) {
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = load<2>(from + Columns::col(4 * j));
  }
  /// For element i of `Columns`.
  WYVERN_DEVICE float of(int i) const { return x[i / 4].at[i % 2]; }
};

/// The operands of u = beta v - beta exp(G) k S, for 16 tokens; without beta where V' is kept.
struct Residual {
  uint32 values[4];
  Float2 beta[2], erase[2];

  WYVERN_DEVICE Residual(const Block& b, int buffer, int consumer, int j) {
    load_matrix_x4_transposed(values, sm90::matrices_at(b.values(buffer, consumer), 2 * j));
    if (!kQueries && b.zero_v) {
#pragma unroll
      for (uint32& pair : values) pair = 0;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kKeeps)
        beta[i].at[0] = beta[i].at[1] = 1.0f / sm90::unit_of<Spec>(b);
      else
        beta[i] = load<2>(b.factors<kLayout.beta>(buffer) + Columns::col(8 * j + 4 * i));
      erase[i] = load<2>(b.factors<kLayout.erase>(buffer) + Columns::col(8 * j + 4 * i));
    }
  }
  /// `x`: elements 8 j to 8 j + 7 of `Columns`.
  WYVERN_DEVICE void apply(float* x) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32 pair = values[i / 2];
      const DTYPE v{static_cast<uint16>(i % 2 == 0 ? pair & 0xFFFFU : pair >> 16U)};
      x[i] = fused_multiply_add(erase[i / 4].at[i % 2], x[i], beta[i / 4].at[i % 2] * to_float(v));
    }
  }
};

/// The state, and a chunk's V' and its output from the state.
struct TransposedState {
  const Block& b;
  int consumer;  ///< which 64 of the block's columns of V
  Transposed state;
  Columns x, y;

  WYVERN_DEVICE int column() const { return b.tile * BV + consumer * kColumns; }

  /// Calls act(offset, x) for each element and its place in a state of Width columns.
  template <int Width, bool VFirst, class Act>
  WYVERN_DEVICE void visit(Act&& act) {
    sm90::visit_state<Width, VFirst>(state, column(), act);
  }

  /// Stores the state times a factor to one of V columns.
  template <bool VFirst, class Element>
  WYVERN_DEVICE void store(float factor, Element* to) const {
    sm90::store_accumulator<VFirst ? K : 1, VFirst ? 1 : V>(state, factor,
                                                            to + column() * (VFirst ? K : 1));
  }

  /// Starts x = k S for the chunk in `at`.
  WYVERN_DEVICE void start(const Position& at, const sm90::FragmentA<DTYPE, K>& packed) {
    sm90::start_product(x, packed, sm90::rows_of(b.keys(at.buffer)));
  }

  /// Starts y = q S.
  WYVERN_DEVICE void start_output(const Position& at, const sm90::FragmentA<DTYPE, K>& packed) {
    sm90::start_product(y, packed, sm90::rows_of(b.queries(at.buffer)));
  }

  WYVERN_DEVICE Residual residual(const Position& at, int j) const {
    return Residual(b, at.buffer, consumer, j);
  }
  WYVERN_DEVICE void apply(const Residual (&residuals)[2], int j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) residuals[i].apply(x.x + 8 * (j + i));
  }

  /// With x in flight and y free: computes x = V' and y = q S, and decays the state.
  WYVERN_DEVICE void compute_values(const Position& at, int chunk,
                                    sm90::FragmentA<DTYPE, K>& packed) {
    sm90::Barrier* const prepared = b.barrier<kLayout.chunk_full>(chunk % kSlots);
    const uint32 parity = static_cast<uint32>(chunk / kSlots % 2);
    if constexpr (kQueries && kConsumers > 1) start_output(at, packed);
    // With norms prep warpgroups complete the factors.
    if constexpr (QK_L2NORM)
      sm90::barrier_wait(prepared, parity);
    else
      sm90::barrier_wait(b.barrier<kLayout.factors_full>(at.buffer), at.parity);
    const float decay = array_at<kLayout.decay>(b.shared)[at.buffer];
    if constexpr (kConsumers == 1) {
      const Residual first[2] = {residual(at, 0), residual(at, 1)};
      const Residual last[2] = {residual(at, 2), residual(at, 3)};
      if constexpr (kQueries) start_output(at, packed);
      sm90::end_products<kQueries ? 1 : 0>(x);
      apply(first, 0);
      apply(last, 2);
    } else {
      Residual next = residual(at, 0);
      sm90::end_products<kQueries ? 1 : 0>(x);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Residual now = next;
        if (i < 3) next = residual(at, i + 1);
        now.apply(x.x + 8 * i);
      }
      if constexpr (kQueries) sm90::end_products<0>(y);
      packed.hold();
    }
    sm90::FragmentA<DTYPE, kRows> u(x);
    if constexpr (!QK_L2NORM) sm90::barrier_wait(prepared, parity);
    sm90::start_product(x, u, sm90::rows_of(b.inverse(chunk)), true);
    // These reads of the tile come before the next load to it.
    sm90::fence_proxy_async();
    const float factor = decay * room_of(b, at.buffer);
    if ((SCALAR_GATE && !kLazyDecay) || ((SCALAR_GATE || kMayOverflow) && factor != 1.0f)) {
#pragma unroll
      for (int i = 0; i < Transposed::kCount; ++i) state.x[i] *= factor;
    }
    sm90::end_products<0>(x, u);
    if constexpr (kConsumers == 1) {
      if constexpr (kQueries) sm90::pin(y.x);
      packed.hold();
    }
  }

  /// V' times its factors in the update, of rows [begin, end) of the chunk, multiples of 16.
  WYVERN_DEVICE Columns scaled_values(const Position& at, int begin = 0, int end = kRows) const {
    const RowFactors rate(b.factors<kLayout.update_factor>(at.buffer));
    const float room = room_of(b, at.buffer);
    Columns scaled;
#pragma unroll
    for (int i = 0; i < Columns::kCount; ++i)
      scaled.x[i] = begin <= i / 8 * 16 && i / 8 * 16 < end ? x.x[i] * (room * rate.of(i)) : 0.0f;
    return scaled;
  }

  /// Divides the state by room_of() after its update.
  WYVERN_DEVICE void restore(const Position& at) {
    if constexpr (!kMayOverflow) return;
    if (room_of(b, at.buffer) == 1.0f) return;
#pragma unroll
    for (int i = 0; i < Transposed::kCount; ++i) state.x[i] *= 1.0f / kRoom;
  }

  /// Starts the state's update by a chunk's V'.
  WYVERN_DEVICE void start_update(const Position& at, const sm90::FragmentA<DTYPE, kRows>& update) {
    sm90::start_product(state, update, sm90::columns_of(b.keys(at.buffer)), true);
  }

  /// Where a checkpoint divides the chunk: updates the state by the rows in front of it, writes the
  /// checkpoint, decays the state to the chunk's end and returns those rows; else 0.
  template <class WriteCheckpoint>
  WYVERN_DEVICE int update_front(const Position& at, const WriteCheckpoint& write_checkpoint) {
    const int rows = sm90::uniform(checkpoint_of(b, at.buffer)[0]);
    if (rows == 0 || rows == kRows) return 0;
    sm90::FragmentA<DTYPE, kRows> update(scaled_values(at, 0, rows));
    start_update(at, update);
    sm90::end_products<0>(state, update);
    write_checkpoint(*this, checkpoint_of(b, at.buffer)[1], 1.0f / room_of(b, at.buffer));
    const float* const G = b.factors<kLayout.G>(at.buffer);
    const float decay = exp2_fast(G[kRows - 1] - G[rows - 1]);
#pragma unroll
    for (int i = 0; i < Transposed::kCount; ++i) state.x[i] *= decay;
    return rows;
  }

  /// Updates the state by a chunk's V', and starts the rest of its output. write_checkpoint(*this,
  /// row, factor) writes the state times a factor to a row of `checkpoints`.
  template <class Output, class WriteCheckpoint>
  WYVERN_DEVICE void update_and_output(const Position& at, int chunk,
                                       sm90::FragmentA<DTYPE, kRows>& values, const Output& output,
                                       const WriteCheckpoint& write_checkpoint) {
    int front = 0;
    if constexpr (kDivided) front = update_front(at, write_checkpoint);
    sm90::FragmentA<DTYPE, kRows> update(scaled_values(at, front));
    start_update(at, update);
    const RowFactors factor(b.factors<kLayout.output_factor>(at.buffer));
#pragma unroll
    for (int i = 0; i < Columns::kCount; ++i) y.x[i] *= factor.of(i);
    sm90::start_product(y, values, sm90::rows_of(b.scores(chunk)), true);
    if constexpr (kKeeps) {
      const RowFactors rate(b.factors<kLayout.beta>(at.buffer));
#pragma unroll
      for (int i = 0; i < Columns::kCount; ++i) x.x[i] *= rate.of(i);
      output.keep_values(b, consumer, ValueFragment(x), at.buffer, chunk);
    }
    sm90::end_products<1>(state, update);
    restore(at);
    if constexpr (kCheckpoints)
      if (const int row = row_of_end(b, at.buffer); row >= 0) write_checkpoint(*this, row, 1.0f);
    output.wait_values();
    sm90::barrier_arrive(b.barrier<kLayout.tiles_empty>(at.buffer));
  }

  /// Updates the state by a chunk's V', without an output.
  WYVERN_DEVICE void update(const Position& at) {
    sm90::FragmentA<DTYPE, kRows> values(scaled_values(at));
    start_update(at, values);
    sm90::end_products<0>(state, values);
    restore(at);
    sm90::barrier_arrive(b.barrier<kLayout.tiles_empty>(at.buffer));
  }
};

/// The consumer's mainloop. Products of a chunk overlap those of the next one.
template <class Output, class WriteCheckpoint>
WYVERN_DEVICE void mainloop(TransposedState& s, const Output& output,
                            const WriteCheckpoint& write_checkpoint) {
  const Block& b = s.b;
  Position at;
  sm90::barrier_wait(b.barrier<kLayout.tiles_full>(at.buffer), at.parity);
  {
    sm90::FragmentA<DTYPE, K> packed(s.state);
    s.start(at, packed);
    output.prefetch(b, s.consumer, 0);
    output.keep_state(b, s.consumer, packed, 0);
    s.compute_values(at, 0, packed);
  }
#pragma unroll 1
  for (int c = 0; c < b.chunks; ++c) {
    sm90::FragmentA<DTYPE, kRows> values(s.x);
    s.update_and_output(at, c, values, output, write_checkpoint);
    const bool last = c + 1 == b.chunks;
    const auto finish = [&] {
      values.hold();
      if (!last) sm90::barrier_arrive(b.barrier<kLayout.scores_empty>(c % kSlots));
      output.store(b, s.consumer, s.y, c);
    };
    // Two consumer warpgroups have no registers for this output beside the next chunk's products.
    if (kConsumers > 1 || last) {
      sm90::end_products<0>(s.y);
      finish();
      if (last) break;
    }
    at.advance();
    sm90::barrier_wait(b.barrier<kLayout.tiles_full>(at.buffer), at.parity);
    sm90::FragmentA<DTYPE, K> packed(s.state);
    s.start(at, packed);
    output.prefetch(b, s.consumer, c + 1);
    if constexpr (kConsumers == 1) {
      sm90::end_products<1>(s.y);
      finish();
    }
    output.keep_state(b, s.consumer, packed, c + 1);
    s.compute_values(at, c + 1, packed);
  }
}

/// The mainloop of the state alone.
WYVERN_DEVICE void mainloop(TransposedState& s) {
  const Block& b = s.b;
  Position at;
#pragma unroll 1
  for (int c = 0; c < b.chunks; ++c, at.advance()) {
    sm90::barrier_wait(b.barrier<kLayout.tiles_full>(at.buffer), at.parity);
    sm90::FragmentA<DTYPE, K> packed(s.state);
    s.start(at, packed);
    s.compute_values(at, c, packed);
    sm90::barrier_arrive(b.barrier<kLayout.scores_empty>(c % kScoreSlots));
    s.update(at);
  }
}
