// A strip of the transposed state in registers: sixteen value columns x all of K, as accumulators,
// and the same for sixteen columns of V'. Transposed, because then the state gives the A fragments
// of S^T W^T, and V'^T those of V'^T K, and neither ever visits shared memory.
#pragma once

#include "device/cuda/chunk.cuh"
#include "device/cuda/mma.cuh"

namespace wyvern::cuda {

/// Value column (of 16) behind row `row` of an accumulator. The order is free, as rows interact
/// only their own row of other strips; this one gives a lane four neighbouring columns after
/// transpose_8x8.
WYVERN_DEVICE int strip_col(int row) { return row % 8 / 2 * 4 + row / 8 * 2 + row % 2; }

/// Offset of element (k, v) in a caller's state of KeyDim x ValueDim.
template <bool ValuesFirst, int KeyDim, int ValueDim>
WYVERN_DEVICE int64 state_offset(int k, int v) {
  return ValuesFirst ? int64{v} * KeyDim + k : int64{k} * ValueDim + v;
}

/// Writes the eight rows of a transposed accumulator: element (value column c, j) goes to
/// to[j * stride + c], for j < rows and c < cols. Rows of the output start at multiples of Align
/// elements from a 16-byte-aligned base.
template <int Align, class T>
WYVERN_DEVICE void store_transposed(T* to, int64 stride, const Accumulator& accumulator, int rows,
                                    int cols) {
  if constexpr (kHalf<T> && Align % 4 == 0) {
    const uint32 low = transpose_8x8(pack<T>(accumulator.x[0], accumulator.x[1]));
    const uint32 high = transpose_8x8(pack<T>(accumulator.x[2], accumulator.x[3]));
    const int row = lane_index() / 4;
    const int col = lane_index() % 4 * 4;
    if (row < rows && col < cols) store_words(to + row * stride + col, {low, high});
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = accumulator_col(i);
      const int col = strip_col(accumulator_row(i));
      if (row < rows && col < cols) to[row * stride + col] = from_float<T>(accumulator.x[i]);
    }
  }
}

/// The transpose of rows row..row+7, columns col..col+15 of a tile, as an accumulator of a strip.
template <class T, int Rows, int Cols>
WYVERN_DEVICE Accumulator load_transposed(const Tile<T, Rows, Cols>& tile, int row, int col) {
  Accumulator accumulator;
  if constexpr (kHalf<T>) {
    const auto words = *reinterpret_cast<const Vector<uint32, 2>*>(
        tile.at(row + lane_index() / 4, col + lane_index() % 4 * 4));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32 pair = transpose_8x8(words.at[half]);
      accumulator.x[2 * half] = to_float(T{static_cast<uint16>(pair & 0xFFFFU)});
      accumulator.x[2 * half + 1] = to_float(T{static_cast<uint16>(pair >> 16U)});
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      accumulator.x[i] = *tile.at(row + accumulator_col(i), col + strip_col(accumulator_row(i)));
  }
  return accumulator;
}

/// The state of sixteen value columns and Keys key channels, transposed.
template <int Keys>
struct StateStrip {
  Accumulator accumulator[Keys / 8];

