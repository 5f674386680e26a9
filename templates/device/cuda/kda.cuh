// Products whose decay differs by key channel: sum over c of x_rc k_sc exp(G_rc - G_sc).
//
// The decay is shared out around an anchor row n: (x_rc exp(G_rc - G_nc)) (k_sc exp(G_nc - G_sc)).
// With n between s and r both exponents are <= 0, at any gate; with a bounded gate any n within
// eight rows of r will do, as exponents of the wrong sign stay below 40. Scaled operands are fp32
// whatever the tensors are, and their products run in a Precision: rounding both to 16 bits would
// take half of the error budget, and fp16 has no range for them.
#pragma once

#include "device/cuda/wy.cuh"

namespace wyvern::cuda {

// ---- the decay around an anchor -----------------------------------------------------------------

/// G of an anchor row in base 2. Products of both sides around it are exact where it is rounded.
WYVERN_DEVICE Float2 anchor_from(const Float2& G) { return {{G.at[0] * kLog2E, G.at[1] * kLog2E}}; }

/// exp(G - anchor): the factor of a row at or after the anchor.
WYVERN_DEVICE float decay_after(float G, float anchor) {
  return exp2_fast(fused_multiply_add(G, kLog2E, -anchor));
}
WYVERN_DEVICE Float2 decay_after(const Float2& G, const Float2& anchor) {
  return {{decay_after(G.at[0], anchor.at[0]), decay_after(G.at[1], anchor.at[1])}};
}

/// exp(anchor - G): the factor of a row at or before the anchor.
WYVERN_DEVICE float decay_before(float G, float anchor) {
  return exp2_fast(fused_multiply_add(G, -kLog2E, anchor));
}
WYVERN_DEVICE Float2 decay_before(const Float2& G, const Float2& anchor) {
  return {{decay_before(G.at[0], anchor.at[0]), decay_before(G.at[1], anchor.at[1])}};
}

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

/// The same, times a factor each.
template <class T>
WYVERN_DEVICE Float2 scaled_pair(const T* from, const Float2& factor) {
  const Float2 x = load_pair(from);
  return {{x.at[0] * factor.at[0], x.at[1] * factor.at[1]}};
}

/// The anchor of a 16-row strip, in a chunk of `rows`. Bounded gates: its middle row, for the strip
/// with every row before it and with itself. Else: its first row, for rows before it only.
template <bool Bounded>
WYVERN_DEVICE int anchor_row(int strip, int rows) {
  return Bounded ? smaller(strip * 16 + 8, rows - 1) : strip * 16;
}

// ---- operands of a step of eight ----------------------------------------------------------------

/// This lane's two of columns depth..depth+7 of an anchor row.
template <int Rows, int Cols>
WYVERN_DEVICE Float2 load_anchor(const Tile<float, Rows, Cols>& G, int anchor_row, int depth) {
  return anchor_from(load<2>(G.at(anchor_row, depth + lane_index() % 4 * 2)));
}

/// Decays of a A fragment's rows row..row+15 after the anchor: those of lane's row and row + 8.
struct LeftDecay {
  Float2 low, high;
};
template <int Rows, int Cols>
WYVERN_DEVICE LeftDecay decay_left(const Tile<float, Rows, Cols>& G, const Float2& anchor, int row,
                                   int depth) {
  const float* const first = G.at(row + lane_index() / 4, depth + lane_index() % 4 * 2);
  return {decay_after(load<2>(first), anchor), decay_after(load<2>(first + 8 * G.kStride), anchor)};
}

/// x_rc times its decay, rows row..row+15, the reduction running over columns depth..depth+7.
template <class T, int Rows, int Cols>
WYVERN_DEVICE FragmentA<float> anchored_left(const Tile<T, Rows, Cols>& x, const LeftDecay& decay,
                                             int row, int depth) {
  const T* const first = x.at(row + lane_index() / 4, depth + lane_index() % 4 * 2);
  const Float2 low = scaled_pair(first, decay.low);
  const Float2 high = scaled_pair(first + 8 * x.kStride, decay.high);
  return {{low.at[0], high.at[0], low.at[1], high.at[1]}};
}

/// k_sc exp(anchor_c - G_sc) as element (depth c, column s): rows row..row+15 of the tiles, the
/// reduction running over their columns depth..depth+7.
template <class T, int Rows, int Cols>
WYVERN_DEVICE FragmentB<float> anchored_right_transposed(const Tile<T, Rows, Cols>& k,
                                                         const Tile<float, Rows, Cols>& G,
                                                         const Float2& anchor, int row, int depth) {
  const int first_row = row + lane_index() / 4;
  const int col = depth + lane_index() % 4 * 2;
  const Float2 low =
      scaled_pair(k.at(first_row, col), decay_before(load<2>(G.at(first_row, col)), anchor));
  const Float2 high = scaled_pair(k.at(first_row + 8, col),
                                  decay_before(load<2>(G.at(first_row + 8, col)), anchor));
  return {{low.at[0], low.at[1], high.at[0], high.at[1]}};
}

enum class Side { before, after };

/// x_sc times its decay before or after row `anchor_row`, as element (depth s, column c): the
/// reduction running down the tiles' rows depth..depth+7, columns col..col+15.
template <Side S, class T, int Rows, int Cols>
WYVERN_DEVICE FragmentB<float> anchored_right(const Tile<T, Rows, Cols>& x,
                                              const Tile<float, Rows, Cols>& G, int anchor_row,
                                              int depth, int col) {
  FragmentB<float> b;
  const int row = depth + lane_index() % 4 * 2;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int c = col + n * 8 + lane_index() / 4;
    const float anchor = *G.at(anchor_row, c) * kLog2E;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float G_s = *G.at(row + j, c);
      b.r[2 * n + j] = to_float(*x.at(row + j, c)) *
                       (S == Side::before ? decay_before(G_s, anchor) : decay_after(G_s, anchor));
    }
  }
  return b;
}

