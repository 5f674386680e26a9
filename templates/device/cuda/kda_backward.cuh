// The gradients of kda through the state and the WY representation, per chunk. X = Tinv^T dU is
// the gradient of diag(beta) (V - (exp(G) K) S), S the entering state; dS' that of the leaving one.
#pragma once

#include "device/cuda/kda_intra_backward.cuh"

namespace wyvern::cuda::kda {

/// Calls put(strip, col, left, right) with X = Tinv^T dU, sixteen columns a warp at a time and
/// sixteen rows a call, and leaves X in dU's place.
template <Precision P, int Warps, class T, int Size, int Cols, class Put>
WYVERN_DEVICE void solve_transposed(const Tile<T, Size, Size>& Tinv, const Tile<T, Size, Cols>& dU,
                                    Put&& put) {
  for (int col = warp_index() * 16; col < Cols; col += Warps * 16) {
    Accumulator x[Size / 16][2];
#pragma unroll
    for (int depth = 0; depth < Size; depth += kDepth<T>) {
      const auto b = load_b(dU, depth, col);
#pragma unroll
      for (int strip = 0; strip <= depth / 16; ++strip)
        multiply<P>(x[strip][0], x[strip][1], load_a_transposed(Tinv, strip * 16, depth), b);
    }
    sync_warp();
#pragma unroll
    for (int strip = 0; strip < Size / 16; ++strip) {
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          *reinterpret_cast<Vector<T, 2>*>(dU.at(strip * 16 + accumulator_row(2 * half),
                                                 col + n * 8 + accumulator_col(0))) = Vector<T, 2>{
              {from_float<T>(x[strip][n].x[2 * half]), from_float<T>(x[strip][n].x[2 * half + 1])}};
      put(strip, col, x[strip][0], x[strip][1]);
    }
  }
}

/// left right^T over sixteen rows of each, added to 16 x 16 elements.
template <Precision P, class T, int Size, int Cols>
WYVERN_DEVICE void multiply_rows(Accumulator& d0, Accumulator& d1, const Tile<T, Size, Cols>& left,
                                 int row, const Tile<T, Size, Cols>& right, int col) {
#pragma unroll 4
  for (int depth = 0; depth < Cols; depth += kDepth<T>)
    multiply<P>(d0, d1, load_a(left, row, depth), load_b_transposed(right, depth, col));
}

/// Calls put(i, j, is_dA, left, right) with the 16 x 16 blocks of scale dO V'^T and of_dA X V'^T on
/// and below the diagonal, what is above it selected away (dA's: what is on it too), and zeros for
/// the others.
template <Precision P, int Warps, class T, int Size, int Cols, class Put>
WYVERN_DEVICE void gradients_of_products(const Tile<T, Size, Cols>& dO,
                                         const Tile<T, Size, Cols>& X,
                                         const Tile<T, Size, Cols>& values, float scale,
                                         float of_dA, Put&& put) {
  constexpr int kBlocks = Size / 16;
#pragma unroll 1
  for (int task = warp_index(); task < 2 * kBlocks * kBlocks; task += Warps) {
    const bool is_dA = task % 2 != 0;
    const int i = task / 2 / kBlocks;
    const int j = task / 2 % kBlocks;
    Accumulator accumulator[2];
    if (j <= i)
      multiply_rows<P>(accumulator[0], accumulator[1], is_dA ? X : dO, i * 16, values, j * 16);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int distance = (i - j) * 16 + accumulator_row(k) - n * 8 - accumulator_col(k);
        const float x = accumulator[n].x[k] * (is_dA ? of_dA : scale);
        accumulator[n].x[k] = distance > 0 || (distance == 0 && !is_dA) ? x : 0.0f;
      }
    put(i, j, is_dA, accumulator[0], accumulator[1]);
  }
}

/// A K tile of the entering state and of the gradient of the leaving one; shared memory.
template <class T, int Rows, int Cols>
struct StateTile {
  Tile<T, Rows, Cols> h, dh;
};

/// end[c] = factor exp(G_C) dS' . S over the values of key channel c.
template <int Threads, class T, int Size, int Rows, int Cols>
WYVERN_DEVICE void chunk_end_products(const StateTile<T, Rows, Cols>& states,
                                      const Tile<float, Size, Rows>& G, float* end, float factor) {
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
    if (c < Rows && part == 0) end[c] = decay(*G.at(Size - 1, c)) * (sum * factor);
  }
}

