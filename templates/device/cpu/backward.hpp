// The gradients of one chunk and value head from the state's gradients, for bwd_dqkwg, wy_bwd and
// wy_dqkg. BT rows, all of V, BK columns of K at a time.
//
// The gate's gradient comes from sums over rows of products that hold each pair of rows twice, with
// opposite signs. Pairs of rows of one token, the diagonal among them, cancel and are left out, and
// so is the last token's update of the state.
#pragma once

#include "device/chunk_tokens.hpp"
#include "device/cpu/backward_layout.hpp"
#include "device/cpu/chunk.hpp"
#include "device/cpu/product.hpp"

namespace wyvern::cpu {

template <class S>
struct ChunkBackward {
  static constexpr int BT = S::BT, BK = S::BK, K = S::K, V = S::V;
  static constexpr int kEarlier = earlier_steps(S{});

  using Tokens = ChunkTokens<S>;

  /// Decay factors of the rows of a chunk: all 1 without a gate.
  struct Decay {
    float* G;
    float* since_start;  ///< exp(G_r)
    float* until_end;    ///< exp(G_C - G_r)

    void load(const float* from, const Extents& e, int rows) const {
      if constexpr (S::SCALAR_GATE) {
        load_column(from, e.HV, rows, G);
        for (int r = 0; r < rows; r += kLanes) {
          store(since_start + r, exp(cpu::load(G + r)));
          store(until_end + r, exp(G[rows - 1] - cpu::load(G + r)));
        }
      } else {
        fill_column(G, 0.0F, rows);
        fill_column(since_start, 1.0F, rows);
        fill_column(until_end, 1.0F, rows);
      }
    }
  };
  template <DecayLayout Place>
  static Decay decay_at(void* memory) {
    return {.G = vector_at<Place.G>(memory),
            .since_start = vector_at<Place.since_start>(memory),
            .until_end = vector_at<Place.until_end>(memory)};
  }

  /// A tile of q or k: BK columns of a chunk's rows times their scales.
  template <class T>
  static void load_keys(const TokenRows<const T>& from, const float* scale, int rows, int columns,
                        Tile<BK> dst) {
    load_tile<S::QK_L2NORM>(from, rows, columns, dst, scale);
  }

  // ---- pairs of rows of one token ---------------------------------------------------------------

  /// Moves the elements of `lower` for pairs of rows of one token, below the diagonal, to `pairs`,
  /// kEarlier for each row, and sets them to 0.
  static void take_pairs(const Tokens& tokens, Tile<BT> lower, float* pairs) {
    for_each_pair(tokens, [&](int r, int s) {
      pair(pairs, r, s) = lower.row(r)[s];
      lower.row(r)[s] = 0.0F;
    });
  }

  /// Adds the pairs of P to the gradients of q and k.
  static void add_attention_pairs(const Tokens& tokens, float* pairs, Tile<BK> queries,
                                  Tile<BK> keys, int columns, Tile<BK> dq, Tile<BK> dk) {
    for_each_pair(tokens, [&](int r, int s) {
      add_row(keys.row(s), pair(pairs, r, s), columns, dq.row(r));
      add_row(queries.row(r), pair(pairs, r, s), columns, dk.row(s));
    });
  }

  /// Adds the pairs of N to the gradient of k: N K to y, rowsum((N K) K) to `of_beta`, and
  /// (diag(beta) N)^T K to dk.
  static void add_inverse_pairs(const Tokens& tokens, float* pairs, const float* beta,
                                Tile<BK> keys, int columns, Tile<BK> y, Tile<BK> dk,
                                float* of_beta) {
    for_each_pair(tokens, [&](int r, int s) {
      of_beta[r] += pair(pairs, r, s) * dot(keys.row(r), keys.row(s), columns);
      add_row(keys.row(s), pair(pairs, r, s), columns, y.row(r));
      add_row(keys.row(r), beta[r] * pair(pairs, r, s), columns, dk.row(s));
    });
  }

  // ---- attention's gradient ---------------------------------------------------------------------

  /// scale dO V'^T exp(G_r - G_s) below the diagonal, with pairs of rows of one token in their own
  /// array, and its diagonal. `products` and `factor` are scratch.
  static void attention_gradient(const Tokens& tokens, Tile<V> dO, Tile<BT> values_t,
                                 const Decay& decay, float scale, Tile<BT> products, float* factor,
                                 Tile<BT> P, float* pairs, float* diagonal) {
    const int rows = tokens.rows;
    multiply<Layout::rows, Lower::c>(rows, rows, V, dO, values_t, products);
    fill_column(factor, scale, rows);
    decay_lower<1, false>(products, rows, decay.G, factor, nullptr, P);
    take_pairs(tokens, P, pairs);
    for (int r = 0; r < rows; ++r) diagonal[r] = scale * products.row(r)[r];
  }

  // ---- the inverse's gradient -------------------------------------------------------------------

