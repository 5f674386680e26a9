// A chunk of Kimi Delta Attention as the kernels of kda_prepare have it in shared memory: tiles as
// they are loaded, and a warp's part of a slice of 16 tokens: gates and their sums, decayed rows,
// the slice's own scores. Who includes it says in kValues how many columns of v there are, none for
// the backward pass; in kAllSums whether sums of gates are written of all rows, or of the last.
//
// num_warps / 4 warps have a slice, each its part of the channels. Within a slice decays are shared
// out around its middle row, between slices at the start of the later one or the end of the earlier
// one, and between the chunk's halves in its middle: there no factor is above 1.
#pragma once

#include "device/cuda/sm90/barrier.cuh"
#include "device/cuda/sm90/inverse.cuh"
#include "device/cuda/sm90/slice.cuh"
#include "device/cuda/warp.cuh"
#include "forward/kda_prepare/layout.hpp"

using kda_prepare::kChunk;
using kda_prepare::kSlices;
using kda_prepare::kTable;
using sm90::kEightRows;
using sm90::kGroup;
using sm90::kSlice;
using sm90::row_of;

constexpr int kThreads = 32 * num_warps;
constexpr bool kBackward = kValues == 0;
constexpr kda_prepare::HopperLayout kLayout{Spec{}, kValues};
constexpr int kParts = num_warps / kSlices;       ///< warps that share a slice's channels
constexpr int kGroups = K / kGroup / kParts;      ///< of a warp
constexpr int kOthers = kThreads - 32 * kSlices;  ///< threads of all warps but each slice's first
constexpr float kLn2 = 0.6931471805599453f;

/// Whether a slice's gates may go beyond what factors around its middle row have room for: 16
/// gates of -5 do not.
constexpr bool kMayBeSteep = !(GATE_IN_KERNEL && LOWER_BOUND);
constexpr float kSteep = 100.0f;  ///< log2

/// What a product in tf32 drops of an operand, the digits behind the eleventh, on the mean and of
/// the operand. Factors around the middle row are larger by so much: rounding would take an
/// instruction or two of each operand.
constexpr float kDropped = 0x1.7p-12f;
constexpr float kDroppedLog2 = kDropped * kLog2E;

using GateForm = sm90::GateForm<GATE_IN_KERNEL, HAS_A_LOG, LOWER_BOUND>;
using GateTile = sm90::GateTile<G_DTYPE, kChunk>;
using Rows = sm90::SliceRows<DTYPE>;
using KeyTile = sm90::SwizzledTile<DTYPE, kChunk, K>;
using SquareTile = sm90::SwizzledTile<DTYPE, kChunk, kChunk>;
using SolveTile = Tile<fp16, kChunk, kChunk>;

/// This thread's warp. With its range known, what is computed from it needs no signs.
WYVERN_DEVICE int block_warp() { return sm90::uniform(warp_index()) & (num_warps - 1); }

struct Block {
  unsigned char* shared;
  Chunk chunk;
  int head;
  int heads;  ///< value heads

  template <sm90::SwizzledPlace Place>
  WYVERN_DEVICE sm90::SwizzledTile<DTYPE, Place.rows, Place.cols> tile_of() const {
    return {shared + Place.offset};
  }
  template <ArrayPlace Place>
  WYVERN_DEVICE float* floats() const {
    return array_at<Place>(shared);
  }
  /// From a tile's start to element (row, col), of a tile with the chunk's rows.
  WYVERN_DEVICE int place(int row, int col) const {
    return static_cast<int>(reinterpret_cast<unsigned char*>(tile_of<kLayout.q>().at(row, col)) -
                            tile_of<kLayout.q>().data);
  }
  WYVERN_DEVICE sm90::Barrier* loaded(int i) const {
    return sm90::barriers_at<kLayout.loaded>(shared) + i;
  }
  /// The chunk's first row of this head in a tensor [tokens, HV, width].
  WYVERN_DEVICE int64 first(int width) const { return (chunk.token * heads + head) * width; }
};

/// Scores of a slice's tokens with each other, as the m16n8k8 products of rows in the layout of
/// SliceRows leave them.
struct Scores {
  cuda::Accumulator x[2];

  WYVERN_DEVICE static int row(int i) { return row_of(lane_index() / 4) + i / 2 * 8; }
  WYVERN_DEVICE static int col(int n, int i) {
    return row_of(lane_index() % 4 * 2 + i % 2) + n * 8;
  }
  /// Calls visit(row, col, i, j, x) with each element, which is 8 i rows and j columns from this
  /// lane's first.
  template <class Visit>
  WYVERN_DEVICE void for_elements(Visit&& visit) const {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) visit(row(i), col(n, i), i / 2, 8 * n + i % 2 * 4, x[n].x[i]);
  }
};