/// The parts of gradients of keys, queries and rates that go through states.
template <class T, Precision P, int Size, int Cols, int Values, bool Scaled>
struct InterBackward {
  KeyTile<T, Size, Cols> tile;
  RowFactors rows;
  StateTile<T, Cols, Values> states;
  Tile<T, Size, Values> dO, values, X;
  float unit = 1.0f, d_unit = 1.0f;  ///< of S and V', of dS' and X

  /// Sets the gradients of rows of `strip` in N times sixteen columns from `col`, the chunk-end
  /// term left out; sums[c] is what column c gives to that: the sum of k exp(G_C - G) (V' dS'^T)
  /// over the strip's rows but the chunk's `last`, which adds and subtracts the same. Adds to the
  /// gradients of the rates.
  template <int N, class RateGradients, class Rates>
  WYVERN_DEVICE void set(KeyGradients (&d)[N], RateGradients& d_rates, const Rates& rates,
                         float* sums, int strip, int col, int last, float scale) const {
    multiply_states(d, strip, col);
#pragma unroll
    for (int pair = 0; pair < N; ++pair)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int c = col + pair * 16 + n * 8 + accumulator_col(0);
        const Float2 G_end = load_two(tile.G, Size - 1, c);
        float end[2] = {0.0f, 0.0f};
#pragma unroll
        for (int half = 0; half < 2; ++half)
          finish(d[pair], gradients_of(d_rates, pair), rates, half, n, end, G_end,
                 strip * 16 + accumulator_row(2 * half), c, last, scale);
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
      const auto a_o = load_a(dO, strip * 16, depth);
      const auto a_v = load_a(values, strip * 16, depth);
      const auto a_x = load_a(X, strip * 16, depth);
#pragma unroll
      for (int pair = 0; pair < N; ++pair) {
        const auto h = load_b_transposed(states.h, depth, col + pair * 16);
        const auto dh = load_b_transposed(states.dh, depth, col + pair * 16);
        multiply<P>(d[pair].dq[0], d[pair].dq[1], a_o, h);
        multiply<P>(d[pair].dG[0], d[pair].dG[1], a_x, h);
        multiply<P>(d[pair].dk[0], d[pair].dk[1], a_v, dh);
      }
    }
  }

  /// Two neighbouring columns c, c + 1 of row r: elements 2 half and 2 half + 1 of accumulators n.
  template <class RateGradients, class Rates>
  WYVERN_DEVICE void finish(KeyGradients& d, RateGradients& d_rates, const Rates& rates, int half,
                            int n, float (&end)[2], const Float2& G_end, int r, int c, int last,
                            float scale) const {
    float* const dq = d.dq[n].x + 2 * half;
    float* const dk = d.dk[n].x + 2 * half;
    float* const dG = d.dG[n].x + 2 * half;
    const Float2 G = load_two(tile.G, r, c);
    const Float2 q = load_two(tile.q, r, c);
    const Float2 k = load_two(tile.k, r, c);
    const auto rate = rates.row(r);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float q_r = Scaled ? q.at[j] * rows.q_rstd[r] : q.at[j];
      const float k_r = Scaled ? k.at[j] * rows.k_rstd[r] : k.at[j];
      const float from_start = decay(G.at[j]);
      const float both = unit * d_unit;
      const float dw = -from_start * (dG[j] * both);  // gradient of beta k, through W
      dq[j] *= scale * unit * from_start;
      const float to_end = (dk[j] * both) * decay(G_end.at[j] - G.at[j]);
      const float through_w = rate(c + j) * dw;
      add_product(d_rates, half, n, j, k_r, dw);
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
      if (accumulator_row(i) != last) continue;
      const int c = n * 8 + accumulator_col(i);
      float sum = end[c];
      for (int strip = 0; strip < Strips; ++strip) sum += sums[strip * Cols + c];
      d.dG[n].x[i] += sum;
    }
}

/// x *= y, element by element.
WYVERN_DEVICE void multiply_elements(Accumulator& x, const Accumulator& y) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x.x[i] *= y.x[i];
}

// ---- a block of a chunk and value head ----------------------------------------------------------

