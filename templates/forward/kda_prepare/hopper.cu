// All of a chunk of Kimi Delta Attention that needs no state, one block a chunk and value head:
// norms of rows, gates and their sums, decayed rows, scores, the inverse of I + A, W and U.
//
// num_warps / 4 warps have a slice of 16 tokens, each its part of the channels. Within a slice
// decays are shared out around its middle row, between slices at the start of the later one or the
// end of the earlier one, and between the chunk's halves in its middle: there no factor is above 1.
#include "device/cuda/chunk.cuh"
#include "device/cuda/sm90/barrier.cuh"
#include "device/cuda/sm90/inverse.cuh"
#include "device/cuda/sm90/slice.cuh"
#include "forward/kda_prepare/layout.hpp"

using kda_prepare::kChunk;
using kda_prepare::kSlices;
using kda_prepare::kTable;
using sm90::kEightRows;
using sm90::kGroup;
using sm90::kSlice;
using sm90::row_of;

constexpr int kThreads = 32 * num_warps;
constexpr kda_prepare::HopperLayout kLayout{Spec{}};
constexpr int kParts = num_warps / kSlices;   ///< warps that share a slice's channels
constexpr int kGroups = K / kGroup / kParts;  ///< of a warp
constexpr float kLn2 = 0.6931471805599453f;

/// Whether a slice's gates may go beyond what factors around its middle row have room for: 16
/// gates of -5 do not.
constexpr bool kMayBeSteep = !(GATE_IN_KERNEL && LOWER_BOUND);
constexpr float kSteep = 100.0f;  ///< log2

using GateForm = sm90::GateForm<GATE_IN_KERNEL, HAS_A_LOG, LOWER_BOUND>;
using GateTile = sm90::GateTile<G_DTYPE, kChunk>;
using Rows = sm90::SliceRows<DTYPE>;
using KeyTile = sm90::SwizzledTile<DTYPE, kChunk, K>;
using SquareTile = sm90::SwizzledTile<DTYPE, kChunk, kChunk>;
using SolveTile = Tile<fp16, kChunk, kChunk>;

struct Block {
  unsigned char* shared;
  Chunk chunk;
  int head;

  template <sm90::SwizzledPlace Place>
  WYVERN_DEVICE sm90::SwizzledTile<DTYPE, Place.rows, Place.cols> tile_of() const {
    return {shared + Place.offset};
  }
  template <ArrayPlace Place>
  WYVERN_DEVICE float* floats() const {
    return array_at<Place>(shared);
  }
  WYVERN_DEVICE sm90::Barrier* loaded(int i) const {
    return sm90::barriers_at<kLayout.loaded>(shared) + i;
  }
  /// The chunk's first row of this head in a tensor [tokens, HV, width].
  WYVERN_DEVICE int64 first(int width) const { return (chunk.token * HV + head) * width; }
};

/// Scores of a slice's tokens with each other, as the m16n8k8 products of rows in the layout of
/// SliceRows leave them.
struct Scores {
  cuda::Accumulator x[2];

  WYVERN_DEVICE static int row(int i) { return row_of(lane_index() / 4) + i / 2 * 8; }
  WYVERN_DEVICE static int col(int n, int i) {
    return row_of(lane_index() % 4 * 2 + i % 2) + n * 8;
  }
};

// ---- bringing tiles -----------------------------------------------------------------------------

/// By one thread.
WYVERN_DEVICE void bring(const Block& b, const TensorMap& q_map, const TensorMap& k_map,
                         const TensorMap& v_map, const TensorMap& g_map) {
  constexpr int kRowBytes = kChunk * static_cast<int>(sizeof(DTYPE));
  constexpr int kGateBytes = kChunk * K * static_cast<int>(sizeof(G_DTYPE));
  const int token = static_cast<int>(b.chunk.token);
  const int key_head = b.head / (HV / H);
  sm90::barrier_arrive_expect(b.loaded(0), 2 * kRowBytes * K + kGateBytes);
  sm90::tensor_load(b.shared + kLayout.gates.offset, g_map, {0, token, 0, b.head}, b.loaded(0));
  sm90::tensor_load(b.tile_of<kLayout.k>().data, k_map, {0, token, 0, key_head}, b.loaded(0));
  sm90::tensor_load(b.tile_of<kLayout.q>().data, q_map, {0, token, 0, key_head}, b.loaded(0));
  sm90::barrier_arrive_expect(b.loaded(1), kRowBytes * V);
  sm90::tensor_load(b.tile_of<kLayout.v>().data, v_map, {0, token, 0, b.head}, b.loaded(1));
}

