// The gradients through states and the WY representation of one chunk and value head, BK columns of
// K at a time.
#include "common/cpu/chunk.hpp"
#include "common/cpu/product.hpp"

constexpr int64 kValueRow = row_stride(V), kKeyRow = row_stride(BK), kSquare = row_stride(BT);
constexpr int64 kValues = int64{HV} * V, kKeys = int64{HV} * K;

/// X = Tinv^T dU, from the diagonal's blocks down.
static void solve_transposed(const float* Tinv, const float* dU, int rows, float* X) {
  for (int s = 0; s < rows; s += 16)
    multiply<Layout::columns>(rows - s < 16 ? rows - s : 16, V, rows - s, Tinv + s * kSquare + s,
                              kSquare, dU + s * kValueRow, kValueRow, X + s * kValueRow,
                              kValueRow);
}

/// dv = beta X, and dbeta = rowsum(X V).
static void values_gradient(const float* X, const DTYPE* v, const float* beta, int rows,
                            DTYPE* dv, float* dbeta) {
  constexpr int kWhole = V / kLanes * kLanes;
  for (int r = 0; r < rows; ++r) {
    const float* from = X + r * kValueRow;
    f32 row_sum{};
    for (int c = 0; c < kWhole; c += kLanes) {
      row_sum += load(from + c) * load(v + r * kValues + c);
      store(dv + r * kValues + c, beta[r] * load(from + c));
    }
    if constexpr (kWhole < V) {
      row_sum += load(from + kWhole) * load_part(v + r * kValues + kWhole, V - kWhole);
      store_part(dv + r * kValues + kWhole, beta[r] * load(from + kWhole), V - kWhole);
    }
    dbeta[r] = sum(row_sum);
  }
}

/// factor left values^T below diagonal `Below` (0: from the main one on), zeros above, to rows of BT
/// floats.
template <int Below>
static void store_products(const float* left, const float* values_t, int rows, float factor,
                           float* products, float* to) {
  const i32 lanes = lane_numbers();
  multiply<Layout::rows, Lower::c>(rows, rows, V, left, kValueRow, values_t, kSquare, products,
                                   kSquare);
  for (int r = 0; r < rows; ++r)
    for (int s = 0; s < BT; s += kLanes) {
      const f32 x = s <= r - Below ? load(products + r * kSquare + s) * factor : f32{};
      store(to + r * (int64{HV} * BT) + s, lanes <= r - Below - s ? x : f32{});
    }
}

/// A K tile: q, k with their scales, the gates; dO S^T, V' dS'^T and X S^T, which become the
/// gradients dq, dk and dG; the chunk-end term's sum over values.
struct KeyTiles {
  float *q, *k, *G, *dq, *dk, *dG, *end;
};

static void finish(const KeyTiles& tiles, int rows, int columns, float scale, const float* beta,
                   float* dbeta) {
  const float* G_end = tiles.G + (rows - 1) * kKeyRow;
  for (int c = 0; c < columns; c += kLanes)
    store(tiles.end + c, load(tiles.end + c) * exp(load(G_end + c)));
  for (int r = 0; r < rows; ++r) {
    f32 row_sum{};
    for (int c = 0; c < columns; c += kLanes) {
      const int64 i = r * kKeyRow + c;
      const f32 G = load(tiles.G + i), k = load(tiles.k + i);
      const f32 from_start = exp(G);
      const f32 dw = -from_start * load(tiles.dG + i);  // gradient of beta k, through W
      const f32 dq = scale * from_start * load(tiles.dq + i);
      const f32 to_end = exp(load(G_end + c) - G) * load(tiles.dk + i);
      // The last row gives to the chunk's end what it takes.
      const f32 given = r == rows - 1 ? f32{} : k * to_end;
      row_sum += k * dw;
      store(tiles.dq + i, dq);
      store(tiles.dk + i, to_end + beta[r] * dw);
      store(tiles.dG + i, load(tiles.q + i) * dq + k * (beta[r] * dw) - given);
      store(tiles.end + c, load(tiles.end + c) + given);
    }
    dbeta[r] += sum(row_sum);
  }
  float* last = tiles.dG + (rows - 1) * kKeyRow;
  for (int c = 0; c < columns; c += kLanes)
    store(last + c, load(last + c) + load(tiles.end + c));
}

/// end[c] = sum over v of a_vc b_vc.
static void column_dots(const float* a, const float* b, int columns, float* end) {
  for (int c = 0; c < columns; c += kLanes) {
    f32 total{};
    for (int v = 0; v < V; ++v) total += load(a + v * kKeyRow + c) * load(b + v * kKeyRow + c);
    store(end + c, total);
  }
}

