// The whole forward pass of the delta rule with one gate a head or none, one block 64 columns
// of V of one sequence, or of a share of it, and value head. The state stays in registers: of q, k,
// v, beta and g nothing but they themselves is read, and nothing but o and the final state written.
//
// Warpgroup 0 brings tiles (warp 0) and makes factors of rows (warps 2 and 3). Warpgroups 1 and 2
// take turns in preparing chunks: the decayed scores of queries and the inverse of I + A.
// Warpgroup 3 has the state, as S^T.
#include "device/cuda/gate.cuh"
#include "device/cuda/share.cuh"
#include "device/cuda/sm90/barrier.cuh"
#include "device/cuda/sm90/inverse.cuh"
#include "device/cuda/sm90/state.cuh"
#include "forward/delta_forward/hopper_layout.hpp"

using delta_forward::kColumns;
using delta_forward::kHelpers;
using delta_forward::kOutputs;
using delta_forward::kRows;

constexpr int kThreads = 128 * (2 + kHelpers);
constexpr int kStages = num_stages;
constexpr int kTilesV = V / kColumns;
constexpr delta_forward::HopperLayout<Spec> kLayout{Spec{}};
constexpr int kTileBytes = kRows * (2 * K + kColumns) * static_cast<int>(sizeof(DTYPE));

/// Registers of a thread: of the warpgroup of tiles and factors, of those that prepare, and of the
/// one with the state. Together 512 or less.
constexpr int kLoaderRegisters = 64;
constexpr int kHelperRegisters = 112;
constexpr int kStateRegisters = 224;

using KeyTile = sm90::SwizzledTile<DTYPE, kRows, K>;
using SquareTile = sm90::SwizzledTile<DTYPE, kRows, kRows>;

/// A chunk's buffer and its parity, as the walk goes on.
using Position = sm90::Pipeline<kStages>::Position;

/// What all warps of a block know.
struct Block : SharedWalk {
  unsigned char* shared;
  int sequence, head, tile;

  WYVERN_DEVICE KeyTile keys(int buffer) const {
    return {shared + kLayout.k.offset + buffer * kLayout.tiles};
  }
  WYVERN_DEVICE KeyTile queries(int buffer) const {
    return {shared + kLayout.q.offset + buffer * kLayout.tiles};
  }
  WYVERN_DEVICE SquareTile values(int buffer) const {
    return {shared + kLayout.v.offset + buffer * kLayout.tiles};
  }
  WYVERN_DEVICE SquareTile output(int i) const {
    return {shared + kLayout.output.offset + i * SquareTile::kBytes};
  }
  WYVERN_DEVICE SquareTile inverse(int i) const {
    return {shared + kLayout.inverse.offset + i * SquareTile::kBytes};
  }
  WYVERN_DEVICE SquareTile scores(int i) const {
    return {shared + kLayout.scores.offset + i * SquareTile::kBytes};
  }
  template <ArrayPlace Place>
  WYVERN_DEVICE float* factors(int buffer) const {
    return array_at<Place>(shared) + buffer * kLayout.factors;
  }
  template <sm90::BarrierPlace Place>
  WYVERN_DEVICE sm90::Barrier* barrier(int i) const {
    return sm90::barriers_at<Place>(shared) + i;
  }
  WYVERN_DEVICE int rows(int chunk) const { return smaller(tokens - chunk * kRows, kRows); }
};

// ---- warp 0 of warpgroup 0: tiles ---------------------------------------------------------------

template <class TileType>
WYVERN_DEVICE void clear_rows(const TileType& tile, int first) {
  constexpr int kPieces = TileType::kCols / 8;
  for (int i = lane_index(); i < (kRows - first) * kPieces; i += 32) {
    auto* const words = reinterpret_cast<uint32*>(tile.at(first + i / kPieces, i % kPieces * 8));
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = 0;
  }
}

