// All of a chunk of Kimi Delta Attention that needs no state, one block a chunk and value head:
// norms of rows, gates and their sums, decayed rows, scores, the inverse of I + A, W and U.
constexpr int kValues = V;
constexpr bool kAllSums = CHECKPOINT_OFFSETS;

#include "device/state_unit.hpp"
#include "forward/kda_prepare/block.cuh"

// ---- W and U ------------------------------------------------------------------------------------

/// 64 columns of (I + A)^-1 diag(beta) times a tile, by one warpgroup: the product of
/// the identity in fp32, and in `unit` that of the rest, for which the inverse's 16 bits are
/// enough. Overwrites the tile.
WYVERN_DEVICE void write_rows(const Block& b, const SquareTile& tile, DTYPE* to, int64 stride,
                              float unit) {
  using Sum = sm90::Accumulator<kChunk>;
  Sum x;
  const float* const beta = b.floats<kLayout.beta>();
  const float rate[2] = {beta[Sum::row(0)], beta[Sum::row(2)]};
  const int lane = lane_index();
  const int first = warp_index() % 4 * 16;
#pragma unroll
  for (int c = 0; c < kChunk; c += 16) {
    uint32 pairs[4];  // of rows, of those eight further on; the same of eight columns further on
    load_matrix_x4(pairs, tile.at(first + lane % 16, c + lane / 16 * 8));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32 pair = pairs[i / 2];
      const DTYPE element{static_cast<uint16>(i % 2 == 0 ? pair & 0xFFFFU : pair >> 16U)};
      x.x[c / 2 + i] = rate[i / 2 % 2] * to_float(element);
    }
  }
  sm90::start_product<kChunk>(x, sm90::rows_of(b.tile_of<kLayout.inverse>()),
                              sm90::columns_of(tile), true);
  sm90::end_products<0>(x);
  // By way of the tile, in rows of 128 bytes, when all have read it.
  sync_named(kFirstOfRows + warp_index() / 4, 128);
  const float factor = 1.0f / unit;
#pragma unroll
  for (int c = 0; c < kChunk; c += 16) {
    uint32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      pairs[i] = pack<DTYPE>(x.x[c / 2 + 2 * i] * factor, x.x[c / 2 + 2 * i + 1] * factor);
    sm90::store_matrix_x4(tile.at(first + lane % 16, c + lane / 16 * 8), pairs);
  }
  sync_warp();
#pragma unroll
  for (int i = 0; i < 16; i += 4) {
    const int row = first + i + lane / 8;
    if (row < b.chunk.rows)
      store_words(to + row * stride + lane % 8 * 8,
                  *reinterpret_cast<const uint32(*)[4]>(tile.at(row, lane % 8 * 8)));
  }
}

// ---- the block ----------------------------------------------------------------------------------

/// Scores of queries to memory.
struct WrittenScores {
  const Block& b;
  float* Aqk;

  WYVERN_DEVICE void put(const sm90::BlockSum& sum, int row, int col) const {
    const int lane = lane_index();
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const int r = row + lane / 4 + i / 2 * 8;
        if (r < b.chunk.rows)
          store_vector(Aqk + int64{r} * b.heads * BT + col + 8 * n + lane % 4 * 2,
                       Float2{{sum.x[n].x[i], sum.x[n].x[i + 1]}});
      }
  }
  WYVERN_DEVICE void put_diagonal(const Scores& sum, int first) const {
    const int row = first + Scores::row(0);
    float* const to = Aqk + int64{row} * b.heads * BT + first + Scores::col(0, 0);
    sum.for_elements([&](int r, int s, int i, int j, float x) {
      if (row + 8 * i < b.chunk.rows) to[int64{8 * i} * b.heads * BT + j] = s <= r ? x : 0.0f;
    });
  }
  WYVERN_DEVICE void clear_behind(int first) const {
    const int lane = lane_index();
    const int row = first + lane / 2;
    if (row >= b.chunk.rows) return;
    for (int col = first + kSlice; col < kChunk; col += 8)
      store_vector(Aqk + int64{row} * b.heads * BT + col + lane % 2 * 4, Vector<float, 4>{});
  }
};

