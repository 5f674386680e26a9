// Aqk and A, the products of a chunk whose decay differs by key channel: the sum over c of
// x_rc k_sc exp(G_rc - G_sc).
//
// The decay is factored at an anchor row n: (x_rc exp(G_rc - G_nc)) (k_sc exp(G_nc - G_sc)).
// With n between s and r both exponents are <= 0, at any gate; with a bounded gate any n within
// eight rows of r will do, as exponents of the wrong sign stay below 40. Scaled operands are fp32
// for tensors of any dtype, and their products run in a Precision: rounding both to 16 bits would
// use half of the error budget, and fp16 has no range for them.
#pragma once

#include "device/cuda/kda_rows.cuh"
#include "device/cuda/mma.cuh"

namespace wyvern::cuda::kda {

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

/// Both numbers, each times its factor.
WYVERN_DEVICE Float2 scaled(const Float2& x, const Float2& factor) {
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

/// Decays after the anchor of the two rows that a lane holds of an A fragment.
struct RowDecay {
  Float2 low, high;
};

/// Those of rows row..row+15, columns depth..depth+7.
template <int Rows, int Cols>
WYVERN_DEVICE RowDecay decay_rows(const Tile<float, Rows, Cols>& G, const Float2& anchor, int row,
                                  int depth) {
  const auto at = lane_rows(G, row, depth);
  return {decay_after(at.low(), anchor), decay_after(at.high(), anchor)};
}

/// Elements (LaneRows) times their decays, as an A fragment of a step.
template <class Rows>
WYVERN_DEVICE FragmentA<float> anchored_a(const Rows& x, const RowDecay& decay) {
  const Float2 low = scaled(x.low(), decay.low);
  const Float2 high = scaled(x.high(), decay.high);
  return {{low.at[0], high.at[0], low.at[1], high.at[1]}};
}

/// k_sc exp(anchor_c - G_sc) as element (depth c, column s): rows row..row+15 of the tiles, the
/// reduction running over their columns depth..depth+7.
template <class T, int Rows, int Cols>
WYVERN_DEVICE FragmentB<float> anchored_b_transposed(const Tile<T, Rows, Cols>& k,
                                                     const Tile<float, Rows, Cols>& G,
                                                     const Float2& anchor, int row, int depth) {
  const int r = row + lane_index() / 4;
  const int c = depth + lane_index() % 4 * 2;
  const T* const first = k.at(r, c);
  const Float2 low_decay = decay_before(load_pair(G, r, c), anchor);
  const Float2 low = scaled(load_pair(first), low_decay);
  const T* const second = k.at(r + 8, c);
  const Float2 high_decay = decay_before(load_pair(G, r + 8, c), anchor);
  const Float2 high = scaled(load_pair(second), high_decay);
  return {{low.at[0], low.at[1], high.at[0], high.at[1]}};
}

// ---- a strip of Aqk and A -----------------------------------------------------------------------

/// Sixteen rows of the products of queries and of keys with the keys of a chunk of Size tokens.
template <int Size>
struct IntraStrip {
  Accumulator qk[Size / 8], kk[Size / 8];
};

/// Every Split-th pair of columns from `share` on: adds the products inside the diagonal block,
/// where no anchor lies between all rows: each pair of rows has its own exponents, shared by
/// queries and keys. Elements above the diagonal are not used.
template <int Split, class Keys, int Size>
WYVERN_DEVICE void add_diagonal_block(IntraStrip<Size>& sum, const Keys& tile, int strip,
                                      int share) {
  const int first = strip * 16;
  Accumulator qk[2], kk[2];
#pragma unroll 1
  for (int c = 2 * share; c < Keys::kCols; c += 2 * Split) {
    Float2 q_r[2], k_r[2], G_r[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = first + accumulator_row(2 * half);
      q_r[half] = load_pair(tile.q, r, c);
      k_r[half] = tile.erasing_two(r, c);
      G_r[half] = load_pair(tile.G, r, c);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int s = first + n * 8 + accumulator_col(j);
        const Float2 k_s = load_pair(tile.k, s, c);
        const Float2 G_s = load_pair(tile.G, s, c);
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

/// Adds a strip's products over the tile's columns, on and below the diagonal: q's rows with k's,
/// and the erasing rows with k's. Split warps share the columns, this one has share `share`. The
/// strip's first row must be one of the chunk's `rows`. Rows at or past `rows`, and elements
/// above the diagonal, are undefined.
template <Precision P, bool Bounded, int Split, class Keys, int Size>
WYVERN_DEVICE void accumulate_intra(IntraStrip<Size>& sum, const Keys& tile, int strip, int rows,
                                    int share) {
  const int n = anchor_row<Bounded>(strip, rows);
  if (Bounded || strip > 0) {
#pragma unroll 1
    for (int depth = share * 8; depth < Keys::kCols; depth += Split * 8) {
      const Float2 anchor = load_anchor(tile.G, n, depth);
      const RowDecay decay = decay_rows(tile.G, anchor, strip * 16, depth);
      const FragmentA<float> q_r = anchored_a(lane_rows(tile.q, strip * 16, depth), decay);
      const FragmentA<float> k_r = anchored_a(tile.erasing_rows(strip * 16, depth), decay);
#pragma unroll
      for (int j = 0; j < Size / 16; ++j) {
        if (Bounded ? j > strip : j >= strip) break;
        const FragmentB<float> b = anchored_b_transposed(tile.k, tile.G, anchor, j * 16, depth);
        multiply<P>(sum.qk[2 * j], sum.qk[2 * j + 1], q_r, b);
        multiply<P>(sum.kk[2 * j], sum.kk[2 * j + 1], k_r, b);
      }
    }
  }
  if constexpr (!Bounded) add_diagonal_block<Split>(sum, tile, strip, share);
}

/// Adds the other shares' sums to share 0's, always in the same order. `memory` is shared,
/// share_floats() long, and free. By every warp of the block.
template <int Split, int Size>
WYVERN_DEVICE void join_shares(IntraStrip<Size>& sum, float* memory, int strip, int share) {
  if constexpr (Split > 1) {
    using Quad = Vector<float, 4>;
    Quad* const quads = reinterpret_cast<Quad*>(memory) + lane_index();
    const auto first = [&](int from) {
      return ((from - 1) * (Size / 16) + strip) * (Size / 8) * 64;
    };
    if (share > 0) {
#pragma unroll
      for (int n = 0; n < Size / 8; ++n) {
        if (n / 2 > strip) break;
        const Accumulator& qk = sum.qk[n];
        const Accumulator& kk = sum.kk[n];
        quads[first(share) + n * 64] = {{qk.x[0], qk.x[1], qk.x[2], qk.x[3]}};
        quads[first(share) + n * 64 + 32] = {{kk.x[0], kk.x[1], kk.x[2], kk.x[3]}};
      }
    }
    sync_block();
    if (share > 0) return;
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

}  // namespace wyvern::cuda::kda
