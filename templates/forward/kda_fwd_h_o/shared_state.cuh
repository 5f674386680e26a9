// The state as S, K x 64 columns of V, in the registers of a consumer warpgroup, and rounded in
// shared memory, where products read it. Tiles of W, qg and kg come one by one through a ring.
//
// A warp may write what the warpgroup's products read only after a barrier behind these products.
#pragma once

#include "device/cuda/sm90/register_tile.cuh"
#include "forward/kda_fwd_h_o/prepare.cuh"

using Square = sm90::Accumulator<64>;
using SquareTile = sm90::SwizzledTile<DTYPE, 64, 64>;

/// The state, and a chunk's V' and its output.
struct SharedState {
  static constexpr int kParts = 4;  ///< of 64 rows
  static_assert(!kLayout.shares_state || K == 64 * kParts);
  using Tile = sm90::SwizzledTile<DTYPE, K, kColumns>;

  const Block& b;
  int column;  ///< the warpgroup's first, of the block's
  Square state[kParts];
  Square x;  ///< W S, then V'
  Square output;

  /// Calls act(offset, x) for each element and its place in a state of Width columns.
  template <int Width, bool VFirst, class Act>
  WYVERN_DEVICE void visit(Act&& act) {
#pragma unroll
    for (int p = 0; p < kParts; ++p)
      sm90::visit_rows<K, Width, VFirst>(state[p], 64 * p, b.tile * BV + column, act);
  }
  /// Stores the state times a factor to one of V columns.
  template <bool VFirst, class Element>
  WYVERN_DEVICE void store(float factor, Element* to) const {
    constexpr int kRowStep = VFirst ? 1 : V, kColumnStep = VFirst ? K : 1;
#pragma unroll
    for (int p = 0; p < kParts; ++p)
      sm90::store_accumulator<kRowStep, kColumnStep>(
          state[p], factor, to + 64 * p * kRowStep + (b.tile * BV + column) * kColumnStep);
  }

  /// The rounded state; as the second part its rounding error.
  WYVERN_DEVICE Tile rounded(int part = 0) const {
    return {b.shared + kLayout.state.offset + part * Tile::kBytes};
  }
  WYVERN_DEVICE SquareTile spare() const { return {b.shared + kLayout.spare.offset}; }
  /// U of a chunk, then V'.
  WYVERN_DEVICE SquareTile values(int buffer) const { return {b.tile_of<kLayout.u>(buffer).data}; }

  WYVERN_DEVICE void sync() const { sync_named(1, 128); }
  /// Makes this warpgroup's writes to shared memory visible to its products.
  WYVERN_DEVICE void publish() const {
    sm90::fence_proxy_async();
    sync();
  }

  /// Waits for the next tile of the ring; returns its buffer.
  WYVERN_DEVICE int wait_tile(RingPosition& next) const {
    const int buffer = next.buffer;
    b.wait_tiles(next);
    next.advance();
    return buffer;
  }
  WYVERN_DEVICE void release(int buffer) const { sm90::barrier_arrive(b.ring_empty(buffer)); }

  /// Writes 64 rows of the state as a sum of Parts 16-bit numbers, which no product may be reading.
  template <int Parts>
  WYVERN_DEVICE void round(int p) const {
    const sm90::FragmentA<DTYPE, 64> first(state[p]);
    sm90::store_fragment(SquareTile{rounded().data + p * SquareTile::kBytes}, first);
    if constexpr (Parts == 2)
      sm90::store_fragment(SquareTile{rounded(1).data + p * SquareTile::kBytes},
                           sm90::FragmentA<DTYPE, 64>(state[p], first));
  }
  template <int Parts>
  WYVERN_DEVICE void round_state() const {
#pragma unroll
    for (int p = 0; p < kParts; ++p) round<Parts>(p);
    publish();
  }

  /// Starts the product of a tile's rows and the state.
  template <int Parts>
  WYVERN_DEVICE void start(Square& sum, int buffer) const {
    sm90::begin_products(sum);
#pragma unroll
    for (int part = 0; part < Parts; ++part)
      sm90::multiply<K>(sum, sm90::rows_of(b.ring(buffer)), sm90::columns_of(rounded(part)),
                        part > 0);
    sm90::wgmma_commit();
  }

  /// Computes V' = U - W S from W S, in U's place, 0 in the rows from `rows` on; with two Parts
  /// also its rounding error. Each warp its own rows.
  template <int Parts>
  WYVERN_DEVICE void compute_values(int buffer, int rows) {
    const SquareTile tile = values(buffer);
    sm90::FragmentA<DTYPE, 64> u = {};
    if (b.has_values()) {
#pragma unroll
      for (int j = 0; j < 4; ++j) load_matrix_x4(u.x[j], sm90::fragment_at(tile, 16 * j));
    }
    const Square from = sm90::unpack(u);
#pragma unroll
    for (int i = 0; i < Square::kCount; ++i)
      x.x[i] =
          Square::row(i) < rows ? (STATE_UNIT ? from.x[i] * b.u_factor : from.x[i]) - x.x[i] : 0.0f;
    const sm90::FragmentA<DTYPE, 64> first(x);
    sm90::store_fragment(tile, first);
    if constexpr (Parts == 2) sm90::store_fragment(spare(), sm90::FragmentA<DTYPE, 64>(x, first));
  }

  WYVERN_DEVICE void decay(const float* factors) {
#pragma unroll
    for (int p = 0; p < kParts; ++p)
      sm90::scale_rows(state[p], sm90::RowPair::load(factors + 64 * p));
  }

