// The WY representation of a chunk: A, its inverse, and the inverse applied to k and v.
#pragma once

#include "device/cuda/chunk.cuh"
#include "device/cuda/mma.cuh"

namespace wyvern::cuda {

// ---- A = strictly lower part of beta_r exp(G_r - G_s) k_r . k_s ---------------------------------

/// The 16-row strips of a Size x Size product that one warp of Warps owns: warp, warp + Warps, ...
template <int Size, int Warps>
struct Strips {
  static constexpr int kCount = ceil_div(Size / 16, Warps);
  Accumulator accumulator[kCount][Size / 8];
};

/// Adds keys * keys^T over the tile's columns, on and below the diagonal.
template <Precision P, int Warps, class T, int Size, int Cols>
WYVERN_DEVICE void accumulate_gram(Strips<Size, Warps>& sum, const Tile<T, Size, Cols>& keys) {
#pragma unroll
  for (int i = 0; i < sum.kCount; ++i) {
    const int strip = warp_index() + i * Warps;
    if (strip * 16 >= Size) break;
#pragma unroll
    for (int depth = 0; depth < Cols; depth += kDepth<T>) {
      const FragmentA<T> a = load_a(keys, strip * 16, depth);
#pragma unroll
      for (int j = 0; j < Size / 16; ++j) {
        if (j > strip) break;
        multiply<P>(sum.accumulator[i][2 * j], sum.accumulator[i][2 * j + 1], a,
                    load_b_transposed(keys, depth, j * 16));
      }
    }
  }
}

/// Calls put(row, col, A_rs, A_r,s+1) for every pair of neighbouring columns of the blocks on and
/// below the diagonal; entries on and above the diagonal are 0. Keys count with their factor of
/// `k_rstd` where `Scaled`.
template <bool Scaled, int Warps, int Size, class Put>
WYVERN_DEVICE void for_each_decayed(const Strips<Size, Warps>& sum, const float* G,
                                    const float* beta, const float* k_rstd, Put&& put) {
#pragma unroll
  for (int i = 0; i < sum.kCount; ++i) {
    const int strip = warp_index() + i * Warps;
    if (strip * 16 >= Size) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = strip * 16 + accumulator_row(2 * half);
      const float G_r = G[r];
      const float beta_r = Scaled ? beta[r] * k_rstd[r] : beta[r];
#pragma unroll
      for (int n = 0; n < Size / 8; ++n) {
        if (n / 2 > strip) break;
        const int s = n * 8 + accumulator_col(0);
        const Float2 G_s = load<2>(G + s);
        Float2 scale{{1.0f, 1.0f}};
        if constexpr (Scaled) scale = load<2>(k_rstd + s);
        const float* const x = sum.accumulator[i][n].x + 2 * half;
        put(r, s, r > s ? beta_r * decay(G_r - G_s.at[0]) * scale.at[0] * x[0] : 0.0f,
            r > s + 1 ? beta_r * decay(G_r - G_s.at[1]) * scale.at[1] * x[1] : 0.0f);
      }
    }
  }
}

// ---- (I + A)^-1 ---------------------------------------------------------------------------------

/// Replaces the diagonal 16x16 blocks of A by their inverses, by forward substitution: half a warp
/// a block, one lane a column. Warp w owns blocks 2w and 2w + 1.
template <int Size>
WYVERN_DEVICE void invert_diagonal_blocks(const Tile<float, Size, Size>& x) {
  if (warp_index() * 32 >= Size) return;
  const int block = warp_index() * 2 + lane_index() / 16;
  const bool active = block * 16 < Size;
  const int origin = active ? block * 16 : 0;
  const int column = lane_index() % 16;
  float inverse[16];
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    float even = r == column ? 1.0f : 0.0f;
    float odd = 0.0f;
#pragma unroll
    for (int s = 0; s < r; s += 4) {
      const auto a = load<4>(x.at(origin + r, origin + s));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& sum = j % 2 == 0 ? even : odd;
        if (s + j < r) sum = fused_multiply_add(-a.at[j], inverse[s + j], sum);
      }
    }
    inverse[r] = even + odd;
  }
  sync_warp();
