// Aqk, W, U, qg and kg straight from q, k, v, beta and Gk, one block a chunk and value head: q, k
// and Gk are read once, A and its inverse stay in shared memory.
#include "device/cuda/kda.cuh"

constexpr int kThreads = num_warps * 32;
constexpr int kTilesV = ceil_div(V, BV);
constexpr int kStrips = BT / 16;
constexpr int kSplit = larger(num_warps / kStrips, 1);

using Keys = Tile<DTYPE, BT, round_up(K, 16)>;
using Gates = Tile<float, BT, round_up(K, 16)>;
using Values = Tile<DTYPE, BT, BV>;
using Square = Tile<float, BT, BT>;

WYVERN_KERNEL(kThreads, 0) {
  const int head = block_index() % HV;
  const Chunk chunk = locate_chunk<VARLEN, BT>(block_index() / HV, e, seq_offsets, chunk_index);
  if (chunk.rows <= 0) return;
  const int64 row = chunk.token * HV + head;
  const int64 row_k = chunk.token * H + head / (HV / H);

  SharedAllocator shared;
  const auto queries = shared.tile<Keys>();
  const auto keys = shared.tile<Keys>();
  const auto gates = shared.tile<Gates>();
  RowFactors rows{shared.take<float>(BT), nullptr, nullptr};
  if constexpr (QK_L2NORM) rows = {rows.beta, shared.take<float>(BT), shared.take<float>(BT)};
  // Warps join their shares of A where A and V will be.
  SharedAllocator joined = shared;
  const auto x = shared.tile<Square>();
  const auto values = shared.tile<Values>();

  load_tile<kThreads, K>(queries, q + row_k * K, H * K, chunk.rows, K);
  load_tile<kThreads, K>(keys, k + row_k * K, H * K, chunk.rows, K);
  load_tile<kThreads, K>(gates, Gk + row * K, int64{HV} * K, chunk.rows, K);
  copy_async_commit();
  load_row_factors<kThreads, BT, QK_L2NORM>(
      rows, q_rstd + row_k, k_rstd + row_k, H, chunk.rows,
      [&](int r) { return activate_beta<BETA_SIGMOID, NEG_EIGVAL>(beta[row + r * HV]); });
  copy_async_wait<0>();
  sync_block();

  {
    const int strip = warp_index() % kStrips;
    const int part = warp_index() / kStrips;
    IntraStrip<BT> sum;
    if (strip * 16 < chunk.rows)
      accumulate_intra<precision, SAFE_GATE, kSplit>(sum, queries, keys, gates, strip, chunk.rows,
                                                     part);
    join_parts<kSplit>(sum, joined.take<float>(kPartFloats<BT, kSplit>), strip, part);
    if constexpr (kSplit > 1) sync_block();
    // Rows past the end may hold anything: they become rows of the unit matrix.
    if (part == 0)
      for_each_intra<QK_L2NORM>(sum, rows, strip,
                                [&](int r, int s, float P_0, float P_1, float A_0, float A_1) {
                                  const bool valid = r < chunk.rows;
                                  *reinterpret_cast<Float2*>(x.at(r, s)) =
                                      Float2{{valid ? A_0 : 0.0f, valid ? A_1 : 0.0f}};
                                  if (valid)
                                    store_vector(Aqk + (row + r * HV) * BT + s, Float2{{P_0, P_1}});
                                });
  }
  const auto load_values = [&](int tile) {
    load_tile<kThreads, V>(values, v + row * V + tile * BV, int64{HV} * V, chunk.rows,
                           V - tile * BV);
    copy_async_commit();
  };
  load_values(0);
  sync_block();
  invert_unit_lower<precision>(x);
  if constexpr (KEEP_INVERSE)
    store_inverse<kThreads>(x, Tinv + row * BT, int64{HV} * BT, chunk.rows);

  // Where U is fp32, its terms are not rounded either.
  constexpr int kInverseParts = kHalf<DTYPE> && !kHalf<U_DTYPE> ? 2 : 1;
  const InverseOperand<DTYPE, BT, kInverseParts> inverse(x, rows.beta);
  const KeyOutputs<DTYPE> to{w + row * K, qg + row * K, kg + row * K, int64{HV} * K};
  const int first = warp_index() * 16;
  for (int col = first; col < K; col += num_warps * 16)
    write_keys<precision, QK_L2NORM, K>(inverse, queries, keys, gates, rows, to, col, col,
                                        chunk.rows, K - col);
  for (int tile = 0; tile < kTilesV; ++tile) {
    copy_async_wait<0>();
    sync_block();
    const int cols = smaller(V - tile * BV, BV);
    for (int col = first; col < cols; col += num_warps * 16)
      inverse.template apply<precision, V>(values, col, u + row * V + tile * BV + col,
                                           int64{HV} * V, chunk.rows, cols - col);
    if (tile + 1 < kTilesV) {
      sync_block();
      load_values(tile + 1);
    }
  }
}
