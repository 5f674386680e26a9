// Products of 16-row tiles on tensor cores. One layout of accumulators serves every dtype and
// precision: of each 16x8 accumulator a lane owns (row g, columns 2t and 2t+1) and (row g+8, the
// same columns), where g = lane / 4 and t = lane % 4. That layout is also the A fragment's, so a
// product's result feeds the next product without leaving registers.
#pragma once

#include "device/cuda/tile.cuh"

namespace wyvern::cuda {

/// A 16x8 accumulator. Wider ones are arrays of these, from left to right.
struct Accumulator {
  float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
};

WYVERN_DEVICE Accumulator scaled(const Accumulator& a, float factor) {
  return {{a.x[0] * factor, a.x[1] * factor, a.x[2] * factor, a.x[3] * factor}};
}

/// Row (of 16) and column (of 8) of element i of an Accumulator in this lane.
WYVERN_DEVICE int accumulator_row(int i) { return lane_index() / 4 + (i / 2) * 8; }
WYVERN_DEVICE int accumulator_col(int i) { return lane_index() % 4 * 2 + i % 2; }

/// The remainder of `x` rounded to T.
template <class T>
WYVERN_DEVICE Accumulator rounded_off(const Accumulator& x) {
  Accumulator rest;
#pragma unroll
  for (int i = 0; i < 4; ++i) rest.x[i] = x.x[i] - to_float(from_float<T>(x.x[i]));
  return rest;
}

/// `x` clamped to the range of T: a factor may be large only because its other operand is small.
template <class T>
WYVERN_DEVICE float within_range(float x) {
  if constexpr (kSame<T, fp16>) return maximum(-65504.0f, -maximum(-65504.0f, -x));
  return x;
}

/// Depth of one step of the reduction.
template <class T>
inline constexpr int kDepth = kHalf<T> ? 16 : 8;

/// A fragment of a step, 16 rows x kDepth. In fp32 the lane holds reduction indices 2t and 2t+1
/// where the instruction has t and t+4: a permutation shared with FragmentB, chosen so that a
/// Accumulator and pairs of adjacent floats fit without shuffles.
template <class T>
struct FragmentA {
  uint32 r[4];
};
template <>
struct FragmentA<float> {
  float r[4];
};

/// B fragments of a step for two neighbouring accumulators: kDepth x 16 columns.
template <class T>
struct FragmentB {
  uint32 r[4];  // accumulator 0: r[0], r[1]; accumulator 1: r[2], r[3]
};
template <>
struct FragmentB<float> {
  float r[4];
};

// ---- A fragments ------------------------------------------------------------------------------

/// Rows row..row+15, reduction indices depth..: stored row by row.
template <class T, int Rows, int Cols>
WYVERN_DEVICE FragmentA<T> load_a(const Tile<T, Rows, Cols>& tile, int row, int depth) {
  FragmentA<T> a;
  const int lane = lane_index();
  if constexpr (kHalf<T>) {
    load_matrix_x4(a.r, tile.at(row + lane % 16, depth + lane / 16 * 8));
  } else {
    const Float2 low = load<2>(tile.at(row + lane / 4, depth + lane % 4 * 2));
    const Float2 high = load<2>(tile.at(row + lane / 4 + 8, depth + lane % 4 * 2));
    a.r[0] = low.at[0];
    a.r[1] = high.at[0];
    a.r[2] = low.at[1];
    a.r[3] = high.at[1];
  }
  return a;
}

/// The same of a tile stored transposed: element (row, depth) at tile(depth, row).
template <class T, int Rows, int Cols>
WYVERN_DEVICE FragmentA<T> load_a_transposed(const Tile<T, Rows, Cols>& tile, int row, int depth) {
  FragmentA<T> a;
  const int lane = lane_index();
  if constexpr (kHalf<T>) {
    load_matrix_x4_transposed(a.r,
                              tile.at(depth + lane % 8 + lane / 16 * 8, row + lane / 8 % 2 * 8));
  } else {
    const T* const first = tile.at(depth + lane % 4 * 2, row + lane / 4);
    a.r[0] = first[0];
    a.r[1] = first[8];
    a.r[2] = first[tile.kStride];
    a.r[3] = first[tile.kStride + 8];
  }
  return a;
}

/// From accumulators: `next` continues `accumulator` by eight columns and is used for
/// 16-bit only.
template <class T>
WYVERN_DEVICE FragmentA<T> fragment_a(const Accumulator& accumulator,
                                      [[maybe_unused]] const Accumulator& next) {
  FragmentA<T> a;
  if constexpr (kHalf<T>) {
    a.r[0] = pack<T>(accumulator.x[0], accumulator.x[1]);
    a.r[1] = pack<T>(accumulator.x[2], accumulator.x[3]);
    a.r[2] = pack<T>(next.x[0], next.x[1]);
    a.r[3] = pack<T>(next.x[2], next.x[3]);
  } else {
    a.r[0] = accumulator.x[0];
    a.r[1] = accumulator.x[2];
    a.r[2] = accumulator.x[1];
    a.r[3] = accumulator.x[3];
  }
  return a;
}

/// Step `step` of an A fragment that is a row of accumulators.
template <class T, int N>
WYVERN_DEVICE FragmentA<T> fragment_a(const Accumulator (&accumulators)[N], int step) {
  if constexpr (kHalf<T>)
    return fragment_a<T>(accumulators[2 * step], accumulators[2 * step + 1]);
  else
    return fragment_a<T>(accumulators[step], accumulators[step]);
}

/// What rounding dropped from step `step` of such a 16-bit operand: the two together hold twice the
/// digits.
template <class T, int N>
WYVERN_DEVICE FragmentA<T> fragment_a_rest(const Accumulator (&accumulators)[N], int step,
                                           const FragmentA<T>& head) {
  FragmentA<T> rest;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* const x = accumulators[2 * step + i / 2].x + i % 2 * 2;
    rest.r[i] = pack<T>(x[0] - to_float(T{static_cast<uint16>(head.r[i] & 0xFFFFU)}),
                        x[1] - to_float(T{static_cast<uint16>(head.r[i] >> 16U)}));
  }
  return rest;
}

