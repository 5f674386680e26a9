// The gradients of kda's products inside a chunk. With E_rs,c = exp(G_rc - G_sc) for rows r >= s:
//
//   dq_r += sum_s dAqk_rs E_rs k_s      dk_s += sum_r (dAqk_rs q_r + dA_rs beta_r k_r) E_rs
//   dk_r += beta_r p_r,  dbeta_r += k_r . p_r,  with p_r = sum_s dA_rs E_rs k_s
//
// by blocks of sixteen rows. E is split at an anchor row between r and s, so that each factor rides
// on one operand of a product: the later block's first row, or, inside a block, its middle row.
//
// What a pair (r, s) adds to the gate's gradient in row r it subtracts in row s, and the sum over
// later rows that follows cancels most of it. So both see the same rounded operands, and the
// diagonal, where r = s, counts in dq and dk only.
//
// beta_r is what a class of rates says: one number a row, or one for each of the row's elements.
#pragma once

#include "device/cuda/kda_rows.cuh"
#include "device/cuda/mma.cuh"

namespace wyvern::cuda::kda {

/// `x` as a product in T and P sees it.
template <class T, Precision P>
WYVERN_DEVICE float as_operand(float x) {
  if constexpr (kHalf<T>) return to_float(from_float<T>(x));
  return P == Precision::tf32 ? to_tf32(x) : x;
}

/// One number for each element of a B fragment that this lane holds.
template <class T>
struct FactorsOfB {
  static constexpr int kCount = kHalf<T> ? 8 : 4;
  float at[kCount];

  /// From of(depth, col), counted from the operand's corner.
  template <class Of>
  WYVERN_DEVICE explicit FactorsOfB(Of&& of) {
    const int depth = lane_index() % 4 * 2;
    const int col = lane_index() / 4;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      at[i] = kHalf<T> ? of(depth + i % 2 + i / 2 % 2 * 8, col + i / 4 * 8)
                       : of(depth + i % 2, col + i / 2 * 8);
  }
};

/// `raw` as `To`: scale(depth, col, x) of every element x, times its factor.
template <class To, class From, class Scale>
WYVERN_DEVICE FragmentB<To> scaled(const FragmentB<From>& raw, const FactorsOfB<To>& factors,
                                   Scale&& scale) {
  FragmentB<To> b;
  const int depth = lane_index() % 4 * 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int col = lane_index() / 4 + i / 2 * 8;
    if constexpr (kHalf<From>) {
      const int d = depth + i % 2 * 8;
      const float low = to_float(From{static_cast<uint16>(raw.r[i] & 0xFFFFU)});
      const float high = to_float(From{static_cast<uint16>(raw.r[i] >> 16U)});
      b.r[i] = pack<To>(factors.at[2 * i] * scale(d, col, low),
                        factors.at[2 * i + 1] * scale(d + 1, col, high));
    } else {
      b.r[i] = factors.at[i] * scale(depth + i % 2, col, raw.r[i]);
    }
  }
  return b;
}

/// Elements (row, col) and (row, col + 1) of a tile, col even: load_pair, but that 16-bit elements
/// are converted one by one, which leaves these kernels fewer instructions.
template <class T, int Rows, int Cols>
WYVERN_DEVICE Float2 load_two(const Tile<T, Rows, Cols>& tile, int row, int col) {
  const auto x = load<2>(tile.at(row, col));
  return {{to_float(x.at[0]), to_float(x.at[1])}};
}

/// One rate a row. A class of rates gives those of a row, by column of the tile.
struct RowRates {
  const float* beta;

  struct Row {
    float beta;
    WYVERN_DEVICE float operator()(int) const { return beta; }
  };
  WYVERN_DEVICE Row row(int r) const { return {beta[r]}; }
};

/// One rate an element, the erase gate.
template <class Gate, int Size, int Cols>
struct ElementRates {
  Tile<Gate, Size, Cols> gate;

