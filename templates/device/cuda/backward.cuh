// The gradients of one chunk and value head once the state's are known: what bwd_dqkwg, wy_bwd and
// wy_dqkg share.
//
// A warp owns one 16-row strip of the chunk and, where there are more warps than strips, a share of
// the columns. All of V stays in shared memory; K passes by in tiles of BK columns.
//
// Products whose row sums make the gate's gradient are taken before scales of rows are undone. With
// QK_L2NORM the operand of P and A holds the scales of both its rows and its columns, so that what
// multiplies it are q and k as they are given, and both sums over a pair of rows see the same
// rounded numbers. Pairs of rows of one token cancel between them, the diagonal above all; they are
// left out, as is what the last token's rows tell the state that leaves.
#pragma once

#include "device/chunk_tokens.hpp"
#include "device/cuda/backward_layout.hpp"
#include "device/cuda/chunk.cuh"
#include "device/cuda/mma.cuh"
#include "device/cuda/warp.cuh"

namespace wyvern::cuda::gradient {

// ---- elements and operands ----------------------------------------------------------------------

/// Two 16-bit numbers in one register, each times its factor.
template <class T>
WYVERN_DEVICE uint32 scale_packed(uint32 x, const Float2& factor) {
  return pack<T>(to_float(T{static_cast<uint16>(x & 0xFFFFU)}) * factor.at[0],
                 to_float(T{static_cast<uint16>(x >> 16U)}) * factor.at[1]);
}

/// beta is the product of a factor that the operand N holds and one beside it. Both uses of N then
/// see the same rounded numbers, as sums that make the gate's gradient need it: one sums over a row
/// and counts beta of its row, the other over a column. Only a beta so small that N could not hold
/// it stays outside, where what its use rounds is small too.
constexpr float kLeastInside = 1.0f / 64;
WYVERN_DEVICE bool is_inside(float beta) { return maximum(beta, -beta) >= kLeastInside; }
WYVERN_DEVICE float inside(float beta) { return is_inside(beta) ? beta : 1.0f; }
WYVERN_DEVICE float beside(float beta) { return is_inside(beta) ? 1.0f : beta; }

WYVERN_DEVICE Float2 beside(const Float2& beta) {
  return {{beside(beta.at[0]), beside(beta.at[1])}};
}

/// `a` with reduction index i times what is beside beta[i].
template <class T>
WYVERN_DEVICE FragmentA<T> scale_depth(const FragmentA<T>& a, const float* beta) {
  FragmentA<T> scaled;
  const Float2 first = beside(load<2>(beta + lane_index() % 4 * 2));
  if constexpr (kHalf<T>) {
    const Float2 second = beside(load<2>(beta + 8 + lane_index() % 4 * 2));
#pragma unroll
    for (int i = 0; i < 4; ++i) scaled.r[i] = scale_packed<T>(a.r[i], i < 2 ? first : second);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) scaled.r[i] = a.r[i] * first.at[i / 2];
  }
  return scaled;
}

/// Two neighbouring elements to shared memory.
template <class T>
WYVERN_DEVICE void store_two(T* to, float first, float second) {
  if constexpr (kHalf<T>)
    *reinterpret_cast<uint32*>(to) = pack<T>(first, second);
  else
    *reinterpret_cast<Float2*>(to) = Float2{{first, second}};
}

/// The sum over the four lanes that share rows of an accumulator.
WYVERN_DEVICE float sum_of_quad(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}

/// A power of two near K, factor on operands that hold two scales of normalized rows: keeps those
/// of rows with elements near 1 near 1, for fp16's range. 1 where rows are not `Scaled`.
template <bool Scaled, int K>
WYVERN_DEVICE constexpr float balance() {
  float factor = 1.0f;
  if (Scaled)
    while (factor < K) factor *= 2.0f;
  return factor;
}

/// The derivative of activate_beta.
template <bool Sigmoid, bool Negative, class T>
WYVERN_DEVICE float beta_slope([[maybe_unused]] T raw) {
  if constexpr (!Sigmoid) return 1.0f;
  const float x = to_float(raw);
  return (Negative ? 2.0f : 1.0f) / (1.0f + exponential(-x)) / (1.0f + exponential(x));
}

// ---- a block of a chunk and value head ----------------------------------------------------------

