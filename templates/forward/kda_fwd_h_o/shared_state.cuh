// The state of kda_fwd_h_o.hopper and its kin as S, K x 64 columns of V, in the registers of a
// warpgroup, and rounded in shared memory, from where products take it. Tiles of W, qg and kg come
// through a ring, each in its turn.
//
// What all warps of the warpgroup read by products, a warp may write again only after a barrier
// that they have come to with these products done.
#pragma once

#include "device/cuda/sm90/register_tile.cuh"
#include "forward/kda_fwd_h_o/block.cuh"

using Square = sm90::Accumulator<64>;
using SquareTile = sm90::SwizzledTile<DTYPE, 64, 64>;

/// The state of 64 columns of V as it walks through the chunks.
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
  /// Writes the state, which is in b's unit, to one of V columns.
  template <bool VFirst, class Element>
  WYVERN_DEVICE void write(Element* to) const {
    constexpr int kRowStep = VFirst ? 1 : V, kColumnStep = VFirst ? K : 1;
#pragma unroll
    for (int p = 0; p < kParts; ++p)
      sm90::store_accumulator<kRowStep, kColumnStep>(
          state[p], b.unit, to + 64 * p * kRowStep + (b.tile * BV + column) * kColumnStep);
  }

  /// The rounded state; as the second part what rounding left of it.
  WYVERN_DEVICE Tile rounded(int part = 0) const {
    return {b.shared + kLayout.state.offset + part * Tile::kBytes};
  }
  WYVERN_DEVICE SquareTile spare() const { return {b.shared + kLayout.spare.offset}; }
  /// U of a chunk, then V'.
  WYVERN_DEVICE SquareTile values(int buffer) const { return {b.tile_of<kLayout.u>(buffer).data}; }

  WYVERN_DEVICE void sync() const { sm90::sync_named(1, 128); }
  /// What this warpgroup wrote to shared memory is there for its products.
  WYVERN_DEVICE void publish() const {
    sm90::fence_proxy_async();
    sync();
  }

  /// The next tile of the ring, once it is there: its buffer.
  WYVERN_DEVICE int await(RingPosition& next) const {
    const int buffer = next.buffer;
    sm90::barrier_wait(b.barrier<kLayout.loaded>(buffer), next.parity);
    next.advance();
    return buffer;
  }
  WYVERN_DEVICE void give_back(int buffer) const {
    sm90::barrier_arrive(b.barrier<kLayout.emptied>(buffer));
  }

  /// Writes 64 rows of the state, as a sum of Parts 16-bit numbers, where no product reads it any
  /// more.
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

  /// Starts what the rows of a tile read of the state.
  template <int Parts>
  WYVERN_DEVICE void start_reading(Square& sum, int buffer) const {
    sm90::begin_products(sum);
#pragma unroll
    for (int part = 0; part < Parts; ++part)
      sm90::multiply<K>(sum, sm90::rows_of(b.ring(buffer)), sm90::columns_of(rounded(part)),
                        part > 0);
    sm90::wgmma_commit();
  }

  /// From W S to V' = U - W S in U's place, 0 in the rows from `rows` on; with two Parts what
  /// rounding left of it beside. Each warp its own rows.
  template <int Parts>
  WYVERN_DEVICE void find_values(int buffer, int rows) {
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

  /// Of a chunk that is not full, rows of keys past its end become 0: what follows in the tensor is
  /// the next sequence's, and whatever it holds must not come in.
  WYVERN_DEVICE void clear_keys(int buffer, int rows) const {
    const KeyTile keys = b.ring(buffer);
    for (int i = thread_index() % 128; i < (kChunk - rows) * (K / 8); i += 128)
      *reinterpret_cast<Vector<uint32, 4>*>(keys.at(rows + i / (K / 8), i % (K / 8) * 8)) = {};
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
  /// Waits for it, behind which Younger groups of products are under way, and rounds these rows.
  template <int Parts, int Younger>
  WYVERN_DEVICE void end_update(int p) {
    sm90::end_products<Younger>(state[p]);
    round<Parts>(p);
  }

  /// Rounds a chunk's output into shared memory, each warp rows of its own.
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
  /// Writes these rows of a chunk.
  WYVERN_DEVICE void store(int chunk, const TokenRows<DTYPE>& o) const {
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

/// Through all chunks, of which there is at least one. keep(row) writes the state to a row of
/// checkpoints. Parts of the state and the output are rounded while products of others run. At the
/// end of a round nothing is under way: ptxas would have products that cross it wait for each
/// other.
template <class Keep>
WYVERN_DEVICE void walk_state(SharedState& walk, float scale, const TokenRows<DTYPE>& o,
                              const Keep& keep) {
  const Block& b = walk.b;
  const int chunks = b.chunks();
  Position at;
  RingPosition next;
  walk.round_state<1>();
#pragma unroll 1
  for (int c = 0; c < chunks; ++c, at.advance()) {
    const int rows = b.rows_of(c);
    const int of_w = walk.await(next);
    walk.start_reading<1>(walk.x, of_w);
    if (c > 0) walk.store(c - 1, o);
    const int of_queries = walk.await(next);
    walk.start_reading<1>(walk.output, of_queries);
    sm90::end_products<1>(walk.x);
    walk.give_back(of_w);
    walk.find_values<1>(at.buffer, rows);
    const int of_keys = walk.await(next);
    if (rows < kChunk) walk.clear_keys(of_keys, rows);
    walk.publish();
    sm90::barrier_wait(b.barrier<kLayout.ready>(at.buffer), at.parity);
    walk.decay(b.decay(at.buffer));
    walk.start_update<1>(0, of_keys, at.buffer);
    walk.start_update<1>(1, of_keys, at.buffer);
    sm90::end_products<2>(walk.output);
    walk.give_back(of_queries);
    sm90::start_product<kChunk>(walk.output, sm90::rows_of(b.tile_of<kLayout.scores>(at.buffer)),
                                sm90::columns_of(walk.values(at.buffer)), true);
    walk.start_update<1>(2, of_keys, at.buffer);
    walk.start_update<1>(3, of_keys, at.buffer);
    walk.sync();  // no warp's products read the state any more
    walk.end_update<1, 4>(0);
    walk.end_update<1, 3>(1);
    sm90::end_products<2>(walk.output);
    walk.round_output(scale);
    walk.end_update<1, 1>(2);
    walk.end_update<1, 0>(3);
    walk.give_back(of_keys);
    if constexpr (kCheckpoints)
      if (b.checkpoint(at.buffer)[0] == kChunk) keep(b.checkpoint(at.buffer)[1]);
    walk.publish();
    sm90::barrier_arrive(b.barrier<kLayout.free>(at.buffer));
  }
  walk.store(chunks - 1, o);
}

/// The same for the state alone, which enters products as a sum of Parts 16-bit numbers, as V'
/// does: where chunks take away most of what there is and add nothing, what is rounded off would
/// outlast the rest.
template <int Parts>
WYVERN_DEVICE void walk_state_alone(SharedState& walk) {
  const Block& b = walk.b;
  const int chunks = b.chunks();
  Position at;
  RingPosition next;
  walk.round_state<Parts>();
#pragma unroll 1
  for (int c = 0; c < chunks; ++c, at.advance()) {
    const int rows = b.rows_of(c);
    const int of_w = walk.await(next);
    walk.start_reading<Parts>(walk.x, of_w);
    sm90::end_products<0>(walk.x);
    walk.give_back(of_w);
    walk.find_values<Parts>(at.buffer, rows);
    sm90::barrier_wait(b.barrier<kLayout.ready>(at.buffer), at.parity);
    walk.decay(b.decay(at.buffer));
    const int of_keys = walk.await(next);
    if (rows < kChunk) walk.clear_keys(of_keys, rows);
    walk.publish();
#pragma unroll
    for (int p = 0; p < SharedState::kParts; ++p) walk.start_update<Parts>(p, of_keys, at.buffer);
    walk.end_update<Parts, 3>(0);
    walk.end_update<Parts, 2>(1);
    walk.end_update<Parts, 1>(2);
    walk.end_update<Parts, 0>(3);
    walk.give_back(of_keys);
    walk.publish();
    sm90::barrier_arrive(b.barrier<kLayout.free>(at.buffer));
  }
}
