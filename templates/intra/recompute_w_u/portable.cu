// W and U from the inverse, one block a tile of BK columns of W or BV columns of U.
#include "device/cuda/wy.cuh"
#include "device/state_unit.hpp"
#include "intra/recompute_w_u/layout.hpp"

constexpr int kThreads = num_warps * 32;
constexpr int kTilesW = ceil_div(K, BK);
constexpr int kTilesU = ceil_div(V, BV);
constexpr recompute_w_u::SharedLayout kLayout{Spec{}};

/// Tinv diag(beta) x for one tile x, whose place is X, W's (where `Keys`) with exp(G) and the scale
/// of keys on top: `from` and `to` point at its first element.
template <bool Keys, TilePlace X, int Columns, class Out>
WYVERN_DEVICE void apply_tile(const DTYPE* Tinv, const TokenRows<const DTYPE>& from,
                              const TokenRows<const BETA_DTYPE>& beta, const float* G,
                              const float* k_rstd, Out* to, const Extents& e, int rows, int cols) {
  unsigned char* const shared = shared_memory();
  const auto inverse = tile_at<kLayout.inverse>(shared);
  float* const scale = array_at<kLayout.scale>(shared);
  const auto x = tile_at<X>(shared);
  load_tile<kThreads, BT>(inverse, Tinv, e.HV * BT, rows, BT);
  copy_async_commit();
  load_tile<kThreads, Columns>(x, from, rows, cols);
  copy_async_commit();
  for (int r = thread_index(); r < BT; r += kThreads) {
    float factor = 0.0f;
    if (r < rows) {
      factor = beta_of_values<Spec>(*beta.row(r));
      if constexpr (Keys && SCALAR_GATE) factor *= decay(G[r * e.HV]);
      if constexpr (Keys && QK_L2NORM) factor *= k_rstd[r * e.H];
    }
    scale[r] = factor;
  }
  copy_async_wait<1>();
  sync_block();
  const LowerOperand<DTYPE, BT> operand(inverse, scale);
  copy_async_wait<0>();
  sync_block();
  for (int col = warp_index() * 16; col < smaller(X.cols, cols); col += num_warps * 16)
    operand.template apply<precision, Columns>(x, col, to + col, e.HV * Columns, rows, cols - col,
                                               Keys ? 1.0f : kValueUnit<Spec>);
}

WYVERN_KERNEL(kThreads, 0) {
  const int tile = block_index() % (kTilesW + kTilesU);
  const int head = block_index() / (kTilesW + kTilesU) % e.HV;
  const int slot = block_index() / (kTilesW + kTilesU) / e.HV;
  const Chunk chunk = locate_chunk<VARLEN, BT>(slot, e, seq_offsets, chunk_index);
  if (chunk.rows <= 0) return;
  const int64 row = chunk.token * e.HV + head;
  const int key = e.key_head(head);
  const int64 row_k = chunk.token * e.H + key;
  const auto k_chunk = rows_in(chunk, k, k_stride, key * K);
  const auto v_chunk = rows_in(chunk, v, v_stride, head * V);
  const auto beta_chunk = rows_in(chunk, beta, beta_stride, head);
  if (tile < kTilesW) {
    const int col = tile * BK;
    apply_tile<true, kLayout.keys, K>(Tinv + row * BT, k_chunk.at(0, col), beta_chunk, G + row,
                                      k_rstd + row_k, w + row * K + col, e, chunk.rows, K - col);
  } else {
    const int col = (tile - kTilesW) * BV;
    apply_tile<false, kLayout.values, V>(Tinv + row * BT, v_chunk.at(0, col), beta_chunk, nullptr,
                                         nullptr, u + row * V + col, e, chunk.rows, V - col);
  }
}