  struct Row {
    const Gate* gates;
    WYVERN_DEVICE float operator()(int c) const { return to_float(gates[c]); }
  };
  WYVERN_DEVICE Row row(int r) const { return {gate.at(r, 0)}; }
};

/// Gradients of sixteen rows and sixteen columns.
struct KeyGradients {
  Accumulator dq[2], dk[2], dG[2];
};

/// Gradients of rates of one a row: this lane's part of rows lane / 4 + 8 * half.
using RowRateGradients = float[2];
/// Of rates of one an element: of sixteen rows and sixteen columns.
struct ElementGradients {
  Accumulator x[2];
};

/// Adds a b to the gradient of the rate of element 2 half + j of accumulator n.
WYVERN_DEVICE void add_product(RowRateGradients& dbeta, int half, int, int, float a, float b) {
  dbeta[half] += a * b;
}
WYVERN_DEVICE void add_product(ElementGradients& d, int half, int n, int j, float a, float b) {
  d.x[n].x[2 * half + j] += a * b;
}

/// Where pair `pair` of accumulators, sixteen columns, adds its part of the rates' gradients: with
/// one rate a row, all to the same.
WYVERN_DEVICE RowRateGradients& gradients_of(RowRateGradients& dbeta, int) { return dbeta; }
template <int N>
WYVERN_DEVICE ElementGradients& gradients_of(ElementGradients (&d)[N], int pair) {
  return d[pair];
}

/// Makes ready for the next columns: gradients of rates of one an element begin again.
WYVERN_DEVICE void begin_columns(RowRateGradients&) {}
template <int N>
WYVERN_DEVICE void begin_columns(ElementGradients (&d)[N]) {
#pragma unroll
  for (int pair = 0; pair < N; ++pair) d[pair] = {};
}

/// Starts copying Rows x Cols gates; rows from `rows` on repeat the last one, so that differences
/// of a chunk's rows are never above 0. Other terms as load_tile's.
template <int Threads, int Align, int Rows, int Cols>
WYVERN_DEVICE void load_gate_tile(const Tile<float, Rows, Cols>& tile, const float* source,
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

/// Starts copying a chunk's K tile: `rows` rows, `cols` columns that count. Rows of G past them
/// repeat the last one.
template <int Threads, int Key, class T, int Size, int Cols>
WYVERN_DEVICE void load_key_tile(const KeyTile<T, Size, Cols>& tile, const TokenRows<const T>& q,
                                 const TokenRows<const T>& k, const TokenRows<const float>& Gk,
                                 int rows, int cols) {
  load_tile<Threads, Key>(tile.q, q, rows, cols);
  load_tile<Threads, Key>(tile.k, k, rows, cols);
  load_gate_tile<Threads, Key>(tile.G, Gk.row(0), Gk.stride, rows, cols);
}

/// Reads what store_pair writes: 16 rows x 16 columns, zeros past `rows` and `cols`.
template <int Align, class T>
WYVERN_DEVICE void load_accumulators(const T* from, int64 stride, Accumulator& left,
                                     Accumulator& right, int rows, int cols) {
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    Accumulator& accumulator = i < 4 ? left : right;
    const int r = accumulator_row(i % 4);
    const int col = i / 4 * 8 + accumulator_col(0);
    const T* const at = from + r * stride + col;
    accumulator.x[i % 4] = accumulator.x[i % 4 + 1] = 0.0f;
    if (r >= rows) continue;
    if constexpr (Align % 2 == 0) {
      if (col < cols) {
        const auto x = load<2>(at);
        accumulator.x[i % 4] = to_float(x.at[0]);
        accumulator.x[i % 4 + 1] = to_float(x.at[1]);
      }
    } else {
      if (col < cols) accumulator.x[i % 4] = to_float(at[0]);
      if (col + 1 < cols) accumulator.x[i % 4 + 1] = to_float(at[1]);
    }
  }
}

