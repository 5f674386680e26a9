// How kernels with one gate a head prepare their chunks: factor warps read the gates and rates of
// rows, prep warpgroups compute the decayed scores of queries and the inverse of I + A.
#pragma once

#include "device/cuda/sm90/barrier.cuh"
#include "device/cuda/sm90/decay.cuh"
#include "device/cuda/sm90/scalar_rows.cuh"

namespace wyvern::cuda::sm90 {

/// The phase of a step in a ring of Stages, where it has stage step % Stages.
template <int Stages>
WYVERN_DEVICE uint32 parity_of(int step) {
  return static_cast<uint32>(step / Stages % 2);
}

/// By a block B of a kernel with the Spec S. B has
///   chunks, head, rows(step), first_row(step)           its work
///   keys(stage), queries(stage)                         tiles of a step's pipeline stage
///   inverse(step), scores(step)                         tiles of prepared chunks
///   factors<Place>(stage), barrier<Place>(i)
///   scale_key(stage, row, scale), scale_query(...)      multiply a norm scale into factors
///   kLayout                                             places of factors and barriers
///   kQueries                                            whether there are scores
///   kScaledRows, kScaledColumns                         whether rows, columns of A have factors
/// Factors: G is the running sum of gates in base 2, row and query are those of rows of A and of
/// the scores, key those of their columns, left the same decayed up to rows 15, 31 and 47.
template <class S, class B>
struct ScalarPrepare {
  static constexpr auto kAt = B::kLayout;
  static constexpr bool kQueries = B::kQueries;
  static constexpr int kSlots = kAt.slots, kScoreSlots = kAt.score_slots;
  /// Factor warps of warpgroup 0: the last two, or the one that loads tiles.
  static constexpr int kFactorWarps = kAt.pipelined ? 1 : 2;
  static constexpr int kFirstFactorWarp = kAt.pipelined ? 0 : 2;
  static constexpr int kLaneRows = 2 / kFactorWarps;
  /// Scores have one buffer and inverses two: scores are stored last, when the buffer is empty.
  static constexpr bool kScoresLast = kScoreSlots < kSlots;

  using KeyTile = SwizzledTile<Element<S::DTYPE>, kChunkRows, S::K>;
  using SquareTile = SwizzledTile<Element<S::DTYPE>, kChunkRows, kChunkRows>;
  using Square = Accumulator<kChunkRows>;
  using Decays = sm90::Decays<S::SCALAR_GATE, B::kScaledColumns>;
  using Position = typename Pipeline<S::num_stages>::Position;

  const B& b;

  /// Clears all inverses and scores, which stay 0 above the diagonal, by `threads` threads.
  WYVERN_DEVICE void clear_squares(int threads) const {
    auto* const words = reinterpret_cast<uint32*>(b.shared + kAt.inverse.offset);
    for (int i = thread_index(); i < (kSlots + kScoreSlots) * SquareTile::kBytes / 4; i += threads)
      words[i] = 0;
  }

  // ---- factor warps -----------------------------------------------------------------------------

  WYVERN_DEVICE static bool computes_factors(int warp) {
    return warp >= kFirstFactorWarp && warp < kFirstFactorWarp + kFactorWarps;
  }
  /// The half of a chunk, 0 or 1, that row `i` of this lane is in.
  WYVERN_DEVICE static int half_of_row(int i) {
    return kFactorWarps == 1 ? i : static_cast<int>(warp_index()) - kFirstFactorWarp;
  }

  /// A lane's raw g and beta: g of a row in both halves of a chunk, for the running sum, and beta
  /// of its own rows. Loaded one chunk ahead of their use.
  struct RawRows {
    Element<S::G_DTYPE> g[2];
    Element<S::BETA_DTYPE> beta[kLaneRows];
  };