// ---- B fragments -----------------------------------------------------------------------------

/// Stored as the reduction index runs down the rows: element (depth, col) at tile(depth, col).
template <class T, int Rows, int Cols>
WYVERN_DEVICE FragmentB<T> load_b(const Tile<T, Rows, Cols>& tile, int depth, int col) {
  FragmentB<T> b;
  const int lane = lane_index();
  if constexpr (kHalf<T>) {
    load_matrix_x4_transposed(b.r, tile.at(depth + lane % 16, col + lane / 16 * 8));
  } else {
    const T* const first = tile.at(depth + lane % 4 * 2, col + lane / 4);
    b.r[0] = first[0];
    b.r[1] = first[tile.kStride];
    b.r[2] = first[8];
    b.r[3] = first[tile.kStride + 8];
  }
  return b;
}

/// Stored transposed: element (depth, col) at tile(col, depth).
template <class T, int Rows, int Cols>
WYVERN_DEVICE FragmentB<T> load_b_transposed(const Tile<T, Rows, Cols>& tile, int depth, int col) {
  FragmentB<T> b;
  const int lane = lane_index();
  if constexpr (kHalf<T>) {
    load_matrix_x4(b.r, tile.at(col + lane % 8 + lane / 16 * 8, depth + lane / 8 % 2 * 8));
  } else {
    const T* const first = tile.at(col + lane / 4, depth + lane % 4 * 2);
    const Float2 low = load<2>(first);
    const Float2 high = load<2>(first + 8 * tile.kStride);
    b.r[0] = low.at[0];
    b.r[1] = low.at[1];
    b.r[2] = high.at[0];
    b.r[3] = high.at[1];
  }
  return b;
}

// ---- products -----------------------------------------------------------------------------------

/// One 16x8x8 step in fp32 FMAs. Operands come from their owners by shuffles. A loop, because steps
/// are unrolled by the hundred around it.
WYVERN_DEVICE void multiply_ieee(float (&d)[4], const float (&a)[4], float b0, float b1) {
  const int lane = lane_index();
  const int quad = lane / 4 * 4;
  const int column = lane % 4 * 8;  // lane that owns (0, 2t) of the B fragment
#pragma unroll 1
  for (int pair = 0; pair < 4; ++pair) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const float low = shuffle(a[2 * odd], quad + pair);
      const float high = shuffle(a[2 * odd + 1], quad + pair);
      const float left = shuffle(odd != 0 ? b1 : b0, column + pair);
      const float right = shuffle(odd != 0 ? b1 : b0, column + 4 + pair);
      d[0] = fused_multiply_add(low, left, d[0]);
      d[1] = fused_multiply_add(low, right, d[1]);
      d[2] = fused_multiply_add(high, left, d[2]);
      d[3] = fused_multiply_add(high, right, d[3]);
    }
  }
}