/// What a block's warps do with tiles in shared memory. S has the constants and tunables of
/// bwd_dqkwg, and of wy_bwd where beta is used. Kernels derive from it.
template <class S>
struct ChunkBackward {
  static constexpr int BT = S::BT, BK = S::BK, num_warps = S::num_warps;
  static constexpr int K = S::K, V = S::V;
  static constexpr bool SCALAR_GATE = S::SCALAR_GATE, QK_L2NORM = S::QK_L2NORM;
  static constexpr Precision precision = S::precision;
  static constexpr int kThreads = num_warps * 32;
  static constexpr int kStrips = BT / 16;
  static constexpr int kAcross = num_warps / kStrips;  // warps that share a strip
  static constexpr int kCols = BK / kAcross;           // columns of a tile of K that a warp owns
  static constexpr int kTilesK = ceil_div(K, BK);
  static constexpr int kPaddedV = round_up(V, 16);
  static constexpr int kEarlier = earlier_steps(S{});

  using T = Element<S::DTYPE>;
  using Tokens = ChunkTokens<S>;

  /// Steps of a reduction that are laid out one after the other. fp32 ones are long as they are.
  static constexpr int kUnroll = kHalf<T> ? 4 : 1;

  using Square = Tile<T, BT, BT>;
  using Keys = Tile<T, BT, BK>;
  using Values = Tile<T, BT, kPaddedV>;
  using States = Tile<T, BK, kPaddedV>;

  /// A warp's share of a BT x BK result. A class, since NVRTC 13.0 gives members of an array of
  /// arrays their initial values only in the first row when the row's type is an alias.
  struct Part {
    Accumulator accumulator[kCols / 8];

    WYVERN_DEVICE Accumulator& operator[](int n) { return accumulator[n]; }
    WYVERN_DEVICE const Accumulator& operator[](int n) const { return accumulator[n]; }
  };

  WYVERN_DEVICE static int own_strip() { return warp_index() % kStrips; }
  WYVERN_DEVICE static int own_share() { return warp_index() / kStrips; }
  /// Row of the chunk of elements 0 and 1 (half 0) and 2 and 3 (half 1) of this lane's
  /// accumulators.
  WYVERN_DEVICE static int own_row(int half) {
    return own_strip() * 16 + accumulator_row(2 * half);
  }

  static constexpr float kBalance = balance<S::QK_L2NORM, K>();
  static constexpr float kUnbalance = 1.0f / kBalance;

  /// Per-row values of the chunk in shared memory. Past the chunk's end G stays as it ended, so
  /// that no difference of two is above 0, and scales are 1.
  struct Columns {
    float* G = nullptr;
    float* q_rstd = nullptr;
    float* k_rstd = nullptr;

    WYVERN_DEVICE void load_gate(const float* from, const Extents& e, int rows) const {
      if constexpr (SCALAR_GATE)
        for (int r = thread_index(); r < BT; r += kThreads)
          G[r] = from[smaller(r, rows - 1) * e.HV];
    }
    WYVERN_DEVICE static void load_scale(float* to, const float* from, const Extents& e, int rows) {
      if constexpr (QK_L2NORM)
        for (int r = thread_index(); r < BT; r += kThreads) to[r] = r < rows ? from[r * e.H] : 1.0f;
    }

    /// exp(G_r), exp(G_C - G_r).
    WYVERN_DEVICE float since_start(int r) const {
      if constexpr (SCALAR_GATE) return decay(G[r]);
      return 1.0f;
    }
    WYVERN_DEVICE float until_end(int r) const {
      if constexpr (SCALAR_GATE) return decay(G[BT - 1] - G[r]);
      return 1.0f;
    }
    WYVERN_DEVICE float scale_of_q(int r) const {
      if constexpr (QK_L2NORM) return q_rstd[r];
      return 1.0f;
    }
    WYVERN_DEVICE float scale_of_k(int r) const {
      if constexpr (QK_L2NORM) return k_rstd[r];
      return 1.0f;
    }
  };

  /// The units of a chunk and head, whose place in the tensors is `at`: of h and V', of dU and dh,
  /// and of products of one with the other.
  struct Units {
    float state = 1.0f, gradient = 1.0f, both = 1.0f;

    WYVERN_DEVICE Units(const float* state_unit, const float* dstate_unit, int64 at) {
      if constexpr (S::STATE_UNIT) {
        state = state_unit[at];
        gradient = dstate_unit[at];
        both = state * gradient;
      }
    }
  };

