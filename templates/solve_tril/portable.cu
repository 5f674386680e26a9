// Tinv = (I + A)^-1, one block a chunk and value head.
#include "common/cuda/wy.cuh"

constexpr int kThreads = num_warps * 32;

WYVERN_KERNEL(kThreads, 0)
(const float* A, const int32* seq_offsets, const int32* chunk_index, DTYPE* Tinv, Extents e) {
  const int head = block_index() % HV;
  const Chunk chunk = locate_chunk<VARLEN, BT>(block_index() / HV, e, seq_offsets, chunk_index);
  if (chunk.rows <= 0) return;
  const int64 offset = (chunk.token * HV + head) * BT;

  SharedAllocator shared;
  const auto x = shared.tile<Tile<float, BT, BT>>();
  load_tile<kThreads, BT>(x, A + offset, HV * BT, chunk.rows, BT);
  copy_async_commit();
  copy_async_wait<0>();
  sync_block();
  invert_unit_lower<precision>(x);

  // Rows past the chunk's end were zeros, so their inverse is a unit row that meets no column of a
  // row before it: columns at or past chunk.rows are already 0 but for the part above the diagonal.
  constexpr int kVector = 16 / static_cast<int>(sizeof(DTYPE));
  for (int i = thread_index(); i < BT * (BT / kVector); i += kThreads) {
    const int r = i / (BT / kVector);
    const int s = i % (BT / kVector) * kVector;
    if (r >= chunk.rows) break;
    Vector<DTYPE, kVector> out;
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      out.at[j] = from_float<DTYPE>(s + j <= r ? *x.at(r, s + j) : 0.0f);
    *reinterpret_cast<Vector<DTYPE, kVector>*>(Tinv + offset + r * (HV * int64{BT}) + s) = out;
  }
}