/// Rows from `rows` on become 0: what follows in the tensor is the next sequence's, and whatever it
/// holds must not come in. By all threads.
template <class TileType>
WYVERN_DEVICE void clear_rows(const TileType& tile, int rows) {
  constexpr int kPieces = TileType::kCols / 8;
  for (int i = thread_index(); i < (kChunk - rows) * kPieces; i += kThreads)
    *reinterpret_cast<Vector<uint32, 4>*>(tile.at(rows + i / kPieces, i % kPieces * 8)) = {};
}

// ---- a warp's part of a slice -------------------------------------------------------------------

/// What a channel's decays over the chunk are to a slice, by a lane for each of a group's channels.
struct ChannelTable {
  float* own;  ///< kTable rows of 32

  WYVERN_DEVICE Float2 of(int row, int j) const {
    return load<2>(own + row * kGroup + lane_index() % 4 * 8 + j);
  }
  enum Row { before, total, whole, ahead, from_middle, to_middle, across };
};

/// Fills the table in; says whether the slice is steep.
WYVERN_DEVICE bool fill_table(const Block& b, const ChannelTable& table, int slice, int group) {
  const int lane = lane_index();
  const int channel = group * kGroup + lane;
  const float* const totals = b.floats<kLayout.totals>();
  float start[kSlices + 1];
  start[0] = 0.0f;
#pragma unroll
  for (int i = 0; i < kSlices; ++i) start[i + 1] = start[i] + totals[i * K + channel];
  float before = start[0];
  float after = start[1];
#pragma unroll
  for (int i = 1; i < kSlices; ++i) {
    if (i == slice) before = start[i];
    if (i == slice) after = start[i + 1];
  }
  const float total = totals[slice * K + channel];
  const float middle = b.floats<kLayout.middles>()[slice * K + channel];
  float* const to = table.own + lane;
  to[ChannelTable::before * kGroup] = before;
  to[ChannelTable::total * kGroup] = total;
  to[ChannelTable::whole * kGroup] = exp2_fast(before);
  to[ChannelTable::ahead * kGroup] = exp2_fast(start[kSlices] - after);
  to[ChannelTable::from_middle * kGroup] = kMayBeSteep ? middle : exp2_fast(-middle);
  to[ChannelTable::to_middle * kGroup] = kMayBeSteep ? 0.0f : exp2_fast(middle - total);
  // From the middle of the chunk to the next slice but one, or to the last but one.
  to[ChannelTable::across * kGroup] = exp2_fast(totals[(slice == 0 ? 1 : 2) * K + channel]);
  bool steep = false;
  if constexpr (kMayBeSteep) {
    float most = maximum(-middle, middle - total);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) most = maximum(most, shuffle_xor(most, mask));
    steep = most > kSteep;
  }
  sync_warp();
  return steep;
}

/// A warp's part of the channels of a slice.
struct Slice {
  const Block& b;
  const int slice, part;
  Scores keys, queries;

  WYVERN_DEVICE int first() const { return slice * kSlice; }
  WYVERN_DEVICE int group(int i) const { return part * kGroups + i; }
  WYVERN_DEVICE static int column(int group) { return group * kGroup + lane_index() % 4 * 8; }
  WYVERN_DEVICE int row() const { return first() + row_of(lane_index() / 4); }

  /// The groups' sums one place on. A loop over groups that were told apart by an index would be
  /// unrolled, and its instructions fetched twice.
  WYVERN_DEVICE static void rotate(float (&G)[kGroups][2][8]) {
#pragma unroll
    for (int i = 0; i + 1 < kGroups; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int j = 0; j < 8; ++j) G[i][r][j] = G[i + 1][r][j];
  }