WYVERN_DEVICE void bring_tiles(const Block& b, const TensorMap& q_map, const TensorMap& k_map,
                               const TensorMap& v_map) {
  const int key_head = b.head / (HV / H);
  Position at;
#pragma unroll 1
  for (int c = 0; c < b.chunks; ++c, at.advance()) {
    sm90::barrier_wait(b.barrier<kLayout.free>(at.buffer), at.parity ^ 1U);
    const int token = static_cast<int>(b.token) + c * kRows;
    const int rows = b.rows(c);
    sm90::Barrier* const loaded = b.barrier<kLayout.loaded>(at.buffer);
    sm90::Barrier* const barrier = rows < kRows ? b.barrier<kLayout.landed>(0) : loaded;
    if (lane_index() > 0 && rows == kRows) sm90::barrier_arrive(loaded);
    if (lane_index() == 0) {
      sm90::barrier_arrive_expect(barrier, kTileBytes);
      sm90::tensor_load(b.keys(at.buffer).data, k_map, {0, token, 0, key_head}, barrier);
      sm90::tensor_load(b.queries(at.buffer).data, q_map, {0, token, 0, key_head}, barrier);
      sm90::tensor_load(b.values(at.buffer).data, v_map, {0, token, b.tile, b.head}, barrier);
    }
    if (rows == kRows) continue;
    // What follows in the tensor is the next sequence's: whatever it holds must not come in.
    sm90::barrier_wait(barrier, 0);
    clear_rows(b.keys(at.buffer), rows);
    clear_rows(b.queries(at.buffer), rows);
    clear_rows(b.values(at.buffer), rows);
    sm90::hand_over(loaded);
  }
}

// ---- where a block's walk begins
// -----------------------------------------------------------------

/// The log decay of a row.
struct GateForm {
  float floor, bias, A_log;

  WYVERN_DEVICE float operator()(G_DTYPE raw) const {
    const float x = to_float(raw);
    return maximum(GATE_IN_KERNEL ? log_decay(x + bias, A_log) : x, floor);
  }
};

/// log2 of a bound on how much longer a state can be after token `t` of a head than before it: the
/// spectral norm of exp(g) (I - beta k k^T) is at most exp(g) max(1, |1 - beta |k|^2|).
WYVERN_DEVICE float stretch(int64 t, int head, const GateForm& form, const G_DTYPE* g,
                            const BETA_DTYPE* beta, const DTYPE* k) {
  const float rate = activate_beta<BETA_SIGMOID, NEG_EIGVAL>(beta[t * HV + head]);
  float square = 1.0f;  // of a normalized row at most; and the bound grows with it
  if constexpr (!QK_L2NORM) {
    square = 0.0f;
    const DTYPE* const row = k + (t * H + head / (HV / H)) * K;
#pragma unroll 4
    for (int i = 0; i < K; i += 8) {
      const auto x = load<8>(row + i);
#pragma unroll
      for (int j = 0; j < 8; ++j)
        square = fused_multiply_add(to_float(x.at[j]), to_float(x.at[j]), square);
    }
  }
  const float kept = 1.0f - rate * square;
  const float grown = maximum(kept, -kept) - 1.0f;
  return (form(g[t * HV + head]) + (grown > 0.0f ? log_one_plus(grown) : 0.0f)) * kLog2E;
}

// ---- warps 2 and 3 of warpgroup 0: factors of rows ----------------------------------------------

/// The sum over lanes up to this one.
WYVERN_DEVICE float running_sum(float x) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float before = shuffle(x, larger(lane_index() - distance, 0));
    if (lane_index() >= distance) x += before;
  }
  return x;
}

/// g and beta as given, of the rows that a lane looks after: g of both halves of a chunk, for their
/// sum, and beta of its own. Read a chunk ahead; what they mean is computed when they are there.
struct RawRows {
  G_DTYPE g[2];
  BETA_DTYPE beta;
};

