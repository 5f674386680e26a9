// W, U, qg and kg of kda's chunks: the inverse applied to decayed keys and to values.
#pragma once

#include "device/cuda/kda_rows.cuh"
#include "device/cuda/wy.cuh"

namespace wyvern::cuda::kda {

/// Where a chunk and value head's rows of W, qg and kg begin, K elements a row, `stride` apart.
template <class T>
struct KeyOutputs {
  T* w;
  T* qg;
  T* kg;
  int64 stride;
};

/// Eight columns of sixteen rows: what W is made of, exp(G) times the erasing rows; exp(G) q and
/// exp(G_last - G) k.
struct DecayedKeys {
  Accumulator erasing, qg, kg;
};

/// Those of rows row..row+15, columns col..col+7, with the scales of rows where `Scaled`. Rows
/// after `last` are 0.
template <bool Scaled, class Keys>
WYVERN_DEVICE DecayedKeys decay_keys(const Keys& tile, const RowFactors& rows, int row, int col,
                                     int last) {
  DecayedKeys to;
  const int c = col + accumulator_col(0);
  const Float2 G_last = load_pair(tile.G, last, c);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + accumulator_row(2 * half);
    const Float2 G_r = load_pair(tile.G, r, c);
    Float2 q_r = load_pair(tile.q, r, c);
    Float2 k_r = load_pair(tile.k, r, c);
    Float2 erasing_r = tile.erasing_two(r, c);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if constexpr (Scaled) {
        q_r.at[j] *= rows.q_rstd[r];
        k_r.at[j] *= rows.k_rstd[r];
        erasing_r.at[j] *= rows.k_rstd[r];
      }
      const float decay_r = decay(G_r.at[j]);
      to.erasing.x[2 * half + j] = erasing_r.at[j] * decay_r;
      to.qg.x[2 * half + j] = q_r.at[j] * decay_r;
      to.kg.x[2 * half + j] = k_r.at[j] * decay(r <= last ? G_last.at[j] - G_r.at[j] : 0.0f);
    }
  }
  return to;
}

/// Two accumulators side by side as B fragments whose reduction runs down the sixteen rows.
template <class T>
WYVERN_DEVICE FragmentB<T> fragment_b(const Accumulator& left, const Accumulator& right) {
  FragmentB<T> b;
  b.r[0] = transpose_8x8(pack<T>(left.x[0], left.x[1]));
  b.r[1] = transpose_8x8(pack<T>(left.x[2], left.x[3]));
  b.r[2] = transpose_8x8(pack<T>(right.x[0], right.x[1]));
  b.r[3] = transpose_8x8(pack<T>(right.x[2], right.x[3]));
  return b;
}

/// Rows depth..depth+7 of beta exp(G) times the erasing rows, as a B fragment of a step; columns
/// col..col+15.
template <bool Scaled, class Keys>
WYVERN_DEVICE FragmentB<float> decayed_b(const Keys& tile, const RowFactors& rows, int depth,
                                         int col) {
  FragmentB<float> b;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int s = depth + lane_index() % 4 * 2 + i % 2;
    const int c = col + i / 2 * 8 + lane_index() / 4;
    b.r[i] = tile.erasing(s, c) * decay(*tile.G.at(s, c)) * rows.beta[s];
    if constexpr (Scaled) b.r[i] *= rows.k_rstd[s];
  }
  return b;
}

/// Tinv diag(beta) as an A fragment, from a tile that must outlive it. 16-bit ones are in
/// registers; there are too few for fp32 ones, which are loaded when used, while beta goes to the
/// B fragment.
template <class T, int Size, int Parts = 1>
struct InverseOperand : LowerOperand<T, Size, Parts> {
  using LowerOperand<T, Size, Parts>::LowerOperand;
};
template <int Size>
struct InverseOperand<float, Size, 1> {
  Tile<float, Size, Size> tile;
  const float* beta;

  WYVERN_DEVICE InverseOperand(const Tile<float, Size, Size>& inverse, const float* factor)
      : tile(inverse), beta(factor) {}

  /// sum += tile * x, x(depth) giving eight rows of sixteen columns as a B fragment.
  template <Precision P, class Rows>
  WYVERN_DEVICE void add(Accumulator (&sum)[Size / 16][2], Rows&& x) const {
#pragma unroll 1
    for (int depth = 0; depth < Size; depth += 8) {
      const FragmentB<float> b = x(depth);
#pragma unroll
      for (int strip = 0; strip < Size / 16; ++strip)
        if (strip >= depth / 16)
          multiply<P>(sum[strip][0], sum[strip][1], load_a(tile, strip * 16, depth), b);
    }
  }