  /// The sums of gates inside the slice, for all its slices to see at its end; squares of rows.
  WYVERN_DEVICE void sum(float (&G)[kGroups][2][8], const GateForm& form) const {
    const int lane = lane_index();
    float squares[2][2] = {};
#pragma unroll 1
    for (int i = 0; i < kGroups; ++i) {
      rotate(G);
      float(&sums)[2][8] = G[kGroups - 1];
      sm90::sum_gates(sums, GateTile{b.shared + kLayout.gates.offset}, first(), group(i),
                      b.chunk.rows - first(), form, b.floats<kLayout.bias>());
      if (lane >= 28) {  // the slice's last row, and the last of its first half
        float* const total = b.floats<kLayout.totals>() + slice * K + column(group(i));
        float* const middle = b.floats<kLayout.middles>() + slice * K + column(group(i));
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
          *reinterpret_cast<Vector<float, 4>*>(total + j) = {
              {sums[1][j], sums[1][j + 1], sums[1][j + 2], sums[1][j + 3]}};
          *reinterpret_cast<Vector<float, 4>*>(middle + j) = {
              {sums[0][j], sums[0][j + 1], sums[0][j + 2], sums[0][j + 3]}};
        }
      }
      if constexpr (QK_L2NORM) {
        const Rows q(b.tile_of<kLayout.q>().at(row(), column(group(i))));
        const Rows k(b.tile_of<kLayout.k>().at(row(), column(group(i))));
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            squares[0][r] = fused_multiply_add(q.of(r, j), q.of(r, j), squares[0][r]);
            squares[1][r] = fused_multiply_add(k.of(r, j), k.of(r, j), squares[1][r]);
          }
      }
    }
    if constexpr (QK_L2NORM) {
#pragma unroll
      for (int of_k = 0; of_k < 2; ++of_k)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float x = squares[of_k][r];
          x += shuffle_xor(x, 1);
          x += shuffle_xor(x, 2);
          if (lane % 4 == 0)
            b.floats<kLayout.squares>()[(kParts * of_k + part) * kChunk + row() + 8 * r] = x;
        }
    }
  }

  /// The scale of a token's norm: of q, or of k.
  WYVERN_DEVICE float norm(int of_k, int token) const {
    if constexpr (!QK_L2NORM) return 1.0f;
    const float* const squares = b.floats<kLayout.squares>() + kParts * of_k * kChunk + token;
    float sum = 1e-6f;
#pragma unroll
    for (int i = 0; i < kParts; ++i) sum += squares[i * kChunk];
    return reciprocal_sqrt(sum);
  }

  /// Decayed rows of one group, and what they add to the scores inside the slice.
  WYVERN_DEVICE void take(const float (&G)[2][8], int group, const float (&norms)[2][2],
                          const ChannelTable& table, float* Gk, DTYPE* qg, DTYPE* kg) {
    const bool steep = fill_table(b, table, slice, group);
    if (kMayBeSteep && steep) add_steep(G, group, norms);
    DTYPE* const key_rows = b.tile_of<kLayout.k>().at(row(), column(group));
    DTYPE* const query_rows = b.tile_of<kLayout.q>().at(row(), column(group));
    const Rows k(key_rows);
    const Rows q(query_rows);
    uint32 left[2][4], query[2][4], right[2][4], erasing[2][4], reading[2][4], adding[2][4];
    // Queries of the last slice in the tile of its own: 48 rows less in each panel of 64 channels,
    // swizzled alike. They go there word by word, since eight more words would spill.
    DTYPE* const late_rows = query_rows - b.tile_of<kLayout.q>().at(3 * kSlice, 0) +
                             b.tile_of<kLayout.late>().at(0, 0) - group / 2 * (3 * kSlice * 64);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const Float2 total = table.of(ChannelTable::total, j);
      const Float2 whole = table.of(ChannelTable::whole, j);
      const Float2 ahead = table.of(ChannelTable::ahead, j);
      const Float2 from_middle = table.of(ChannelTable::from_middle, j);
      const Float2 to_middle = table.of(ChannelTable::to_middle, j);
      const Float2 across = table.of(ChannelTable::across, j);
      float a[2][2], y[2][2], c[2][2];  // rows of k and q decayed from the start, k to the end
      float own_k[4], own_q[4], own_right[2][2];
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int d = 0; d < 2; ++d) {
          const float g = G[r][j + d];
          const float key = k.of(r, j + d) * norms[1][r];
          const float asked = q.of(r, j + d) * norms[0][r];
          const float reached = exp2_fast(g);
          const float left_over = exp2_fast(total.at[d] - g);
          a[r][d] = key * reached;
          y[r][d] = asked * reached;
          c[r][d] = key * left_over;
          if constexpr (kMayBeSteep) {
            const float after = exp2_fast(g - from_middle.at[d]);
            own_k[2 * d + r] = to_tf32(steep ? 0.0f : key * after);
            own_q[2 * d + r] = to_tf32(steep ? 0.0f : asked * after);
            own_right[r][d] = to_tf32(steep ? 0.0f : key * exp2_fast(from_middle.at[d] - g));
          } else {
            own_k[2 * d + r] = to_tf32(a[r][d] * from_middle.at[d]);
            own_q[2 * d + r] = to_tf32(y[r][d] * from_middle.at[d]);
            own_right[r][d] = to_tf32(c[r][d] * to_middle.at[d]);
          }
        }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        mma_m16n8k8_tf32(keys.x[n].x, own_k, own_right[n][0], own_right[n][1]);
        mma_m16n8k8_tf32(queries.x[n].x, own_q, own_right[n][0], own_right[n][1]);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (slice == 3) {
          DTYPE* const to = late_rows + r * kEightRows + j;
          sm90::touch(to);
          *reinterpret_cast<uint32*>(to) =
              pack<DTYPE>(y[r][0] * across.at[0], y[r][1] * across.at[1]);
        }
        query[r][j / 2] = pack<DTYPE>(y[r][0], y[r][1]);
        left[r][j / 2] = slice == 0 ? pack<DTYPE>(c[r][0] * across.at[0], c[r][1] * across.at[1])
                                    : pack<DTYPE>(a[r][0], a[r][1]);
        right[r][j / 2] = slice == 3 ? pack<DTYPE>(a[r][0] * across.at[0], a[r][1] * across.at[1])
                                     : pack<DTYPE>(c[r][0], c[r][1]);
        erasing[r][j / 2] = pack<DTYPE>(a[r][0] * whole.at[0], a[r][1] * whole.at[1]);
        reading[r][j / 2] = pack<DTYPE>(y[r][0] * whole.at[0], y[r][1] * whole.at[1]);
        adding[r][j / 2] = pack<DTYPE>(c[r][0] * ahead.at[0], c[r][1] * ahead.at[1]);
      }
    }
    sync_warp();  // the table may be filled again
    const int lane = lane_index();
    const int col = column(group);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      Rows::store(key_rows, r, left[r]);
      Rows::store(query_rows, r, query[r]);
      Rows::store(b.tile_of<kLayout.erasing>().at(row(), col), r, erasing[r]);
      Rows::store(b.tile_of<kLayout.right>().at(row(), col), r, right[r]);
      const int token = row() + 8 * r;
      if (token >= b.chunk.rows) continue;
      const int64 at = int64{token} * HV * K + col;
      store_words(qg + at, reading[r]);
      store_words(kg + at, adding[r]);
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        const auto before = load<4>(table.own + ChannelTable::before * kGroup + lane % 4 * 8 + j);
        Vector<float, 4> sums;