/// Squares of 16 rows: the diagonal of products of rows with themselves.
struct Squares {
  cuda::Accumulator x[2];  ///< of rows 0 to 7, and 8 to 15, with all 16

  /// Adds those of a group of channels from `col` on.
  WYVERN_DEVICE void add(const KeyTile& tile, int row, int col) {
    const int lane = lane_index();
#pragma unroll
    for (int depth = 0; depth < kGroup; depth += 16) {
      uint32 r[4];
      load_matrix_x4(r, tile.at(row + lane % 16, col + depth + lane / 16 * 8));
      mma_m16n8k16<DTYPE>(x[0].x, r, r[0], r[2]);
      mma_m16n8k16<DTYPE>(x[1].x, r, r[1], r[3]);
    }
  }
  WYVERN_DEVICE void store(float* to) const {
    const int lane = lane_index();
    if (lane % 4 != lane / 8) return;
    const int odd = lane / 4 % 2;
    to[lane / 4] = odd != 0 ? x[0].x[1] : x[0].x[0];
    to[lane / 4 + 8] = odd != 0 ? x[1].x[3] : x[1].x[2];
  }
};

// ---- loading tiles ------------------------------------------------------------------------------

constexpr int kRowBytes = kChunk * static_cast<int>(sizeof(DTYPE));

/// Loads gates, k and q, by one thread.
WYVERN_DEVICE void load_rows(const Block& b, int key_head, const TensorMap& q_map,
                             const TensorMap& k_map, const TensorMap& g_map) {
  constexpr int kGateBytes = kChunk * K * static_cast<int>(sizeof(G_DTYPE));
  const int token = static_cast<int>(b.chunk.token);
  sm90::barrier_arrive_expect(b.loaded(0), 2 * kRowBytes * K + kGateBytes);
  sm90::tensor_load(b.shared + kLayout.gates.offset, g_map, {0, token, 0, b.head}, b.loaded(0));
  sm90::tensor_load(b.tile_of<kLayout.k>().data, k_map, {0, token, 0, key_head}, b.loaded(0));
  sm90::tensor_load(b.tile_of<kLayout.q>().data, q_map, {0, token, 0, key_head}, b.loaded(0));
}

// ---- gates of one number an element -------------------------------------------------------------

/// Starts copies of the chunk's rows of the erase gate, by all threads; those behind a sequence's
/// end are 0.
WYVERN_DEVICE void load_erase(const Block& b, const TokenRows<const BETA_DTYPE>& erase) {
  const auto tile = b.tile_of<kLayout.erase>();
  constexpr int kPieces = K / 8;
  for (int i = thread_index(); i < kChunk * kPieces; i += kThreads) {
    const int row = i / kPieces;
    const int col = i % kPieces * 8;
    const bool is_used = row < b.chunk.rows;
    copy_async<16>(tile.at(row, col), erase.row(is_used ? row : 0) + col, is_used);
  }
  copy_async_commit();
}

/// Calls put(row, col, words) with write v, eight columns at a time, by all warps but each slice's
/// first, of whose threads this one is number `thread`; behind a sequence's end it is 0.
template <class Put>
WYVERN_DEVICE void make_written(const Block& b, int thread, const TokenRows<const DTYPE>& v,
                                const TokenRows<const BETA_DTYPE>& write, Put&& put) {
  constexpr int kPieces = V / 8;
#pragma unroll 4
  for (int i = thread; i < kChunk * kPieces; i += kOthers) {
    const int row = i / kPieces;
    const int col = i % kPieces * 8;
    uint32 words[4] = {};
    if (row < b.chunk.rows) {
      const auto values = load<8>(v.row(row) + col);
      const auto gates = load<8>(write.row(row) + col);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float x[2];
#pragma unroll
        for (int n = 0; n < 2; ++n)
          x[n] =
              within_range<DTYPE>(to_float(values.at[2 * j + n]) * to_float(gates.at[2 * j + n]));
        words[j] = pack<DTYPE>(x[0], x[1]);
      }
    }
    put(row, col, words);
  }
}

// ---- a warp's part of a slice -------------------------------------------------------------------

/// Where decayed rows of the chunk and head go, `stride` elements from a token's to the next one's.
/// For the backward pass k exp(G) is negated, keys decayed to the chunk's end come times beta, and
/// queries times `scale`.
struct DecayedRows {
  DTYPE *q_entering, *k_leaving;
  int64 stride;
  float* Gk;          ///< only forward
  DTYPE* k_entering;  ///< only backward; forward it stays in shared memory
  float scale;
};