#pragma unroll
  for (int r = 0; r < 16; ++r)
    if (active) *x.at(origin + r, origin + column) = inverse[r];
  sync_warp();
}

/// Joins neighbouring inverses X11, X22 of Half rows: X21 = -(X22 A21) X11. A warp computes 16
/// rows.
template <Precision P, int Half, int Size>
WYVERN_DEVICE void merge_blocks(const Tile<float, Size, Size>& x) {
  constexpr int kStripsPerPair = Half / 16;
  const int strip = warp_index();
  const bool active = strip * 32 < Size;
  const int origin = strip / kStripsPerPair * 2 * Half;
  const int row = origin + Half + strip % kStripsPerPair * 16;
  Accumulator z[Half / 8];
  if (active) {
#pragma unroll
    for (int depth = 0; depth < Half; depth += kDepth<float>) {
      if (origin + Half + depth > row + 15) break;
      const FragmentA<float> a = load_a(x, row, origin + Half + depth);
#pragma unroll
      for (int col = 0; col < Half; col += 16)
        multiply<P>(z[col / 8], z[col / 8 + 1], a, load_b(x, origin + Half + depth, origin + col));
    }
  }
  if constexpr (kStripsPerPair > 1)
    sync_block();  // another warp's rows of A21 are about to be overwritten
  else
    sync_warp();
  if (active) {
#pragma unroll
    for (int col = 0; col < Half; col += 16) {
      Accumulator left, right;
#pragma unroll
      for (int depth = col; depth < Half; depth += kDepth<float>)
        multiply<P>(left, right, fragment_a<float>(z, depth / kDepth<float>),
                    load_b(x, origin + depth, origin + col));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        *x.at(row + accumulator_row(i), origin + col + accumulator_col(i)) = -left.x[i];
        *x.at(row + accumulator_row(i), origin + col + 8 + accumulator_col(i)) = -right.x[i];
      }
    }
  }
}

/// Replaces A by (I + A)^-1, reading its strictly lower part: recursive doubling from
/// inverted diagonal blocks. Blocks above the diagonal blocks are left as they are. At least
/// Size/32 warps; A must be visible to the block before, and the inverse is after.
template <Precision P, int Size>
WYVERN_DEVICE void invert_unit_lower(const Tile<float, Size, Size>& x) {
  // Later merges amplify the errors of earlier ones, and earlier ones are small: tf32 is for the
  // last.
  constexpr Precision kInner = P == Precision::tf32 ? Precision::tf32x3 : P;
  invert_diagonal_blocks(x);
  if constexpr (Size >= 32) merge_blocks<Size == 32 ? P : kInner, 16>(x);
  if constexpr (Size >= 64) {
    sync_block();
    merge_blocks<Size == 64 ? P : kInner, 32>(x);
  }
  if constexpr (Size >= 128) {
    sync_block();
    merge_blocks<P, 64>(x);
  }
  sync_block();
}

// ---- Tinv diag(scale) X -------------------------------------------------------------------------

/// A unit lower triangular matrix with scaled columns, in registers as A fragments: its blocks
/// on and below the diagonal. The diagonal of a 16-bit one, the scale itself, is left out and
/// applied in fp32: it is the largest term, and of short chunks all there is. With two Parts the
/// rest is the sum of two 16-bit numbers each: a matrix with large elements needs their digits.
template <class T, int Size, int Parts = 1>
struct LowerOperand {
  static_assert(kHalf<T> || Parts == 1);
  static constexpr int kSteps = 16 / kDepth<T>;  // per 16 columns
  FragmentA<T> a[Parts][Size / 16 * (Size / 16 + 1) / 2 * kSteps];
  const float* diagonal;

  WYVERN_DEVICE static constexpr int index(int strip, int depth) {
    return strip * (strip + 1) / 2 * kSteps + depth / kDepth<T>;
  }

