// Tinv = (I + A)^-1, one block a chunk and value head.
#include "device/cuda/wy.cuh"
#include "intra/solve_tril/layout.hpp"

constexpr int kThreads = num_warps * 32;
constexpr solve_tril::SharedLayout kLayout{Spec{}};

WYVERN_KERNEL(kThreads, 0) {
  const int head = block_index() % e.HV;
  const Chunk chunk = locate_chunk<VARLEN, BT>(block_index() / e.HV, e, seq_offsets, chunk_index);
  if (chunk.rows <= 0) return;
  const int64 offset = (chunk.token * e.HV + head) * BT;

  const auto x = tile_at<kLayout.x>(shared_memory());
  load_tile<kThreads, BT>(x, A + offset, e.HV * BT, chunk.rows, BT);
  copy_async_commit();
  copy_async_wait<0>();
  sync_block();
  invert_unit_lower<precision>(x);
  store_inverse<kThreads>(x, Tinv + offset, e.HV * BT, chunk.rows);
}
