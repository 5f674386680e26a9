// What a block does with the slices of a chunk: their decayed rows, scores between them, where all
// scores of keys and queries go, and the inverse.
#pragma once

#include "forward/kda_prepare/slice.cuh"

/// Named barriers behind the inverse's three: scores of keys are there; warpgroups' own.
constexpr int kKeysDone = 4;
constexpr int kFirstOfRows = 5;

// ---- factors and decayed rows -------------------------------------------------------------------

/// beta of a row. In the backward pass it is on columns of A, whose inverse is in fp16, and dV is
/// divided by it: a column of next to nothing must keep its digits. So beta counts as at least
/// 2^-14 in A, and columns of the inverse get the rest of their factor as they are written. A row
/// that adds less adds nothing that shows, so that other columns do not change.
WYVERN_DEVICE void store_rate(const Block& b, int row, float beta) {
  b.floats<kLayout.beta>()[row] = beta;
  if constexpr (kBackward) {
    const float solved = away_from_zero(beta, 0x1p-14f);
    b.floats<kLayout.solved>()[row] = solved;
    b.floats<kLayout.rest>()[row] = beta / solved;
  }
}

/// What the chunk's tokens and channels have of their own, and its head; beta(row) is that of a row
/// that is used. Other warps read those of tokens than those of channels, and all is asked for
/// before anything waits.
template <class Beta>
WYVERN_DEVICE GateForm read_factors(const Block& b, const Extents& e, const float* A_log,
                                    const float* dt_bias, Beta&& beta) {
  static_assert(K + kChunk <= kThreads);
  const int thread = thread_index();
  const float shift = HAS_DT_BIAS && thread < K ? dt_bias[b.head * K + thread] : 0.0f;
  const GateForm form(e, HAS_A_LOG ? A_log[b.head] : 0.0f);
  const int row = thread - (kThreads - kChunk);
  if (thread < K)
    b.floats<kLayout.bias>()[thread] = HAS_DT_BIAS ? form.bias(shift) : 0.0f;
  else if (row >= 0)
    store_rate(b, row, row < b.chunk.rows ? beta(row) : 0.0f);
  return form;
}

/// beta of a token; 1 where erase and write gates, one number an element, replace it.
WYVERN_DEVICE float rate_of(const TokenRows<const BETA_DTYPE>& beta, int64 token, int head) {
  if constexpr (ERASE_WRITE)
    return 1.0f;
  else
    return activate_beta<BETA_SIGMOID, NEG_EIGVAL>(beta.row(token)[head]);
}

/// All of a warp's part of its slice. When the sums over slices are there, between() says where
/// rows go: pointers from before would take registers that there are not.
template <class Between>
WYVERN_DEVICE void decay_rows(Slice& slice, const GateForm& form, Between&& between) {
  const Block& b = slice.b;
  float G[kGroups][2][8] = {};
  slice.sum(G, form);
  sync_block();
  const DecayedRows to = between();
  const ChannelTable table(b.floats<kLayout.table>() +
                           (slice.slice * kParts + slice.part) * kTable * kGroup);
  const int row = slice.row();
  const float norms[2][2] = {{slice.norm(0, row), slice.norm(0, row + 8)},
                             {slice.norm(1, row), slice.norm(1, row + 8)}};
#pragma unroll 1
  for (int i = 0; i < kGroups; ++i) {
    slice.decay_group(G[0], slice.group(i), norms, table, to);
    Slice::rotate(G);
  }
  slice.share();
}

// ---- scores between slices ----------------------------------------------------------------------

/// 16 rows of keys or queries: where their tile begins, its panels `pitch` bytes apart.
struct LeftRows {
  unsigned char* data;
  int pitch, row;
};