  /// Calls visit(k, v, element), v relative to the strip.
  template <class Visit>
  WYVERN_DEVICE void for_each(Visit&& visit) {
#pragma unroll
    for (int n = 0; n < Keys / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        visit(n * 8 + accumulator_col(i), strip_col(accumulator_row(i)), accumulator[n].x[i]);
  }

  /// Multiplies key channels k and k + 1 by the two factors factors(k), for every k of this lane.
  template <class Factors>
  WYVERN_DEVICE void scale_channels(Factors&& factors) {
#pragma unroll
    for (int n = 0; n < Keys / 8; ++n) {
      const Float2 factor = factors(n * 8 + accumulator_col(0));
#pragma unroll
      for (int i = 0; i < 4; ++i) accumulator[n].x[i] *= factor.at[i % 2];
    }
  }
};

/// rows += S^T x^T: a column for each row of x, whose first Keys columns are the state's keys. The
/// state enters as the sum of Parts numbers of T.
template <Precision P, int Parts = 1, class T, int Strips, int Size, int Keys, int Cols>
WYVERN_DEVICE void multiply_rows(Accumulator (&rows)[Strips][Size / 8],
                                 const StateStrip<Keys> (&state)[Strips],
                                 const Tile<T, Size, Cols>& x) {
#pragma unroll
  for (int step = 0; step < Keys / kDepth<T>; ++step) {
    FragmentA<T> a[Strips][Parts];
#pragma unroll
    for (int i = 0; i < Strips; ++i) {
      a[i][0] = fragment_a<T>(state[i].accumulator, step);
      if constexpr (Parts == 2)
        a[i][1] = fragment_a<T>(rounded_off<T>(state[i].accumulator[2 * step]),
                                rounded_off<T>(state[i].accumulator[2 * step + 1]));
    }
#pragma unroll
    for (int n = 0; n < Size / 8; n += 2) {
      const auto b = load_b_transposed(x, step * kDepth<T>, n * 8);
#pragma unroll
      for (int i = 0; i < Strips; ++i)
#pragma unroll
        for (int part = 0; part < Parts; ++part)
          multiply<P>(rows[i][n], rows[i][n + 1], a[i][part], b);
    }
  }
}

/// S^T += a x for one step of rows of x, its first Keys columns: `a` holds their columns of what is
/// transposed there.
template <Precision P, class T, int Strips, int Size, int Keys, int Cols>
WYVERN_DEVICE void add_rows(StateStrip<Keys> (&state)[Strips], const FragmentA<T> (&a)[Strips],
                            const Tile<T, Size, Cols>& x, int step) {
#pragma unroll
  for (int n = 0; n < Keys / 8; n += 2) {
    const auto b = load_b(x, step * kDepth<T>, n * 8);
#pragma unroll
    for (int i = 0; i < Strips; ++i)
      multiply<P>(state[i].accumulator[n], state[i].accumulator[n + 1], a[i], b);
  }
}

/// S^T <- S^T diag(exp(end)): one gate for the head, or with Vector one for each key channel.
template <bool Vector, int Strips, int Keys>
WYVERN_DEVICE void decay_state(StateStrip<Keys> (&state)[Strips], const float* end) {
  Float2 factor;
  if constexpr (!Vector) factor.at[0] = factor.at[1] = decay(end[0]);
#pragma unroll
  for (int i = 0; i < Strips; ++i)
    state[i].scale_channels([&](int k) {
      if constexpr (!Vector) return factor;
      const Float2 gate = load<2>(end + k);
      return Float2{{decay(gate.at[0]), decay(gate.at[1])}};
    });
}

/// Calls visit(offset, element) for every element of the strips that a [K,V] state tensor has, or a
/// [V,K] one with ValuesFirst: `offset` is where. The strips are value columns from `first_v` on.
template <bool ValuesFirst, int K, int V, int Strips, int Keys, class Visit>
WYVERN_DEVICE void visit_state(StateStrip<Keys> (&state)[Strips], int first_v, Visit&& visit) {
#pragma unroll
  for (int i = 0; i < Strips; ++i)
    state[i].for_each([&](int k, int col, float& x) {
      const int v = first_v + i * 16 + col;
      if (k < K && v < V) visit(state_offset<ValuesFirst, K, V>(k, v), x);
    });
}

/// Writes the strips to sixteen columns each of a [K,V] tensor, of which there are `cols` from `to`
/// on.
template <int K, int V, class T, int Strips, int Keys>
WYVERN_DEVICE void store_state(T* to, const StateStrip<Keys> (&state)[Strips], int cols) {
#pragma unroll
  for (int i = 0; i < Strips; ++i)
#pragma unroll
    for (int n = 0; n < Keys / 8; ++n)
      store_transposed<V>(to + n * 8 * V + i * 16, V, state[i].accumulator[n], K - n * 8,
                          cols - i * 16);
}

/// The same for strips of rows of a tensor of width Align: `rows` of them, `stride` elements apart.
template <int Align, class T, int Strips, int N>
WYVERN_DEVICE void store_rows(T* to, int64 stride, const Accumulator (&accumulators)[Strips][N],
                              int rows, int cols) {
#pragma unroll
  for (int i = 0; i < Strips; ++i)
#pragma unroll
    for (int n = 0; n < N; ++n)
      store_transposed<Align>(to + n * 8 * stride + i * 16, stride, accumulators[i][n],
                              rows - n * 8, cols - i * 16);
}

}  // namespace wyvern::cuda