#pragma unroll
        for (int i = 0; i < 4; ++i) sums.at[i] = (before.at[i] + G[r][j + i]) * kLn2;
        store_vector(Gk + at + j, sums);
      }
    }
    sync_warp();
  }

  /// The group's scores by exponentials of differences, none of them above 1. The group's
  /// part of the tile of erasing rows, not written yet, has room for the sums of 16 channels'
  /// gates.
  WYVERN_DEVICE void add_steep(const float (&G)[2][8], int group, const float (&norms)[2][2]) {
    const int lane = lane_index();
    const auto room = b.tile_of<kLayout.erasing>();
    const auto sums = [&](int r, int c) {
      return reinterpret_cast<float*>(room.at(first() + r, group * kGroup + c / 4 * 8)) + c % 4;
    };
    const auto q = b.tile_of<kLayout.q>();
    const auto k = b.tile_of<kLayout.k>();
    // Rows of k enter unscaled; columns by the norms of their tokens, which other lanes have.
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
      sync_warp();
      if (lane % 4 / 2 == part)
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
          for (int j = 0; j < 8; ++j) *sums(row_of(lane / 4) + 8 * r, lane % 2 * 8 + j) = G[r][j];
      sync_warp();
#pragma unroll 1
      for (int c = 0; c < kSlice; ++c) {
        const int col = group * kGroup + part * 16 + c;
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int i = 2 * n; i < 4; ++i) {
            const int r = Scores::row(i);
            const int s = Scores::col(n, i);
            const float difference = s > r ? 0.0f : *sums(r, c) - *sums(s, c);
            const float x = to_float(*k.at(first() + s, col)) * exp2_fast(difference) *
                            norms[1][i / 2] * norm(1, first() + s);
            keys.x[n].x[i] =
                fused_multiply_add(to_float(*k.at(first() + r, col)), x, keys.x[n].x[i]);
            queries.x[n].x[i] = fused_multiply_add(
                to_float(*q.at(first() + r, col)) * (norms[0][i / 2] / norms[1][i / 2]), x,
                queries.x[n].x[i]);
          }
      }
    }
    sync_warp();
  }
  /// Hands the slice's first warp, which finishes scores of keys, and the second, which finishes
  /// those of queries, what this one's channels add.
  WYVERN_DEVICE void share() const {
    if (part != 0) write(shares(0, part - 1), keys);
    if (part != 1) write(shares(1, part == 0 ? 0 : part - 1), queries);
  }
  /// The slice's scores, by the warp that finishes them.
  WYVERN_DEVICE Scores joined() const {
    Scores sum;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum.x[n].x[i] = part == 0 ? keys.x[n].x[i] : queries.x[n].x[i];
#pragma unroll
    for (int other = 0; other + 1 < kParts; ++other)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const auto x = load<4>(shares(part, other) + n * 128);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum.x[n].x[i] += x.at[i];
      }
    return sum;
  }
  WYVERN_DEVICE float* shares(int kind, int other) const {
    return b.floats<kLayout.shares>() + ((2 * slice + kind) * (kParts - 1) + other) * 256 +
           lane_index() * 4;
  }
  WYVERN_DEVICE static void write(float* to, const Scores& scores) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
      *reinterpret_cast<Vector<float, 4>*>(to + n * 128) = {
          {scores.x[n].x[0], scores.x[n].x[1], scores.x[n].x[2], scores.x[n].x[3]}};
  }
};

