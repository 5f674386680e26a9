// Aqk, W, U, qg and kg straight from q, k, v, their rates and Gk, one block a chunk and value head:
// q, k and Gk are read once, A and its inverse stay in shared memory.
#include "device/cuda/kda.cuh"
#include "device/cuda/kda_wy.cuh"
#include "device/state_unit.hpp"
#include "intra/kda_intra_solve_wu/layout.hpp"

constexpr int kThreads = num_warps * 32;
constexpr int kTilesV = ceil_div(V, BV);
constexpr int kStrips = BT / 16;
constexpr int kSplit = num_warps / kStrips;  // warps a strip

constexpr kda_intra_solve_wu::SharedLayout kLayout{Spec{}};

WYVERN_KERNEL(kThreads, 0) {
  const int head = block_index() % e.HV;
  const Chunk chunk = locate_chunk<VARLEN, BT>(block_index() / e.HV, e, seq_offsets, chunk_index);
  if (chunk.rows <= 0) return;
  const int64 row = chunk.token * e.HV + head;
  const int key = e.key_head(head);
  const int64 row_k = chunk.token * e.H + key;
  const auto q_chunk = rows_in(chunk, q, q_stride, key * K);
  const auto k_chunk = rows_in(chunk, k, k_stride, key * K);
  const auto v_chunk = rows_in(chunk, v, v_stride, head * V);
  const auto beta_chunk = rows_in(chunk, beta, beta_stride, head);
  const auto erase_chunk = rows_in(chunk, erase, erase_stride, head * K);
  const auto write_chunk = rows_in(chunk, write, write_stride, head * V);

  unsigned char* const shared = shared_memory();
  const auto keys = kda::keys_at<kLayout.keys>(shared);
  const auto rows = kda::rows_at<kLayout.rows>(shared);
  const auto x = tile_at<kLayout.A>(shared);  // A, then its inverse
  const auto values = kda::values_at<kLayout.values>(shared);

  load_tile<kThreads, K>(keys.q, q_chunk, chunk.rows, K);
  load_tile<kThreads, K>(keys.k, k_chunk, chunk.rows, K);
  load_tile<kThreads, K>(keys.G, Gk + row * K, e.HV * K, chunk.rows, K);
  kda::load_erase_gate<kThreads, K>(keys, erase_chunk, chunk.rows, K);
  copy_async_commit();
  kda::load_row_factors<kThreads, BT, QK_L2NORM>(
      rows, q_rstd + row_k, k_rstd + row_k, e.H, chunk.rows,
      [&](int r) { return kda::row_rate<Spec>(beta_chunk, r); });
  copy_async_wait<0>();
  sync_block();

  {
    const int strip = warp_index() % kStrips;
    const int share = warp_index() / kStrips;
    kda::IntraStrip<BT> sum;
    if (strip * 16 < chunk.rows)
      kda::accumulate_intra<precision, SAFE_GATE, kSplit>(sum, keys, strip, chunk.rows, share);
    kda::join_shares<kSplit>(sum, array_at<kLayout.shares>(shared), strip, share);
    if constexpr (kSplit > 1) sync_block();
    // Rows past the end may hold anything: they become rows of the unit matrix.
    if (share == 0)
      kda::for_each_intra<QK_L2NORM>(
          sum, rows, strip, [&](int r, int s, float P_0, float P_1, float A_0, float A_1) {
            const bool valid = r < chunk.rows;
            *reinterpret_cast<Float2*>(x.at(r, s)) =
                Float2{{valid ? A_0 : 0.0f, valid ? A_1 : 0.0f}};
            if (valid) store_vector(Aqk + (row + r * e.HV) * BT + s, Float2{{P_0, P_1}});
          });
  }
  const auto load_values = [&](int tile) {
    const int col = tile * BV;
    kda::load_values<kThreads, V>(values, v_chunk.at(0, col), write_chunk.at(0, col), chunk.rows,
                                  V - col);
    copy_async_commit();
  };
  load_values(0);
  sync_block();
  invert_unit_lower<precision>(x);
  if constexpr (KEEP_INVERSE) store_inverse<kThreads>(x, Tinv + row * BT, e.HV * BT, chunk.rows);

  // Where U is fp32, its terms are not rounded either.
  constexpr int kInverseParts = kHalf<DTYPE> && !kHalf<U_DTYPE> ? 2 : 1;
  const kda::InverseOperand<DTYPE, BT, kInverseParts> inverse(x, rows.beta);
  const kda::KeyOutputs<DTYPE> to{w + row * K, qg + row * K, kg + row * K, e.HV * K};
  const int first = warp_index() * 16;
  for (int col = first; col < K; col += num_warps * 16)
    kda::write_keys<precision, QK_L2NORM, K>(inverse, keys, rows, to, col, col, chunk.rows,
                                             K - col);
  for (int tile = 0; tile < kTilesV; ++tile) {
    copy_async_wait<0>();
    sync_block();
    const int cols = smaller(V - tile * BV, BV);
    for (int col = first; col < cols; col += num_warps * 16)
      kda::write_values<precision, V>(inverse, values, col, u + row * V + tile * BV + col, e.HV * V,
                                      chunk.rows, cols - col, kValueUnit<Spec>);
    if (tile + 1 < kTilesV) {
      sync_block();
      load_values(tile + 1);
    }
  }
}