WYVERN_DEVICE RawRows read_rows(const Block& b, int chunk, const G_DTYPE* g,
                                const BETA_DTYPE* beta) {
  RawRows raw = {};
  const int rows = b.rows(chunk);
  const int64 first = (b.token + chunk * kRows) * HV + b.head;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 32 * i + lane_index();
    if (SCALAR_GATE && row < rows) raw.g[i] = g[first + row * HV];
  }
  const int row = 32 * (warp_index() - 2) + lane_index();
  if (row < rows) raw.beta = beta[first + row * HV];
  return raw;
}

WYVERN_DEVICE void scale_rows(const Block& b, float scale, const GateForm& form, const G_DTYPE* g,
                              const BETA_DTYPE* beta) {
  const int half = warp_index() - 2;
  const int row = 32 * half + lane_index();
  Position at;
  RawRows next = read_rows(b, 0, g, beta);
#pragma unroll 1
  for (int c = 0; c < b.chunks; ++c, at.advance()) {
    const RawRows raw = next;
    if (c + 1 < b.chunks) next = read_rows(b, c + 1, g, beta);
    const int rows = b.rows(c);
    const float rate = row < rows ? activate_beta<BETA_SIGMOID, NEG_EIGVAL>(raw.beta) : 0.0f;
    float low = 0.0f;
    float high = 0.0f;
    if constexpr (SCALAR_GATE) {
      low = running_sum(lane_index() < rows ? form(raw.g[0]) : 0.0f);
      high = running_sum(32 + lane_index() < rows ? form(raw.g[1]) : 0.0f);
    }
    const float low_sum = shuffle(low, 31);
    const float G = (half == 0 ? low : low_sum + high) * kLog2E;
    const float last = (low_sum + shuffle(high, 31)) * kLog2E;
    const float reached_by[3] = {shuffle(low, 15) * kLog2E, low_sum * kLog2E,
                                 (low_sum + shuffle(high, 15)) * kLog2E};
    const float reached = exp2_fast(G);
    sm90::barrier_wait(b.barrier<kLayout.free>(at.buffer), at.parity ^ 1U);
    b.factors<kLayout.G>(at.buffer)[row] = G;
    b.factors<kLayout.row>(at.buffer)[row] = rate;
    b.factors<kLayout.query>(at.buffer)[row] = scale;
    b.factors<kLayout.beta>(at.buffer)[row] = rate;
    b.factors<kLayout.erase>(at.buffer)[row] = -rate * reached;
    b.factors<kLayout.update>(at.buffer)[row] = exp2_fast(last - G);
    b.factors<kLayout.output_factor>(at.buffer)[row] = scale * reached;
#pragma unroll
    for (int i = 0; i < 3; ++i)
      if (row < 16 * (i + 1))
        b.factors<kLayout.left>(at.buffer)[8 * i * (i + 1) + row] = exp2_fast(reached_by[i] - G);
    if (row == 0) array_at<kLayout.decay>(b.shared)[at.buffer] = exp2_fast(last);
    sm90::barrier_arrive(b.barrier<kLayout.scaled>(at.buffer));
  }
}

// ---- warpgroups 1 and 2: scores and inverses
// -----------------------------------------------------

using Square = sm90::Accumulator<kRows>;

/// What a warp has of the lower part of its sixteen rows: of blocks of 16 x 16 left of the
/// diagonal's, of which only as many as the warp's number count, and the diagonal's.
struct LowerRows {
  sm90::BlockSum left[3], diagonal;
};

/// Decays between this thread's rows and columns of a chunk, with the factors of keys.
struct Decays {
  float reached[2];      ///< from the last row of the warp before to the thread's rows
  Float2 column[6];      ///< from the thread's columns to that row
  float diagonal[2][4];  ///< in the diagonal's block