  /// As LowerOperand's; fp32 has no units.
  template <Precision P, int Align, int Cols>
  WYVERN_DEVICE void apply(const Tile<float, Size, Cols>& x, int col, float* to, int64 stride,
                           int rows, int cols, float) const {
    Accumulator sum[Size / 16][2];
    add<P>(sum, [&](int depth) {
      FragmentB<float> b = load_b(x, depth, col);
#pragma unroll
      for (int i = 0; i < 4; ++i) b.r[i] *= beta[depth + lane_index() % 4 * 2 + i % 2];
      return b;
    });
#pragma unroll
    for (int strip = 0; strip < Size / 16; ++strip)
      store_pair<Align>(to + strip * 16 * stride, stride, sum[strip][0], sum[strip][1],
                        rows - strip * 16, cols);
  }
};

/// Writes columns first..first+15 of W = Tinv diag(beta) (exp(G) K), qg and kg, for a chunk of
/// `chunk_rows`: those before `cols`, of which there is at least one. The tiles hold the columns
/// from `first` at `col`.
template <Precision P, bool Scaled, int Align, class T, int Size, int Parts, class Keys>
WYVERN_DEVICE void write_keys(const InverseOperand<T, Size, Parts>& inverse, const Keys& tile,
                              const RowFactors& rows, const KeyOutputs<T>& to, int first, int col,
                              int chunk_rows, int cols) {
  Accumulator w[Size / 16][2];
#pragma unroll
  for (int depth = 0; depth < Size / 16; ++depth) {
    if (depth * 16 >= chunk_rows) break;
    const DecayedKeys left = decay_keys<Scaled>(tile, rows, depth * 16, col, chunk_rows - 1);
    const DecayedKeys right = decay_keys<Scaled>(tile, rows, depth * 16, col + 8, chunk_rows - 1);
    const int64 at = depth * 16 * to.stride + first;
    store_pair<Align>(to.qg + at, to.stride, left.qg, right.qg, chunk_rows - depth * 16, cols);
    store_pair<Align>(to.kg + at, to.stride, left.kg, right.kg, chunk_rows - depth * 16, cols);
    if constexpr (kHalf<T>) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float beta_r = rows.beta[depth * 16 + accumulator_row(i)];
        w[depth][0].x[i] += beta_r * left.erasing.x[i];
        w[depth][1].x[i] += beta_r * right.erasing.x[i];
      }
      const FragmentB<T> b = fragment_b<T>(left.erasing, right.erasing);
#pragma unroll
      for (int strip = depth; strip < Size / 16; ++strip)
#pragma unroll
        for (int part = 0; part < Parts; ++part)
          multiply<P>(w[strip][0], w[strip][1], inverse.a[part][inverse.index(strip, depth * 16)],
                      b);
    }
  }
  if constexpr (!kHalf<T>)
    inverse.template add<P>(w,
                            [&](int depth) { return decayed_b<Scaled>(tile, rows, depth, col); });
#pragma unroll
  for (int strip = 0; strip < Size / 16; ++strip)
    store_pair<Align>(to.w + strip * 16 * to.stride + first, to.stride, w[strip][0], w[strip][1],
                      chunk_rows - strip * 16, cols);
}

// ---- values -------------------------------------------------------------------------------------

/// Size rows and Cols columns of a chunk's v and write.
template <class T, class Gate, int Size, int Cols>
struct ValueTile {
  Tile<T, Size, Cols> v;
  Tile<Gate, Size, Cols> gate;

  /// write v in rows row..row+15 and columns col..col+7.
  WYVERN_DEVICE Accumulator product(int row, int col) const {
    Accumulator x;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + accumulator_row(2 * half);
      const int c = col + accumulator_col(0);
      const Float2 x_r = kda::product(load_pair(gate, r, c), load_pair(v, r, c));
      x.x[2 * half] = x_r.at[0];
      x.x[2 * half + 1] = x_r.at[1];
    }
    return x;
  }
};