WYVERN_KERNEL(kThreads, num_warps == 8 ? 2 : 1) {
  Block b;
  b.shared = sm90::swizzled_memory();
  b.head = block_index();
  b.heads = e.HV;
  if (block_row() >= e.NT) return;
  b.chunk = locate_chunk<VARLEN, kChunk>(block_row(), e, seq_offsets, chunk_index);
  if (b.chunk.rows <= 0) return;
  if (thread_index() == 0) {
    sm90::barrier_init(b.loaded(0), 1);
    sm90::barrier_init(b.loaded(1), 1);
    sm90::fence_barrier_init();
    load_rows(b, e.key_head(b.head), q_map, k_map, g_map);
    if constexpr (!ERASE_WRITE) {
      sm90::barrier_arrive_expect(b.loaded(1), kRowBytes * V);
      sm90::tensor_load(b.tile_of<kLayout.v>().data, v_map,
                        {0, static_cast<int>(b.chunk.token), 0, b.head}, b.loaded(1));
    }
  }
  if constexpr (ERASE_WRITE) load_erase(b, rows_in(b.chunk, erase, erase_stride, b.head * K));
  const GateForm form = read_factors(
      b, e, A_log, dt_bias, [rows = TokenRows<const BETA_DTYPE>{beta, beta_stride}, &b](int row) {
        return rate_of(rows, b.chunk.token + row, b.head);
      });
  if constexpr (ERASE_WRITE) copy_async_wait<0>();
  sync_block();
  sm90::barrier_wait(b.loaded(0), 0);
  if (b.chunk.rows < kChunk) {
    sm90::clear_rows<kThreads>(b.tile_of<kLayout.q>(), b.chunk.rows);
    sm90::clear_rows<kThreads>(b.tile_of<kLayout.k>(), b.chunk.rows);
    if constexpr (!ERASE_WRITE) {
      sm90::barrier_wait(b.loaded(1), 0);
      sm90::clear_rows<kThreads>(b.tile_of<kLayout.v>(), b.chunk.rows);
    }
    sync_block();
  }

  const int warp = block_warp();
  Slice slice = slice_of(b, warp);
  decay_rows(slice, form, [&]() -> DecayedRows {
    return {qg + b.first(K), kg + b.first(K), b.heads * K, Gk + b.first(K), nullptr, 1.0f};
  });
  sync_block();

  const auto solve = sm90::UnitLowerInverse::at<kLayout.solve>(b.shared, 1);
  make_scores(slice, KeyScores{b, solve.x}, WrittenScores{b, Aqk + b.first(BT)});
  const auto inverse = b.tile_of<kLayout.inverse>();
  invert(slice, solve, inverse, sm90::ScaledColumns<SquareTile>{inverse, b.floats<kLayout.beta>()});
  if constexpr (!ERASE_WRITE) sm90::barrier_wait(b.loaded(1), 0);
  if (ERASE_WRITE && slice.part > 0)
    make_written(
        b, slice.other_thread(), rows_in(b.chunk, v, v_stride, b.head * V),
        rows_in(b.chunk, write, write_stride, b.head * V),
        [tile = b.tile_of<kLayout.v>()](int row, int col, const uint32(&x)[4]) {
          *reinterpret_cast<Vector<uint32, 4>*>(tile.at(row, col)) = {{x[0], x[1], x[2], x[3]}};
        });
  sm90::fence_proxy_async();
  sync_block();
  constexpr int kPanelsOfW = K / kChunk;
#pragma unroll 1
  for (int panel = warp / 4; panel < kPanelsOfW + V / kChunk; panel += num_warps / 4) {
    const bool of_w = panel < kPanelsOfW;
    const int i = of_w ? panel : panel - kPanelsOfW;
    const SquareTile tile{b.shared + (of_w ? kLayout.erasing.offset : kLayout.v.offset) +
                          i * SquareTile::kBytes};
    write_rows(b, tile, (of_w ? w + b.first(K) : u + b.first(V)) + i * kChunk,
               int64{b.heads} * (of_w ? K : V), of_w ? 1.0f : kValueUnit<Spec>);
  }
}