  /// No branch depends on the warp, so that loads and exponentials of all blocks are under way
  /// together: while products of other warpgroups stream operands, each wait for shared memory is
  /// hundreds of clocks.
  WYVERN_DEVICE Decays(const Block& b, int buffer, int warp) {
    const float* const G = b.factors<kLayout.G>(buffer);
    const float* const key = b.factors<kLayout.key>(buffer);
    const float* const left = b.factors<kLayout.left>(buffer) + 8 * warp * (warp - 1);
    const int first = 16 * warp;
    float G_r[2] = {};
    if constexpr (SCALAR_GATE) {
      const float G_before = G[larger(first - 1, 0)];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        G_r[i] = G[Square::row(2 * i)];
        reached[i] = exp2_fast(G_r[i] - G_before);
      }
    } else {
      reached[0] = reached[1] = 1.0f;
    }
#pragma unroll
    for (int j = 0; j < 6; ++j)
      column[j] =
          SCALAR_GATE || QK_L2NORM ? load<2>(left + Square::col(4 * j)) : Float2{{1.0f, 1.0f}};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      Float2 factor{{1.0f, 1.0f}};
      Float2 G_s{};
      if constexpr (QK_L2NORM) factor = load<2>(key + first + Square::col(4 * n));
      if constexpr (SCALAR_GATE) G_s = load<2>(G + first + Square::col(4 * n));
#pragma unroll
      for (int i = 0; i < 4; ++i)
        diagonal[n][i] = SCALAR_GATE ? factor.at[i % 2] * exp2_fast(G_r[i / 2] - G_s.at[i % 2])
                                     : factor.at[i % 2];
    }
  }
};

/// The lower part of x times decays and factors of rows; the diagonal's block is 0 above the
/// diagonal, and with Strict on it.
template <bool Strict>
WYVERN_DEVICE LowerRows finish(const Square& x, const Decays& decays, int warp,
                               const float (&factor)[2]) {
  LowerRows lower;
#pragma unroll
  for (int j = 0; j < 6; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      lower.left[j / 2].x[j % 2].x[i] =
          x.x[4 * j + i] * (factor[i / 2] * decays.reached[i / 2]) * decays.column[j].at[i % 2];
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float value = x.x[4 * n + i];
#pragma unroll
      for (int other = 1; other < 4; ++other)
        if (warp == other) value = x.x[8 * other + 4 * n + i];
      const int right = Square::col(4 * n + i) - Square::row(i) + 16 * warp;
      lower.diagonal.x[n].x[i] =
          right > (Strict ? -1 : 0) ? 0.0f : value * (factor[i / 2] * decays.diagonal[n][i]);
    }
  return lower;
}

/// Rows of this warp on and below the diagonal, rounded.
WYVERN_DEVICE void store_lower(const LowerRows& x, const SquareTile& to, int warp) {
#pragma unroll
  for (int s = 0; s < 3; ++s)
    if (s < warp) sm90::store_block(x.left[s], to, 16 * warp, 16 * s);
  sm90::store_block(x.diagonal, to, 16 * warp, 16 * warp);
}

/// 1 / sqrt(sum of squares + 1e-6) of a row of a tile.
WYVERN_DEVICE float scale_of_row(const KeyTile& tile, int row) {
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
  for (int col = 0; col < K; col += 8) {
    const auto words = load<4>(reinterpret_cast<const uint32*>(tile.at(row, col)));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float low = to_float(DTYPE{static_cast<uint16>(words.at[i] & 0xFFFFU)});
      const float high = to_float(DTYPE{static_cast<uint16>(words.at[i] >> 16U)});
      sum[i] = fused_multiply_add(high, high, fused_multiply_add(low, low, sum[i]));
    }
  }
  return reciprocal_sqrt((sum[0] + sum[1]) + (sum[2] + sum[3]) + 1e-6f);
}

