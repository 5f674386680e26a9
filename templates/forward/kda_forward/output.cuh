// kda_forward's epilogues: a slice's output as it is computed, or with the norm of o and its gate.
// By the warps of a consumer warpgroup, each with 16 columns of V of the slice's rows, transposed.
#pragma once

#include "forward/kda_forward/prepare.cuh"

using Columns = sm90::Accumulator<kSlice>;  ///< of V, one for each row of a slice

/// Factors of a slice's rows, for this thread's columns of `Columns`.
struct RowFactors {
  Float2 x[2];

  WYVERN_DEVICE explicit RowFactors(const float* from)
      : x{load<2>(from + Columns::col(0)), load<2>(from + Columns::col(4))} {}
  /// For element i of `Columns`.
  WYVERN_DEVICE float of(int i) const { return x[i / 4].at[i % 2]; }
};

/// A warp's 16 columns and its own shared memory for 16 rows of them, in which they are transposed:
/// a lane gets half a row, in one piece.
struct Strip {
  const Block& b;
  int lane;
  int first;  ///< column, of the block's

  WYVERN_DEVICE DTYPE* piece(int row, int half) const {
    DTYPE* const own = array_at<kLayout.output>(b.shared) + first * kSlice;
    return own + row * 16 + (half ^ (row / 4 % 2)) * 8;
  }
  /// This lane's piece.
  WYVERN_DEVICE DTYPE* own() const { return piece(lane / 2, lane % 2); }
  /// Its row, of the block's, and where that is in a tensor [tokens, HV, V].
  WYVERN_DEVICE int row(int slice) const { return slice * kSlice + lane / 2; }
  template <class T>
  WYVERN_DEVICE T* in(const TokenRows<T>& rows, int row) const {
    return rows.row(b.token + row) + b.head * V + b.tile * BV + first + lane % 2 * 8;
  }

  /// Writes x, with the factors of queries, when all lanes have read what was there.
  WYVERN_DEVICE void write(const Columns& x, const RowFactors& query) const {
    uint32 packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      packed[i] = pack<DTYPE>(x.x[2 * i] * query.of(2 * i), x.x[2 * i + 1] * query.of(2 * i + 1));
    sync_warp();
    sm90::store_matrix_x4_transposed(piece(lane / 16 * 8 + lane % 8, lane / 8 % 2), packed);
    sync_warp();
  }
};

/// Stores the output as it is, in the consumer's columns from `column` on.
struct PlainOutput {
  TokenRows<DTYPE> rows;

  /// Before the first slice with output.
  WYVERN_DEVICE void start(const Block&, int, int) const {}

  /// When a slice's products are done.
  WYVERN_DEVICE void store(const Block& b, int column, const Columns& x, const RowFactors& query,
                           int slice) const {
    const Strip strip{b, lane_index(), column + warp_index() % 4 * 16};
    strip.write(x, query);
    const int row = strip.row(slice);
    if (row >= b.tokens) return;
    store_vector(strip.in(rows, row), load<8>(strip.own()));
  }

  /// While the next slice's update is under way, when registers are free; or after the last one.
  WYVERN_DEVICE void finish(const Block&, int, int) const {}
};

/// Normalizes and gates the output of two consumers, which have all columns of V. A lane has its
/// part of the gate's input copied to shared memory a slice ahead.
template <class S>
struct NormOutput {
  static constexpr int kWarps = 4 * kConsumers, kName = 1;  ///< of a named barrier

  TokenRows<DTYPE> rows;
  TokenRows<const DTYPE> gate;
  const float* weight;
  float eps;

  WYVERN_DEVICE void start(const Block& b, int column, int slice) const {
    load_gate(strip_of(b, column), slice);
    copy_async_commit();
  }

  /// Commits no copy: lanes without a row have none, and finish() counts groups.
  WYVERN_DEVICE void store(const Block& b, int column, const Columns& x, const RowFactors& query,
                           int slice) const {
    const Strip strip = strip_of(b, column);
    strip.write(x, query);
    load_gate(strip, slice + 1);
  }

  WYVERN_DEVICE void finish(const Block& b, int column, int slice) const {
    const Strip strip = strip_of(b, column);
    const auto y = load<8>(strip.own());
    const float rstd = norm_rstd<V>(sum_squares(strip, y, slice), eps);
    copy_async_commit();
    copy_async_wait<1>();
    const int row = strip.row(slice);
    if (row >= b.tokens) return;
    const auto z = load<8>(gate_of(strip, slice));
    NormWeights<8> weights;
    weights.load_from(weight + strip.first + strip.lane % 2 * 8);
    store_vector(strip.in(rows, row), normalized<S>(y, z, weights, rstd));
  }

 private:
  /// Addresses are made anew in each slice: consumers have no registers for them beside products.
  WYVERN_DEVICE static Strip strip_of(const Block& b, int column) {
    const int thread = sm90::opaque(thread_index());
    return {b, thread % 32, column + thread / 32 % 4 * 16};
  }

  WYVERN_DEVICE static DTYPE* gate_of(const Strip& strip, int slice) {
    return array_at<kLayout.gate>(strip.b.shared) +
           ((slice % 2 * BV + strip.first) * kSlice + strip.lane * 8);
  }
  /// Returns early, as PlainOutput::store does: without a branch behind what it writes, ptxas moves
  /// loads of the next slice's values in front of it, runs out of registers and serializes
  /// products.
  WYVERN_DEVICE void load_gate(const Strip& strip, int slice) const {
    const int row = strip.row(slice);
    if (row >= strip.b.tokens) return;
    copy_async<16>(gate_of(strip, slice), strip.in(gate, row), true);
  }

  /// The sum of squares of the lane's row of a slice. Sums of slices of either parity have places
  /// of their own: a warp that is at the next barrier has read those of the last.
  WYVERN_DEVICE static float sum_squares(const Strip& strip, const Vector<DTYPE, 8>& y, int slice) {
    float own = 0.0f;
    add_squares(y, own);
    own = sum_lanes<2>(own);
    float* const row =
        array_at<kLayout.squares>(strip.b.shared) + (slice % 2 * kSlice + strip.lane / 2) * kWarps;
    if (strip.lane % 2 == 0) row[strip.first / 16] = own;
    sync_named(kName, 32 * kWarps);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; i += 4) {
      const auto four = load<4>(row + i);
      sum += (four.at[0] + four.at[1]) + (four.at[2] + four.at[3]);
    }
    return sum;
  }
};