// ---- a strip of Aqk and A -----------------------------------------------------------------------

/// Sixteen rows of the products of queries and of keys with the keys of a chunk of Size tokens.
template <int Size>
struct IntraStrip {
  Accumulator qk[Size / 8], kk[Size / 8];
};

/// Every Split-th pair of columns from `part`: adds the products inside the diagonal block, where
/// no anchor lies between all rows: each pair of rows has its own exponents, shared by queries and
/// keys. What lies above the diagonal is of no use.
template <int Split, class T, int Size, int Cols>
WYVERN_DEVICE void add_diagonal_block(IntraStrip<Size>& sum, const Tile<T, Size, Cols>& q,
                                      const Tile<T, Size, Cols>& k,
                                      const Tile<float, Size, Cols>& G, int strip, int part) {
  const int first = strip * 16;
  Accumulator qk[2], kk[2];
#pragma unroll 1
  for (int c = 2 * part; c < Cols; c += 2 * Split) {
    Float2 q_r[2], k_r[2], G_r[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = first + accumulator_row(2 * half);
      q_r[half] = load_pair(q.at(r, c));
      k_r[half] = load_pair(k.at(r, c));
      G_r[half] = load<2>(G.at(r, c));
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int s = first + n * 8 + accumulator_col(j);
        const Float2 k_s = load_pair(k.at(s, c));
        const Float2 G_s = load<2>(G.at(s, c));
#pragma unroll
        for (int half = n; half < 2; ++half) {
          const bool wanted = first + accumulator_row(2 * half) >= s;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float x = k_s.at[i] * decay(wanted ? G_r[half].at[i] - G_s.at[i] : 0.0f);
            float& qk_rs = qk[n].x[2 * half + j];
            float& kk_rs = kk[n].x[2 * half + j];
            qk_rs = fused_multiply_add(q_r[half].at[i], x, qk_rs);
            kk_rs = fused_multiply_add(k_r[half].at[i], x, kk_rs);
          }
        }
      }
  }