/// fp32 operands as a step needs them: rounded to tf32, and what rounding dropped for tf32x3.
template <Precision P>
struct Split {
  float head[4], tail[4];

  WYVERN_DEVICE explicit Split(const float (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      head[i] = P == Precision::ieee ? x[i] : to_tf32(x[i]);
      tail[i] = P == Precision::tf32x3 ? to_tf32(x[i] - head[i]) : 0.0f;
    }
  }
};

template <Precision P>
WYVERN_DEVICE void multiply_split(float (&d)[4], const Split<P>& a, const Split<P>& b,
                                  int accumulator) {
  const float b0 = b.head[2 * accumulator];
  const float b1 = b.head[2 * accumulator + 1];
  if constexpr (P == Precision::ieee) {
    multiply_ieee(d, a.head, b0, b1);
  } else {
    if constexpr (P == Precision::tf32x3) {
      mma_m16n8k8_tf32(d, a.tail, b0, b1);
      mma_m16n8k8_tf32(d, a.head, b.tail[2 * accumulator], b.tail[2 * accumulator + 1]);
    }
    mma_m16n8k8_tf32(d, a.head, b0, b1);
  }
}

/// d0 += a * (first eight columns of b), d1 += a * (the others).
template <Precision P, class T>
WYVERN_DEVICE void multiply(Accumulator& d0, Accumulator& d1, const FragmentA<T>& a,
                            const FragmentB<T>& b) {
  if constexpr (kHalf<T>) {
    mma_m16n8k16<T>(d0.x, a.r, b.r[0], b.r[1]);
    mma_m16n8k16<T>(d1.x, a.r, b.r[2], b.r[3]);
  } else {
    const Split<P> left(a.r);
    const Split<P> right(b.r);
    multiply_split<P>(d0.x, left, right, 0);
    multiply_split<P>(d1.x, left, right, 1);
  }
}

// ---- results to memory --------------------------------------------------------------------------

/// Writes two neighbouring accumulators, 16 rows x 16 columns, to rows `stride` elements apart, up
/// to `rows` rows and `cols` columns. Rows start at multiples of Align elements from a
/// 16-byte-aligned base. Where that allows, neighbouring lanes trade halves so that each writes
/// four columns at once.
template <int Align, class T>
WYVERN_DEVICE void store_pair(T* to, int64 stride, const Accumulator& left,
                              const Accumulator& right, int rows, int cols) {
  const int row = lane_index() / 4;
  const int t = lane_index() % 4;
  if constexpr (kHalf<T> && Align % 4 == 0) {
    const bool odd = t % 2 != 0;
    const int col = (odd ? 8 : 0) + t / 2 * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32 a = pack<T>(left.x[2 * half], left.x[2 * half + 1]);
      const uint32 b = pack<T>(right.x[2 * half], right.x[2 * half + 1]);
      const uint32 other = shuffle_xor(odd ? a : b, 1);
      if (row + 8 * half < rows && col < cols)
        store_words(to + (row + 8 * half) * stride + col, {odd ? other : a, odd ? b : other});
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const Accumulator& accumulator = i < 4 ? left : right;
      const int r = row + i % 4 / 2 * 8;
      const int col = i / 4 * 8 + 2 * t;
      if (r >= rows) continue;
      T* const at = to + r * stride + col;
      if constexpr (sizeof(T) == 4 && Align % 2 == 0) {
        if (col < cols) store_vector(at, Float2{{accumulator.x[i % 4], accumulator.x[i % 4 + 1]}});
      } else {
        if (col < cols) at[0] = from_float<T>(accumulator.x[i % 4]);
        if (col + 1 < cols) at[1] = from_float<T>(accumulator.x[i % 4 + 1]);
      }
    }
  }
}

}  // namespace wyvern::cuda