// ---- scores between slices ----------------------------------------------------------------------

/// 16 rows of keys or queries: where their tile begins, its panels `pitch` bytes apart.
struct LeftRows {
  unsigned char* data;
  int pitch, row;
};

/// The rows times 16 of a tile.
WYVERN_DEVICE sm90::BlockSum product(const LeftRows& left, const KeyTile& right, int col) {
  const int lane = lane_index();
  sm90::BlockSum sum;
#pragma unroll
  for (int depth = 0; depth < K; depth += 16) {
    cuda::FragmentA<DTYPE> a;
    cuda::FragmentB<DTYPE> x;
    const SquareTile panel{left.data + depth / 64 * left.pitch};
    load_matrix_x4(a.r, panel.at(left.row + lane % 16, depth % 64 + lane / 16 * 8));
    load_matrix_x4(x.r, right.at(col + lane % 8 + lane / 16 * 8, depth + lane / 8 % 2 * 8));
    multiply<Precision::ieee>(sum.x[0], sum.x[1], a, x);
  }
  return sum;
}

/// -A below the diagonal's blocks, or scores of queries to memory.
struct BlockPlace {
  const Block& b;
  bool of_keys;
  SolveTile solve;
  float* Aqk;

  WYVERN_DEVICE void put(sm90::BlockSum sum, int row, int col) const {
    const int lane = lane_index();
    if (of_keys) {
      const float* const beta = b.floats<kLayout.beta>() + 16 * row + lane / 4;
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum.x[n].x[i] *= beta[i / 2 * 8];
      sm90::share_block(sm90::negated(sum), solve, 16 * row, 16 * col);
      return;
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const int r = 16 * row + lane / 4 + i / 2 * 8;
        if (r < b.chunk.rows)
          store_vector(Aqk + int64{r} * HV * BT + 16 * col + 8 * n + lane % 4 * 2,
                       Float2{{sum.x[n].x[i], sum.x[n].x[i + 1]}});
      }
  }