#pragma unroll
  for (int n = 0; n < Size / 8; ++n)
    if (n / 2 == strip)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum.qk[n].x[i] += qk[n % 2].x[i];
        sum.kk[n].x[i] += kk[n % 2].x[i];
      }
}

/// Adds a strip's products over the tiles' columns, on and below the diagonal; Split warps share
/// the columns, this one is number `part`. The strip's first row must be one of the chunk's `rows`.
/// Rows at or past `rows`, and what lies above the diagonal, may become anything.
template <Precision P, bool Bounded, int Split, class T, int Size, int Cols>
WYVERN_DEVICE void accumulate_intra(IntraStrip<Size>& sum, const Tile<T, Size, Cols>& q,
                                    const Tile<T, Size, Cols>& k, const Tile<float, Size, Cols>& G,
                                    int strip, int rows, int part) {
  const int n = anchor_row<Bounded>(strip, rows);
  if (Bounded || strip > 0) {
#pragma unroll 1
    for (int depth = part * 8; depth < Cols; depth += Split * 8) {
      const Float2 anchor = load_anchor(G, n, depth);
      const LeftDecay decay = decay_left(G, anchor, strip * 16, depth);
      const FragmentA<float> q_r = anchored_left(q, decay, strip * 16, depth);
      const FragmentA<float> k_r = anchored_left(k, decay, strip * 16, depth);
#pragma unroll
      for (int j = 0; j < Size / 16; ++j) {
        if (Bounded ? j > strip : j >= strip) break;
        const FragmentB<float> b = anchored_right_transposed(k, G, anchor, j * 16, depth);
        multiply<P>(sum.qk[2 * j], sum.qk[2 * j + 1], q_r, b);
        multiply<P>(sum.kk[2 * j], sum.kk[2 * j + 1], k_r, b);
      }
    }
  }
  if constexpr (!Bounded) add_diagonal_block<Split>(sum, q, k, G, strip, part);
}

/// Floats that join_parts needs for the strips of a chunk.
template <int Size, int Split>
inline constexpr int kPartFloats = (Split - 1) * (Size / 16) * (Size / 8) * 2 * 128;

/// Adds the other parts' sums to part 0's, always in the same order. `memory` is shared,
/// kPartFloats long, and free. Every warp of the block takes part.
template <int Split, int Size>
WYVERN_DEVICE void join_parts(IntraStrip<Size>& sum, float* memory, int strip, int part) {
  if constexpr (Split > 1) {
    using Quad = Vector<float, 4>;
    Quad* const quads = reinterpret_cast<Quad*>(memory) + lane_index();
    const auto first = [&](int from) {
      return ((from - 1) * (Size / 16) + strip) * (Size / 8) * 64;
    };
    if (part > 0) {
#pragma unroll
      for (int n = 0; n < Size / 8; ++n) {
        if (n / 2 > strip) break;
        const Accumulator& qk = sum.qk[n];
        const Accumulator& kk = sum.kk[n];
        quads[first(part) + n * 64] = {{qk.x[0], qk.x[1], qk.x[2], qk.x[3]}};
        quads[first(part) + n * 64 + 32] = {{kk.x[0], kk.x[1], kk.x[2], kk.x[3]}};
      }
    }
    sync_block();
    if (part > 0) return;
#pragma unroll
    for (int from = 1; from < Split; ++from)
#pragma unroll
      for (int n = 0; n < Size / 8; ++n) {
        if (n / 2 > strip) break;
        const Quad qk = quads[first(from) + n * 64];
        const Quad kk = quads[first(from) + n * 64 + 32];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum.qk[n].x[i] += qk.at[i];
          sum.kk[n].x[i] += kk.at[i];
        }
      }
  }
}

/// Factors of a chunk's rows in shared memory; the scales of queries and keys where there are any.
struct RowFactors {
  float* beta;
  float* q_rstd;
  float* k_rstd;
};

