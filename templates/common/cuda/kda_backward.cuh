// The gradients of kda through the state and the WY representation, per chunk. X = Tinv^T dU is
// the gradient of diag(beta) (V - (exp(G) K) S), S the entering state; dS' that of the leaving one.
#pragma once

#include "common/cuda/kda_intra_backward.cuh"

/// Starts copying Rows x Cols gates; rows from `rows` on repeat the last one, so that differences
/// of a chunk's rows are never above 0. Other terms as load_tile's.
template <int Threads, int Align, int Rows, int Cols>
WYVERN_DEVICE void load_gates(const Tile<float, Rows, Cols>& tile, const float* source,
                              int64 row_stride, int rows, int cols) {
  constexpr int kBytes = vector_bytes<float>(Align);
  constexpr int kVector = kBytes / 4;
  constexpr int kPerRow = round_up(Cols, 16) / kVector;
#pragma unroll
  for (int first = 0; first < Rows * kPerRow; first += Threads) {
    const int row = (first + thread_index()) / kPerRow;
    const int col = (first + thread_index()) % kPerRow * kVector;
    if (row < Rows)
      load_vector<kBytes>(tile.at(row, col), source + smaller(row, rows - 1) * row_stride + col,
                          col < cols);
  }
}

/// Starts copying a chunk's K tile: `rows` rows, `cols` columns that count.
template <int Threads, int Key, int KeyHeads, int ValueHeads, class T, int Size, int Cols>
WYVERN_DEVICE void load_key_tile(const KeyTile<T, Size, Cols>& tile, const T* q, const T* k,
                                 const float* Gk, int rows, int cols) {
  load_tile<Threads, Key>(tile.q, q, int64{KeyHeads} * Key, rows, cols);
  load_tile<Threads, Key>(tile.k, k, int64{KeyHeads} * Key, rows, cols);
  load_gates<Threads, Key>(tile.G, Gk, int64{ValueHeads} * Key, rows, cols);
}

/// Fills the factors of Size rows, 0 past `rows`. `beta` as the tensor holds it.
template <int Threads, int Size, bool Scaled, bool Sigmoid, bool Negative, class Beta>
WYVERN_DEVICE void fill_factors(const RowFactors& to, const Beta* beta, int64 beta_stride,
                                const float* q_rstd, const float* k_rstd, int64 rstd_stride,
                                int rows) {
  for (int r = thread_index(); r < Size; r += Threads) {
    to.beta[r] =
        r < rows ? activate_beta<Sigmoid, Negative>(beta[r * beta_stride]) : 0.0f;
    if constexpr (Scaled) {
      to.q_rstd[r] = r < rows ? q_rstd[r * rstd_stride] : 0.0f;
      to.k_rstd[r] = r < rows ? k_rstd[r * rstd_stride] : 0.0f;
    }
  }
}

/// Reads what store_pair writes: 16 rows x 16 columns, zeros past `rows` and `cols`.
template <int Align, class T>
WYVERN_DEVICE void load_pair(const T* from, int64 stride, Piece& left, Piece& right, int rows,
                             int cols) {
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    Piece& piece = i < 4 ? left : right;
    const int r = piece_row(i % 4);
    const int col = i / 4 * 8 + piece_col(0);
    const T* const at = from + r * stride + col;
    piece.x[i % 4] = piece.x[i % 4 + 1] = 0.0f;
    if (r >= rows) continue;
    if constexpr (Align % 2 == 0) {
      if (col < cols) {
        const auto x = load<2>(at);
        piece.x[i % 4] = to_float(x.at[0]);
        piece.x[i % 4 + 1] = to_float(x.at[1]);
      }
    } else {
      if (col < cols) piece.x[i % 4] = to_float(at[0]);
      if (col + 1 < cols) piece.x[i % 4 + 1] = to_float(at[1]);
    }
  }
}