  /// Factors of this lane's two rows.
  struct OwnRows {
    float q_scale[2], k_scale[2];        ///< of normalized rows
    float q_unit[2], k_unit[2];          ///< what accumulators of dQ and dK are multiples of
    float since_start[2], until_end[2];  ///< exp(G_r), exp(G_C - G_r)

    WYVERN_DEVICE explicit OwnRows(const Columns& columns) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = own_row(half);
        q_scale[half] = columns.scale_of_q(r);
        k_scale[half] = columns.scale_of_k(r);
        q_unit[half] = q_scale[half] * kBalance;
        k_unit[half] = k_scale[half] * kBalance;
        since_start[half] = columns.since_start(r);
        until_end[half] = columns.until_end(r);
      }
    }
  };

  // ---- BT x BT products
  // ---------------------------------------------------------------------------

  /// The 16x16 blocks on and below the diagonal that a warp owns: every kAcross-th of its strip.
  struct Blocks {
    static constexpr int kCount = ceil_div(kStrips, kAcross);
    Accumulator accumulator[kCount][2];

    WYVERN_DEVICE static int column(int i) { return (own_share() + i * kAcross) * 16; }

    /// this = left right^T.
    WYVERN_DEVICE Blocks(const Values& left, const Values& right) {
#pragma unroll kUnroll
      for (int depth = 0; depth < kPaddedV; depth += kDepth<T>) {
        const auto a = load_a(left, own_strip() * 16, depth);
#pragma unroll
        for (int i = 0; i < kCount; ++i)
          if (column(i) <= own_strip() * 16)
            multiply<precision>(accumulator[i][0], accumulator[i][1], a,
                                load_b_transposed(right, depth, column(i)));
      }
    }

    /// Calls visit(r, s, x_rs, x_r,s+1) for each pair of neighbouring columns.
    template <class Visit>
    WYVERN_DEVICE void for_each_pair(Visit&& visit) const {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (column(i) <= own_strip() * 16)
#pragma unroll
          for (int j = 0; j < 8; j += 2)
            visit(own_row(j / 2 % 2), column(i) + j / 4 * 8 + accumulator_col(0),
                  accumulator[i][j / 4].x[j % 4], accumulator[i][j / 4].x[j % 4 + 1]);
    }

    /// to_rs = factor(r) exp(G_r - G_s) this_rs where row s is of an earlier token than r, else 0,
    /// in these blocks; times the scales of rows and of keys.
    template <class Factor>
    WYVERN_DEVICE void store_decayed(const Square& to, const Tokens& tokens, Factor&& factor,
                                     const Columns& columns, const float* row_rstd) const {
      for_each_pair([&](int r, int s, float first, float second) {
        float weight[2] = {factor(r), factor(r)};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if constexpr (QK_L2NORM) weight[j] *= row_rstd[r] * kBalance * columns.k_rstd[s + j];
          // Only below the diagonal is the exponent known not to be positive.
          if constexpr (SCALAR_GATE)
            weight[j] *=
                tokens.is_earlier(s + j, r) ? decay(columns.G[r] - columns.G[s + j]) : 0.0f;
        }
        store_two(to.at(r, s), tokens.is_earlier(s, r) ? within_range<T>(first * weight[0]) : 0.0f,
                  tokens.is_earlier(s + 1, r) ? within_range<T>(second * weight[1]) : 0.0f);
      });
    }
    WYVERN_DEVICE void store_diagonal(float* to, float factor) const {
      for_each_pair([&](int r, int s, float first, float second) {
        if (r == s) to[r] = factor * first;
        if (r == s + 1) to[r] = factor * second;
      });
    }
    /// What store_decayed() leaves out below the diagonal: factor(r) this_rs at BT (r - s - 1) + r,
    /// 0 for rows of two tokens.
    template <class Factor>
    WYVERN_DEVICE void store_pairs(float* to, const Tokens& tokens, Factor&& factor) const {
      if constexpr (kEarlier > 0)
        for_each_pair([&](int r, int s, float first, float second) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int before = r - s - j;
            if (before < 1 || before > kEarlier) continue;
            const float x = factor(r) * (j == 0 ? first : second);
            to[BT * (before - 1) + r] = tokens.is_earlier(s + j, r) ? 0.0f : x;
          }
        });
    }
  };

  // ---- X = Tinv^T dU
  // ------------------------------------------------------------------------------

  /// Columns col..col+15 of sixteen rows of X, from dU.
  WYVERN_DEVICE static void apply_inverse_transposed(Accumulator (&sum)[2], const Square& Tinv,
                                                     const Values& du, int strip, int col) {
#pragma unroll 1
    for (int depth = strip * 16; depth < BT; depth += kDepth<T>)
      multiply<precision>(sum[0], sum[1], load_a_transposed(Tinv, strip * 16, depth),
                          load_b(du, depth, col));
  }

  /// Sixteen rows and columns of X, in `unit`, to where dU was; `sums` += this lane's part of
  /// rowsum(X V); and what holds X becomes dV = beta X. The latter two have no unit.
  WYVERN_DEVICE static void finish_x(Accumulator (&sum)[2], const Values& x, const Values& v,
                                     const float* beta, int strip, int col, float (&sums)[2],
                                     float unit) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = strip * 16 + accumulator_row(2 * half);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float* const x_r = sum[n].x + 2 * half;
        const int c = col + n * 8 + accumulator_col(0);
        const auto v_r = load<2>(v.at(r, c));
        store_two(x.at(r, c), x_r[0], x_r[1]);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if constexpr (S::STATE_UNIT) x_r[j] *= unit;
          sums[half] += x_r[j] * to_float(v_r.at[j]);
          x_r[j] *= beta[r];
        }
      }
    }
  }

  /// X in the place of dU, dV = beta X to memory and, for each row, this warp's part of rowsum(X V)
  /// to `sums` (of BT); dU is in `unit`. v, beta and Tinv are in shared memory. A warp takes
  /// sixteen columns from the top down: no row of X needs a row of dU above it.
  WYVERN_DEVICE static void make_x(const Square& Tinv, const Values& x, const Values& v,
                                   const float* beta, T* dv, const Extents& e, int rows,
                                   float* sums, float unit) {
#pragma unroll 1
    for (int strip = 0; strip < kStrips; ++strip) {
      float products[2] = {};
#pragma unroll 1
      for (int col = warp_index() * 16; col < kPaddedV; col += num_warps * 16) {
        Accumulator sum[2];
        apply_inverse_transposed(sum, Tinv, x, strip, col);
        sync_warp();
        finish_x(sum, x, v, beta, strip, col, products, unit);
        store_pair<V>(dv + strip * 16 * (int64{e.HV} * V) + col, e.HV * V, sum[0], sum[1],
                      rows - strip * 16, V % 16 == 0 ? 16 : V - col);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = sum_of_quad(products[half]);
        if (lane_index() % 4 == 0)
          sums[warp_index() * BT + strip * 16 + accumulator_row(2 * half)] = sum;
      }
    }
  }

  /// The sum of what make_x left for a row.
  WYVERN_DEVICE static float sum_of_warps(const float* sums, int r) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < num_warps; ++i) sum += sums[i * BT + r];
    return sum;
  }

  // ---- products with a tile of K
  // ------------------------------------------------------------------

  WYVERN_DEVICE static int own_col() { return own_share() * kCols; }

  /// out[i] += rows[i] states^T, several A fragments against the same states.
  template <int N>
  WYVERN_DEVICE static void accumulate_states(Part (&out)[N], const Values (&rows)[N],
                                              const States& states) {
#pragma unroll kUnroll
    for (int depth = 0; depth < kPaddedV; depth += kDepth<T>) {
      FragmentA<T> a[N];
#pragma unroll
      for (int i = 0; i < N; ++i) a[i] = load_a(rows[i], own_strip() * 16, depth);
#pragma unroll
      for (int n = 0; n < kCols / 8; n += 2) {
        const auto b = load_b_transposed(states, depth, own_col() + n * 8);
#pragma unroll
        for (int i = 0; i < N; ++i) multiply<precision>(out[i][n], out[i][n + 1], a[i], b);
      }
    }
  }

  /// out[i] += lower[i] keys, for the operands there are; they have nothing above their diagonal
  /// blocks.
  template <int M, int N>
  WYVERN_DEVICE static void accumulate_lower(Part (&out)[M], const Square (&lower)[N],
                                             const Keys& keys) {
    static_assert(N <= M);
#pragma unroll kUnroll
    for (int depth = 0; depth < BT; depth += kDepth<T>) {
      if (depth >= own_strip() * 16 + 16) break;
      FragmentA<T> a[N];
#pragma unroll
      for (int i = 0; i < N; ++i) a[i] = load_a(lower[i], own_strip() * 16, depth);
#pragma unroll
      for (int n = 0; n < kCols / 8; n += 2) {
        const auto b = load_b(keys, depth, own_col() + n * 8);
#pragma unroll
        for (int i = 0; i < N; ++i) multiply<precision>(out[i][n], out[i][n + 1], a[i], b);
      }
    }
  }

  /// out += (diag(what is beside beta) lower)^T keys; no factor where `Scaled` is false.
  template <bool Scaled>
  WYVERN_DEVICE static void accumulate_transposed(Part& out, const Square& lower, const Keys& keys,
                                                  const float* beta = nullptr) {
#pragma unroll kUnroll
    for (int depth = 0; depth < BT; depth += kDepth<T>) {
      if (depth < own_strip() * 16) continue;
      auto a = load_a_transposed(lower, own_strip() * 16, depth);
      if constexpr (Scaled) a = scale_depth(a, beta + depth);
#pragma unroll
      for (int n = 0; n < kCols / 8; n += 2)
        multiply<precision>(out[n], out[n + 1], a, load_b(keys, depth, own_col() + n * 8));
    }
  }

  WYVERN_DEVICE static void scale_rows(Part& out, const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) out[n].x[j] *= factor[j / 2];
  }

  /// An element of q or k as products see it.
  WYVERN_DEVICE static float as_multiplied(T x) {
    if constexpr (!kHalf<T> && precision == Precision::tf32) return to_tf32(to_float(x));
    return to_float(x);
  }

  /// sums += sign rowsum(out * keys) over this lane's columns of its two rows.
  WYVERN_DEVICE static void add_row_products(float (&sums)[2], float sign, const Part& out,
                                             const Keys& keys) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kCols / 8; ++n) {
        const auto x = load<2>(keys.at(own_row(half), own_col() + n * 8 + accumulator_col(0)));
#pragma unroll
        for (int j = 0; j < 2; ++j)
          sum = fused_multiply_add(out[n].x[2 * half + j], as_multiplied(x.at[j]), sum);
      }
      sums[half] += sign * sum;
    }
  }

  /// out += factor keys, row by row.
  WYVERN_DEVICE static void add_scaled_rows(Part& out, const Keys& keys, const float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < kCols / 8; ++n) {
        const auto x = load<2>(keys.at(own_row(half), own_col() + n * 8 + accumulator_col(0)));
#pragma unroll
        for (int j = 0; j < 2; ++j) out[n].x[2 * half + j] += factor[half] * to_float(x.at[j]);
      }
  }

  /// Adds what pairs of rows r and s of one token, s < r, make of `keys`: pairs_rs factor(r, s)
  /// keys_s to out_r where `Rows`, else pairs_rs factor(r, s) keys_r to out_s. `pairs` is what
  /// store_pairs() left.
  template <bool Rows, class Factor>
  WYVERN_DEVICE static void add_pairs(Part& out, const float* pairs, const Keys& keys,
                                      Factor&& factor) {
    if constexpr (kEarlier > 0)
#pragma unroll 1
      for (int between = 1; between <= kEarlier; ++between)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int own = own_row(half);
          const int other = Rows ? own - between : own + between;
          if (other < 0 || other >= BT) continue;
          const int r = Rows ? own : other, s = Rows ? other : own;
          const float weight = pairs[BT * (between - 1) + r] * factor(r, s);
#pragma unroll
          for (int n = 0; n < kCols / 8; ++n) {
            const auto x = load<2>(keys.at(other, own_col() + n * 8 + accumulator_col(0)));
#pragma unroll
            for (int j = 0; j < 2; ++j) out[n].x[2 * half + j] += weight * to_float(x.at[j]);
          }
        }
  }

  /// What pairs of N make of k: their part of y = inside(beta) (exp(G) Y + N K) as it is scaled;
  /// sums += rowsum(y K) then.
  WYVERN_DEVICE static void add_inverse_pairs(Part& y, const float* pairs, const Keys& keys,
                                              const Columns& columns, float (&sums)[2]) {
    if constexpr (kEarlier > 0) {
      add_pairs<true>(y, pairs, keys, [&](int r, int s) {
        return kBalance * columns.scale_of_k(r) * columns.scale_of_k(s);
      });
      add_row_products(sums, 1.0f, y, keys);
    }
  }

  /// out += factor other, row by row.
  WYVERN_DEVICE static void add_rows(Part& out, const Part& other, const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) out[n].x[j] += factor[j / 2] * other[n].x[j];
  }

  /// Writes this warp's share of tile `tile` to rows of [B,T,HV,K]; `to` is the chunk's first.
  template <class Out>
  WYVERN_DEVICE static void store_part(Out* to, int tile, const Part& out, const Extents& e,
                                       int rows) {
    const int first_row = own_strip() * 16;
#pragma unroll
    for (int n = 0; n < kCols / 8; n += 2) {
      const int col = tile * BK + own_col() + n * 8;
      store_pair<K>(to + first_row * (int64{e.HV} * K) + col, e.HV * K, out[n], out[n + 1],
                    rows - first_row, K - col);
    }
  }

  /// This thread's part of sum(a * b) over a tile.
  WYVERN_DEVICE static float sum_of_products(const States& a, const States& b) {
    constexpr int kVector = 16 / static_cast<int>(sizeof(T));
    constexpr int kPerRow = kPaddedV / kVector;
    float sum = 0.0f;
    for (int i = thread_index(); i < BK * kPerRow; i += kThreads) {
      const auto x = load<kVector>(a.at(i / kPerRow, i % kPerRow * kVector));
      const auto y = load<kVector>(b.at(i / kPerRow, i % kPerRow * kVector));
#pragma unroll
      for (int j = 0; j < kVector; ++j)
        sum = fused_multiply_add(to_float(x.at[j]), to_float(y.at[j]), sum);
    }
    return sum;
  }

  // ---- sums over the block
  // ------------------------------------------------------------------------

  /// Sums of rows over the warps that share them, in shared memory.
  struct RowSums {
    float* at;

    WYVERN_DEVICE void put(const float (&own)[2]) const {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = sum_of_quad(own[half]);
        if (lane_index() % 4 == 0) at[own_share() * BT + own_row(half)] = sum;
      }
    }
    WYVERN_DEVICE float get(int r) const {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kAcross; ++i) sum += at[i * BT + r];
      return sum;
    }
  };

  /// A sum over all threads, in shared memory.
  struct BlockSum {
    float* at;

    WYVERN_DEVICE void put(float own) const {
      own = sum_warp(own);
      if (lane_index() == 0) at[warp_index()] = own;
    }
    WYVERN_DEVICE float get() const {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < num_warps; ++i) sum += at[i];
      return sum;
    }
  };

  /// A lane's sums over all tiles, from which it computes the gate's gradient.
  struct GateSums {
    float q[2] = {};     ///< rowsum(dQ Q) of its rows
    float k[2] = {};     ///< -rowsum(dK K)
    float end[2] = {};   ///< exp(G_C - G) rowsum(K (V' dS'^T))
    float state = 0.0f;  ///< sum of S dS'

    /// Sums of rows to `gate`, what the chunk's last row gets on top to `at_end`. What rows of the
    /// last token tell the state that leaves is in neither.
    WYVERN_DEVICE void put(const RowSums& gate, const BlockSum& at_end, const Tokens& tokens,
                           const Columns& columns) const {
      float rows[2], leaving[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool is_last = tokens.is_last(own_row(half));
        rows[half] = q[half] + (is_last ? 0.0f : k[half]);
        leaving[half] = is_last ? 0.0f : end[half];
      }
      gate.put(rows);
      at_end.put((leaving[0] + leaving[1]) * kUnbalance + decay(columns.G[BT - 1]) * state);
    }
  };

  // ---- beta
  // ---------------------------------------------------------------------------------------

  /// beta as the recurrence uses it, 0 past the chunk's end.
  template <bool Sigmoid, bool Negative, class Beta>
  WYVERN_DEVICE static void load_beta(float* to, const TokenRows<const Beta>& from, int rows) {
    for (int r = thread_index(); r < BT; r += kThreads)
      to[r] = r < rows ? activate_beta<Sigmoid, Negative>(*from.row(r)) : 0.0f;
  }
};

}  // namespace wyvern::cuda::gradient
