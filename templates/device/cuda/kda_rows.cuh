// A chunk of kda in shared memory: queries, keys, gates and what its rows count by.
#pragma once

#include "device/cuda/chunk.cuh"
#include "device/cuda/kda_layout.hpp"

namespace wyvern::cuda::kda {

/// Two neighbouring elements as floats.
template <class T>
WYVERN_DEVICE Float2 load_pair(const T* from) {
  if constexpr (kSame<T, bf16>) {
    const uint32 pair = *reinterpret_cast<const uint32*>(from);
    return {{bits_float(pair << 16U), bits_float(pair & 0xFFFF0000U)}};
  } else {
    const Vector<T, 2> x = load<2>(from);
    return {{to_float(x.at[0]), to_float(x.at[1])}};
  }
}

/// Elements (row, col) and (row, col + 1) of a tile, col even.
template <class T, int Rows, int Cols>
WYVERN_DEVICE Float2 load_pair(const Tile<T, Rows, Cols>& tile, int row, int col) {
  return load_pair(tile.at(row, col));
}

/// What this lane holds of sixteen rows and eight columns as an A fragment: two neighbouring
/// elements of one row, and of the row eight below it.
template <class T, int Stride>
struct LaneRows {
  const T* first;

  WYVERN_DEVICE Float2 low() const { return load_pair(first); }
  WYVERN_DEVICE Float2 high() const { return load_pair(first + 8 * Stride); }
};

/// Rows row..row+15, columns col..col+7 of a tile.
template <class T, int Rows, int Cols>
WYVERN_DEVICE LaneRows<T, Tile<T, Rows, Cols>::kStride> lane_rows(const Tile<T, Rows, Cols>& tile,
                                                                  int row, int col) {
  return {tile.at(row + lane_index() / 4, col + lane_index() % 4 * 2)};
}

/// Size rows and Cols columns of a chunk's q, k and Gk.
///
/// Blocks take a tile of any type with these members. What A's rows are made of, and W, is a member
/// of its own: here keys, which beta scales as a factor of rows.
template <class T, int Size, int Cols>
struct KeyTile {
  static constexpr bool kErases = false;
  static constexpr int kCols = Cols;

  Tile<T, Size, Cols> q, k;
  Tile<float, Size, Cols> G;

  /// Element (r, c) of what A's rows and W are made of, before beta and the scales of rows.
  WYVERN_DEVICE float erasing(int r, int c) const { return to_float(*k.at(r, c)); }
  /// Elements (r, c) and (r, c + 1), c even.
  WYVERN_DEVICE Float2 erasing_two(int r, int c) const { return load_pair(k, r, c); }
  /// LaneRows of rows r..r+15, columns c..c+7.
  WYVERN_DEVICE auto erasing_rows(int r, int c) const { return lane_rows(k, r, c); }
};

/// Both numbers of a times those of b.
WYVERN_DEVICE Float2 product(const Float2& a, const Float2& b) {
  return {{a.at[0] * b.at[0], a.at[1] * b.at[1]}};
}

/// Products of two LaneRows.
template <class A, class B>
struct LaneProducts {
  A a;
  B b;

  WYVERN_DEVICE Float2 low() const { return product(a.low(), b.low()); }
  WYVERN_DEVICE Float2 high() const { return product(a.high(), b.high()); }
};
template <class A, class B>
LaneProducts(A, B) -> LaneProducts<A, B>;

/// The same where a gate of one number an element erases: keys erase as erase k.
template <class T, class Gate, int Size, int Cols>
struct ErasingKeyTile : KeyTile<T, Size, Cols> {
  static constexpr bool kErases = true;

  Tile<Gate, Size, Cols> gate;

  WYVERN_DEVICE float erasing(int r, int c) const {
    return to_float(*gate.at(r, c)) * to_float(*this->k.at(r, c));
  }
  WYVERN_DEVICE Float2 erasing_two(int r, int c) const {
    return product(load_pair(gate, r, c), load_pair(this->k, r, c));
  }
  WYVERN_DEVICE auto erasing_rows(int r, int c) const {
    return LaneProducts{lane_rows(gate, r, c), lane_rows(this->k, r, c)};
  }
};

/// The tile that a layout which starts at `start` has in Place.
template <KeyPlace Place>
WYVERN_DEVICE auto keys_at(unsigned char* start) {
  using T = Element<Place.q.type>;
  const KeyTile<T, Place.q.rows, Place.q.cols> keys{
      tile_at<Place.q>(start), tile_at<Place.k>(start), tile_at<Place.G>(start)};
  if constexpr (Place.erase.rows == 0)
    return keys;
  else
    return ErasingKeyTile<T, Element<Place.erase.type>, Place.q.rows, Place.q.cols>{
        keys, tile_at<Place.erase>(start)};
}

/// Starts copying a tile's erase gate where it has one: `rows` rows and `cols` columns that count.
template <int Threads, int Key, class Keys, class Gate>
WYVERN_DEVICE void load_erase_gate(const Keys& to, const TokenRows<const Gate>& erase, int rows,
                                   int cols) {
  if constexpr (Keys::kErases) load_tile<Threads, Key>(to.gate, erase, rows, cols);
}

/// Factors of a chunk's rows; the scales of queries and keys are there with QK_L2NORM.
struct RowFactors {
  float* beta;
  float* q_rstd;
  float* k_rstd;
};

/// The factors that a layout which starts at `start` has in Place.
template <RowPlace Place>
WYVERN_DEVICE RowFactors rows_at(unsigned char* start) {
  return {array_at<Place.beta>(start), array_at<Place.q_rstd>(start),
          array_at<Place.k_rstd>(start)};
}

/// beta of row r, of a kernel with the constants S; 1 where erase and write gates replace it.
template <class S, class Beta>
WYVERN_DEVICE float row_rate(const TokenRows<const Beta>& beta, int r) {
  if constexpr (S::ERASE_WRITE)
    return 1.0f;
  else
    return activate_beta<S::BETA_SIGMOID, S::NEG_EIGVAL>(*beta.row(r));
}

/// Fills in the factors of Size rows, beta from load_beta(r); 0 past the chunk's end.
template <int Threads, int Size, bool Scaled, class Beta>
WYVERN_DEVICE void load_row_factors(const RowFactors& to, const float* q_rstd, const float* k_rstd,
                                    int64 stride, int rows, Beta&& load_beta) {
  for (int r = thread_index(); r < Size; r += Threads) {
    to.beta[r] = r < rows ? load_beta(r) : 0.0f;
    if constexpr (Scaled) {
      to.q_rstd[r] = r < rows ? q_rstd[r * stride] : 0.0f;
      to.k_rstd[r] = r < rows ? k_rstd[r * stride] : 0.0f;
    }
  }
}

}  // namespace wyvern::cuda::kda
