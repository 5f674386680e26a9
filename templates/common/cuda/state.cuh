// A strip of the transposed state in registers: sixteen value columns x all of K, as accumulator
// pieces, and the same for sixteen columns of V'. Transposed, because then the state is the left
// operand of S^T W^T and V'^T that of V'^T K, and neither ever visits shared memory.
#pragma once

#include "common/cuda/mma.cuh"

/// Value column (of 16) behind row `row` of a piece. The order is free, as rows meet only their own
/// row of other strips; this one gives a lane four neighbouring columns after transpose_8x8.
WYVERN_DEVICE int strip_col(int row) { return row % 8 / 2 * 4 + row / 8 * 2 + row % 2; }

/// Offset of element (k, v) in a caller's state of KeyDim x ValueDim.
template <bool ValuesFirst, int KeyDim, int ValueDim>
WYVERN_DEVICE int64 state_offset(int k, int v) {
  return ValuesFirst ? int64{v} * KeyDim + k : int64{k} * ValueDim + v;
}

/// Writes the eight rows of a transposed piece: element (value column c, j) goes to
/// to[j * stride + c], for j < rows and c < cols. Rows of the output start at multiples of Align
/// elements from a 16-byte-aligned base.
template <int Align, class T>
WYVERN_DEVICE void store_transposed(T* to, int64 stride, const Piece& piece, int rows, int cols) {
  if constexpr (kHalf<T> && Align % 4 == 0) {
    const uint32 low = transpose_8x8(pack<T>(piece.x[0], piece.x[1]));
    const uint32 high = transpose_8x8(pack<T>(piece.x[2], piece.x[3]));
    const int row = lane_index() / 4;
    const int col = lane_index() % 4 * 4;
    if (row < rows && col < cols)
      *reinterpret_cast<Vector<uint32, 2>*>(to + row * stride + col) = {{low, high}};
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = piece_col(i);
      const int col = strip_col(piece_row(i));
      if (row < rows && col < cols) to[row * stride + col] = from_float<T>(piece.x[i]);
    }
  }
}

/// The transpose of rows row..row+7, columns col..col+15 of a tile, as a piece of a strip.
template <class T, int Rows, int Cols>
WYVERN_DEVICE Piece load_transposed(const Tile<T, Rows, Cols>& tile, int row, int col) {
  Piece piece;
  if constexpr (kHalf<T>) {
    const auto words = *reinterpret_cast<const Vector<uint32, 2>*>(
        tile.at(row + lane_index() / 4, col + lane_index() % 4 * 4));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32 pair = transpose_8x8(words.at[half]);
      piece.x[2 * half] = to_float(T{static_cast<uint16>(pair & 0xFFFFU)});
      piece.x[2 * half + 1] = to_float(T{static_cast<uint16>(pair >> 16U)});
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      piece.x[i] = *tile.at(row + piece_col(i), col + strip_col(piece_row(i)));
  }
  return piece;
}
