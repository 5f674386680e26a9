// All gradients of a chunk and value head but the gate's sum, one block for each: dO, V' and
// X = Tinv^T dU stay in shared memory, and so do dAqk and dA, while tiles of K stream past them.
#include "device/cuda/gdn2_backward.cuh"
#include "gdn2/gdn2_chunk_bwd/layout.hpp"

constexpr int kThreads = num_warps * 32;
constexpr int kStrips = BT / 16;              // one a warp
constexpr int kGroups = num_warps / kStrips;  // warps side by side
constexpr int kCols = BK / kGroups;
constexpr int kTilesK = ceil_div(K, BK);
constexpr int kPaddedV = round_up(V, 16);

constexpr gdn2_chunk_bwd::SharedLayout kLayout{Spec{}};
constexpr gdn2_chunk_bwd::BufferLayout kBuffer{Spec{}};

using Rates = gdn2::ElementRates<BETA_DTYPE, BT, BK>;
using Inter = kda::InterBackward<DTYPE, precision, BT, BK, kPaddedV, QK_L2NORM>;
using Factor = TileAt<kLayout.dA>::Element;
using Intra = kda::IntraBackward<DTYPE, Factor, precision, BT, BK, SAFE_GATE, QK_L2NORM, Rates>;

/// One of the buffers of the pipeline.
struct Buffer {
  unsigned char* const start;
  kda::StateTile<DTYPE, BK, kPaddedV> states{tile_at<kBuffer.h>(start), tile_at<kBuffer.dh>(start)};
  kda::KeyTile<DTYPE, BT, BK> keys = kda::keys_at<kBuffer.keys.keys>(start);
  Rates rates{tile_at<kBuffer.keys.erase>(start)};

  WYVERN_DEVICE explicit Buffer(int tile)
      : start(shared_memory() + tile % num_stages * kBuffer.bytes) {}
};

/// Inputs of the block's chunk and value head, from the chunk's first row on.
struct Inputs {
  TokenRows<const DTYPE> q, k, v, dO;
  TokenRows<const BETA_DTYPE> erase, write;
  const DTYPE *v_new, *Tinv;
  const float *Gk, *q_rstd, *k_rstd;
  const DTYPE *h, *dh, *dU;
  int rows;
  const Extents& e;

  /// Starts copying a K tile, if there is one, as one group.
  WYVERN_DEVICE void load(int tile) const {
    if (tile < kTilesK) {
      const Buffer to(tile);
      const int first = tile * BK;
      load_tile<kThreads, V>(to.states.h, h + int64{first} * V, V, K - first, V);
      load_tile<kThreads, V>(to.states.dh, dh + int64{first} * V, V, K - first, V);
      kda::load_key_tile<kThreads, K>(to.keys, q.at(0, first), k.at(0, first),
                                      TokenRows<const float>{Gk + first, e.HV * K}, rows,
                                      K - first);
      load_tile<kThreads, K>(to.rates.gate, erase.at(0, first), rows, K - first);
    }
    copy_async_commit();
  }
};

/// x *= y, element by element.
WYVERN_DEVICE void multiply_elements(Accumulator& x, const Accumulator& y) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x.x[i] *= y.x[i];
}

/// Brings dO, V' and X to shared memory, starts on the first K tiles, and writes dv = write X and
/// dwrite = v X.
WYVERN_DEVICE void begin(const Inter& inter, const Inputs& in, DTYPE* dv, BETA_DTYPE* dwrite) {
  const int64 stride = in.e.HV * V;
  const auto inverse = tile_at<kLayout.inverse>(shared_memory());
  load_tile<kThreads, BT>(inverse, in.Tinv, in.e.HV * BT, in.rows, BT);
  load_tile<kThreads, V>(inter.X, in.dU, stride, in.rows, V);
  copy_async_commit();
  load_tile<kThreads, V>(inter.dO, in.dO, in.rows, V);
  load_tile<kThreads, V>(inter.values, in.v_new, stride, in.rows, V);
  copy_async_commit();
  kda::load_row_factors<kThreads, BT, QK_L2NORM>(inter.rows, in.q_rstd, in.k_rstd, in.e.H, in.rows,
                                                 [](int) { return 1.0f; });
  copy_async_wait<1>();
  sync_block();
  kda::solve_transposed<precision, num_warps>(
      inverse, inter.X, [&](int strip, int col, Accumulator& left, Accumulator& right) {
        const int rows = in.rows - strip * 16;
        const int64 at = strip * 16 * stride + col;
        Accumulator v_left, v_right, write_left, write_right;
        kda::load_accumulators<V>(in.v.row(strip * 16) + col, in.v.stride, v_left, v_right, rows,
                                  V - col);
        kda::load_accumulators<V>(in.write.row(strip * 16) + col, in.write.stride, write_left,
                                  write_right, rows, V - col);
        multiply_elements(v_left, left);
        multiply_elements(v_right, right);
        multiply_elements(left, write_left);
        multiply_elements(right, write_right);
        store_pair<V>(dwrite + at, stride, v_left, v_right, rows, V - col);
        store_pair<V>(dv + at, stride, left, right, rows, V - col);
      });
  copy_async_wait<0>();
  sync_block();
  for (int i = 0; i < num_stages; ++i) in.load(i);
}