extern "C" void wyvern_kernel(void* const* a, const Extents* e, const int64* block,
                              void* memory) {
  const auto* q = static_cast<const DTYPE*>(a[0]);
  const auto* k = static_cast<const DTYPE*>(a[1]);
  const auto* v = static_cast<const DTYPE*>(a[2]);
  const auto* v_new = static_cast<const DTYPE*>(a[3]);
  const auto* beta = static_cast<const BETA_DTYPE*>(a[4]);
  const auto* Tinv = static_cast<const DTYPE*>(a[5]);
  const auto* Gk = static_cast<const float*>(a[6]);
  const auto* q_rstd = static_cast<const float*>(a[7]);
  const auto* k_rstd = static_cast<const float*>(a[8]);
  const auto* h = static_cast<const DTYPE*>(a[9]);
  const auto* dh = static_cast<const DTYPE*>(a[10]);
  const auto* d_o = static_cast<const DTYPE*>(a[11]);
  const auto* du = static_cast<const DTYPE*>(a[12]);
  auto* dq_inter = static_cast<float*>(a[15]);
  auto* dk_inter = static_cast<float*>(a[16]);
  auto* dGk_inter = static_cast<float*>(a[17]);
  auto* dv = static_cast<DTYPE*>(a[18]);
  auto* dbeta_inter = static_cast<float*>(a[19]);
  auto* dAqk = static_cast<float*>(a[20]);
  auto* dA = static_cast<float*>(a[21]);
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, *e, static_cast<const int32*>(a[13]),
                                         static_cast<const int32*>(a[14]));
  const int64 hv = block[0], head = hv / (HV / H);
  const int64 at = chunk.token * HV + hv, key_at = chunk.token * H + head;
  const int64 state = (block[1] * HV + hv) * K * V;
  const int rows = chunk.rows;
  if (rows <= 0) return;

  Scratch scratch(memory);
  float* dO = scratch.tile(BT, V);
  float* values = scratch.tile(BT, V);  // dU, then V'
  float* X = scratch.tile(BT, V);
  float* values_t = scratch.tile(V, BT);
  float* h_t = scratch.tile(V, BK);
  float* dh_t = scratch.tile(V, BK);
  float* square = scratch.tile(BT, BT);  // Tinv, then products
  const auto tile = [&] { return scratch.tile(BT, BK); };
  const KeyTiles tiles{.q = tile(), .k = tile(), .G = tile(), .dq = tile(), .dk = tile(),
                       .dG = tile(), .end = scratch.vector(BK)};
  float* rate = scratch.vector(BT);
  float* dbeta = scratch.vector(BT);
  float* q_scale = scratch.vector(BT);
  float* k_scale = scratch.vector(BT);

  load_beta<BETA_SIGMOID, NEG_EIGVAL>(beta + at, HV, rows, rate);
  if constexpr (QK_L2NORM) {
    load_column(q_rstd + key_at, H, rows, q_scale);
    load_column(k_rstd + key_at, H, rows, k_scale);
  }
  load_tile(Tinv + at * BT, int64{HV} * BT, rows, BT, square, kSquare);
  load_tile(du + at * V, kValues, rows, V, values, kValueRow);
  solve_transposed(square, values, rows, X);
  values_gradient(X, v + at * V, rate, rows, dv + at * V, dbeta);

  load_tile(d_o + at * V, kValues, rows, V, dO, kValueRow);
  load_tile(v_new + at * V, kValues, rows, V, values, kValueRow);
  transpose<true>(values, kValueRow, rows, V, values_t, kSquare);
  store_products<0>(dO, values_t, rows, e->scale, square, dAqk + at * BT);
  store_products<1>(X, values_t, rows, -1.0F, square, dA + at * BT);

  for (int c = 0; c < K; c += BK) {
    const int columns = K - c < BK ? K - c : BK;
    transpose<true>(h + state + int64{c} * V, V, columns, V, h_t, kKeyRow);
    transpose<true>(dh + state + int64{c} * V, V, columns, V, dh_t, kKeyRow);
    load_tile<QK_L2NORM>(q + key_at * K + c, int64{H} * K, rows, columns, tiles.q, kKeyRow,
                         q_scale);
    load_tile<QK_L2NORM>(k + key_at * K + c, int64{H} * K, rows, columns, tiles.k, kKeyRow,
                         k_scale);
    load_tile(Gk + at * K + c, kKeys, rows, columns, tiles.G, kKeyRow);
    multiply(rows, columns, V, dO, kValueRow, h_t, kKeyRow, tiles.dq, kKeyRow);
    multiply(rows, columns, V, values, kValueRow, dh_t, kKeyRow, tiles.dk, kKeyRow);
    multiply(rows, columns, V, X, kValueRow, h_t, kKeyRow, tiles.dG, kKeyRow);
    column_dots(h_t, dh_t, columns, tiles.end);
    finish(tiles, rows, columns, e->scale, rate, dbeta);
    store_tile(tiles.dq, kKeyRow, rows, columns, dq_inter + at * K + c, kKeys);
    store_tile(tiles.dk, kKeyRow, rows, columns, dk_inter + at * K + c, kKeys);
    store_tile(tiles.dG, kKeyRow, rows, columns, dGk_inter + at * K + c, kKeys);
  }
  for (int r = 0; r < rows; ++r) dbeta_inter[at + r * HV] = dbeta[r];
}