/// The rows times 16 of a tile. Two sums, so that a product need not wait for the one before.
WYVERN_DEVICE sm90::BlockSum product(const LeftRows& left, const KeyTile& right, int col) {
  const int lane = lane_index();
  sm90::BlockSum sums[2];
#pragma unroll
  for (int depth = 0; depth < K; depth += 16) {
    cuda::FragmentA<DTYPE> a;
    cuda::FragmentB<DTYPE> x;
    const SquareTile panel{left.data + depth / 64 * left.pitch};
    load_matrix_x4(a.r, panel.at(left.row + lane % 16, depth % 64 + lane / 16 * 8));
    load_matrix_x4(x.r, right.at(col + lane % 8 + lane / 16 * 8, depth + lane / 8 % 2 * 8));
    sm90::BlockSum& sum = sums[depth / 16 % 2];
    multiply<Precision::ieee>(sum.x[0], sum.x[1], a, x);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[0].x[n].x[i] += sums[1].x[n].x[i];
  return sums[0];
}

/// Where scores of keys go: -A of the chunk, by which the inverse begins. Beta is of its rows, for
/// the backward pass of its columns.
struct KeyScores {
  static constexpr ArrayPlace kRates = kBackward ? kLayout.solved : kLayout.beta;

  const Block& b;
  SolveTile solve;

  WYVERN_DEVICE void put(sm90::BlockSum sum, int row, int col) const {
    const int lane = lane_index();
    const float* const beta = b.floats<kRates>();
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sum.x[n].x[i] *=
            beta[kBackward ? col + 8 * n + lane % 4 * 2 + i % 2 : row + lane / 4 + i / 2 * 8];
    sm90::share_block(sm90::negated(sum), solve, row, col);
  }
  /// A block on the diagonal, from the layout of Scores.
  WYVERN_DEVICE void put_diagonal(const Scores& sum, int first) const {
    const float* const beta = b.floats<kRates>() + first;
    fp16* const to = solve.at(first + Scores::row(0), first + Scores::col(0, 0));
    sum.for_elements([&](int r, int s, int i, int j, float x) {
      to[i * 8 * solve.kStride + j] =
          from_float<fp16>(s < r ? within_range<fp16>(-beta[kBackward ? s : r] * x) : 0.0f);
    });
  }
};

/// Block i (of two at most) of a slice's scores with earlier ones, of keys or of queries. The first
/// slice has none with earlier ones and has those of the last with the one before.
template <class Place>
WYVERN_DEVICE void make_block(const Slice& slice, bool of_keys, int i, const Place& place) {
  const Block& b = slice.b;
  const int late = slice.slice;
  if (i > 0 && late < 2) return;
  const KeyTile keys{b.tile_of<kLayout.k>()};
  const KeyTile right{b.tile_of<kLayout.right>()};
  // The scores of the last slice with the chunk's first half have strided left rows.
  LeftRows left{b.shared + (of_keys ? kLayout.k.offset : kLayout.q.offset), SquareTile::kBytes,
                late == 0 ? 48 : 16 * late};
  if (late == 3) left = {right.data, SquareTile::kBytes, 48};
  if (late == 3 && !of_keys) left = {b.shared + kLayout.late.offset, kSlice * 128, 0};
  const int early = late == 0 ? 2 : i;
  const bool far = early == 0 && late != 1;
  place.put(product(left, far ? keys : right, 16 * early), late == 0 ? 48 : 16 * late, 16 * early);
}

/// Scores of slices with earlier ones, and of the slices' own. Each slice's first warp returns when
/// all of keys are there, which inverts them while others are still at those of queries.
template <class Queries>
WYVERN_DEVICE void make_scores(const Slice& slice, const KeyScores& keys, const Queries& queries) {
  constexpr int kMakers = 2 * kSlices * 32;
  const int part = slice.part;
  const int first = slice.first();
  if (kParts == 2 || part % 2 == 0) {
    make_block(slice, true, part / (kParts / 2), keys);
    if (part == 0) {
      keys.put_diagonal(slice.joined(), first);
      sync_named(kKeysDone, kMakers);
    } else {
      arrive_named(kKeysDone, kMakers);
    }
  }
  if (part % 2 != 0)
#pragma unroll 1
    for (int i = part / 2; i < 2; i += kParts / 2) make_block(slice, false, i, queries);
  if (part == 1) queries.put_diagonal(slice.joined(), first);
  // Scores with later slices' keys are 0.
  if (part == kParts - 1) queries.clear_behind(first);
}

/// The inverse, less the identity, from what make_scores() left in `solve`, by each slice's first
/// warp; `to` is `inverse`, a SwizzledTile, or that with ScaledColumns.
template <class To>
WYVERN_DEVICE void invert(const Slice& slice, const sm90::UnitLowerInverse& solve,
                          const SquareTile& inverse, const To& to) {
  const int own_slice = slice.slice;
  if (slice.part == 0) {
    auto own = solve;
#pragma unroll
    for (int i = 0; i < 3; ++i)
      if (i < own_slice) own.left[i] = load_a(solve.x, 16 * own_slice, 16 * i);
    own.own = load_a(solve.x, 16 * own_slice, 16 * own_slice);
    sync_warp();
    own.invert(to, own_slice);
  } else {
    // Right of the diagonal the inverse is 0.
    for (int i = slice.other_thread(); i < 6 * 32; i += kOthers) {
      const int block = i / 32;
      const int row = block < 3 ? 0 : block < 5 ? 1 : 2;
      const int col = block < 3 ? block + 1 : block < 5 ? block - 1 : 3;
      *reinterpret_cast<Vector<uint32, 4>*>(
          inverse.at(16 * row + i % 32 / 2, 16 * col + i % 2 * 8)) = {};
    }
  }
}