/// Reads or writes the pair's gradients of rates of one an element: 16 rows x 16 columns.
template <int Align>
WYVERN_DEVICE void load_rates(const float*, int64, RowRateGradients&, int, int, int) {}
template <int Align, int N>
WYVERN_DEVICE void load_rates(const float* from, int64 stride, ElementGradients (&d)[N], int pair,
                              int rows, int cols) {
  load_accumulators<Align>(from, stride, d[pair].x[0], d[pair].x[1], rows, cols);
}
template <int Align, class T>
WYVERN_DEVICE void store_rates(T*, int64, const RowRateGradients&, int, int, int) {}
template <int Align, int N, class T>
WYVERN_DEVICE void store_rates(T* to, int64 stride, const ElementGradients (&d)[N], int pair,
                               int rows, int cols) {
  store_pair<Align>(to, stride, d[pair].x[0], d[pair].x[1], rows, cols);
}

/// The rates that a kernel with the constants S has of a tile of Cols columns, and their gradients
/// in Pairs times sixteen columns.
template <class S, int Cols, int Pairs, bool Elements = S::ERASE_WRITE>
struct RatesOf {
  using Type = RowRates;
  using Gradients = RowRateGradients;

  template <class Keys>
  WYVERN_DEVICE static Type at(const Keys&, const RowFactors& rows) {
    return {rows.beta};
  }
};
template <class S, int Cols, int Pairs>
struct RatesOf<S, Cols, Pairs, true> {
  using Type = ElementRates<Element<S::BETA_DTYPE>, S::BT, Cols>;
  using Gradients = ElementGradients[Pairs];

  template <class Keys>
  WYVERN_DEVICE static Type at(const Keys& tile, const RowFactors&) {
    return {tile.gate};
  }
};

/// The products inside a chunk, over one K tile of T: its rows with strictly lower parts of dAqk
/// and dA, whose other elements are 0, and dAqk's diagonal. Factor: operand_of() that type.
template <class T, class Factor, Precision P, int Size, int Cols, bool Safe, bool Scaled,
          class Rates = RowRates>
struct IntraBackward {
  static_assert(sizeof(Factor) == sizeof(T));

  KeyTile<T, Size, Cols> tile;
  RowFactors rows;
  Rates rates;
  Tile<Factor, Size, Size> dAqk, dA;
  const float* diagonal;

  WYVERN_DEVICE float query_scale(int r) const { return Scaled ? rows.q_rstd[r] : 1.0f; }
  WYVERN_DEVICE float key_scale(int r) const { return Scaled ? rows.k_rstd[r] : 1.0f; }

  /// Decay from the anchor row to row r, and from row s to the anchor. Without a bound on the gate
  /// only rows on their own side of an anchor inside their block count: the other pairs of that
  /// block meet in add_halves.
  template <bool Inside>
  WYVERN_DEVICE float after(float G_anchor, float G_r, int r) const {
    return Inside && !Safe && r % 16 < 8 ? 0.0f : decay(G_r - G_anchor);
  }
  template <bool Inside>
  WYVERN_DEVICE float before(float G_anchor, float G_s, int s) const {
    return Inside && !Safe && s % 16 >= 8 ? 0.0f : decay(G_anchor - G_s);
  }

  /// queries += dAqk E k and keys += dA E k, of rows of `strip` with those of block `earlier`; the
  /// decay from the anchor on is left to finish_later.
  template <bool Inside>
  WYVERN_DEVICE void gather_earlier(Accumulator (&queries)[2], Accumulator (&keys)[2], int strip,
                                    int earlier, int anchor, int col) const {
#pragma unroll
    for (int depth = 0; depth < 16; depth += kDepth<Factor>) {
      const int first = earlier * 16 + depth;
      const FactorsOfB<Factor> E([&](int s, int c) {
        return before<Inside>(*tile.G.at(anchor, col + c), *tile.G.at(first + s, col + c),
                              first + s);
      });
      const auto b = scaled(load_b(tile.k, first, col), E,
                            [&](int s, int, float k) { return k * key_scale(first + s); });
      multiply<P>(queries[0], queries[1], load_a(dAqk, strip * 16, first), b);
      multiply<P>(keys[0], keys[1], load_a(dA, strip * 16, first), b);
    }
  }