/// The columns of values that a layout which starts at `start` has in Place.
template <ValuePlace Place>
WYVERN_DEVICE auto values_at(unsigned char* start) {
  if constexpr (Place.write.rows == 0)
    return tile_at<Place.v>(start);
  else
    return ValueTile<Element<Place.v.type>, Element<Place.write.type>, Place.v.rows, Place.v.cols>{
        tile_at<Place.v>(start), tile_at<Place.write>(start)};
}

/// Starts copying them, `rows` rows and `cols` columns that count, of heads of Value elements.
template <int Threads, int Value, class T, class Gate, int Size, int Cols>
WYVERN_DEVICE void load_values(const Tile<T, Size, Cols>& to, const TokenRows<const T>& v,
                               const TokenRows<const Gate>&, int rows, int cols) {
  load_tile<Threads, Value>(to, v, rows, cols);
}
template <int Threads, int Value, class T, class Gate, int Size, int Cols>
WYVERN_DEVICE void load_values(const ValueTile<T, Gate, Size, Cols>& to,
                               const TokenRows<const T>& v, const TokenRows<const Gate>& write,
                               int rows, int cols) {
  load_tile<Threads, Value>(to.v, v, rows, cols);
  load_tile<Threads, Value>(to.gate, write, rows, cols);
}

/// `x` kept within the range of T.
template <class T>
WYVERN_DEVICE Accumulator within_range(const Accumulator& x) {
  Accumulator y;
#pragma unroll
  for (int i = 0; i < 4; ++i) y.x[i] = cuda::within_range<T>(x.x[i]);
  return y;
}

/// Writes sixteen columns of U = Tinv (beta v), the tile's from `col`, in `unit` to `to`, for a
/// chunk of `rows`: those before `cols`, at least one.
template <Precision P, int Align, class T, int Size, int Parts, int Cols, class Out>
WYVERN_DEVICE void write_values(const InverseOperand<T, Size, Parts>& inverse,
                                const Tile<T, Size, Cols>& tile, int col, Out* to, int64 stride,
                                int rows, int cols, float unit) {
  inverse.template apply<P, Align>(tile, col, to, stride, rows, cols, unit);
}

/// The same of U = Tinv (write v). The inverse comes with factors of 1; where it has two parts,
/// products of v are not rounded either.
template <Precision P, int Align, class T, class Gate, int Size, int Parts, int Cols, class Out>
WYVERN_DEVICE void write_values(const InverseOperand<T, Size, Parts>& inverse,
                                const ValueTile<T, Gate, Size, Cols>& tile, int col, Out* to,
                                int64 stride, int rows, int cols, float unit) {
  Accumulator u[Size / 16][2];
  if constexpr (kHalf<T>) {
#pragma unroll
    for (int depth = 0; depth < Size / 16; ++depth) {
      if (depth * 16 >= rows) break;
      const Accumulator x[2] = {within_range<T>(tile.product(depth * 16, col)),
                                within_range<T>(tile.product(depth * 16, col + 8))};
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) u[depth][n].x[i] += x[n].x[i];
      const FragmentB<T> b = fragment_b<T>(x[0], x[1]);
#pragma unroll
      for (int strip = depth; strip < Size / 16; ++strip)
#pragma unroll
        for (int part = 0; part < Parts; ++part)
          multiply<P>(u[strip][0], u[strip][1], inverse.a[part][inverse.index(strip, depth * 16)],
                      b);
      if constexpr (Parts == 2) {
        const FragmentB<T> rest = fragment_b<T>(rounded_off<T>(x[0]), rounded_off<T>(x[1]));
#pragma unroll
        for (int strip = depth; strip < Size / 16; ++strip)
          multiply<P>(u[strip][0], u[strip][1], inverse.a[0][inverse.index(strip, depth * 16)],
                      rest);
      }
    }
  } else {
    inverse.template add<P>(u, [&](int depth) {
      FragmentB<float> b = load_b(tile.v, depth, col);
      const FragmentB<float> gate = load_b(tile.gate, depth, col);
#pragma unroll
      for (int i = 0; i < 4; ++i) b.r[i] *= gate.r[i];
      return b;
    });
  }
#pragma unroll
  for (int strip = 0; strip < Size / 16; ++strip)
    store_pair<Align>(to + strip * 16 * stride, stride, scaled(u[strip][0], 1.0f / unit),
                      scaled(u[strip][1], 1.0f / unit), rows - strip * 16, cols);
}

}  // namespace wyvern::cuda::kda