  /// N = dA exp(G_r - G_s), with pairs of rows of one token in their own array, and M = diag(beta)
  /// N, dA = -strict_tril(X V'^T). `products` and `factor` are scratch.
  static void inverse_gradient(const Tokens& tokens, Tile<V> x, Tile<BT> values_t,
                               const Decay& decay, const float* beta, Tile<BT> products,
                               float* factor, Tile<BT> N, float* pairs, Tile<BT> M) {
    const int rows = tokens.rows;
    multiply<Layout::rows, Lower::c>(rows, rows, V, x, values_t, products);
    fill_column(factor, -1.0F, rows);
    decay_lower<1, false>(products, rows, decay.G, factor, nullptr, N);
    take_pairs(tokens, N, pairs);
    const int columns = round_up(rows, 16);
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < columns; c += kLanes) store(M.row(r) + c, load(N.row(r) + c) * beta[r]);
    clear_rows(M, rows, columns, columns);
  }

  /// dV = beta X to memory; sums_r = rowsum(X V).
  template <class T>
  [[gnu::noinline]] static void finish_values(Tile<V> x, const TokenRows<const T>& v,
                                              const float* beta, const Extents& e, int rows, T* dv,
                                              float* sums) {
    constexpr int kWhole = V / kLanes * kLanes;
    for (int r = 0; r < rows; ++r) {
      const float* from = x.row(r);
      const T* other = v.row(r);
      T* to = dv + r * (int64{e.HV} * V);
      f32 products{};
      for (int c = 0; c < kWhole; c += kLanes) {
        products += load(from + c) * load(other + c);
        store(to + c, load(from + c) * beta[r]);
      }
      if constexpr (kWhole < V) {
        products += load(from + kWhole) * load_part(other + kWhole, V - kWhole);
        store_part(to + kWhole, load(from + kWhole) * beta[r], V - kWhole);
      }
      sums[r] = sum(products);
    }
  }

  // ---- sums over rows ---------------------------------------------------------------------------

  /// sums_r += sign rowsum(a * b).
  [[gnu::noinline]] static void add_row_products(Tile<BK> a, Tile<BK> b, float sign, int rows,
                                                 int columns, float* sums) {
    for (int r = 0; r < rows; ++r) sums[r] += sign * dot(a.row(r), b.row(r), columns);
  }

  /// dst_r += factor_r src_r.
  [[gnu::noinline]] static void add_rows(Tile<BK> src, const float* factor, int rows, int columns,
                                         Tile<BK> dst) {
    for (int r = 0; r < rows; ++r) add_row(src.row(r), factor[r], columns, dst.row(r));
  }

  /// The end term of the gate's gradient, added to a chunk's last row: the sum over rows before the
  /// last token's of exp(G_C - G) K (V' dS'^T), where dk is V' dS'^T, plus sum(exp(G_C) S dS').
  /// `row_sums` is scratch.
  static float end_of_chunk(const Tokens& tokens, Tile<BK> dk, Tile<BK> keys, Tile<BK> state_t,
                            Tile<BK> gradient_t, const Decay& decay, int columns, float* row_sums) {
    const int rows = tokens.first(tokens.rows - 1);
    fill_column(row_sums, 0.0F, tokens.rows);
    add_row_products(dk, keys, 1.0F, rows, columns, row_sums);
    float end = decay.since_start[tokens.rows - 1] * sum_of_products(state_t, gradient_t, columns);
    for (int r = 0; r < rows; ++r) end += decay.until_end[r] * row_sums[r];
    return end;
  }

  // ---- beta -------------------------------------------------------------------------------------

  /// dst_r = src_r times the derivative of beta's activation; `raw` is scratch.
  template <class T>
  static void through_activation(const TokenRows<const T>& beta, int rows, float* raw, float* dst) {
    if constexpr (S::BETA_SIGMOID) {
      load_column(beta.first, beta.stride, rows, raw);
      for (int r = 0; r < rows; r += kLanes) {
        const f32 x = load(raw + r);
        store(dst + r, load(dst + r) * sigmoid(x) * sigmoid(-x) * (S::NEG_EIGVAL ? 2.0F : 1.0F));
      }
    }
  }

 private:
  template <class Visit>
  static void for_each_pair(const Tokens& tokens, Visit visit) {
    if constexpr (kEarlier > 0)
      for (int r = 0; r < tokens.rows; ++r)
        for (int s = tokens.first(r); s < r; ++s) visit(r, s);
  }
  static float& pair(float* pairs, int r, int s) { return pairs[r * kEarlier + r - s - 1]; }

  static void add_row(const float* src, float factor, int columns, float* dst) {
    for (int c = 0; c < columns; c += kLanes)
      store(dst + c, load(dst + c) + load(src + c) * factor);
  }
  static float dot(const float* a, const float* b, int columns) {
    f32 products{};
    for (int c = 0; c < columns; c += kLanes) products += load(a + c) * load(b + c);
    return sum(products);
  }

  /// The sum of a * b over V rows.
  [[gnu::noinline]] static float sum_of_products(Tile<BK> a, Tile<BK> b, int columns) {
    f32 products{};
    for (int r = 0; r < V; ++r)
      for (int c = 0; c < columns; c += kLanes) products += load(a.row(r) + c) * load(b.row(r) + c);
    return sum(products);
  }
};

}  // namespace wyvern::cpu
