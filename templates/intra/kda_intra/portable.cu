// Aqk and A, one block a chunk and value head: products of queries and keys with keys, summed over
// tiles of BK columns. A warp owns a strip of sixteen rows, or shares it by columns with others.
#include "device/cuda/kda.cuh"

constexpr int kThreads = num_warps * 32;
constexpr int kTiles = ceil_div(K, BK);
constexpr int kStrips = BT / 16;
constexpr int kSplit = num_warps / kStrips;

/// One of the buffers that tiles of BK columns of q, k and Gk pass through.
struct Stage {
  using Operand = Tile<DTYPE, BT, BK>;
  using Gates = Tile<float, BT, BK>;
  static constexpr int kBytes = 2 * Operand::kBytes + Gates::kBytes;

  Operand q, k;
  Gates G;

  WYVERN_DEVICE explicit Stage(int tile) {
    SharedAllocator shared(tile % num_stages * kBytes);
    q = shared.tile<Operand>();
    k = shared.tile<Operand>();
    G = shared.tile<Gates>();
  }
};

WYVERN_KERNEL(kThreads, 0) {
  const int head = block_index() % HV;
  const Chunk chunk = locate_chunk<VARLEN, BT>(block_index() / HV, e, seq_offsets, chunk_index);
  if (chunk.rows <= 0) return;
  const int64 row = chunk.token * HV + head;
  const int64 row_k = chunk.token * H + head / (HV / H);

  const auto load = [&](int tile) {
    if (tile < kTiles) {
      const Stage stage(tile);
      const int col = tile * BK;
      load_tile<kThreads, K>(stage.q, q + row_k * K + col, H * K, chunk.rows, K - col);
      load_tile<kThreads, K>(stage.k, k + row_k * K + col, H * K, chunk.rows, K - col);
      load_tile<kThreads, K>(stage.G, Gk + row * K + col, int64{HV} * K, chunk.rows, K - col);
    }
    copy_async_commit();
  };
  for (int i = 0; i < num_stages; ++i) load(i);

  constexpr int kPartBytes = kPartFloats<BT, kSplit> * 4;
  SharedAllocator shared(larger(num_stages * Stage::kBytes, kPartBytes));
  RowFactors rows{shared.take<float>(BT), nullptr, nullptr};
  if constexpr (QK_L2NORM) rows = {rows.beta, shared.take<float>(BT), shared.take<float>(BT)};
  load_row_factors<kThreads, BT, QK_L2NORM>(
      rows, q_rstd + row_k, k_rstd + row_k, H, chunk.rows,
      [&](int r) { return activate_beta<BETA_SIGMOID, NEG_EIGVAL>(beta[row + r * HV]); });

  const int strip = warp_index() % kStrips;
  const int part = warp_index() / kStrips;
  IntraStrip<BT> sum;
  for (int tile = 0; tile < kTiles; ++tile) {
    copy_async_wait<num_stages - 1>();
    sync_block();
    const Stage stage(tile);
    if (strip * 16 < chunk.rows)
      accumulate_intra<precision, SAFE_GATE, kSplit>(sum, stage.q, stage.k, stage.G, strip,
                                                     chunk.rows, part);
    if (tile + 1 < kTiles || kSplit > 1) sync_block();
    load(tile + num_stages);
  }
  join_parts<kSplit>(sum, SharedAllocator().take<float>(kPartFloats<BT, kSplit>), strip, part);
  if (part > 0) return;
  for_each_intra<QK_L2NORM>(sum, rows, strip,
                            [&](int r, int s, float P_0, float P_1, float A_0, float A_1) {
                              if (r >= chunk.rows) return;
                              const int64 at = (row + r * HV) * BT + s;
                              store_vector(Aqk + at, Float2{{P_0, P_1}});
                              store_vector(A + at, Float2{{A_0, A_1}});
                            });
}