  WYVERN_DEVICE RawRows read_rows(int step, const ScalarRows<S>& from) const {
    RawRows raw = {};
    const int rows = b.rows(step);
    const auto* const gates = from.g.row(b.first_row(step)) + b.head;
    const auto* const rates = from.beta.row(b.first_row(step)) + b.head;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 32 * i + lane_index();
      if (S::SCALAR_GATE && row < rows) raw.g[i] = gates[row * from.g.stride];
    }
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const int row = 32 * half_of_row(i) + lane_index();
      if (row < rows) raw.beta[i] = rates[row * from.beta.stride];
    }
    return raw;
  }

  /// Running sums of a step's `rows` gates.
  WYVERN_DEVICE static DecaySums sums_of(const RawRows& raw, int rows, const ScalarGate<S>& gate) {
    if constexpr (!S::SCALAR_GATE) return {};
    float log_decay[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (32 * i + lane_index() < rows) log_decay[i] = gate(raw.g[i]);
    return DecaySums(log_decay);
  }

  /// Writes a row's factors as a column of A, decayed up to each later row that is an anchor.
  WYVERN_DEVICE void store_left(int stage, int row, float G, const DecaySums& sums,
                                float factor) const {
#pragma unroll
    for (int i = 0; i < kAnchors; ++i)
      if (row < 16 * (i + 1))
        factors<kAt.left>(stage)[anchored_columns(i + 1) + row] =
            factor * exp2_fast(sums.anchor[i] - G);
  }

  // ---- prep warpgroups --------------------------------------------------------------------------

  /// A prep warpgroup that leaves the inverse to warps of warpgroup 0: -A and scores of every
  /// chunk.
  WYVERN_DEVICE void prepare_A() const {
    const int warp = uniform(warp_index()) % 4;
    Position at;
#pragma unroll 1
    for (int step = 0; step < b.chunks; ++step, at.advance()) {
      const int slot = step % kSlots;
      wait_for_tiles(at);
      Square x;
      multiply_by_keys(b.keys(at.buffer), at.buffer, x);
      barrier_wait(barrier<kAt.factors_full>(at.buffer), at.parity);
      if constexpr (S::QK_L2NORM) {
        RowPair queries;
        if constexpr (kQueries) queries = squares_of_rows(b.queries(at.buffer));
        end_products<0>(x);
        normalize(at.buffer, diagonal_of(x, warp), queries);
        sync_named(kAt.consumers + 1, 128);
      }
      const RowFactors factor(*this, at.buffer);
      const Decays decays = decays_of(at.buffer, warp);
      end_products<0>(x);
      if (step >= kSlots) barrier_wait(barrier<kAt.A_empty>(slot), parity_of<kSlots>(step) ^ 1U);
      store_negated(lower_rows<true>(x, decays, warp, factor.key), A_tile(step), warp);
      barrier_arrive(barrier<kAt.A_full>(slot));
      if constexpr (kQueries) {
        multiply_by_keys(b.queries(at.buffer), at.buffer, x);
        wait_scores_empty(step);
        end_products<0>(x);
      }
      barrier_arrive(barrier<kAt.tiles_empty>(at.buffer));
      if constexpr (kQueries) store_scores(step, x, decays, warp, factor.query);
      hand_over(barrier<kAt.chunk_full>(slot));
    }
  }

  /// Warps 1 to 3 of warpgroup 0 invert I + A: warps 2 and 3 one half of 32 rows each, then warp 1
  /// the block below them.
  WYVERN_DEVICE void invert_chunks() const {
    const int warp = uniform(warp_index());
#pragma unroll 1
    for (int step = 0; step < b.chunks; ++step) {
      const int slot = step % kSlots;
      const uint32 parity = parity_of<kSlots>(step);
      const auto begin = [&] { wait_inverse_empty(step); };
      if (warp > 1) {
        barrier_wait(barrier<kAt.A_full>(slot), parity);
        invert_32(A_tile(step), b.inverse(step), opaque(32 * (warp - 2)), begin);
        barrier_arrive(barrier<kAt.halves_full>(slot));
      } else {
        barrier_wait(barrier<kAt.halves_full>(slot), parity);
        join_32(A_tile(step), b.inverse(step), begin);
        barrier_arrive(barrier<kAt.A_empty>(slot));
      }
      hand_over(barrier<kAt.chunk_full>(slot));
    }
  }

  /// A prep warpgroup that inverts: every chunk whose turn it is, from chunk `prep` on.
  WYVERN_DEVICE void prepare_chunks(int prep) const {
    const int warp = uniform(warp_index()) % 4;
    auto inverse = UnitLowerInverse::at<kAt.inversion>(b.shared + prep * kAt.inversion_bytes,
                                                       kAt.consumers + 3 + 3 * prep);
    Position at;
    if (prep == 1) at.advance();
#pragma unroll 1
    for (int step = prep; step < b.chunks; step += kAt.prep_groups) {
      wait_for_tiles(at);
      Square of_queries, of_keys;
      if constexpr (kQueries) multiply_by_keys(b.queries(at.buffer), at.buffer, of_queries);
      if constexpr (kScoresLast || !kQueries)
        multiply_by_keys(b.keys(at.buffer), at.buffer, of_keys);
      wait_for_factors(at, prep);
      const RowFactors factor(*this, at.buffer);
      const Decays decays = decays_of(at.buffer, warp);
      LowerRows scores;
      if constexpr (kQueries && kScoresLast) {
        end_products<0>(of_queries);
        pin(of_keys.x);
        scores = lower_rows<false>(of_queries, decays, warp, factor.query);
      } else {
        if constexpr (kQueries)
          end_products<0>(of_queries);
        else
          end_products<0>(of_keys);
        if constexpr (!kScoresLast) wait_slot_empty(step);
        if constexpr (kQueries) {
          store_scores(step, of_queries, decays, warp, factor.query);
          multiply_by_keys(b.keys(at.buffer), at.buffer, of_keys);
          end_products<0>(of_keys);
        }
      }
      const LowerRows A = lower_rows<true>(of_keys, decays, warp, factor.key);
      barrier_arrive(barrier<kAt.tiles_empty>(at.buffer));
      inverse.take(A.left, A.diagonal);
      inverse.invert(b.inverse(step), warp);
      if constexpr (kScoresLast) {
        wait_scores_empty(step);
        if constexpr (kQueries) store_lower(scores, b.scores(step), warp, 16 * warp);
      }
      hand_over(barrier<kAt.chunk_full>(step % kSlots));
      inverse.release();
#pragma unroll
      for (int i = 0; i < kAt.prep_groups; ++i) at.advance();
    }
  }

 private:
  template <BarrierPlace Place>
  WYVERN_DEVICE Barrier* barrier(int i) const {
    return b.template barrier<Place>(i);
  }
  template <ArrayPlace Place>
  WYVERN_DEVICE float* factors(int stage) const {
    return b.template factors<Place>(stage);
  }
  /// -A of a chunk, for the warps that invert I + A.
  WYVERN_DEVICE Tile<fp16, kChunkRows, kChunkRows> A_tile(int step) const {
    return tile_at<kAt.inversion.inverse>(b.shared + step % kSlots * kAt.inversion_bytes);
  }

  WYVERN_DEVICE void wait_for_tiles(const Position& at) const {
    // Loads may complete out of order: the wait for `empty` tells this phase of `full` from the one
    // before.
    barrier_wait(barrier<kAt.tiles_empty>(at.buffer), at.parity ^ 1U);
    barrier_wait(barrier<kAt.tiles_full>(at.buffer), at.parity);
  }
  /// Waits for the factors of a chunk and multiplies the norm scales into them.
  WYVERN_DEVICE void wait_for_factors(const Position& at, int prep) const {
    barrier_wait(barrier<kAt.factors_full>(at.buffer), at.parity);
    if constexpr (S::QK_L2NORM) {
      normalize(at.buffer);
      sync_named(kAt.consumers + 1 + prep, 128);
    }
  }
  WYVERN_DEVICE void wait_scores_empty(int step) const {
    if (step >= kScoreSlots)
      barrier_wait(barrier<kAt.scores_empty>(step % kScoreSlots),
                   parity_of<kScoreSlots>(step) ^ 1U);
  }
  /// Whether the consumers say of an inverse alone that they have read it.
  static constexpr bool kInverseEmpty = requires { kAt.inverse_empty; };
  WYVERN_DEVICE void wait_inverse_empty(int step) const {
    if constexpr (!kInverseEmpty)
      wait_scores_empty(step);
    else if (step >= kSlots)
      barrier_wait(b.template barrier<B::kLayout.inverse_empty>(step % kSlots),
                   parity_of<kSlots>(step) ^ 1U);
  }
  /// For both.
  WYVERN_DEVICE void wait_slot_empty(int step) const {
    wait_inverse_empty(step);
    if constexpr (kInverseEmpty && kQueries) wait_scores_empty(step);
  }

  /// Multiplies the norm scales of rows into their factors, one thread per row of keys or queries.
  /// The fence of hand_over(chunk_full) orders these reads of tiles before the next load to them:
  /// consumers wait for chunk_full before they arrive at tiles_empty.
  WYVERN_DEVICE void normalize(int stage) const {
    const int thread = thread_index() % 128;
    const int row = thread % kChunkRows;
    if (thread < kChunkRows)
      scale_key(stage, row, norm_scale(b.keys(stage), row));
    else if constexpr (kQueries)
      b.scale_query(stage, row, norm_scale(b.queries(stage), row));
  }
  /// The same from the sums of squares of the rows that four threads share, which take one each.
  /// The squares of keys are the diagonal of K K^T: each wait for shared memory is long while
  /// products of other warpgroups stream operands.
  WYVERN_DEVICE void normalize(int stage, const RowPair& keys, const RowPair& queries) const {
    const int half = lane_index() % 2;
    const int row = Square::row(2 * half);
    const RowPair& squares = lane_index() % 4 < 2 ? keys : queries;
    const float scale = norm_scale(half == 0 ? squares.at[0] : squares.at[1]);
    if (lane_index() % 4 < 2)
      scale_key(stage, row, scale);
    else if constexpr (kQueries)
      b.scale_query(stage, row, scale);
  }
  WYVERN_DEVICE void scale_key(int stage, int row, float scale) const {
    b.scale_key(stage, row, scale);
#pragma unroll
    for (int i = 0; i < kAnchors; ++i)
      if (row < 16 * (i + 1)) factors<kAt.left>(stage)[anchored_columns(i + 1) + row] *= scale;
  }

  /// Starts x = rows K^T.
  WYVERN_DEVICE void multiply_by_keys(const KeyTile& rows, int stage, Square& x) const {
    start_product<S::K>(x, rows_of(rows), rows_of(b.keys(stage)));
  }

  /// The factors of this thread's two rows of A and of the scores.
  struct RowFactors {
    float key[2] = {1.0f, 1.0f}, query[2] = {};

    WYVERN_DEVICE RowFactors(const ScalarPrepare& prepare, int stage) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (B::kScaledRows)
          key[i] = prepare.template factors<kAt.row>(stage)[Square::row(2 * i)];
        if constexpr (kQueries)
          query[i] = prepare.template factors<kAt.query>(stage)[Square::row(2 * i)];
      }
    }
  };

  WYVERN_DEVICE Decays decays_of(int stage, int warp) const {
    return Decays(factors<kAt.G>(stage), factors<kAt.key>(stage), factors<kAt.left>(stage), warp);
  }

  /// Rows of this warp on and below the diagonal, rounded.
  WYVERN_DEVICE void store_scores(int step, const Square& x, const Decays& decays, int warp,
                                  const float (&factor)[2]) const {
    store_lower(lower_rows<false>(x, decays, warp, factor), b.scores(step), warp,
                kAt.pipelined ? opaque(16 * warp) : 16 * warp);
  }
};

}  // namespace wyvern::cuda::sm90