/// What a channel's decays over the chunk are to a slice, by a lane for each of a group's channels.
struct ChannelTable {
  float* own;         ///< kTable rows of 32
  const float* mine;  ///< the first of this lane's channels

  WYVERN_DEVICE explicit ChannelTable(float* table)
      : own(table), mine(table + sm90::opaque(lane_index() % 4 * 8)) {}
  template <int N = 2>
  WYVERN_DEVICE Vector<float, N> of(int row, int j) const {
    return load<N>(mine + row * kGroup + j);
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
  to[ChannelTable::before * kGroup] = before * kLn2;
  to[ChannelTable::total * kGroup] = total;
  to[ChannelTable::whole * kGroup] = exp2_fast(before);
  to[ChannelTable::ahead * kGroup] = exp2_fast(start[kSlices] - after);
  constexpr float kMore = 1.0f + kDropped;
  to[ChannelTable::from_middle * kGroup] =
      kMayBeSteep ? middle - kDroppedLog2 : kMore * exp2_fast(-middle);
  to[ChannelTable::to_middle * kGroup] = kMayBeSteep ? 0.0f : kMore * exp2_fast(middle - total);
  // From the middle of the chunk to the next slice but one, or to the last but one.
  to[ChannelTable::across * kGroup] = exp2_fast(totals[(slice == 0 ? 1 : 2) * K + channel]);
  bool steep = false;
  if constexpr (kMayBeSteep) {
    float most = maximum(-middle, middle - total);
    most = max_warp(most);
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
  /// This thread's number among kOthers.
  WYVERN_DEVICE int other_thread() const {
    return (slice * (kParts - 1) + part - 1) * 32 + lane_index();
  }

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
    Squares squares[2];
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
        squares[0].add(b.tile_of<kLayout.q>(), first(), group(i) * kGroup);
        squares[1].add(b.tile_of<kLayout.k>(), first(), group(i) * kGroup);
      }
    }
    if constexpr (QK_L2NORM) {
#pragma unroll
      for (int of_k = 0; of_k < 2; ++of_k)
        squares[of_k].store(b.floats<kLayout.squares>() + (kParts * of_k + part) * kChunk +
                            first());
    }
  }

  /// The scale of a token's norm: of q, or of k.
  WYVERN_DEVICE float norm(int of_k, int token) const {
    if constexpr (!QK_L2NORM) return 1.0f;
    const float* const squares = b.floats<kLayout.squares>() + kParts * of_k * kChunk + token;
    float sum = 1e-6f;
#pragma unroll
    for (int i = 0; i < kParts; ++i) sum += squares[i * kChunk];
    return reciprocal_sqrt_fast(sum);
  }

  /// Decayed rows of one group, and what they add to the scores inside the slice. Of rows behind a
  /// sequence's end all are 0.
  WYVERN_DEVICE void decay_group(const float (&G)[2][8], int group, const float (&norms)[2][2],
                                 const ChannelTable& table, const DecayedRows& to) {
    const bool steep = fill_table(b, table, slice, group);
    if (kMayBeSteep && steep) add_steep(G, group, norms);
    const float betas[2] = {b.floats<kLayout.beta>()[row()], b.floats<kLayout.beta>()[row() + 8]};
    // One address and constants from it: of what the compiler knew it would make one for each tile.
    unsigned char* const place = b.shared + sm90::opaque(b.place(row(), column(group)));
    DTYPE* const key_rows = reinterpret_cast<DTYPE*>(place + kLayout.k.offset);
    DTYPE* const query_rows = reinterpret_cast<DTYPE*>(place + kLayout.q.offset);
    const Rows k(key_rows);
    const Rows q(query_rows);
    const auto* const erase_rows = reinterpret_cast<const DTYPE*>(place + kLayout.erase.offset);
    uint32 left[2][4], query[2][4], right[2][4], erasing[2][4], reading[2][4], adding[2][4];
    // Queries of the last slice in the tile of its own: 48 rows less in each panel of 64 channels,
    // with the same swizzle. They are stored word by word, since eight more words would spill.
    auto* const late_rows = reinterpret_cast<DTYPE*>(place + kLayout.late.offset -
                                                     (group / 2 + 1) * (3 * kSlice * 128));
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
          float erased = key;
          if constexpr (ERASE_WRITE) {
            const DTYPE* const gates = erase_rows + r * kEightRows + j;
            sm90::touch(gates);
            erased *= to_float(load<2>(gates).at[d]);
          }
          const float asked = q.of(r, j + d) * norms[0][r];
          const float reached = exp2_fast(g);
          const float left_over = exp2_fast(total.at[d] - g);
          a[r][d] = erased * reached;
          y[r][d] = asked * reached;
          c[r][d] = key * left_over;
          if constexpr (kMayBeSteep) {
            const float after = exp2_fast(g - from_middle.at[d]);
            own_k[2 * d + r] = erased * after;
            own_q[2 * d + r] = asked * after;
            own_right[r][d] = key * exp2_fast(from_middle.at[d] + 2 * kDroppedLog2 - g);
          } else {
            own_k[2 * d + r] = a[r][d] * from_middle.at[d];
            own_q[2 * d + r] = y[r][d] * from_middle.at[d];
            own_right[r][d] = c[r][d] * to_middle.at[d];
          }
        }
      if (!steep)
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          mma_m16n8k8_tf32(keys.x[n].x, own_k, own_right[n][0], own_right[n][1]);
          mma_m16n8k8_tf32(queries.x[n].x, own_q, own_right[n][0], own_right[n][1]);
        }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        query[r][j / 2] = pack<DTYPE>(y[r][0], y[r][1]);
        left[r][j / 2] = pack<DTYPE>(a[r][0], a[r][1]);
        right[r][j / 2] = pack<DTYPE>(c[r][0], c[r][1]);
        const float of_a = kBackward ? -1.0f : 1.0f;
        const float of_y = kBackward ? to.scale : 1.0f;
        const float of_c = kBackward ? betas[r] : 1.0f;
        erasing[r][j / 2] =
            pack<DTYPE>(a[r][0] * (of_a * whole.at[0]), a[r][1] * (of_a * whole.at[1]));
        reading[r][j / 2] =
            pack<DTYPE>(y[r][0] * (of_y * whole.at[0]), y[r][1] * (of_y * whole.at[1]));
        adding[r][j / 2] =
            pack<DTYPE>(c[r][0] * (of_c * ahead.at[0]), c[r][1] * (of_c * ahead.at[1]));
      }
      // Products with the chunk's other half decay by way of its middle.
      if (slice % 3 == 0) {
        const auto across_half = [&](const float(&x)[2]) {
          return pack<DTYPE>(x[0] * across.at[0], x[1] * across.at[1]);
        };
        if (slice == 0) {
#pragma unroll
          for (int r = 0; r < 2; ++r) left[r][j / 2] = across_half(c[r]);
        } else {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            right[r][j / 2] = across_half(a[r]);
            DTYPE* const to = late_rows + r * kEightRows + j;
            sm90::touch(to);
            *reinterpret_cast<uint32*>(to) = across_half(y[r]);
          }
        }
      }
    }
    sync_warp();  // the table may be filled again
    const int col = column(group);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      Rows::store(key_rows, r, left[r]);
      Rows::store(query_rows, r, query[r]);
      if constexpr (!kBackward)
        Rows::store(reinterpret_cast<DTYPE*>(place + kLayout.erasing.offset), r, erasing[r]);
      Rows::store(reinterpret_cast<DTYPE*>(place + kLayout.right.offset), r, right[r]);
      const int token = row() + 8 * r;
      if (!kBackward && token >= b.chunk.rows) continue;
      const int64 at = token * to.stride + col;
      store_words(to.q_entering + at, reading[r]);
      store_words(to.k_leaving + at, adding[r]);
      if constexpr (kBackward) {
        store_words(to.k_entering + at, erasing[r]);
      } else if (kAllSums || token + 1 == b.chunk.rows) {
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
          const auto before = table.of<4>(ChannelTable::before, j);
          Vector<float, 4> sums;
#pragma unroll
          for (int i = 0; i < 4; ++i)
            sums.at[i] = fused_multiply_add(G[r][j + i], kLn2, before.at[i]);
          store_vector(to.Gk + at + j, sums);
        }
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
            float erased = to_float(*k.at(first() + r, col));
            if constexpr (ERASE_WRITE)
              erased *= to_float(*b.tile_of<kLayout.erase>().at(first() + r, col));
            keys.x[n].x[i] = fused_multiply_add(erased, x, keys.x[n].x[i]);
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

/// A warp's. Warps go to the quarters of a multiprocessor in turns, and each slice's first part,
/// which inverts, to another.
WYVERN_DEVICE Slice slice_of(const Block& b, int warp) {
  const int slice = warp / kParts;
  return {b, slice, (warp + slice * kParts / kSlices) % kParts, {}, {}};
}