/// Multiplies the scales of rows into their factors: a thread a row of keys or of queries.
WYVERN_DEVICE void normalize(const Block& b, int buffer) {
  const int thread = thread_index() % 128;
  const int row = thread % kRows;
  if (thread < kRows) {
    const float scale = scale_of_row(b.keys(buffer), row);
    b.factors<kLayout.key>(buffer)[row] = scale;
    b.factors<kLayout.row>(buffer)[row] *= scale;
    b.factors<kLayout.erase>(buffer)[row] *= scale;
    b.factors<kLayout.update>(buffer)[row] *= scale;
#pragma unroll
    for (int i = 0; i < 3; ++i)
      if (row < 16 * (i + 1)) b.factors<kLayout.left>(buffer)[8 * i * (i + 1) + row] *= scale;
  } else {
    const float scale = scale_of_row(b.queries(buffer), row);
    b.factors<kLayout.query>(buffer)[row] *= scale;
    b.factors<kLayout.output_factor>(buffer)[row] *= scale;
  }
}

/// Every chunk whose turn it is, from chunk `helper` on.
WYVERN_DEVICE void prepare_chunks(const Block& b, int helper) {
  const int warp = sm90::uniform(warp_index()) % 4;
  auto inverse = sm90::UnitLowerInverse::at<kLayout.inversion>(
      b.shared + helper * kLayout.inversion_bytes, 4 + 3 * helper);
  Position at;
  if (helper == 1) at.advance();
#pragma unroll 1
  for (int c = helper; c < b.chunks; c += kHelpers) {
    const int slot = c % kHelpers;
    // Copies need not land in order: that the buffer's last chunk is gone tells its phase from this
    // one's.
    sm90::barrier_wait(b.barrier<kLayout.free>(at.buffer), at.parity ^ 1U);
    sm90::barrier_wait(b.barrier<kLayout.loaded>(at.buffer), at.parity);
    const auto keys = sm90::rows_of(b.keys(at.buffer));
    Square product;
    sm90::begin_products(product);
    sm90::multiply<K>(product, sm90::rows_of(b.queries(at.buffer)), keys, false);
    sm90::wgmma_commit();
    sm90::barrier_wait(b.barrier<kLayout.scaled>(at.buffer), at.parity);
    if constexpr (QK_L2NORM) {
      normalize(b, at.buffer);
      sm90::sync_named(2 + helper, 128);
    }
    const int r[2] = {Square::row(0), Square::row(2)};
    const float* const query = b.factors<kLayout.query>(at.buffer);
    const float* const key = b.factors<kLayout.row>(at.buffer);
    const float of_query[2] = {query[r[0]], query[r[1]]};
    const float of_key[2] = {key[r[0]], key[r[1]]};
    const Decays decays(b, at.buffer, warp);
    sm90::end_products<0>(product);
    if (c >= kHelpers) sm90::barrier_wait(b.barrier<kLayout.taken>(slot), (c / kHelpers + 1) % 2);
    store_lower(finish<false>(product, decays, warp, of_query), b.scores(slot), warp);

    sm90::begin_products(product);
    sm90::multiply<K>(product, keys, keys, false);
    sm90::wgmma_commit();
    sm90::end_products<0>(product);
    const LowerRows A = finish<true>(product, decays, warp, of_key);
    sm90::barrier_arrive(b.barrier<kLayout.free>(at.buffer));
    inverse.take(A.left, A.diagonal);
    inverse.invert(b.inverse(slot), warp);
    sm90::hand_over(b.barrier<kLayout.ready>(slot));
    inverse.release();
#pragma unroll
    for (int i = 0; i < kHelpers; ++i) at.advance();
  }
}

// ---- the state
// ------------------------------------------------------------------------------------

using State = sm90::Accumulator<K>;
using Columns = sm90::Accumulator<kRows>;  // of V, one for each row of a chunk

/// Factors of the rows of a chunk, for this thread's columns of `Columns`.
struct RowFactors {
  Float2 x[8];

  WYVERN_DEVICE explicit RowFactors(const float* from) {
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = load<2>(from + Columns::col(4 * j));
  }
  /// For element i of `Columns`.
  WYVERN_DEVICE float of(int i) const { return x[i / 4].at[i % 2]; }
};