/// Calls put(strip, col, left, right) with X = Tinv^T dU, sixteen columns a warp at a time and
/// sixteen rows a call, and leaves X in dU's place.
template <Precision P, int Warps, class T, int Size, int Cols, class Put>
WYVERN_DEVICE void solve_transposed(const Tile<T, Size, Size>& Tinv, const Tile<T, Size, Cols>& dU,
                                    Put&& put) {
  for (int col = warp_index() * 16; col < Cols; col += Warps * 16) {
    Piece x[Size / 16][2];
#pragma unroll
    for (int depth = 0; depth < Size; depth += kDepth<T>) {
      const auto b = load_right(dU, depth, col);
#pragma unroll
      for (int strip = 0; strip <= depth / 16; ++strip)
        multiply<P>(x[strip][0], x[strip][1], load_left_transposed(Tinv, depth, strip * 16), b);
    }
    sync_warp();
#pragma unroll
    for (int strip = 0; strip < Size / 16; ++strip) {
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          *reinterpret_cast<Vector<T, 2>*>(
              dU.at(strip * 16 + piece_row(2 * half), col + n * 8 + piece_col(0))) =
              Vector<T, 2>{{from_float<T>(x[strip][n].x[2 * half]),
                            from_float<T>(x[strip][n].x[2 * half + 1])}};
      put(strip, col, x[strip][0], x[strip][1]);
    }
  }
}

/// left right^T over sixteen rows of each, added to 16 x 16 elements.
template <Precision P, class T, int Size, int Cols>
WYVERN_DEVICE void multiply_rows(Piece& d0, Piece& d1, const Tile<T, Size, Cols>& left, int row,
                                 const Tile<T, Size, Cols>& right, int col) {
#pragma unroll 4
  for (int depth = 0; depth < Cols; depth += kDepth<T>)
    multiply<P>(d0, d1, load_left(left, row, depth), load_right_transposed(right, depth, col));
}

/// Calls put(i, j, is_dA, left, right) with the 16 x 16 blocks of scale dO V'^T and -X V'^T on and
/// below the diagonal, what is above it selected away (dA's: what is on it too), and zeros for the
/// others.
template <Precision P, int Warps, class T, int Size, int Cols, class Put>
WYVERN_DEVICE void gradients_of_products(const Tile<T, Size, Cols>& dO,
                                         const Tile<T, Size, Cols>& X,
                                         const Tile<T, Size, Cols>& values, float scale,
                                         Put&& put) {
  constexpr int kBlocks = Size / 16;
#pragma unroll 1
  for (int task = warp_index(); task < 2 * kBlocks * kBlocks; task += Warps) {
    const bool is_dA = task % 2 != 0;
    const int i = task / 2 / kBlocks;
    const int j = task / 2 % kBlocks;
    Piece piece[2];
    if (j <= i)
      multiply_rows<P>(piece[0], piece[1], is_dA ? X : dO, i * 16, values, j * 16);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int distance = (i - j) * 16 + piece_row(k) - n * 8 - piece_col(k);
        const float x = piece[n].x[k] * (is_dA ? -1.0f : scale);
        piece[n].x[k] = distance > 0 || (distance == 0 && !is_dA) ? x : 0.0f;
      }
    put(i, j, is_dA, piece[0], piece[1]);
  }
}

/// A K tile of the entering state and of the gradient of the leaving one; shared memory.
template <class T, int Rows, int Cols>
struct StateTile {
  Tile<T, Rows, Cols> h, dh;
};

/// end[c] = exp(G_C) dS' . S over the values of key channel c.
template <int Threads, class T, int Size, int Rows, int Cols>
WYVERN_DEVICE void chunk_end_products(const StateTile<T, Rows, Cols>& states,
                                      const Tile<float, Size, Rows>& G, float* end) {
  const int part = lane_index() % 8;
#pragma unroll
  for (int first = 0; first < Rows; first += Threads / 8) {
    const int c = first + thread_index() / 8;
    float sum = 0.0f;
    if (c < Rows)
      for (int v = 2 * part; v < Cols; v += 16) {
        const Float2 a = load_two(states.h, c, v);
        const Float2 b = load_two(states.dh, c, v);
        sum = fused_multiply_add(a.at[0], b.at[0], sum);
        sum = fused_multiply_add(a.at[1], b.at[1], sum);
      }
    for (int mask = 1; mask < 8; mask *= 2) sum += shuffle_xor(sum, mask);
    if (c < Rows && part == 0) end[c] = decay(*G.at(Size - 1, c)) * sum;
  }
}

/// The parts of gradients of keys and queries that go through states.
template <class T, Precision P, int Size, int Cols, int Values, bool Scaled>
struct InterBackward {
  KeyTile<T, Size, Cols> tile;
  RowFactors rows;
  StateTile<T, Cols, Values> states;
  Tile<T, Size, Values> dO, values, X;