  template <bool Inside, class RateGradients>
  WYVERN_DEVICE void finish_later(KeyGradients& d, RateGradients& dbeta,
                                  const Accumulator (&queries)[2], const Accumulator (&keys)[2],
                                  int strip, int anchor, int col) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = strip * 16 + accumulator_row(2 * half);
      const auto rate = rates.row(r);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int c = col + n * 8 + accumulator_col(0);
        const Float2 G_r = load_two(tile.G, r, c);
        const Float2 G_anchor = load_two(tile.G, anchor, c);
        const Float2 q = load_two(tile.q, r, c);
        const Float2 k = load_two(tile.k, r, c);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int i = 2 * half + j;
          const float E = after<Inside>(G_anchor.at[j], G_r.at[j], r);
          const float k_r = k.at[j] * key_scale(r);
          const float p = E * keys[n].x[i];
          const float beta = rate(c + j);
          d.dq[n].x[i] += E * queries[n].x[i];
          d.dk[n].x[i] += beta * p;
          add_product(dbeta, half, n, j, k_r, p);
          d.dG[n].x[i] += as_operand<Factor, P>(E * (q.at[j] * query_scale(r))) * queries[n].x[i] +
                          as_operand<Factor, P>(E * (beta * k_r)) * keys[n].x[i];
        }
      }
    }
  }

  /// What rows of block `later` give to the earlier rows of `strip`.
  template <bool Inside>
  WYVERN_DEVICE void add_later(KeyGradients& d, int strip, int later, int anchor, int col) const {
    Accumulator sum[2];
#pragma unroll
    for (int depth = 0; depth < 16; depth += kDepth<Factor>) {
      const int first = later * 16 + depth;
      const FactorsOfB<Factor> E([&](int r, int c) {
        return after<Inside>(*tile.G.at(anchor, col + c), *tile.G.at(first + r, col + c),
                             first + r);
      });
      const auto q = scaled(load_b(tile.q, first, col), E,
                            [&](int r, int, float x) { return x * query_scale(first + r); });
      multiply<P>(sum[0], sum[1], load_a_transposed(dAqk, strip * 16, first), q);
      const auto k = scaled(load_b(tile.k, first, col), E, [&](int r, int c, float x) {
        return rates.row(first + r)(col + c) * (x * key_scale(first + r));
      });
      multiply<P>(sum[0], sum[1], load_a_transposed(dA, strip * 16, first), k);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int s = strip * 16 + accumulator_row(2 * half);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int c = col + n * 8 + accumulator_col(0);
        const Float2 G_s = load_two(tile.G, s, c);
        const Float2 G_anchor = load_two(tile.G, anchor, c);
        const Float2 k = load_two(tile.k, s, c);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float E = before<Inside>(G_anchor.at[j], G_s.at[j], s);
          const float x = sum[n].x[2 * half + j];
          d.dk[n].x[2 * half + j] += E * x;
          d.dG[n].x[2 * half + j] -= as_operand<Factor, P>(E * (k.at[j] * key_scale(s))) * x;
        }
      }
    }
  }

  /// Pairs of rows within eight of a diagonal block: element by element, with the exp of their own
  /// difference.
  template <class RateGradients>
  WYVERN_DEVICE void add_halves(KeyGradients& d, RateGradients& dbeta, int strip, int col) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int first = strip * 16 + 8 * half;
      const int r = strip * 16 + accumulator_row(2 * half);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int c = col + n * 8 + accumulator_col(0);
        const Float2 G_r = load_two(tile.G, r, c);
        float queries[2] = {}, keys[2] = {}, sum[2] = {};