/// Where lanes' rows of four 8 x 8 matrices lie in a tile of a chunk's rows by columns of V: first
/// this warp's 16 columns of rows 8 j to 8 j + 7, then those of the eight rows that follow.
WYVERN_DEVICE DTYPE* matrices_at(const SquareTile& tile, int j) {
  const int lane = lane_index();
  return tile.at(8 * j + lane / 16 * 8 + lane % 8, warp_index() % 4 * 16 + lane / 8 % 2 * 8);
}

/// What makes u = beta v - beta exp(G) k S of k S: loaded before products begin, because while they
/// stream their operands each wait for shared memory is hundreds of clocks.
struct Residual {
  uint32 values[4][4];
  RowFactors beta, erase;

  WYVERN_DEVICE Residual(const Block& b, int buffer)
      : beta(b.factors<kLayout.beta>(buffer)), erase(b.factors<kLayout.erase>(buffer)) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      load_matrix_x4_transposed(values[j], matrices_at(b.values(buffer), 2 * j));
  }
  WYVERN_DEVICE void apply(Columns& x) const {
#pragma unroll
    for (int i = 0; i < Columns::kCount; ++i) {
      const uint32 pair = values[i / 8][i / 2 % 4];
      const DTYPE v{static_cast<uint16>(i % 2 == 0 ? pair & 0xFFFFU : pair >> 16U)};
      x.x[i] = fused_multiply_add(erase.of(i), x.x[i], beta.of(i) * to_float(v));
    }
  }
};

/// The output of a chunk: by a tensor copy, or row by row where the sequence ends in it.
WYVERN_DEVICE void store_output(const Block& b, const Columns& x, int chunk, const TensorMap& o_map,
                                DTYPE* o) {
  constexpr int kName = 1;  // of the barrier
  const int thread = thread_index() % 128;
  const SquareTile tile = b.output(chunk % kOutputs);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32 packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) packed[i] = pack<DTYPE>(x.x[8 * j + 2 * i], x.x[8 * j + 2 * i + 1]);
    sm90::store_matrix_x4_transposed(matrices_at(tile, 2 * j), packed);
  }
  sm90::fence_proxy_async();
  if (thread == 0) sm90::bulk_wait_read<0>();
  sm90::sync_named(kName, 128);
  const int64 token = b.token + chunk * kRows;
  const int rows = b.rows(chunk);
  if (rows == kRows) {
    if (thread == 0) {
      sm90::tensor_store(o_map, {0, static_cast<int>(token), b.tile, b.head}, tile.data);
      sm90::bulk_commit();
    }
    return;
  }
#pragma unroll 1
  for (int i = thread; i < rows * 8; i += 128)
    store_vector(o + ((token + i / 8) * HV + b.head) * V + b.tile * kColumns + i % 8 * 8,
                 load<8>(tile.at(i / 8, i % 8 * 8)));
}

/// The state, and of a chunk V' and what the state gives to its output.
struct StateWalk {
  const Block& b;
  State state;
  Columns x, y;

  /// Starts x = k S for the chunk in `at`.
  WYVERN_DEVICE void start(const Position& at, const sm90::FragmentA<DTYPE, K>& packed) {
    sm90::begin_products(x);
    sm90::multiply(x, packed, sm90::rows_of(b.keys(at.buffer)), false);
    sm90::wgmma_commit();
  }

