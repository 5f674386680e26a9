// The state as S^T, 64 columns of V x K, in the registers of a consumer warpgroup, rounded to 16
// bits as the left operand of products.
#pragma once

#include "forward/kda_fwd_h_o/prepare.cuh"

using Transposed = sm90::Accumulator<K>;
using Columns = sm90::Accumulator<kChunk>;  ///< of V, one for each row of a chunk

/// The state, and a chunk's V' and its output.
struct TransposedState {
  const Block& b;
  int column;  ///< the warpgroup's first, of the block's
  Transposed state;
  Columns values;  ///< S^T W^T, then V'
  Columns output;

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

  WYVERN_DEVICE void wait_chunk(const Position& at) const {
    b.wait_scores(at);
    b.wait_tiles(at);
  }

  /// Starts S^T W^T.
  WYVERN_DEVICE void start(int buffer, const sm90::FragmentA<DTYPE, K>& packed) {
    sm90::start_product(values, packed, sm90::rows_of(b.tile_of<kLayout.w>(buffer)));
  }
  /// Starts the output from the state, S^T qg^T.
  WYVERN_DEVICE void start_output(int buffer, const sm90::FragmentA<DTYPE, K>& packed) {
    sm90::start_product(output, packed, sm90::rows_of(b.tile_of<kLayout.qg>(buffer)));
  }

  /// Computes V' = U - W S from S^T W^T, 0 in the rows from `rows` on.
  WYVERN_DEVICE void subtract_from_u(int buffer, int rows) {
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
    for (int i = 0; i < Columns::kCount; ++i)
      if (Columns::col(i) >= rows) values.x[i] = 0.0f;
  }

  /// Waits for S^T W^T and computes V' while the queries' products run; waits for these.
  WYVERN_DEVICE void compute_values(int buffer, int rows, sm90::FragmentA<DTYPE, K>& packed) {
    sm90::end_products<1>(values);
    subtract_from_u(buffer, rows);
    sm90::end_products<0>(output, packed);
  }

  /// Where a checkpoint divides the chunk: updates the state by the rows in front of it, writes the
  /// checkpoint and decays the state to the chunk's end. Returns the rest of the update.
  template <class WriteCheckpoint>
  WYVERN_DEVICE sm90::FragmentA<DTYPE, kChunk> update_front(
      int buffer, const sm90::FragmentA<DTYPE, kChunk>& update,
      const WriteCheckpoint& write_checkpoint) {
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
    write_checkpoint(b.checkpoint(buffer)[1]);
    sm90::scale_columns(state, array_at<kLayout.rest>(b.shared));
    return behind;
  }

  /// Updates the state by a chunk's V', and starts the rest of its output.
  template <class WriteCheckpoint>
  WYVERN_DEVICE void update_and_output(int buffer, const sm90::FragmentA<DTYPE, kChunk>& update,
                                       const WriteCheckpoint& write_checkpoint) {
    const auto keys = sm90::columns_of(b.tile_of<kLayout.kg>(buffer));
    const auto scores = sm90::rows_of(b.tile_of<kLayout.scores>(buffer));
    if constexpr (kDivided) {
      sm90::FragmentA<DTYPE, kChunk> behind = update_front(buffer, update, write_checkpoint);
      sm90::start_product(state, behind, keys, true);
      sm90::start_product(output, update, scores, true);
      sm90::end_products<1>(state, behind);
    } else {
      sm90::start_product(state, update, keys, true);
      sm90::start_product(output, update, scores, true);
      sm90::end_products<1>(state);
    }
    if constexpr (kCheckpoints)
      if (b.checkpoint(buffer)[0] == kChunk) write_checkpoint(b.checkpoint(buffer)[1]);
  }

  /// Stores a chunk's output: a warp its 16 columns, by way of its own shared memory, a lane half a
  /// row of them at a time.
  WYVERN_DEVICE void store_output(float scale, int chunk, const TokenRows<DTYPE>& o) const {
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

/// The consumer's mainloop. While a chunk's first products run, the output of the chunk before is
/// written. At the loop's back edge no product is in flight: ptxas would serialize all of them.
/// write_checkpoint(row) writes the state to a row of `checkpoints`.
template <class WriteCheckpoint>
WYVERN_DEVICE void mainloop(TransposedState& s, float scale, const TokenRows<DTYPE>& o,
                            const WriteCheckpoint& write_checkpoint) {
  const Block& b = s.b;
  const int chunks = b.chunks;
  Position at;
  s.wait_chunk(at);
  {
    sm90::FragmentA<DTYPE, K> packed(s.state);
    sm90::scale_columns(s.state, b.decay(at.buffer));
    s.start(at.buffer, packed);
    s.start_output(at.buffer, packed);
    s.compute_values(at.buffer, b.rows_of(0), packed);
  }
#pragma unroll 1
  for (int c = 0; c < chunks; ++c) {
    const int buffer = at.buffer;
    sm90::FragmentA<DTYPE, kChunk> update(s.values);
    s.update_and_output(buffer, update, write_checkpoint);
    at.advance();
    if (c + 1 == chunks) {
      sm90::end_products<0>(s.output, update);
      s.store_output(scale, c, o);
      break;
    }
    sm90::FragmentA<DTYPE, K> packed(s.state);
    s.wait_chunk(at);
    s.start(at.buffer, packed);
    sm90::end_products<1>(s.output, update);
    sm90::hand_over(b.empty(buffer));
    s.store_output(scale, c, o);
    s.start_output(at.buffer, packed);
    sm90::scale_columns(s.state, b.decay(at.buffer));
    s.compute_values(at.buffer, b.rows_of(c + 1), packed);
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

/// The mainloop of the state alone, which enters products as a sum of Parts 16-bit numbers, as V'
/// does: where chunks only decay it, rounding errors would outlast the rest.
template <int Parts>
WYVERN_DEVICE void mainloop(TransposedState& s) {
  const Block& b = s.b;
  const int chunks = b.chunks;
  Position at;
#pragma unroll 1
  for (int c = 0; c < chunks; ++c, at.advance()) {
    const int buffer = at.buffer;
    {
      Summands<K, Parts> packed(s.state);
      s.wait_chunk(at);
      sm90::begin_products(s.values);
      packed.multiply(s.values, sm90::rows_of(b.tile_of<kLayout.w>(buffer)), false);
      sm90::wgmma_commit();
      sm90::end_products<0>(s.values, packed);
    }
    sm90::scale_columns(s.state, b.decay(buffer));
    s.subtract_from_u(buffer, b.rows_of(c));
    Summands<kChunk, Parts> update(s.values);
    sm90::begin_products(s.state);
    update.multiply(s.state, sm90::columns_of(b.tile_of<kLayout.kg>(buffer)), true);
    sm90::wgmma_commit();
    sm90::end_products<0>(s.state, update);
    sm90::hand_over(b.empty(buffer));
  }
}