  /// matrix(r, s) * scale(s), for r >= s; what the tile holds above the diagonal is not used.
  /// `scale` must outlive this.
  template <class S>
  WYVERN_DEVICE LowerOperand(const Tile<S, Size, Size>& matrix, const float* scale)
      : diagonal(scale) {
    const int row = lane_index() / 4;
    const int col = lane_index() % 4 * 2;
#pragma unroll
    for (int strip = 0; strip < Size / 16; ++strip)
#pragma unroll
      for (int depth = 0; depth < (strip + 1) * 16; depth += kDepth<T>) {
        Accumulator accumulator[2];
#pragma unroll
        for (int n = 0; n < kDepth<T> / 8; ++n)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int r = strip * 16 + row + half * 8;
            const int s = depth + n * 8 + col;
            const auto x = load<2>(matrix.at(r, s));
            const Float2 factor = load<2>(scale + s);
#pragma unroll
            for (int j = 0; j < 2; ++j)
              accumulator[n].x[2 * half + j] =
                  r >= s + j + (kHalf<T> ? 1 : 0)
                      ? within_range<T>(to_float(x.at[j]) * factor.at[j])
                      : 0.0f;
          }
        a[0][index(strip, depth)] = fragment_a<T>(accumulator[0], accumulator[1]);
        if constexpr (Parts == 2)
          a[1][index(strip, depth)] =
              fragment_a<T>(rounded_off<T>(accumulator[0]), rounded_off<T>(accumulator[1]));
      }
  }

  /// Writes rows 0 .. rows-1 of this * x for sixteen columns, x's from `col`, in `unit` to `to`:
  /// those before `cols`, at least one. Align is the width of the tensor.
  template <Precision P, int Align, int Cols, class Out>
  WYVERN_DEVICE void apply(const Tile<T, Size, Cols>& x, int col, Out* to, int64 stride, int rows,
                           int cols, float unit) const {
    Accumulator sum[Size / 16][2];
    if constexpr (kHalf<T>) apply_diagonal(sum, x, col);
#pragma unroll
    for (int depth = 0; depth < Size; depth += kDepth<T>) {
      const FragmentB<T> b = load_b(x, depth, col);
#pragma unroll
      for (int strip = depth / 16; strip < Size / 16; ++strip) {
#pragma unroll
        for (int part = 0; part < Parts; ++part)
          multiply<P>(sum[strip][0], sum[strip][1], a[part][index(strip, depth)], b);
      }
    }
#pragma unroll
    for (int strip = 0; strip < Size / 16; ++strip)
      store_pair<Align>(to + strip * 16 * stride, stride, scaled(sum[strip][0], 1.0f / unit),
                        scaled(sum[strip][1], 1.0f / unit), rows - strip * 16,
                        Align % 16 == 0 ? 16 : cols);
  }

  /// sum = the diagonal's part of this * x.
  template <int Cols>
  WYVERN_DEVICE void apply_diagonal(Accumulator (&sum)[Size / 16][2], const Tile<T, Size, Cols>& x,
                                    int col) const {
#pragma unroll
    for (int strip = 0; strip < Size / 16; ++strip)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = strip * 16 + accumulator_row(2 * half);
        const float scale = diagonal[r];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const auto x_r = load<2>(x.at(r, col + n * 8 + accumulator_col(0)));
          sum[strip][n].x[2 * half] = scale * to_float(x_r.at[0]);
          sum[strip][n].x[2 * half + 1] = scale * to_float(x_r.at[1]);
        }
      }
  }
};

// ---- the inverse as a tensor --------------------------------------------------------------------

/// Writes rows 0 .. rows-1 of an inverse, zeros above its diagonal: what the tile holds there is
/// not used.
template <int Threads, class T, int Size>
WYVERN_DEVICE void store_inverse(const Tile<float, Size, Size>& x, T* to, int64 stride, int rows) {
  constexpr int kVector = 16 / static_cast<int>(sizeof(T));
  for (int i = thread_index(); i < Size * (Size / kVector); i += Threads) {
    const int r = i / (Size / kVector);
    const int s = i % (Size / kVector) * kVector;
    if (r >= rows) break;
    Vector<T, kVector> out;
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      out.at[j] = from_float<T>(s + j <= r ? *x.at(r, s + j) : 0.0f);
    store_vector(to + r * stride + s, out);
  }
}

}  // namespace wyvern::cuda
