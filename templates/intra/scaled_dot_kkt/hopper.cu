// A on Hopper, one block a chunk and key head: a tensor copy loads the chunk's keys, one warpgroup
// multiplies them with themselves, and the product serves all value heads of the key head.
#include "device/cuda/chunk.cuh"
#include "device/cuda/sm90/barrier.cuh"
#include "device/cuda/sm90/product.cuh"
#include "intra/scaled_dot_kkt/hopper_layout.hpp"

constexpr int kThreads = 128;
constexpr scaled_dot_kkt::HopperLayout kLayout{Spec{}};
static_assert(BT == 64, "a warpgroup's product has 64 rows");

WYVERN_KERNEL(kThreads, 0) {
  const int head = block_index() % e.H;
  const Chunk chunk = locate_chunk<VARLEN, BT>(block_index() / e.H, e, seq_offsets, chunk_index);
  if (chunk.rows <= 0) return;

  unsigned char* const shared = sm90::swizzled_memory();
  const auto keys = sm90::swizzled_at<kLayout.keys>(shared);
  sm90::Barrier* const arrived = sm90::barriers_at<kLayout.arrived>(shared);
  float* const G_tile = array_at<kLayout.G>(shared);
  float* const beta_tile = array_at<kLayout.beta>(shared);
  float* const rstd_tile = array_at<kLayout.k_rstd>(shared);

  if (thread_index() == 0) {
    sm90::barrier_init(arrived, 1);
    sm90::fence_barrier_init();
    sm90::barrier_arrive_expect(arrived, keys.kBytes);
    // Rows past the chunk are the next sequence's, or zeros past the tensor: nothing kept has them.
    sm90::tensor_load(keys.data, k_map, {0, static_cast<int32>(chunk.token), 0, head}, arrived);
  }
  if constexpr (QK_L2NORM)
    load_column<kThreads, BT>(rstd_tile, k_rstd + chunk.token * e.H + head, e.H, chunk.rows);
  sync_block();
  sm90::barrier_wait(arrived, 0);

  sm90::Accumulator<BT> gram;
  sm90::start_product<K>(gram, sm90::rows_of(keys), sm90::rows_of(keys));
  sm90::end_products<0>(gram);

#pragma unroll 1
  for (int member = 0; member < e.group(); ++member) {
    const int value_head = head * e.group() + member;
    const int64 row = chunk.token * e.HV + value_head;
    const auto beta_chunk = rows_in(chunk, beta, beta_stride, value_head);
    if (member > 0) sync_block();
    load_gates<SCALAR_GATE, kThreads, BT>(G_tile, G + row, e.HV, chunk.rows);
    copy_async_commit();
    for (int r = thread_index(); r < BT; r += kThreads)
      beta_tile[r] = r < chunk.rows ? beta_of_values<Spec>(*beta_chunk.row(r)) : 0.0f;
    copy_async_wait<0>();
    sync_block();

#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = gram.row(2 * half);
      if (r >= chunk.rows) continue;
      const float G_r = G_tile[r];
      const float beta_r = QK_L2NORM ? beta_tile[r] * rstd_tile[r] : beta_tile[r];
      float* const A_row = A + (row + r * e.HV) * BT;
#pragma unroll
      for (int i = 2 * half; i < gram.kCount; i += 4) {
        const int s = gram.col(i);
        const Float2 G_s = load<2>(G_tile + s);
        Float2 scale{{1.0f, 1.0f}};
        if constexpr (QK_L2NORM) scale = load<2>(rstd_tile + s);
        Float2 x;
#pragma unroll
        for (int j = 0; j < 2; ++j)
          x.at[j] =
              r > s + j ? beta_r * decay(G_r - G_s.at[j]) * scale.at[j] * gram.x[i + j] : 0.0f;
        store_vector(A_row + s, x);
      }
    }
  }
}