/// The part that kernels of a whole chunk share: dO, V' and X stay in shared memory while tiles of
/// K stream past them. S has the constants and tunables of kda_bwd_dqkg.
template <class S>
struct StateBackward {
  static constexpr int BT = S::BT, BK = S::BK, num_warps = S::num_warps, num_stages = S::num_stages;
  static constexpr int K = S::K, V = S::V;
  static constexpr Precision precision = S::precision;
  static constexpr int kThreads = num_warps * 32;
  static constexpr int kStrips = BT / 16;              // one a warp
  static constexpr int kGroups = num_warps / kStrips;  // warps side by side
  static constexpr int kCols = BK / kGroups;
  static constexpr int kTilesK = ceil_div(K, BK);
  static constexpr StateBackwardLayout<S> kLayout{S{}};
  static constexpr StateBufferLayout<S> kBuffer{S{}};

  using T = Element<S::DTYPE>;
  using Gate = Element<S::BETA_DTYPE>;
  using Inter = InterBackward<T, precision, BT, BK, TileAt<kLayout.dO>::kCols, S::QK_L2NORM>;
  using Rates = RatesOf<S, BK, kCols / 16>;
  using Keys = decltype(keys_at<kBuffer.keys>(nullptr));

  /// Inputs of the block's chunk and value head, from the chunk's first row on.
  struct Inputs {
    TokenRows<const T> q, k, v, dO;
    TokenRows<const Gate> beta, erase, write;
    const T *v_new, *Tinv;
    const float *Gk, *q_rstd, *k_rstd;
    const T *h, *dh, *dU;
    float unit, d_unit;  ///< of h and v_new, of dh and dU
    int rows;
    const Extents& e;
  };

  /// A unit of a chunk and head, whose place in the tensor is `at`.
  WYVERN_DEVICE static float unit_at(const float* units, int64 at) {
    return S::STATE_UNIT ? units[at] : 1.0f;
  }

  /// One of the buffers of the pipeline.
  struct Buffer {
    StateTile<T, BK, TileAt<kBuffer.h>::kCols> states;
    Keys tile;

    WYVERN_DEVICE explicit Buffer(unsigned char* start)
        : states{tile_at<kBuffer.h>(start), tile_at<kBuffer.dh>(start)},
          tile(keys_at<kBuffer.keys>(start)) {}
  };

  unsigned char* shared;  ///< where kLayout starts
  Inter inter;
  float* row_sums;
  float* end;
  float* column_sums;

  WYVERN_DEVICE explicit StateBackward(unsigned char* start) : shared(start) {
    inter.dO = tile_at<kLayout.dO>(start);
    inter.values = tile_at<kLayout.values>(start);
    inter.X = tile_at<kLayout.X>(start);
    inter.rows = rows_at<kLayout.rows>(start);
    row_sums = array_at<kLayout.row_sums>(start);
    end = array_at<kLayout.end>(start);
    column_sums = array_at<kLayout.column_sums>(start);
  }

  /// Starts copying K tile `index`, if there is one, as one group.
  WYVERN_DEVICE void load(const Inputs& in, int index) const {
    if (index < kTilesK) {
      const Buffer to = buffer(index);
      const int first = index * BK;
      load_tile<kThreads, V>(to.states.h, in.h + int64{first} * V, V, K - first, V);
      load_tile<kThreads, V>(to.states.dh, in.dh + int64{first} * V, V, K - first, V);
      load_key_tile<kThreads, K>(to.tile, in.q.at(0, first), in.k.at(0, first),
                                 TokenRows<const float>{in.Gk + first, in.e.HV * K}, in.rows,
                                 K - first);
      load_erase_gate<kThreads, K>(to.tile, in.erase.at(0, first), in.rows, K - first);
    }
    copy_async_commit();
  }

  /// The rates of K tile `index`, once it is there.
  WYVERN_DEVICE typename Rates::Type rates(int index) const {
    return Rates::at(buffer(index).tile, inter.rows);
  }