/// Fills in the factors, beta from load_beta(r); 0 past the chunk's end.
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

/// Calls put(r, s, Aqk_rs, Aqk_r,s+1, A_rs, A_r,s+1) for all pairs of neighbouring columns of a
/// strip; 0 above the diagonal (A: on it too).
template <bool Scaled, int Size, class Put>
WYVERN_DEVICE void for_each_intra(const IntraStrip<Size>& sum, const RowFactors& rows, int strip,
                                  Put&& put) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = strip * 16 + accumulator_row(2 * half);
    float beta_r = rows.beta[r];
    float q_r = 1.0f;
    if constexpr (Scaled) {
      beta_r *= rows.k_rstd[r];
      q_r = rows.q_rstd[r];
    }
#pragma unroll
    for (int n = 0; n < Size / 8; ++n) {
      const int s = n * 8 + accumulator_col(0);
      float P[2], A[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float k_s = 1.0f;
        if constexpr (Scaled) k_s = rows.k_rstd[s + j];
        P[j] = r >= s + j ? q_r * k_s * sum.qk[n].x[2 * half + j] : 0.0f;
        A[j] = r > s + j ? beta_r * k_s * sum.kk[n].x[2 * half + j] : 0.0f;
      }
      put(r, s, P[0], P[1], A[0], A[1]);
    }
  }
}

// ---- W, qg and kg -------------------------------------------------------------------------------

/// Where a chunk and value head's rows of W, qg and kg begin, K elements a row, `stride` apart.
template <class T>
struct KeyOutputs {
  T* w;
  T* qg;
  T* kg;
  int64 stride;
};

/// What a accumulator of sixteen rows and eight columns of W, qg and kg comes from.
struct KeyPieces {
  Accumulator k_decayed, qg, kg;
};

/// Rows row..row+15, columns col..col+7: exp(G) k, exp(G) q and exp(G_last - G) k, with the scales
/// of rows where `Scaled`. Rows after `last` are 0.
template <bool Scaled, class T, int Size, int Cols>
WYVERN_DEVICE KeyPieces decay_keys(const Tile<T, Size, Cols>& q, const Tile<T, Size, Cols>& k,
                                   const Tile<float, Size, Cols>& G, const RowFactors& rows,
                                   int row, int col, int last) {
  KeyPieces to;
  const int c = col + accumulator_col(0);
  const Float2 G_last = load<2>(G.at(last, c));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + accumulator_row(2 * half);
    const Float2 G_r = load<2>(G.at(r, c));
    Float2 q_r = load_pair(q.at(r, c));
    Float2 k_r = load_pair(k.at(r, c));
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if constexpr (Scaled) {
        q_r.at[j] *= rows.q_rstd[r];
        k_r.at[j] *= rows.k_rstd[r];
      }
      const float decay_r = decay(G_r.at[j]);
      to.k_decayed.x[2 * half + j] = k_r.at[j] * decay_r;
      to.qg.x[2 * half + j] = q_r.at[j] * decay_r;
      to.kg.x[2 * half + j] = k_r.at[j] * decay(r <= last ? G_last.at[j] - G_r.at[j] : 0.0f);
    }
  }
  return to;
}

/// Two accumulators side by side as B fragments whose reduction runs down the sixteen rows.
template <class T>
WYVERN_DEVICE FragmentB<T> right_from(const Accumulator& left, const Accumulator& right) {
  FragmentB<T> b;
  b.r[0] = transpose_8x8(pack<T>(left.x[0], left.x[1]));
  b.r[1] = transpose_8x8(pack<T>(left.x[2], left.x[3]));
  b.r[2] = transpose_8x8(pack<T>(right.x[0], right.x[1]));
  b.r[3] = transpose_8x8(pack<T>(right.x[2], right.x[3]));
  return b;
}