/// Puts 16 x 16 elements of dAqk or dA to shared memory, with dAqk's diagonal by itself.
WYVERN_DEVICE void put_products(const Intra& intra, float* diagonal, int i, int j, bool is_dA,
                                const Accumulator& left, const Accumulator& right) {
  const auto& to = is_dA ? intra.dA : intra.dAqk;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = i * 16 + accumulator_row(2 * half);
      const int s = j * 16 + n * 8 + accumulator_col(0);
      const float* const x = (n == 0 ? left : right).x + 2 * half;
      *reinterpret_cast<Vector<Factor, 2>*>(to.at(r, s)) = Vector<Factor, 2>{
          {from_float<Factor>(r == s ? 0.0f : x[0]), from_float<Factor>(r == s + 1 ? 0.0f : x[1])}};
      if (!is_dA && r == s) diagonal[r] = x[0];
      if (!is_dA && r == s + 1) diagonal[r] = x[1];
    }
}

/// Sets this warp's gradients of what goes through states in K tile `tile`, once it is there.
WYVERN_DEVICE void set_inter(Inter& inter, kda::KeyGradients (&d)[kCols / 16],
                             gdn2::ElementGradients (&derase)[kCols / 16], int tile, int rows,
                             float scale) {
  const int strip = warp_index() % kStrips;
  const int col = warp_index() / kStrips * kCols;
  float* const end = array_at<kLayout.end>(shared_memory());
  float* const column_sums = array_at<kLayout.column_sums>(shared_memory());
  const Buffer buffer(tile);
  inter.tile = buffer.keys;
  inter.states = buffer.states;
  copy_async_wait<num_stages - 1>();
  sync_block();
  inter.set(d, derase, buffer.rates, column_sums + strip * BK, strip, col, rows - 1, scale);
  kda::chunk_end_products<kThreads>(inter.states, inter.tile.G, end);
  sync_block();
  const int last = rows - 1 - strip * 16;
  if (last < 0 || last >= 16) return;
#pragma unroll
  for (int pair = 0; pair < kCols / 16; ++pair)
    kda::add_chunk_end<kStrips, BK>(d[pair], end + col + pair * 16, column_sums + col + pair * 16,
                                    last);
}

WYVERN_KERNEL(kThreads, min_blocks) {
  const int head = block_index() % e.HV;
  const int slot = block_index() / e.HV;
  const Chunk chunk = locate_chunk<VARLEN, BT>(slot, e, seq_offsets, chunk_index);
  if (chunk.rows <= 0) return;
  const int64 row = chunk.token * e.HV + head;
  const int key = e.key_head(head);
  const int64 row_k = chunk.token * e.H + key;
  const auto q_chunk = rows_in(chunk, q, q_stride, key * K);
  const auto k_chunk = rows_in(chunk, k, k_stride, key * K);
  const auto v_chunk = rows_in(chunk, v, v_stride, head * V);
  const auto erase_chunk = rows_in(chunk, erase, erase_stride, head * K);
  const auto write_chunk = rows_in(chunk, write, write_stride, head * V);
  const auto dO_chunk = rows_in(chunk, dO, dO_stride, head * V);
  const int64 state = (int64{slot} * e.HV + head) * K * V;
  const Inputs in{q_chunk,      k_chunk,        v_chunk,         dO_chunk,
                  erase_chunk,  write_chunk,    v_new + row * V, Tinv + row * BT,
                  Gk + row * K, q_rstd + row_k, k_rstd + row_k,  h + state,
                  dh + state,   du + row * V,   chunk.rows,      e};

  unsigned char* const shared = shared_memory();
  Inter inter;
  inter.dO = tile_at<kLayout.dO>(shared);
  inter.values = tile_at<kLayout.values>(shared);
  inter.X = tile_at<kLayout.X>(shared);
  inter.rows = kda::rows_at<kLayout.rows>(shared);
  Intra intra;
  intra.rows = inter.rows;
  intra.dAqk = tile_at<kLayout.dAqk>(shared);
  intra.dA = tile_at<kLayout.dA>(shared);
  float* const diagonal = array_at<kLayout.diagonal>(shared);
  intra.diagonal = diagonal;
  begin(inter, in, dv + row * V, dwrite + row * V);
  kda::gradients_of_products<precision, num_warps>(
      inter.dO, inter.X, inter.values, e.scale,
      [&](int i, int j, bool is_dA, const Accumulator& left, const Accumulator& right) {
        put_products(intra, diagonal, i, j, is_dA, left, right);
      });

  const int strip = warp_index() % kStrips;
  const int first_col = warp_index() / kStrips * kCols;
  const int rows = chunk.rows - strip * 16;
#pragma unroll 1
  for (int tile = 0; tile < kTilesK; ++tile) {
    kda::KeyGradients d[kCols / 16];
    gdn2::ElementGradients derase_[kCols / 16] = {};
    set_inter(inter, d, derase_, tile, chunk.rows, e.scale);
    intra.tile = inter.tile;
    intra.rates = Buffer(tile).rates;
#pragma unroll
    for (int pair = 0; pair < kCols / 16; ++pair) {
      const int col = tile * BK + first_col + pair * 16;
      if (col >= K) break;
      intra.add(d[pair], derase_[pair], strip, first_col + pair * 16);
      const int64 at = (row + int64{strip} * 16 * e.HV) * K + col;
      const int64 stride = e.HV * K;
      store_pair<K>(dq + at, stride, d[pair].dq[0], d[pair].dq[1], rows, K - col);
      store_pair<K>(dk + at, stride, d[pair].dk[0], d[pair].dk[1], rows, K - col);
      store_pair<K>(dGk + at, stride, d[pair].dG[0], d[pair].dG[1], rows, K - col);
      store_pair<K>(derase + at, stride, derase_[pair].x[0], derase_[pair].x[1], rows, K - col);
    }
    sync_block();
    in.load(tile + num_stages);
  }
}