  /// Starts the update of 64 rows of the state by a chunk's V'.
  template <int Parts>
  WYVERN_DEVICE void start_update(int p, int of_keys, int buffer) {
    sm90::begin_products(state[p]);
#pragma unroll
    for (int part = 0; part < Parts; ++part)
      sm90::multiply<kChunk>(state[p], sm90::columns_of(b.ring(of_keys), 64 * p),
                             sm90::columns_of(part == 0 ? values(buffer) : spare()), true);
    sm90::wgmma_commit();
  }
  /// Waits for it, with Younger groups of products in flight, and rounds these rows.
  template <int Parts, int Younger>
  WYVERN_DEVICE void end_update(int p) {
    sm90::end_products<Younger>(state[p]);
    round<Parts>(p);
  }

  /// Rounds a chunk's output into shared memory, each warp its own rows.
  WYVERN_DEVICE void round_output(float scale) const {
    sync_warp();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32 packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        packed[i] = pack_within_range<DTYPE>(output.x[8 * j + 2 * i] * scale,
                                             output.x[8 * j + 2 * i + 1] * scale);
      sm90::store_matrix_x4(sm90::fragment_at(spare(), 16 * j), packed);
    }
    sync_warp();
  }
  /// Stores these rows of a chunk's output.
  WYVERN_DEVICE void store_output(int chunk, const TokenRows<DTYPE>& o) const {
    if (chunk < b.overlap) return;
    const int lane = lane_index();
    const int rows = b.rows_of(chunk);
    const int first = warp_index() % 4 * 16 + lane / 8;
    DTYPE* const to =
        o.row(b.token + int64{chunk} * kChunk) + b.head * V + b.tile * BV + column + lane % 8 * 8;
#pragma unroll
    for (int i = 0; i < 16; i += 4)
      if (first + i < rows)
        store_vector(to + (first + i) * o.stride, load<8>(spare().at(first + i, lane % 8 * 8)));
  }
};

/// The consumer's mainloop. Parts of the state and the output are rounded while products of others
/// run. At the loop's back edge no product is in flight: ptxas would serialize all of them.
/// write_checkpoint(row) writes the state to a row of `checkpoints`.
template <class WriteCheckpoint>
WYVERN_DEVICE void mainloop(SharedState& s, float scale, const TokenRows<DTYPE>& o,
                            const WriteCheckpoint& write_checkpoint) {
  const Block& b = s.b;
  const int chunks = b.chunks;
  Position at;
  RingPosition next;
  s.round_state<1>();
#pragma unroll 1
  for (int c = 0; c < chunks; ++c, at.advance()) {
    const int rows = b.rows_of(c);
    const int of_w = s.wait_tile(next);
    s.start<1>(s.x, of_w);
    if (c > 0) s.store_output(c - 1, o);
    const int of_queries = s.wait_tile(next);
    s.start<1>(s.output, of_queries);
    sm90::end_products<1>(s.x);
    s.release(of_w);
    s.compute_values<1>(at.buffer, rows);
    const int of_keys = s.wait_tile(next);
    if (rows < kChunk) sm90::clear_rows<128>(b.ring(of_keys), rows);
    s.publish();
    b.wait_scores(at);
    s.decay(b.decay(at.buffer));
    s.start_update<1>(0, of_keys, at.buffer);
    s.start_update<1>(1, of_keys, at.buffer);
    sm90::end_products<2>(s.output);
    s.release(of_queries);
    sm90::start_product<kChunk>(s.output, sm90::rows_of(b.tile_of<kLayout.scores>(at.buffer)),
                                sm90::columns_of(s.values(at.buffer)), true);
    s.start_update<1>(2, of_keys, at.buffer);
    s.start_update<1>(3, of_keys, at.buffer);
    s.sync();  // all warps' products have read the state
    s.end_update<1, 4>(0);
    s.end_update<1, 3>(1);
    sm90::end_products<2>(s.output);
    s.round_output(scale);
    s.end_update<1, 1>(2);
    s.end_update<1, 0>(3);
    s.release(of_keys);
    if constexpr (kCheckpoints)
      if (b.checkpoint(at.buffer)[0] == kChunk) write_checkpoint(b.checkpoint(at.buffer)[1]);
    s.publish();
    sm90::barrier_arrive(b.empty(at.buffer));
  }
  s.store_output(chunks - 1, o);
}

/// The mainloop of the state alone, which enters products as a sum of Parts 16-bit numbers, as V'
/// does: where chunks only decay it, rounding errors would outlast the rest.
template <int Parts>
WYVERN_DEVICE void mainloop(SharedState& s) {
  const Block& b = s.b;
  const int chunks = b.chunks;
  Position at;
  RingPosition next;
  s.round_state<Parts>();
#pragma unroll 1
  for (int c = 0; c < chunks; ++c, at.advance()) {
    const int rows = b.rows_of(c);
    const int of_w = s.wait_tile(next);
    s.start<Parts>(s.x, of_w);
    sm90::end_products<0>(s.x);
    s.release(of_w);
    s.compute_values<Parts>(at.buffer, rows);
    b.wait_scores(at);
    s.decay(b.decay(at.buffer));
    const int of_keys = s.wait_tile(next);
    if (rows < kChunk) sm90::clear_rows<128>(b.ring(of_keys), rows);
    s.publish();
#pragma unroll
    for (int p = 0; p < SharedState::kParts; ++p) s.start_update<Parts>(p, of_keys, at.buffer);
    s.end_update<Parts, 3>(0);
    s.end_update<Parts, 2>(1);
    s.end_update<Parts, 1>(2);
    s.end_update<Parts, 0>(3);
    s.release(of_keys);
    s.publish();
    sm90::barrier_arrive(b.empty(at.buffer));
  }
}