/// Rows depth..depth+7 of beta exp(G) k as a B fragment of a step, columns col..col+15.
template <bool Scaled, int Size, int Cols>
WYVERN_DEVICE FragmentB<float> decayed_right(const Tile<float, Size, Cols>& k,
                                             const Tile<float, Size, Cols>& G,
                                             const RowFactors& rows, int depth, int col) {
  FragmentB<float> b;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int s = depth + lane_index() % 4 * 2 + i % 2;
    const int c = col + i / 2 * 8 + lane_index() / 4;
    b.r[i] = *k.at(s, c) * decay(*G.at(s, c)) * rows.beta[s];
    if constexpr (Scaled) b.r[i] *= rows.k_rstd[s];
  }
  return b;
}

/// Tinv diag(beta) as a A fragment, from a tile that must outlive it. 16-bit ones are in
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

  /// sum += tile * right(depth), right giving eight rows of sixteen columns.
  template <Precision P, class Right>
  WYVERN_DEVICE void add(Accumulator (&sum)[Size / 16][2], Right&& right) const {
#pragma unroll 1
    for (int depth = 0; depth < Size; depth += 8) {
      const FragmentB<float> b = right(depth);
#pragma unroll
      for (int strip = 0; strip < Size / 16; ++strip)
        if (strip >= depth / 16)
          multiply<P>(sum[strip][0], sum[strip][1], load_a(tile, strip * 16, depth), b);
    }
  }

  /// As LowerOperand's.
  template <Precision P, int Align, int Cols>
  WYVERN_DEVICE void apply(const Tile<float, Size, Cols>& x, int col, float* to, int64 stride,
                           int rows, int cols) const {
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
template <Precision P, bool Scaled, int Align, class T, int Size, int Parts, int Cols>
WYVERN_DEVICE void write_keys(const InverseOperand<T, Size, Parts>& inverse,
                              const Tile<T, Size, Cols>& q, const Tile<T, Size, Cols>& k,
                              const Tile<float, Size, Cols>& G, const RowFactors& rows,
                              const KeyOutputs<T>& to, int first, int col, int chunk_rows,
                              int cols) {
  Accumulator w[Size / 16][2];
#pragma unroll
  for (int depth = 0; depth < Size / 16; ++depth) {
    if (depth * 16 >= chunk_rows) break;
    const KeyPieces left = decay_keys<Scaled>(q, k, G, rows, depth * 16, col, chunk_rows - 1);
    const KeyPieces right = decay_keys<Scaled>(q, k, G, rows, depth * 16, col + 8, chunk_rows - 1);
    const int64 at = depth * 16 * to.stride + first;
    store_pair<Align>(to.qg + at, to.stride, left.qg, right.qg, chunk_rows - depth * 16, cols);
    store_pair<Align>(to.kg + at, to.stride, left.kg, right.kg, chunk_rows - depth * 16, cols);
    if constexpr (kHalf<T>) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float beta_r = rows.beta[depth * 16 + accumulator_row(i)];
        w[depth][0].x[i] += beta_r * left.k_decayed.x[i];
        w[depth][1].x[i] += beta_r * right.k_decayed.x[i];
      }
      const FragmentB<T> b = right_from<T>(left.k_decayed, right.k_decayed);
#pragma unroll
      for (int strip = depth; strip < Size / 16; ++strip)
#pragma unroll
        for (int part = 0; part < Parts; ++part)
          multiply<P>(w[strip][0], w[strip][1], inverse.a[part][inverse.index(strip, depth * 16)],
                      b);
    }
  }
  if constexpr (!kHalf<T>)
    inverse.template add<P>(
        w, [&](int depth) { return decayed_right<Scaled>(k, G, rows, depth, col); });
#pragma unroll
  for (int strip = 0; strip < Size / 16; ++strip)
    store_pair<Align>(to.w + strip * 16 * to.stride + first, to.stride, w[strip][0], w[strip][1],
                      chunk_rows - strip * 16, cols);
}

}  // namespace wyvern::cuda
