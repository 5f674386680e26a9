// What delta_forward keeps of chunks for a backward pass, besides their output: the states that
// enter them and V'. By a consumer warpgroup, which has 64 columns of V of both, transposed.
#pragma once

#include "forward/delta_forward/output.cuh"

/// Both are stored by TMA where they have been staged: a state in a tile of its own, V' in place of
/// v. A state's tile is free again when the next one comes: meanwhile its thread has waited in
/// wait_values(), and the warpgroup has met to store the output.
struct KeptOutput : PlainOutput {
  const TensorMap &states, &values;
  TokenRows<DTYPE> value_rows;
  int place, heads;  ///< of the block's first chunk and head in [NT, HV, ...]; value heads

  /// While products of the rounded state are under way.
  WYVERN_DEVICE void keep_state(const Block& block, int consumer, const StateFragment& state,
                                int chunk) const {
    const Block b = recalled(block);
    if (chunk < b.overlap) return;
    const KeptTile tile = b.kept(consumer);
#pragma unroll
    for (int j = 0; j < K / 16; ++j)
      sm90::store_matrix_x4_transposed(sm90::matrices_at(tile, 2 * j), state.x[j]);
    sm90::fence_proxy_async();
    sync_named(1 + consumer, 128);
    if (thread_index() % 128 != 0) return;
    sm90::tensor_store(states, {0, 0, kPanels * b.tile + consumer, place + chunk * heads},
                       tile.data);
    sm90::bulk_commit();
  }

  /// While products of Z are under way. Each lane writes what it has read of v.
  WYVERN_DEVICE void keep_values(const Block& block, int consumer, const ValueFragment& x,
                                 int buffer, int chunk) const {
    const Block b = recalled(block);
    if (chunk < b.overlap) return;
    const SquareTile tile = b.values(buffer, consumer);
    sm90::store_transposed(tile, x);
    sm90::fence_proxy_async();
    sync_named(1 + consumer, 128);
    sm90::store_rows(values, value_rows, tile, b.token + chunk * kRows, b.rows(chunk),
                     kPanels * b.tile + consumer, b.head, V);
  }

  /// Before the tile of v is loaded again.
  WYVERN_DEVICE void wait_values() const {
    if (thread_index() % 128 == 0) sm90::bulk_wait_read<0>();
  }
};

/// Of the block's first chunk and head in a tensor [NT, HV, ...].
template <class Kernel>
WYVERN_DEVICE int first_place(const Kernel& k) {
  const Extents& e = k.p.e;
  const Sequence sequence =
      locate_sequence<VARLEN, kRows>(k.work.sequence, e, k.p.seq_offsets, k.p.chunk_offsets);
  return static_cast<int>(sequence.slot + k.scheduler.passed(k.work) / kRows) *
             static_cast<int>(e.HV) +
         k.work.head;
}

/// Zeros in a consumer's columns of the states of slots that no chunk uses: the blocks at the ends
/// of all sequences clear them in turns.
WYVERN_DEVICE void clear_unused_states(const Block& b, int consumer, DTYPE* h,
                                       const int32* chunk_offsets, const Extents& e) {
  for (int64 slot = chunk_offsets[e.N] + b.sequence; slot < e.NT; slot += e.N) {
    DTYPE* const to = h + (slot * e.HV + b.head) * K * V + b.tile * BV + consumer * kColumns;
    for (int i = thread_index() % 128; i < K * kColumns; i += 128)
      to[int64{i / kColumns} * V + i % kColumns] = from_float<DTYPE>(0.0f);
  }
}