  /// With x under way and y free: makes x = V' and y = q S, and the state decay.
  WYVERN_DEVICE void enter(const Position& at, int chunk, sm90::FragmentA<DTYPE, K>& packed) {
    sm90::Barrier* const ready = b.barrier<kLayout.ready>(chunk % kHelpers);
    const uint32 parity = static_cast<uint32>(chunk / kHelpers % 2);
    // With norms the factors are there only when the chunk is prepared.
    if constexpr (QK_L2NORM)
      sm90::barrier_wait(ready, parity);
    else
      sm90::barrier_wait(b.barrier<kLayout.scaled>(at.buffer), at.parity);
    const Residual residual(b, at.buffer);
    const float decay = array_at<kLayout.decay>(b.shared)[at.buffer];
    sm90::begin_products(y);
    sm90::multiply(y, packed, sm90::rows_of(b.queries(at.buffer)), false);
    sm90::wgmma_commit();
    sm90::end_products<1>(x);
    residual.apply(x);
    sm90::FragmentA<DTYPE, kRows> u(x);
    // What was read of the tile was read before the tile is free for the next copy.
    sm90::fence_proxy_async();
    if constexpr (!QK_L2NORM) sm90::barrier_wait(ready, parity);
    sm90::begin_products(x);
    sm90::multiply(x, u, sm90::rows_of(b.inverse(chunk % kHelpers)), true);
    sm90::wgmma_commit();
    if constexpr (SCALAR_GATE) {
#pragma unroll
      for (int i = 0; i < State::kCount; ++i) state.x[i] *= decay;
    }
    sm90::end_products<0>(x);
    sm90::pin(y.x);
    u.hold();
    packed.hold();
  }

  /// Starts the state's update by a chunk's V' and then the rest of its output.
  WYVERN_DEVICE void leave(const Position& at, int chunk, sm90::FragmentA<DTYPE, kRows>& values) {
    const RowFactors rate(b.factors<kLayout.update>(at.buffer));
    const RowFactors factor(b.factors<kLayout.output_factor>(at.buffer));
    Columns scaled;
#pragma unroll
    for (int i = 0; i < Columns::kCount; ++i) scaled.x[i] = x.x[i] * rate.of(i);
    sm90::FragmentA<DTYPE, kRows> update(scaled);
    sm90::begin_products(state);
    sm90::multiply(state, update, sm90::columns_of(b.keys(at.buffer)), true);
    sm90::wgmma_commit();
#pragma unroll
    for (int i = 0; i < Columns::kCount; ++i) y.x[i] *= factor.of(i);
    sm90::begin_products(y);
    sm90::multiply(y, values, sm90::rows_of(b.scores(chunk % kHelpers)), true);
    sm90::wgmma_commit();
    sm90::end_products<1>(state);
    update.hold();
    sm90::barrier_arrive(b.barrier<kLayout.free>(at.buffer));
  }
};

WYVERN_DEVICE void walk_state(StateWalk& walk, const TensorMap& o_map, DTYPE* o) {
  const Block& b = walk.b;
  Position at;
  sm90::barrier_wait(b.barrier<kLayout.loaded>(at.buffer), at.parity);
  {
    sm90::FragmentA<DTYPE, K> packed(walk.state);
    walk.start(at, packed);
    walk.enter(at, 0, packed);
  }
#pragma unroll 1
  for (int c = 0; c < b.chunks; ++c) {
    sm90::FragmentA<DTYPE, kRows> values(walk.x);
    walk.leave(at, c, values);
    at.advance();
    if (c + 1 == b.chunks) {
      sm90::end_products<0>(walk.y);
      values.hold();
      store_output(b, walk.y, c, o_map, o);
      break;
    }
    sm90::barrier_wait(b.barrier<kLayout.loaded>(at.buffer), at.parity);
    sm90::FragmentA<DTYPE, K> packed(walk.state);
    walk.start(at, packed);
    sm90::end_products<1>(walk.y);
    values.hold();
    sm90::barrier_arrive(b.barrier<kLayout.taken>(c % kHelpers));
    if (c >= b.warm) store_output(b, walk.y, c, o_map, o);
    walk.enter(at, c + 1, packed);
  }
}

// ---- the block ----------------------------------------------------------------------------------

