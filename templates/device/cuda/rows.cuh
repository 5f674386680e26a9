// Work on rows of `Cols` elements that some lanes of a warp share, a power of two of them.
#pragma once

#include "device/cuda/tile.cuh"

namespace wyvern::cuda {

template <class T, int Cols>
struct RowShape {
  static constexpr int kVector = vector_bytes<T>(Cols) / static_cast<int>(sizeof(T));
  static constexpr int kPerRow = Cols / kVector;
  static constexpr int kLanes = smaller(power_of_two(kPerRow), 32);
  static constexpr int kPerLane = ceil_div(kPerRow, kLanes);
};

/// A lane's vectors of a row, as fp32.
template <class T, int Cols>
struct RowPart {
  using Shape = RowShape<T, Cols>;
  float x[Shape::kPerLane][Shape::kVector] = {};

  /// Calls visit(i, element) for the vector of index i that starts at this element of the row.
  template <class Visit>
  WYVERN_DEVICE static void for_vectors(bool active, Visit&& visit) {
#pragma unroll
    for (int i = 0; i < Shape::kPerLane; ++i) {
      const int vector = i * Shape::kLanes + lane_index() % Shape::kLanes;
      if (active && vector < Shape::kPerRow) visit(i, vector * Shape::kVector);
    }
  }
  WYVERN_DEVICE void add(const T* row, bool active) {
    for_vectors(active, [&](int i, int element) {
      const auto in = load<Shape::kVector>(row + element);
#pragma unroll
      for (int j = 0; j < Shape::kVector; ++j) x[i][j] += to_float(in.at[j]);
    });
  }
  WYVERN_DEVICE void store(T* row, bool active) const {
    for_vectors(active, [&](int i, int element) {
      Vector<T, Shape::kVector> out;
#pragma unroll
      for (int j = 0; j < Shape::kVector; ++j) out.at[j] = from_float<T>(x[i][j]);
      store_vector(row + element, out);
    });
  }
};

/// Row `row` of a tensor with `heads` rows of Cols elements a token, tokens `stride` elements
/// apart.
template <int Cols, class T>
WYVERN_DEVICE T* row_of_head(T* first, int64 stride, int64 row, int heads) {
  return first + row / heads * stride + row % heads * Cols;
}

/// The sum of `Count` rows, one after another in memory.
template <int Count, class T, int Cols>
WYVERN_DEVICE void add_rows(RowPart<T, Cols>& sum, const T* rows, bool active) {
#pragma unroll
  for (int i = 0; i < Count; ++i) sum.add(rows + i * Cols, active);
}

/// The inner product of two rows, in every lane that shares them; all lanes of the warp take part.
template <class T, int Cols>
WYVERN_DEVICE float dot(const RowPart<T, Cols>& a, const RowPart<T, Cols>& b) {
  using Shape = RowShape<T, Cols>;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < Shape::kPerLane; ++i)
#pragma unroll
    for (int j = 0; j < Shape::kVector; ++j) sum = fused_multiply_add(a.x[i][j], b.x[i][j], sum);
#pragma unroll
  for (int mask = Shape::kLanes / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  return sum;
}

/// dy, the gradient of y = x rstd, becomes that of x: rstd (dy - y (y . dy)).
template <class T, int Cols>
WYVERN_DEVICE void l2norm_gradient(const RowPart<T, Cols>& x, float rstd, RowPart<T, Cols>& dy) {
  using Shape = RowShape<T, Cols>;
  const float along = rstd * dot(x, dy);
#pragma unroll
  for (int i = 0; i < Shape::kPerLane; ++i)
#pragma unroll
    for (int j = 0; j < Shape::kVector; ++j)
      dy.x[i][j] = rstd * (dy.x[i][j] - x.x[i][j] * rstd * along);
}

}  // namespace wyvern::cuda
