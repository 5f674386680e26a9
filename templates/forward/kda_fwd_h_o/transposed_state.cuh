// The state of kda_fwd_h_o.hopper and its kin as S^T, 64 columns of V by K, in the registers of a
// warpgroup, rounded to 16 bits where it is the left operand of products.
#pragma once

#include "forward/kda_fwd_h_o/block.cuh"

using State = sm90::Accumulator<K>;
using Rows = sm90::Accumulator<kChunk>;  ///< of V's columns, one for each token of a chunk

/// The state of 64 columns of V as it walks through the chunks.
struct TransposedState {
  const Block& b;
  int column;  ///< the warpgroup's first, of the block's
  State state;
  Rows values;  ///< S^T W^T, then V'
  Rows output;

  /// Calls act(offset, x) for each element and its place in a state of Width columns.
  template <int Width, bool VFirst, class Act>
  WYVERN_DEVICE void visit(Act&& act) {
    sm90::visit_state<Width, VFirst>(state, b.tile * BV + column, act);
  }
  /// Writes the state, which is in b's unit, to one of V columns.
  template <bool VFirst, class Element>
  WYVERN_DEVICE void write(Element* to) const {
    constexpr int kRowStep = VFirst ? K : 1, kColumnStep = VFirst ? 1 : V;
    sm90::store_accumulator<kRowStep, kColumnStep>(state, b.unit,
                                                   to + (b.tile * BV + column) * kRowStep);
  }

  WYVERN_DEVICE void await(const Position& at) const {
    sm90::barrier_wait(b.barrier<kLayout.ready>(at.buffer), at.parity);
    sm90::barrier_wait(b.barrier<kLayout.loaded>(at.buffer), at.parity);
  }

  /// Starts what a chunk's W reads of the state.
  WYVERN_DEVICE void predict(int buffer, const sm90::FragmentA<DTYPE, K>& packed) {
    sm90::start_product(values, packed, sm90::rows_of(b.tile_of<kLayout.w>(buffer)));
  }
  /// Starts what its queries read.
  WYVERN_DEVICE void ask(int buffer, const sm90::FragmentA<DTYPE, K>& packed) {
    sm90::start_product(output, packed, sm90::rows_of(b.tile_of<kLayout.qg>(buffer)));
  }