  /// A block on the diagonal, from the layout of Scores.
  WYVERN_DEVICE void put_diagonal(const Scores& sum, int slice) const {
    const float* const beta = b.floats<kLayout.beta>() + 16 * slice;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = Scores::row(i);
        const int s = Scores::col(n, i);
        const float x = sum.x[n].x[i];
        if (of_keys)
          *solve.at(16 * slice + r, 16 * slice + s) =
              from_float<fp16>(s < r ? within_range<fp16>(-beta[r] * x) : 0.0f);
        else if (16 * slice + r < b.chunk.rows)
          Aqk[int64{16 * slice + r} * HV * BT + 16 * slice + s] = s <= r ? x : 0.0f;
      }
  }

  /// Scores with later slices' keys are 0.
  WYVERN_DEVICE void clear_behind(int slice) const {
    const int columns = 16 * (kSlices - 1 - slice);
    for (int i = lane_index() * 4; i < 16 * columns; i += 128) {
      const int r = 16 * slice + i / columns;
      if (r < b.chunk.rows)
        store_vector(Aqk + int64{r} * HV * BT + 16 * (slice + 1) + i % columns, Vector<float, 4>{});
    }
  }
};

// ---- W and U ------------------------------------------------------------------------------------

/// 64 columns of (I + A)^-1 diag(beta) times a tile, by one warpgroup: what the identity makes of
/// them in fp32, and the rest, of which the inverse's 16 bits are enough.
WYVERN_DEVICE void write_rows(const Block& b, const SquareTile& tile, DTYPE* to, int64 stride) {
  using Sum = sm90::Accumulator<kChunk>;
  Sum x;
  const float* const beta = b.floats<kLayout.beta>();
  const float rate[2] = {beta[Sum::row(0)], beta[Sum::row(2)]};
#pragma unroll
  for (int i = 0; i < Sum::kCount; i += 2) {
    const auto pair = load<2>(tile.at(Sum::row(i), Sum::col(i)));
    x.x[i] = rate[i / 2 % 2] * to_float(pair.at[0]);
    x.x[i + 1] = rate[i / 2 % 2] * to_float(pair.at[1]);
  }
  sm90::begin_products(x);
  sm90::multiply<kChunk>(x, sm90::rows_of(b.tile_of<kLayout.inverse>()), sm90::columns_of(tile),
                         true);
  sm90::wgmma_commit();
  sm90::end_products<0>(x);
  const int first = warp_index() % 4 * 16;
#pragma unroll
  for (int c = 0; c < kChunk; c += 16) {
    cuda::Accumulator pair[2];
#pragma unroll
    for (int i = 0; i < 8; ++i) pair[i / 4].x[i % 4] = x.x[c / 2 + i];
    store_pair<8>(to + int64{first} * stride + c, stride, pair[0], pair[1], b.chunk.rows - first,
                  16);
  }
}

// ---- the block ----------------------------------------------------------------------------------