WYVERN_DEVICE void begin_block(const Block& b) {
  if (thread_index() == 0) {
    for (int i = 0; i < kStages; ++i) {
      sm90::barrier_init(b.barrier<kLayout.loaded>(i), 32);
      sm90::barrier_init(b.barrier<kLayout.scaled>(i), 64);
      sm90::barrier_init(b.barrier<kLayout.free>(i), 256);
    }
    for (int i = 0; i < kHelpers; ++i) {
      sm90::barrier_init(b.barrier<kLayout.ready>(i), 128);
      sm90::barrier_init(b.barrier<kLayout.taken>(i), 128);
    }
    sm90::barrier_init(b.barrier<kLayout.landed>(0), 1);
    sm90::fence_barrier_init();
  }
  // Above the diagonal both stay as they are here.
  auto* const words = reinterpret_cast<uint32*>(b.shared + kLayout.inverse.offset);
  for (int i = thread_index(); i < 2 * kHelpers * SquareTile::kBytes / 4; i += kThreads)
    words[i] = 0;
  sm90::fence_proxy_async();
  sync_block();
}

WYVERN_KERNEL(kThreads, 1) {
  Block b;
  b.shared = sm90::swizzled_memory();
  b.tile = block_index() % kTilesV;
  b.head = block_index() / kTilesV % HV;
  const int sequences = static_cast<int>(e.N);
  b.sequence = block_index() / kTilesV / HV % sequences;
  const Sequence sequence =
      locate_sequence<VARLEN, kRows>(b.sequence, e, seq_offsets, chunk_offsets);
  GateForm form{e.gate_floor, 0.0f, 0.0f};
  if constexpr (GATE_IN_KERNEL) {
    form.A_log = A_log[b.head];
    if constexpr (HAS_DT_BIAS) form.bias = dt_bias[b.head];
  }

  // Without a gate older states always count.
  const int shares = SCALAR_GATE ? block_count() / (kTilesV * HV * sequences) : 1;
  const int share = shares - 1 - block_index() / (kTilesV * HV * sequences);
  static_cast<SharedWalk&>(b) = share_out<kRows>(sequence, share, shares, [&](int first) {
    if constexpr (!SCALAR_GATE) return first;
    return warm_up<kRows, kThreads, 32>(first, b.factors<kLayout.G>(0), [&](int last) {
      const int t = last - lane_index();
      return t < 0 ? 0.0f : stretch(sequence.token + t, b.head, form, g, beta, k);
    });
  });
  if (b.chunks == 0 && !b.to_end) return;
  begin_block(b);

  const int warp = sm90::uniform(warp_index());
  const int warpgroup = warp / 4;
  if (warpgroup == 0) {
    sm90::lower_registers<kLoaderRegisters>();
    if (b.chunks == 0) return;
    if (warp == 0) bring_tiles(b, q_map, k_map, v_map);
    if (warp >= 2) scale_rows(b, e.scale, form, g, beta);
  } else if (warpgroup <= kHelpers) {
    sm90::lower_registers<kHelperRegisters>();
    prepare_chunks(b, warpgroup - 1);
  } else {
    sm90::raise_registers<kStateRegisters>();
    const int64 state_start = (int64{b.sequence} * HV + b.head) * K * V;
    StateWalk walk{b, {}, {}, {}};
    if constexpr (INITIAL_STATE) {
      if (b.from_start)
        sm90::visit_state<V, STATE_V_FIRST>(
            walk.state, b.tile * kColumns,
            [from = initial_state + state_start](int offset, float& x) {
              x = to_float(from[offset]);
            });
    }
    if (b.chunks > 0) walk_state(walk, o_map, o);
    if constexpr (FINAL_STATE) {
      if (b.to_end)
        sm90::visit_state<V, STATE_V_FIRST>(
            walk.state, b.tile * kColumns,
            [to = final_state + state_start](int offset, float& x) { to[offset] = x; });
    }
    if (thread_index() % 128 == 0) sm90::bulk_wait_read<0>();
  }
}