  /// Loads dO, V' and X to shared memory, starts to load the first K tiles, writes dv, and dwrite
  /// or returns what X gives to dbeta of row thread_index().
  WYVERN_DEVICE float begin(const Inputs& in, T* dv, Gate* dwrite) {
    inter.unit = in.unit;
    inter.d_unit = in.d_unit;
    const auto inverse = tile_at<kLayout.Tinv>(shared);
    load_tile<kThreads, BT>(inverse, in.Tinv, int64{in.e.HV} * BT, in.rows, BT);
    load_tile<kThreads, V>(inter.X, in.dU, int64{in.e.HV} * V, in.rows, V);
    copy_async_commit();
    load_tile<kThreads, V>(inter.dO, in.dO, in.rows, V);
    load_tile<kThreads, V>(inter.values, in.v_new, int64{in.e.HV} * V, in.rows, V);
    copy_async_commit();
    load_row_factors<kThreads, BT, S::QK_L2NORM>(inter.rows, in.q_rstd, in.k_rstd, in.e.H, in.rows,
                                                 [&](int r) { return row_rate<S>(in.beta, r); });
    copy_async_wait<1>();
    sync_block();

    float x_dot_v[kStrips][2] = {};
    solve_transposed<precision, num_warps>(
        inverse, inter.X, [&](int strip, int col, Accumulator& left, Accumulator& right) {
          const int rows = in.rows - strip * 16;
          const int64 at = int64{strip} * 16 * in.e.HV * V + col;
          left = scaled(left, in.d_unit);
          right = scaled(right, in.d_unit);
          Accumulator v_left, v_right;
          load_accumulators<V>(in.v.row(strip * 16) + col, in.v.stride, v_left, v_right, rows,
                               V - col);
          if constexpr (S::ERASE_WRITE) {
            Accumulator write_left, write_right;
            load_accumulators<V>(in.write.row(strip * 16) + col, in.write.stride, write_left,
                                 write_right, rows, V - col);
            multiply_elements(v_left, left);
            multiply_elements(v_right, right);
            multiply_elements(left, write_left);
            multiply_elements(right, write_right);
            store_pair<V>(dwrite + at, in.e.HV * V, v_left, v_right, rows, V - col);
            store_pair<V>(dv + at, in.e.HV * V, left, right, rows, V - col);
            return;
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            x_dot_v[strip][i / 2] += left.x[i] * v_left.x[i] + right.x[i] * v_right.x[i];
            const float rate = inter.rows.beta[strip * 16 + accumulator_row(i)];
            left.x[i] *= rate;
            right.x[i] *= rate;
          }
          store_pair<V>(dv + at, in.e.HV * V, left, right, rows, V - col);
        });
    if constexpr (!S::ERASE_WRITE)
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip)
        store_row_sums(x_dot_v[strip], row_sums + warp_index() * BT + strip * 16);
    copy_async_wait<0>();
    sync_block();
    for (int i = 0; i < num_stages; ++i) load(in, i);
    return sum_of_rows(num_warps);
  }

  /// Sets this warp's gradients in K tile `index`, once it is there. All of it but their own q, k
  /// and Gk has then been read.
  WYVERN_DEVICE void set(KeyGradients (&d)[kCols / 16], typename Rates::Gradients& d_rates,
                         int index, const Inputs& in, float scale) {
    const int strip = warp_index() % kStrips;
    const int col = warp_index() / kStrips * kCols;
    const Buffer from = buffer(index);
    inter.tile = from.tile;
    inter.states = from.states;
    copy_async_wait<num_stages - 1>();
    sync_block();
    inter.set(d, d_rates, Rates::at(from.tile, inter.rows), column_sums + strip * BK, strip, col,
              in.rows - 1, scale);
    chunk_end_products<kThreads>(inter.states, inter.tile.G, end, in.unit * in.d_unit);
    sync_block();
    const int last = in.rows - 1 - strip * 16;
    if (last < 0 || last >= 16) return;
#pragma unroll
    for (int pair = 0; pair < kCols / 16; ++pair)
      add_chunk_end<kStrips, BK>(d[pair], end + col + pair * 16, column_sums + col + pair * 16,
                                 last);
  }

  /// Joins what warps hold of dbeta: the sum for row thread_index(). Gradients of rates of one an
  /// element have been stored.
  WYVERN_DEVICE float join(RowRateGradients& dbeta) const {
    store_row_sums(dbeta, row_sums + warp_index() / kStrips * BT + warp_index() % kStrips * 16);
    sync_block();
    return sum_of_rows(kGroups);
  }
  template <int N>
  WYVERN_DEVICE float join(ElementGradients (&)[N]) const {
    return 0.0f;
  }

 private:
  WYVERN_DEVICE Buffer buffer(int index) const {
    return Buffer(shared + index % num_stages * kBuffer.bytes);
  }
  WYVERN_DEVICE float sum_of_rows(int parts) const {
    float sum = 0.0f;
    if (!S::ERASE_WRITE && thread_index() < BT)
      for (int i = 0; i < parts; ++i) sum += row_sums[i * BT + thread_index()];
    return sum;
  }
};

}  // namespace wyvern::cuda::kda