WYVERN_KERNEL(kThreads, num_warps == 8 ? 2 : 1) {
  Block b;
  b.shared = sm90::swizzled_memory();
  b.head = block_index() % HV;
  b.chunk = locate_chunk<VARLEN, kChunk>(block_index() / HV, e, seq_offsets, chunk_index);
  if (b.chunk.rows <= 0) return;
  const int thread = thread_index();
  if (thread == 0) {
    sm90::barrier_init(b.loaded(0), 1);
    sm90::barrier_init(b.loaded(1), 1);
    sm90::fence_barrier_init();
    bring(b, q_map, k_map, v_map, g_map);
  }
  const GateForm form(e, HAS_A_LOG ? A_log[b.head] : 0.0f);
  for (int i = thread; i < K; i += kThreads)
    b.floats<kLayout.bias>()[i] = HAS_DT_BIAS ? form.bias(dt_bias[b.head * K + i]) : 0.0f;
  if (thread < kChunk) {
    const TokenRows<const BETA_DTYPE> rows{beta, beta_stride};
    b.floats<kLayout.beta>()[thread] =
        thread < b.chunk.rows
            ? activate_beta<BETA_SIGMOID, NEG_EIGVAL>(rows.row(b.chunk.token + thread)[b.head])
            : 0.0f;
  }
  sync_block();
  sm90::barrier_wait(b.loaded(0), 0);
  if (b.chunk.rows < kChunk) {
    clear_rows(b.tile_of<kLayout.q>(), b.chunk.rows);
    clear_rows(b.tile_of<kLayout.k>(), b.chunk.rows);
    sm90::barrier_wait(b.loaded(1), 0);
    clear_rows(b.tile_of<kLayout.v>(), b.chunk.rows);
    sync_block();
  }

  const int warp = sm90::uniform(warp_index());
  Slice slice{b, warp / kParts, warp % kParts, {}, {}};
  {
    float G[kGroups][2][8] = {};
    slice.sum(G, form);
    sync_block();
    const ChannelTable table{b.floats<kLayout.table>() + warp * kTable * kGroup};
    const int row = slice.row();
    const float norms[2][2] = {{slice.norm(0, row), slice.norm(0, row + 8)},
                               {slice.norm(1, row), slice.norm(1, row + 8)}};
#pragma unroll 1
    for (int i = 0; i < kGroups; ++i) {
      slice.take(G[0], slice.group(i), norms, table, Gk + b.first(K), qg + b.first(K),
                 kg + b.first(K));
      Slice::rotate(G);
    }
    slice.share();
  }
  sync_block();

  // Scores of slices with earlier ones, of keys by every other warp, of queries by those between.
  // The first slice's warps have none of their own and take those of the last with the one before.
  const auto solve = sm90::UnitLowerInverse::at<kLayout.solve>(b.shared, 1);
  {
    const bool of_keys = slice.part % 2 == 0;
    const int late = slice.slice;
    const BlockPlace place{b, of_keys, solve.x, Aqk + b.first(BT)};
    const KeyTile keys{b.tile_of<kLayout.k>()};
    const KeyTile right{b.tile_of<kLayout.right>()};
    // Of the last slice's scores with the chunk's first half the left rows lie apart.
    LeftRows left{b.shared + (of_keys ? kLayout.k.offset : kLayout.q.offset), SquareTile::kBytes,
                  late == 0 ? 48 : 16 * late};
    if (late == 3) left = {right.data, SquareTile::kBytes, 48};
    if (late == 3 && !of_keys) left = {b.shared + kLayout.late.offset, kSlice * 128, 0};
    const int products = late < 2 ? 1 : 2;
#pragma unroll 1
    for (int i = slice.part / 2; i < products; i += kParts / 2) {
      const int early = late == 0 ? 2 : i;
      const bool far = early == 0 && late != 1;
      place.put(product(left, far ? keys : right, 16 * early), late == 0 ? 3 : late, early);
    }
    if (slice.part < 2) place.put_diagonal(slice.joined(), late);
    if (slice.part == kParts - 2) place.clear_behind(late);
  }
  sync_block();

  const auto inverse = b.tile_of<kLayout.inverse>();
  const float* const rates = b.floats<kLayout.beta>();
  sm90::barrier_wait(b.loaded(1), 0);
  if (warp < 4) {
    auto own = solve;
#pragma unroll
    for (int i = 0; i < 3; ++i)
      if (i < warp) own.left[i] = load_a(solve.x, 16 * warp, 16 * i);
    own.own = load_a(solve.x, 16 * warp, 16 * warp);
    sync_warp();
    own.invert(sm90::ScaledColumns<SquareTile>{inverse, rates}, warp);
  } else {
    // Right of the diagonal the inverse is 0.
    for (int i = thread - 128; i < 6 * 32; i += kThreads - 128) {
      const int block = i / 32;
      const int row = block < 3 ? 0 : block < 5 ? 1 : 2;
      const int col = block < 3 ? block + 1 : block < 5 ? block - 1 : 3;
      *reinterpret_cast<Vector<uint32, 4>*>(
          inverse.at(16 * row + i % 32 / 2, 16 * col + i % 2 * 8)) = {};
    }
  }
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
               int64{HV} * (of_w ? K : V));
  }
}
