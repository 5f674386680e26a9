// The products inside a chunk, their gradients added to those through the states: one block a chunk
// and value head, BK columns of K at a time.
#include "device/cuda/kda_intra_backward.cuh"
#include "gradient/kda_intra_bwd/layout.hpp"

constexpr int kThreads = num_warps * 32;
constexpr int kStrips = BT / 16;              // one a warp
constexpr int kGroups = num_warps / kStrips;  // warps side by side
constexpr int kCols = BK / kGroups;
constexpr int kTilesK = ceil_div(K, BK);

constexpr kda_intra_bwd::SharedLayout kLayout{Spec{}};
using Products = TileAt<kLayout.dA>;
using Factor = Products::Element;
using Rates = kda::RatesOf<Spec, BK, 1>;
using Intra =
    kda::IntraBackward<DTYPE, Factor, precision, BT, BK, SAFE_GATE, QK_L2NORM, Rates::Type>;

/// The strictly lower part of a [BT,BT] matrix of fp32, zeros elsewhere, and its diagonal.
WYVERN_DEVICE void load_lower(const Products& to, float* diagonal, const float* from,
                              const Extents& e, int rows) {
  for (int i = thread_index() * 4; i < BT * BT; i += kThreads * 4) {
    const int r = i / BT;
    const int s = i % BT;
    Vector<float, 4> x{};
    if (r < rows) x = load<4>(from + r * int64{e.HV * BT} + s);
    Vector<Factor, 4> lower;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      lower.at[j] = from_float<Factor>(r > s + j ? x.at[j] : 0.0f);
      if (diagonal != nullptr && r == s + j) diagonal[r] = x.at[j];
    }
    *reinterpret_cast<Vector<Factor, 4>*>(to.at(r, s)) = lower;
  }
}

WYVERN_KERNEL(kThreads, 0) {
  const int head = block_index() % e.HV;
  const int slot = block_index() / e.HV;
  const Chunk chunk = locate_chunk<VARLEN, BT>(slot, e, seq_offsets, chunk_index);
  if (chunk.rows <= 0) return;
  const int64 row = chunk.token * e.HV + head;
  const int key = e.key_head(head);
  const int64 row_k = chunk.token * e.H + key;
  const auto q_chunk = rows_in(chunk, q, q_stride, key * K);
  const auto k_chunk = rows_in(chunk, k, k_stride, key * K);
  const auto beta_chunk = rows_in(chunk, beta, beta_stride, head);
  const auto erase_chunk = rows_in(chunk, erase, erase_stride, head * K);

  unsigned char* const shared = shared_memory();
  float* const diagonal = array_at<kLayout.diagonal>(shared);
  float* const row_sums = array_at<kLayout.row_sums>(shared);
  Intra intra;
  intra.dAqk = tile_at<kLayout.dAqk>(shared);
  intra.dA = tile_at<kLayout.dA>(shared);
  const auto keys = kda::keys_at<kLayout.keys>(shared);
  intra.tile = keys;
  intra.rows = kda::rows_at<kLayout.rows>(shared);
  intra.rates = Rates::at(keys, intra.rows);
  intra.diagonal = diagonal;
  kda::load_row_factors<kThreads, BT, QK_L2NORM>(
      intra.rows, q_rstd + row_k, k_rstd + row_k, e.H, chunk.rows,
      [&](int r) { return kda::row_rate<Spec>(beta_chunk, r); });
  load_lower(intra.dAqk, diagonal, dAqk + row * BT, e, chunk.rows);
  load_lower(intra.dA, nullptr, dA + row * BT, e, chunk.rows);

  const int strip = warp_index() % kStrips;
  const int group = warp_index() / kStrips;
  const int first_row = strip * 16;
  const int64 warp_row = row + int64{first_row} * e.HV;
  const int rows = chunk.rows - first_row;
  const int64 stride = e.HV * K;
  Rates::Gradients d_rates = {};
#pragma unroll 1
  for (int tile = 0; tile < kTilesK; ++tile) {
    const int first = tile * BK;
    if (tile > 0) sync_block();
    kda::load_key_tile<kThreads, K>(intra.tile, q_chunk.at(0, first), k_chunk.at(0, first),
                                    TokenRows<const float>{Gk + row * K + first, e.HV * K},
                                    chunk.rows, K - first);
    kda::load_erase_gate<kThreads, K>(keys, erase_chunk.at(0, first), chunk.rows, K - first);
    copy_async_commit();
    copy_async_wait<0>();
    sync_block();
#pragma unroll 1
    for (int col = group * kCols; col < (group + 1) * kCols; col += 16) {
      const int cols = K - first - col;
      if (cols <= 0) break;
      const int64 at = warp_row * K + first + col;
      kda::KeyGradients d;
      kda::load_accumulators<K>(dq_inter + at, stride, d.dq[0], d.dq[1], rows, cols);
      kda::load_accumulators<K>(dk_inter + at, stride, d.dk[0], d.dk[1], rows, cols);
      kda::load_accumulators<K>(dGk_inter + at, stride, d.dG[0], d.dG[1], rows, cols);
      kda::load_rates<K>(derase_inter + at, stride, d_rates, 0, rows, cols);
      intra.add(d, kda::gradients_of(d_rates, 0), strip, col);
      store_pair<K>(dq + at, stride, d.dq[0], d.dq[1], rows, cols);
      store_pair<K>(dk + at, stride, d.dk[0], d.dk[1], rows, cols);
      store_pair<K>(dGk + at, stride, d.dG[0], d.dG[1], rows, cols);
      kda::store_rates<K>(derase + at, stride, d_rates, 0, rows, cols);
    }
  }
  if constexpr (ERASE_WRITE) return;
  kda::store_row_sums(d_rates, row_sums + group * BT + first_row);
  sync_block();
  for (int r = thread_index(); r < chunk.rows; r += kThreads) {
    float sum = dbeta_inter[row + r * e.HV];
    for (int i = 0; i < kGroups; ++i) sum += row_sums[i * BT + r];
    sum *= kda::beta_slope<BETA_SIGMOID, NEG_EIGVAL>(intra.rows.beta[r]);
    dbeta[row + r * e.HV] = from_float<BETA_DTYPE>(sum);
  }
}