  /// Sets the gradients of rows of `strip` in N times sixteen columns from `col`, the chunk-end term
  /// left out; sums[c] is what column c gives to that: the sum of k exp(G_C - G) (V' dS'^T) over
  /// the strip's rows but the chunk's `last`, which gives and takes the same.
  template <int N>
  WYVERN_DEVICE void set(KeyGradients (&d)[N], float (&dbeta)[2], float* sums, int strip, int col,
                         int last, float scale) const {
    multiply_states(d, strip, col);
#pragma unroll
    for (int pair = 0; pair < N; ++pair)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int c = col + pair * 16 + n * 8 + piece_col(0);
        const Float2 G_end = load_two(tile.G, Size - 1, c);
        float end[2] = {0.0f, 0.0f};
#pragma unroll
        for (int half = 0; half < 2; ++half)
          finish(d[pair].dq[n].x + 2 * half, d[pair].dk[n].x + 2 * half,
                 d[pair].dG[n].x + 2 * half, dbeta[half], end, G_end,
                 strip * 16 + piece_row(2 * half), c, last, scale);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          for (int mask = 4; mask < 32; mask *= 2) end[j] += shuffle_xor(end[j], mask);
          if (lane_index() < 4) sums[c + j] = end[j];
        }
      }
  }

 private:
  /// dq = dO S^T, dk = V' dS'^T, dG = X S^T.
  template <int N>
  WYVERN_DEVICE void multiply_states(KeyGradients (&d)[N], int strip, int col) const {
#pragma unroll 4
    for (int depth = 0; depth < Values; depth += kDepth<T>) {
      const auto a_o = load_left(dO, strip * 16, depth);
      const auto a_v = load_left(values, strip * 16, depth);
      const auto a_x = load_left(X, strip * 16, depth);
#pragma unroll
      for (int pair = 0; pair < N; ++pair) {
        const auto h = load_right_transposed(states.h, depth, col + pair * 16);
        const auto dh = load_right_transposed(states.dh, depth, col + pair * 16);
        multiply<P>(d[pair].dq[0], d[pair].dq[1], a_o, h);
        multiply<P>(d[pair].dG[0], d[pair].dG[1], a_x, h);
        multiply<P>(d[pair].dk[0], d[pair].dk[1], a_v, dh);
      }
    }
  }

  /// Two neighbouring columns c, c + 1 of row r.
  WYVERN_DEVICE void finish(float* dq, float* dk, float* dG, float& dbeta, float (&end)[2],
                            const Float2& G_end, int r, int c, int last, float scale) const {
    const Float2 G = load_two(tile.G, r, c);
    const Float2 q = load_two(tile.q, r, c);
    const Float2 k = load_two(tile.k, r, c);
    const float beta = rows.beta[r];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float q_r = Scaled ? q.at[j] * rows.q_rstd[r] : q.at[j];
      const float k_r = Scaled ? k.at[j] * rows.k_rstd[r] : k.at[j];
      const float from_start = decay(G.at[j]);
      const float dw = -from_start * dG[j];  // gradient of beta k, through W
      dq[j] *= scale * from_start;
      const float to_end = dk[j] * decay(G_end.at[j] - G.at[j]);
      const float through_w = beta * dw;
      dbeta += k_r * dw;
      dk[j] = to_end + through_w;
      const float given = r == last ? 0.0f : k_r * to_end;
      dG[j] = q_r * dq[j] + k_r * through_w - given;
      end[j] += given;
    }
  }
};

/// Adds the chunk-end term of sixteen columns to row `last` of the strip: `end`, and the sums of
/// all strips in their order.
template <int Strips, int Cols>
WYVERN_DEVICE void add_chunk_end(KeyGradients& d, const float* end, const float* sums, int last) {
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (piece_row(i) != last) continue;
      const int c = n * 8 + piece_col(i);
      float sum = end[c];
      for (int strip = 0; strip < Strips; ++strip) sum += sums[strip * Cols + c];
      d.dG[n].x[i] += sum;
    }
}

/// Writes the sums over rows of what four lanes hold of each: sum[half] is this lane's part of row
/// lane / 4 + 8 * half.
WYVERN_DEVICE void store_row_sums(float (&sum)[2], float* to) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] += shuffle_xor(sum[half], 1);
    sum[half] += shuffle_xor(sum[half], 2);
    if (lane_index() % 4 == 0) to[piece_row(2 * half)] = sum[half];
  }
}

/// The derivative of activate_beta, from its result.
template <bool Sigmoid, bool Negative>
WYVERN_DEVICE float beta_slope(float beta) {
  if constexpr (!Sigmoid) return 1.0f;
  return beta * (1.0f - (Negative ? 0.5f : 1.0f) * beta);
}
