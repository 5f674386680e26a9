// A chunk of Kimi Delta Attention as both scans of the backward pass and its gradients read it, one
// block a chunk and value head: rows decayed to the chunk's ends, the inverse of I + A and the
// scores P with beta on their columns, norms of rows. Rows behind a sequence's end are 0.
constexpr int kValues = 0;
constexpr bool kAllSums = false;

#include "forward/kda_prepare/block.cuh"

/// Scores of queries, times the scale, to a tile.
struct TiledScores {
  SquareTile tile;
  const float* beta;
  float scale;

  WYVERN_DEVICE void put(sm90::BlockSum sum, int row, int col) const {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum.x[n].x[i] *= scale;
    sm90::store_block(sum, sm90::ScaledColumns<SquareTile>{tile, beta}, row, col);
  }
  WYVERN_DEVICE void put_diagonal(const Scores& sum, int first) const {
    const int row = first + Scores::row(0);
    const int col = first + Scores::col(0, 0);
    // Eight columns more are the next piece of 16 bytes, and eight rows more have the same swizzle.
    DTYPE* const to[2] = {tile.at(row, col), tile.at(row, col + 8)};
    sum.for_elements([&](int r, int s, int i, int j, float x) {
      to[j / 8][i * kEightRows + j % 8] =
          from_float<DTYPE>(s <= r ? scale * beta[first + s] * x : 0.0f);
    });
  }
  WYVERN_DEVICE void clear_behind(int first) const {
    const int lane = lane_index();
    for (int col = first + kSlice; col < kChunk; col += kSlice)
      *reinterpret_cast<Vector<uint32, 4>*>(tile.at(first + lane / 2, col + lane % 2 * 8)) = {};
  }
};

WYVERN_KERNEL(kThreads, num_warps == 8 ? 2 : 1) {
  Block b;
  b.shared = sm90::swizzled_memory();
  b.head = block_index();
  b.heads = e.HV;
  const int slot = block_row();
  if (slot >= e.NT) return;
  b.chunk = locate_chunk<VARLEN, kChunk>(slot, e, seq_offsets, chunk_index);
  if (b.chunk.rows <= 0) return;
  const int thread = thread_index();
  if (thread == 0) {
    sm90::barrier_init(b.loaded(0), 1);
    sm90::fence_barrier_init();
    load_rows(b, e.key_head(b.head), q_map, k_map, g_map);
  }
  if constexpr (ERASE_WRITE) load_erase(b, rows_in(b.chunk, erase, erase_stride, b.head * K));
  const GateForm form = read_factors(
      b, e, A_log, dt_bias, [rows = TokenRows<const BETA_DTYPE>{beta, beta_stride}, &b](int row) {
        return beta_divisor(rate_of(rows, b.chunk.token + row, b.head));
      });
  if constexpr (ERASE_WRITE) copy_async_wait<0>();
  sync_block();
  sm90::barrier_wait(b.loaded(0), 0);
  if (b.chunk.rows < kChunk) {
    sm90::clear_rows<kThreads>(b.tile_of<kLayout.q>(), b.chunk.rows);
    sm90::clear_rows<kThreads>(b.tile_of<kLayout.k>(), b.chunk.rows);
    sync_block();
  }

  Slice slice = slice_of(b, block_warp());
  const int64 place = int64{slot} * e.HV + b.head;
  decay_rows(slice, form, [&]() -> DecayedRows {
    // By warps of the slices in the middle, which have the least to do.
    const int i = thread - (kThreads - K) / 2;
    const float* const totals = b.floats<kLayout.totals>();
    if (i >= 0 && i < K)
      decay[place * K + i] =
          exp2_fast(totals[i] + totals[K + i] + totals[2 * K + i] + totals[3 * K + i]);
    DTYPE* const rows = decayed_rows + place * 3 * kChunk * K;
    return {rows + 2 * kChunk * K, rows + kChunk * K, K, nullptr, rows, e.scale};
  });
  sync_block();

  const auto solve = sm90::UnitLowerInverse::at<kLayout.solve>(b.shared, 1);
  const auto tile = b.tile_of<kLayout.scores>();
  make_scores(slice, KeyScores{b, solve.x}, TiledScores{tile, b.floats<kLayout.beta>(), e.scale});
  const auto inverted = b.tile_of<kLayout.inverse>();
  invert(slice, solve, inverted,
         sm90::ScaledColumns<SquareTile>{inverted, b.floats<kLayout.rest>()});
  if (QK_L2NORM && slice.part > 0) {
    const int i = slice.other_thread();
    const int row = i % kChunk;
    if (i < 2 * kChunk)
      row_scales[place * 2 * kChunk + i] = row < b.chunk.rows ? slice.norm(i / kChunk, row) : 0.0f;
  }
  if constexpr (ERASE_WRITE) {
    if (slice.part > 0)
      make_written(b, slice.other_thread(), rows_in(b.chunk, v, v_stride, b.head * V),
                   rows_in(b.chunk, write, write_stride, b.head * V),
                   [&, to = written + b.first(V)](int row, int col, const uint32(&x)[4]) {
                     if (row < b.chunk.rows) store_words(to + int64{row} * b.heads * V + col, x);
                   });
  }
  sm90::fence_proxy_async();
  sync_block();
  if (thread > 0) return;
  const int row = static_cast<int>(place) * 2 * kChunk;
  sm90::tensor_store(squares_map, {0, row, 0, 0}, inverted.data);
  sm90::tensor_store(squares_map, {0, row + kChunk, 0, 0}, tile.data);
  sm90::bulk_commit();
  sm90::bulk_wait_read<0>();
}
