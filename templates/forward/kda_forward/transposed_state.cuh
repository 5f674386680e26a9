// kda_forward's consumers: the state as S^T in the registers of a warpgroup, 64 columns of V x K,
// and their mainloop over slices.
#pragma once

#include "forward/kda_forward/output.cuh"

using Transposed = sm90::Accumulator<K>;

/// The state, and a slice's V' and its output from the state.
struct TransposedState {
  const Block& b;
  int column;  ///< the warpgroup's first, of the block's
  Transposed state;
  sm90::Accumulator<(kQueries ? 2 : 1) * kSlice> read;  ///< S^T k and S^T q of the slice's rows
  Columns values;                                       ///< V'
  Columns output;      ///< of the slice's own values, then all of it
  Columns from_state;  ///< S^T q: the output from earlier slices

  /// Calls act(offset, x) for each element and its place in a state of Width columns.
  template <int Width, bool VFirst, class Act>
  WYVERN_DEVICE void visit(Act&& act) {
    sm90::visit_state<Width, VFirst>(state, b.tile * BV + column, act);
  }

  /// Stores the state times a factor to one of V columns.
  template <bool VFirst, class Element>
  WYVERN_DEVICE void store(float factor, Element* to) const {
    sm90::store_accumulator<VFirst ? K : 1, VFirst ? 1 : V>(
        state, factor, to + (b.tile * BV + column) * (VFirst ? K : 1));
  }

  /// Starts S^T k and S^T q.
  WYVERN_DEVICE void start(int buffer, sm90::FragmentA<Operand, K>& packed) {
    sm90::start_product(read, packed, sm90::rows_of(b.rows(buffer)));
  }

  WYVERN_DEVICE void decay(int buffer) {
    sm90::scale_columns(state, b.factors<kLayout.decay>(buffer));
  }

  /// Waits for S^T k and S^T q; computes the slice's residual and from it V'.
  WYVERN_DEVICE void compute_values(int buffer, sm90::FragmentA<Operand, K>& packed) {
    const RowFactors beta(b.factors<kLayout.beta>(buffer));
    const RowFactors erase(b.factors<kLayout.erase>(buffer));
    uint32 v[4] = {};
    const int lane = lane_index();
    if (b.has_values())
      load_matrix_x4_transposed(
          v, b.values(buffer).at(lane / 16 * 8 + lane % 8,
                                 column + warp_index() % 4 * 16 + lane / 8 % 2 * 8));
    sm90::end_products<0>(read, packed);
#pragma unroll
    for (int i = 0; i < Columns::kCount; ++i) {
      const uint32 pair = v[i / 2];
      const DTYPE x{static_cast<uint16>(i % 2 == 0 ? pair & 0xFFFFU : pair >> 16U)};
      values.x[i] = fused_multiply_add(erase.of(i), read.x[i], beta.of(i) * to_float(x));
      if constexpr (kQueries) from_state.x[i] = read.x[Columns::kCount + i];
    }
    sm90::FragmentA<Operand, kSlice> u(values);
    sm90::start_product(values, u, sm90::rows_of(b.square(buffer)), true);
    sm90::end_products<0>(values, u);
  }

  /// V' with the factors of keys.
  WYVERN_DEVICE Columns scaled_values(int buffer) const {
    if constexpr (!QK_L2NORM) return values;
    const RowFactors key(b.factors<kLayout.key>(buffer));
    Columns x;
#pragma unroll
    for (int i = 0; i < Columns::kCount; ++i) x.x[i] = values.x[i] * key.of(i);
    return x;
  }

  /// Updates the state by a slice's V', and starts the rest of its output. Calls meanwhile() before
  /// it waits for the state.
  template <class Meanwhile>
  WYVERN_DEVICE void update_and_output(int buffer, sm90::FragmentA<Operand, kSlice>& update,
                                       const Meanwhile& meanwhile) {
    sm90::start_product(state, update, sm90::columns_of(b.updates(buffer)), true);
    if constexpr (!kQueries) {
      sm90::end_products<0>(state, update);
      return;
    }
    sm90::start_product(output, update, sm90::rows_of(b.square(buffer), 0, kSlice));
    meanwhile();
    sm90::end_products<1>(state);
  }

  /// Completes the output, when its products are done.
  WYVERN_DEVICE void add_from_state() {
#pragma unroll
    for (int i = 0; i < Columns::kCount; ++i) output.x[i] += from_state.x[i];
  }
};

/// The mainloop's prologue: the first slice's V'; the state decays over the slice.
WYVERN_DEVICE void prologue(TransposedState& s, const Position& at) {
  s.b.wait_slice(at);
  sm90::FragmentA<Operand, K> packed(s.state);
  s.start(at.buffer, packed);
  s.compute_values(at.buffer, packed);
  s.decay(at.buffer);
}

/// The consumer's mainloop. Products of a slice overlap those of the next one.
/// write_checkpoint(row) writes the state to a row of `checkpoints`.
template <class Output, class WriteCheckpoint>
WYVERN_DEVICE void mainloop(TransposedState& s, const Output& to,
                            const WriteCheckpoint& write_checkpoint) {
  const Block& b = s.b;
  const int slices = b.slices();
  const int overlap = b.overlap * (kChunk / kSlice);
  Position at;
  to.start(b, s.column, overlap);
  prologue(s, at);
#pragma unroll 1
  for (int i = 0; i < slices; ++i) {
    const int buffer = at.buffer;
    const RowFactors query(b.factors<kLayout.query>(buffer));
    sm90::FragmentA<Operand, kSlice> update(s.scaled_values(buffer));
    s.update_and_output(buffer, update, [&] {
      if (i > overlap) to.finish(b, s.column, i - 1);
    });
    if constexpr (kCheckpoints)
      if (const int row = *b.checkpoint(buffer); row != 0) write_checkpoint(row - 1);
    at.advance();
    if (i + 1 == slices) {
      sm90::end_products<0>(s.output, update);
      s.add_from_state();
      to.store(b, s.column, s.output, query, i);
      to.finish(b, s.column, i);
      break;
    }
    sm90::FragmentA<Operand, K> packed(s.state);
    b.wait_slice(at);
    s.start(at.buffer, packed);
    sm90::end_products<1>(s.output, update);
    sm90::hand_over(b.empty(buffer));
    s.add_from_state();
    if (i >= overlap) to.store(b, s.column, s.output, query, i);
    s.decay(at.buffer);
    s.compute_values(at.buffer, packed);
  }
}

/// The mainloop of the state alone.
WYVERN_DEVICE void mainloop(TransposedState& s) {
  const Block& b = s.b;
  const int slices = b.slices();
  Position at;
  prologue(s, at);
#pragma unroll 1
  for (int i = 0; i < slices; ++i) {
    const int buffer = at.buffer;
    sm90::FragmentA<Operand, kSlice> update(s.scaled_values(buffer));
    s.update_and_output(buffer, update, [] {});
    sm90::hand_over(b.empty(buffer));
    at.advance();
    if (i + 1 == slices) break;
    sm90::FragmentA<Operand, K> packed(s.state);
    b.wait_slice(at);
    s.start(at.buffer, packed);
    s.decay(at.buffer);
    s.compute_values(at.buffer, packed);
  }
}
