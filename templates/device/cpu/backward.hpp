// The gradients of one chunk and value head once the state's are known: what bwd_dqkwg, wy_bwd and
// wy_dqkg share. It is written over the constants and tunables of the template that includes it:
// BT rows, all of V, BK columns of K at a time.
//
// The gate's gradient comes from sums over rows of products that hold each pair of rows twice, with
// opposite signs; what lies on the diagonal cancels between them and is left out.
#pragma once

#include "device/cpu/chunk.hpp"
#include "device/cpu/product.hpp"

namespace wyvern::cpu {

constexpr int64 kRow = row_stride(BT), kKeyRow = row_stride(BK), kValueRow = row_stride(V);

/// dst = value over `rows` values, in whole vectors.
inline void fill_column(float* dst, float value, int rows) {
  for (int r = 0; r < rows; r += kLanes) store(dst + r, splat(value));
}

template <class T>
[[gnu::noinline]] static void store_column(const float* src, int rows, T* dst, int64 stride) {
  for (int r = 0; r < rows; ++r) store_part(dst + r * stride, splat(src[r]), 1);
}

/// What decays the rows of a chunk: all 1 without a gate.
struct Decay {
  float* G;
  float* since_start;  ///< exp(G_r)
  float* until_end;    ///< exp(G_C - G_r)

  explicit Decay(Scratch& scratch)
      : G(scratch.vector(BT)), since_start(scratch.vector(BT)), until_end(scratch.vector(BT)) {}

  void load(const float* from, int rows) const {
    if constexpr (SCALAR_GATE) {
      load_column(from, HV, rows, G);
      for (int r = 0; r < rows; r += kLanes) {
        store(since_start + r, exp(::load(G + r)));
        store(until_end + r, exp(G[rows - 1] - ::load(G + r)));
      }
    } else {
      fill_column(G, 0.0F, rows);
      fill_column(since_start, 1.0F, rows);
      fill_column(until_end, 1.0F, rows);
    }
  }
};

/// A tile of q or k: BK columns of a chunk's rows times their scales.
template <class T>
inline void load_keys(const T* from, const float* scale, int rows, int columns, float* dst) {
  load_tile<QK_L2NORM>(from, int64{H} * K, rows, columns, dst, kKeyRow, scale);
}

// ---- attention's gradient -----------------------------------------------------------------------

/// What dO V'^T gives: scale dO V'^T exp(G_r - G_s) below the diagonal, and the diagonal.
/// `products` and `factor` are scratch.
inline void attention_gradient(const float* dO, const float* values_t, const Decay& decay,
                               float scale, int rows, float* products, float* factor, float* P,
                               float* diagonal) {
  multiply<Layout::rows, Lower::c>(rows, rows, V, dO, kValueRow, values_t, kRow, products, kRow);
  fill_column(factor, scale, rows);
  decay_lower<1, false>(products, kRow, rows, decay.G, factor, nullptr, P);
  for (int r = 0; r < rows; ++r) diagonal[r] = scale * products[r * kRow + r];
}

// ---- the inverse's gradient ---------------------------------------------------------------------

/// N = dA exp(G_r - G_s) and M = diag(beta) N, dA = -strict_tril(X V'^T).
inline void inverse_gradient(const float* x, const float* values_t, const Decay& decay,
                             const float* beta, int rows, float* products, float* factor, float* N,
                             float* M) {
  multiply<Layout::rows, Lower::c>(rows, rows, V, x, kValueRow, values_t, kRow, products, kRow);
  fill_column(factor, -1.0F, rows);
  decay_lower<1, false>(products, kRow, rows, decay.G, factor, nullptr, N);
  const int columns = round_up(rows, 16);
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; c += kLanes)
      store(M + r * kRow + c, load(N + r * kRow + c) * beta[r]);
  clear_rows(M, kRow, rows, columns, columns);
}

/// dV = beta X to memory; sums_r = rowsum(X V).
template <class T>
[[gnu::noinline]] static void finish_values(const float* x, const T* v, const float* beta, int rows,
                                            T* dv, float* sums) {
  constexpr int kWhole = V / kLanes * kLanes;
  for (int r = 0; r < rows; ++r) {
    const float* from = x + r * kValueRow;
    const T* other = v + r * (int64{HV} * V);
    T* to = dv + r * (int64{HV} * V);
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

// ---- sums over rows -----------------------------------------------------------------------------

/// sums_r += sign rowsum(a * b).
[[gnu::noinline]] static void add_row_products(const float* a, const float* b, float sign, int rows,
                                               int columns, float* sums) {
  for (int r = 0; r < rows; ++r) {
    f32 products{};
    for (int c = 0; c < columns; c += kLanes)
      products += load(a + r * kKeyRow + c) * load(b + r * kKeyRow + c);
    sums[r] += sign * sum(products);
  }
}

/// dst_r += factor_r src_r.
[[gnu::noinline]] static void add_rows(const float* src, const float* factor, int rows, int columns,
                                       float* dst) {
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; c += kLanes)
      store(dst + r * kKeyRow + c,
            load(dst + r * kKeyRow + c) + load(src + r * kKeyRow + c) * factor[r]);
}

/// The sum of a * b over a V x BK tile.
[[gnu::noinline]] static float sum_of_products(const float* a, const float* b, int columns) {
  f32 products{};
  for (int r = 0; r < V; ++r)
    for (int c = 0; c < columns; c += kLanes)
      products += load(a + r * kKeyRow + c) * load(b + r * kKeyRow + c);
  return sum(products);
}

/// What a chunk's last row gets on top: sum over rows of exp(G_C - G) K (V' dS'^T), where dk is
/// V' dS'^T, plus sum(exp(G_C) S dS').
inline float end_of_chunk(const float* dk, const float* keys, const float* state_t,
                          const float* gradient_t, const Decay& decay, int rows, int columns,
                          float* row_sums) {
  for (int r = 0; r < rows; r += kLanes) store(row_sums + r, f32{});
  add_row_products(dk, keys, 1.0F, rows, columns, row_sums);
  float end = decay.since_start[rows - 1] * sum_of_products(state_t, gradient_t, columns);
  for (int r = 0; r < rows; ++r) end += decay.until_end[r] * row_sums[r];
  return end;
}

// ---- beta ---------------------------------------------------------------------------------------

/// dst_r = src_r times the derivative of beta's activation.
template <bool Sigmoid, bool Negative, class T>
inline void through_activation(const T* beta, int rows, float* raw, float* dst) {
  if constexpr (!Sigmoid) return;
  load_column(beta, HV, rows, raw);
  for (int r = 0; r < rows; r += kLanes) {
    const f32 x = load(raw + r);
    store(dst + r, load(dst + r) * sigmoid(x) * sigmoid(-x) * (Negative ? 2.0F : 1.0F));
  }
}

}  // namespace wyvern::cpu