#pragma unroll 2
        for (int x = first; x < first + 8; ++x) {
          // Of each pair of elements one is above the diagonal and 0: x comes before r, or after.
          const float dAqk_rx = to_float(*dAqk.at(r, x));
          const float dA_rx = to_float(*dA.at(r, x));
          const float dAqk_xr = to_float(*dAqk.at(x, r));
          const float dA_xr = to_float(*dA.at(x, r));
          const Float2 G_x = load_two(tile.G, x, c);
          const Float2 q_x = load_two(tile.q, x, c);
          const Float2 k_x = load_two(tile.k, x, c);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const float E = decay(x < r ? G_r.at[j] - G_x.at[j] : G_x.at[j] - G_r.at[j]);
            const float k = k_x.at[j] * key_scale(x);
            queries[j] += dAqk_rx * (E * k);
            keys[j] += dA_rx * (E * k);
            sum[j] +=
                E * (dAqk_xr * (q_x.at[j] * query_scale(x)) + dA_xr * (rates.row(x)(c + j) * k));
          }
        }
        const Float2 q_r = load_two(tile.q, r, c);
        const Float2 k_r = load_two(tile.k, r, c);
        const auto rate = rates.row(r);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int i = 2 * half + j;
          const float q = q_r.at[j] * query_scale(r);
          const float k = k_r.at[j] * key_scale(r);
          const float beta = rate(c + j);
          d.dq[n].x[i] += queries[j];
          d.dk[n].x[i] += beta * keys[j] + sum[j];
          add_product(dbeta, half, n, j, k, keys[j]);
          d.dG[n].x[i] += q * queries[j] + k * (beta * keys[j]) - k * sum[j];
        }
      }
    }
  }

  WYVERN_DEVICE void add_diagonal(KeyGradients& d, int strip, int col) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = strip * 16 + accumulator_row(2 * half);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const Float2 q = load_two(tile.q, r, col + n * 8 + accumulator_col(0));
        const Float2 k = load_two(tile.k, r, col + n * 8 + accumulator_col(0));
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          d.dq[n].x[2 * half + j] += diagonal[r] * (k.at[j] * key_scale(r));
          d.dk[n].x[2 * half + j] += diagonal[r] * (q.at[j] * query_scale(r));
        }
      }
    }
  }

  /// Adds the gradients of rows of `strip` in columns col .. col + 15 of the tile; dbeta[half] gets
  /// this lane's part of rows lane / 4 + 8 * half.
  template <class RateGradients>
  WYVERN_DEVICE void add(KeyGradients& d, RateGradients& dbeta, int strip, int col) const {
    const int first = strip * 16;
    const int middle = first + 8;
    {
      Accumulator queries[2], keys[2];
#pragma unroll 1
      for (int earlier = 0; earlier < strip; ++earlier)
        gather_earlier<false>(queries, keys, strip, earlier, first, col);
      finish_later<false>(d, dbeta, queries, keys, strip, first, col);
    }
    {
      Accumulator queries[2], keys[2];
      gather_earlier<true>(queries, keys, strip, strip, middle, col);
      finish_later<true>(d, dbeta, queries, keys, strip, middle, col);
    }
    add_later<true>(d, strip, strip, middle, col);
#pragma unroll 1
    for (int later = strip + 1; later < Size / 16; ++later)
      add_later<false>(d, strip, later, later * 16, col);
    if constexpr (!Safe) add_halves(d, dbeta, strip, col);
    add_diagonal(d, strip, col);
  }
};

/// Writes the sums over rows of what four lanes hold of each: sum[half] is this lane's part of row
/// lane / 4 + 8 * half.
WYVERN_DEVICE void store_row_sums(float (&sum)[2], float* to) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] += shuffle_xor(sum[half], 1);
    sum[half] += shuffle_xor(sum[half], 2);
    if (lane_index() % 4 == 0) to[accumulator_row(2 * half)] = sum[half];
  }
}

template <int N>
WYVERN_DEVICE void store_row_sums(ElementGradients (&)[N], float*) {}

/// The derivative of activate_beta, from its result.
template <bool Sigmoid, bool Negative>
WYVERN_DEVICE float beta_slope(float beta) {
  if constexpr (!Sigmoid) return 1.0f;
  return beta * (1.0f - (Negative ? 0.5f : 1.0f) * beta);
}

}  // namespace wyvern::cuda::kda