  /// From S^T W^T to V' = U - W S, 0 in the rows from `rows` on.
  WYVERN_DEVICE void find_values(int buffer, int rows) {
    const auto u = b.tile_of<kLayout.u>(buffer);
    const int lane = lane_index();
    const int col = column + warp_index() % 4 * 16 + lane / 8 % 2 * 8;
#pragma unroll
    for (int first = 0; first < kChunk; first += 16) {
      uint32 x[4] = {};
      if (b.has_values()) load_matrix_x4_transposed(x, u.at(first + lane / 16 * 8 + lane % 8, col));
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32 pair = x[i / 2];
        const DTYPE from{static_cast<uint16>(i % 2 == 0 ? pair & 0xFFFFU : pair >> 16U)};
        float& value = values.x[first / 2 + i];
        value = (STATE_UNIT ? to_float(from) * b.u_factor : to_float(from)) - value;
      }
    }
    if (rows == kChunk) return;
#pragma unroll
    for (int i = 0; i < Rows::kCount; ++i)
      if (Rows::col(i) >= rows) values.x[i] = 0.0f;
  }

  /// V', while the queries' products are under way; then they have ended.
  WYVERN_DEVICE void enter(int buffer, int rows, sm90::FragmentA<DTYPE, K>& packed) {
    sm90::end_products<1>(values);
    find_values(buffer, rows);
    sm90::end_products<0>(output, packed);
  }

  /// Where a checkpoint divides the chunk, the state takes up the rows in front of it, is kept, and
  /// decays to the chunk's end. Returns what it still has to take up.
  template <class Keep>
  WYVERN_DEVICE sm90::FragmentA<DTYPE, kChunk> take_front(
      int buffer, const sm90::FragmentA<DTYPE, kChunk>& update, const Keep& keep) {
    sm90::FragmentA<DTYPE, kChunk> behind = update;
    const int rows = sm90::uniform(b.checkpoint(buffer)[0]);
    if (rows == 0 || rows == kChunk) return behind;
    sm90::FragmentA<DTYPE, kChunk> front = update;
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool is_front = step * 16 < rows;
        front.x[step][i] = is_front ? update.x[step][i] : 0;
        behind.x[step][i] = is_front ? 0 : update.x[step][i];
      }
    sm90::start_product(state, front, sm90::columns_of(b.tile_of<kLayout.kg>(buffer)), true);
    sm90::end_products<0>(state, front);
    keep(b.checkpoint(buffer)[1]);
    sm90::scale_columns(state, array_at<kLayout.rest>(b.shared));
    return behind;
  }

  /// The state's update by a chunk's V', with the rest of its output behind it, which is under way
  /// then. keep(row) writes the state to a row of checkpoints.
  template <class Keep>
  WYVERN_DEVICE void leave(int buffer, const sm90::FragmentA<DTYPE, kChunk>& update,
                           const Keep& keep) {
    const auto keys = sm90::columns_of(b.tile_of<kLayout.kg>(buffer));
    const auto scores = sm90::rows_of(b.tile_of<kLayout.scores>(buffer));
    if constexpr (kDivided) {
      sm90::FragmentA<DTYPE, kChunk> behind = take_front(buffer, update, keep);
      sm90::start_product(state, behind, keys, true);
      sm90::start_product(output, update, scores, true);
      sm90::end_products<1>(state, behind);
    } else {
      sm90::start_product(state, update, keys, true);
      sm90::start_product(output, update, scores, true);
      sm90::end_products<1>(state);
    }
    if constexpr (kCheckpoints)
      if (b.checkpoint(buffer)[0] == kChunk) keep(b.checkpoint(buffer)[1]);
  }

  /// Writes a chunk's output: a warp its 16 columns, by way of shared memory of its own, a lane
  /// half a row of them at a time.
  WYVERN_DEVICE void store(float scale, int chunk, const TokenRows<DTYPE>& o) const {
    if (chunk < b.overlap) return;
    const int lane = lane_index();
    const int first = column + warp_index() % 4 * 16;
    DTYPE* const own = array_at<kLayout.output>(b.shared) + first * kChunk;
    const auto piece = [&](int row, int half) {
      return own + row * 16 + (half ^ (row / 4 % 2)) * 8;
    };
    sync_warp();
#pragma unroll
    for (int part = 0; part < kChunk / 16; ++part) {
      uint32 packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        packed[i] = pack_within_range<DTYPE>(output.x[part * 8 + 2 * i] * scale,
                                             output.x[part * 8 + 2 * i + 1] * scale);
      sm90::store_matrix_x4_transposed(piece(part * 16 + lane / 16 * 8 + lane % 8, lane / 8 % 2),
                                       packed);
    }
    sync_warp();
    const int rows = b.rows_of(chunk);
    DTYPE* const to =
        o.row(b.token + int64{chunk} * kChunk) + b.head * V + b.tile * BV + first + lane % 2 * 8;
#pragma unroll
    for (int part = 0; part < kChunk / 16; ++part) {
      const int row = part * 16 + lane / 2;
      if (row < rows) store_vector(to + row * o.stride, load<8>(piece(row, lane % 2)));
    }
  }
};

/// Through all chunks, of which there is at least one. While a chunk's first products run, the
/// output of the chunk before is written. At the end of a round nothing is under way: ptxas would
/// have products that cross it wait for each other.
template <class Keep>
WYVERN_DEVICE void walk_state(TransposedState& walk, float scale, const TokenRows<DTYPE>& o,
                              const Keep& keep) {
  const Block& b = walk.b;
  const int chunks = b.chunks();
  Position at;
  walk.await(at);
  {
    sm90::FragmentA<DTYPE, K> packed(walk.state);
    sm90::scale_columns(walk.state, b.decay(at.buffer));
    walk.predict(at.buffer, packed);
    walk.ask(at.buffer, packed);
    walk.enter(at.buffer, b.rows_of(0), packed);
  }
#pragma unroll 1
  for (int c = 0; c < chunks; ++c) {
    const int buffer = at.buffer;
    sm90::FragmentA<DTYPE, kChunk> update(walk.values);
    walk.leave(buffer, update, keep);
    at.advance();
    if (c + 1 == chunks) {
      sm90::end_products<0>(walk.output, update);
      walk.store(scale, c, o);
      break;
    }
    sm90::FragmentA<DTYPE, K> packed(walk.state);
    walk.await(at);
    walk.predict(at.buffer, packed);
    sm90::end_products<1>(walk.output, update);
    sm90::hand_over(b.barrier<kLayout.free>(buffer));
    walk.store(scale, c, o);
    walk.ask(at.buffer, packed);
    sm90::scale_columns(walk.state, b.decay(at.buffer));
    walk.enter(at.buffer, b.rows_of(c + 1), packed);
  }
}

/// A left operand in registers that is the sum of Parts 16-bit numbers.
template <int Depth, int Parts>
struct Summands {
  sm90::FragmentA<DTYPE, Depth> first;

  WYVERN_DEVICE explicit Summands(const sm90::Accumulator<Depth>& from) : first(from) {}
  template <int N, class Right>
  WYVERN_DEVICE void multiply(sm90::Accumulator<N>& d, const Right& right, bool accumulate) const {
    sm90::multiply(d, first, right, accumulate);
  }
  WYVERN_DEVICE void hold() { first.hold(); }
};
template <int Depth>
struct Summands<Depth, 2> : Summands<Depth, 1> {
  sm90::FragmentA<DTYPE, Depth> rest;

  WYVERN_DEVICE explicit Summands(const sm90::Accumulator<Depth>& from)
      : Summands<Depth, 1>(from), rest(from, this->first) {}
  template <int N, class Right>
  WYVERN_DEVICE void multiply(sm90::Accumulator<N>& d, const Right& right, bool accumulate) const {
    Summands<Depth, 1>::multiply(d, right, accumulate);
    sm90::multiply(d, rest, right, true);
  }
  WYVERN_DEVICE void hold() {
    Summands<Depth, 1>::hold();
    rest.hold();
  }
};

/// The same for the state alone, which enters products as a sum of Parts 16-bit numbers, as V'
/// does: where chunks take away most of what there is and add nothing, what is rounded off would
/// outlast the rest.
template <int Parts>
WYVERN_DEVICE void walk_state_alone(TransposedState& walk) {
  const Block& b = walk.b;
  const int chunks = b.chunks();
  Position at;
#pragma unroll 1
  for (int c = 0; c < chunks; ++c, at.advance()) {
    const int buffer = at.buffer;
    {
      Summands<K, Parts> packed(walk.state);
      walk.await(at);
      sm90::begin_products(walk.values);
      packed.multiply(walk.values, sm90::rows_of(b.tile_of<kLayout.w>(buffer)), false);
      sm90::wgmma_commit();
      sm90::end_products<0>(walk.values, packed);
    }
    sm90::scale_columns(walk.state, b.decay(buffer));
    walk.find_values(buffer, b.rows_of(c));
    Summands<kChunk, Parts> update(walk.values);
    sm90::begin_products(walk.state);
    update.multiply(walk.state, sm90::columns_of(b.tile_of<kLayout.kg>(buffer)), true);
    sm90::wgmma_commit();
    sm90::end_products<0>(walk.state, update);
    sm90::hand_over(b.barrier<kLayout.free>(buffer));
  }
}
