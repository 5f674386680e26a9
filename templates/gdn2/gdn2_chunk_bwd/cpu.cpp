// All gradients of one chunk and value head but the gate's sum, BK columns of K at a time. They are
// kda's with erase in beta's place where keys are read, and write where values are.
#include "device/cpu/kda_state_backward.hpp"
#include "gdn2/gdn2_chunk_bwd/cpu_layout.hpp"

using Backward = StateBackward<Spec>;
constexpr gdn2_chunk_bwd::ScratchLayout kScratch{Spec{}};

/// Rates of one an element, and their gradients: tiles like those of the keys.
struct ElementRates {
  const float* rates;
  float* gradients;

  struct Row {
    const float* rates;
    float* gradients;
    f32 rate(int64 i) const { return load(rates + i); }
    void add(int64 i, f32 a, f32 b) const { store(gradients + i, load(gradients + i) + a * b); }
  };
  f32 rate(int, int64 i) const { return load(rates + i); }
  Row begin(int) const { return {rates, gradients}; }
  void end(int, const Row&) const {}
};

/// dv = write X and dwrite = v X, from their first row on.
static void values_gradient(Tile<V> X, const TokenRows<const DTYPE>& v,
                            const TokenRows<const BETA_DTYPE>& write, const Backward::Inputs& in,
                            DTYPE* dv, BETA_DTYPE* dwrite) {
  constexpr int kWhole = V / kLanes * kLanes;
  for (int r = 0; r < in.rows; ++r) {
    const float* from = X.row(r);
    const int64 row = r * in.value_stride();
    const DTYPE* v_r = v.row(r);
    const BETA_DTYPE* write_r = write.row(r);
    for (int c = 0; c < kWhole; c += kLanes) {
      store(dv + row + c, load(from + c) * load(write_r + c));
      store(dwrite + row + c, load(from + c) * load(v_r + c));
    }
    if constexpr (kWhole < V) {
      constexpr int kRest = V - kWhole;
      const f32 x = load(from + kWhole);
      store_part(dv + row + kWhole, x * load_part(write_r + kWhole, kRest), kRest);
      store_part(dwrite + row + kWhole, x * load_part(v_r + kWhole, kRest), kRest);
    }
  }
}

WYVERN_BLOCK {
  const Chunk chunk = find_chunk<VARLEN>(block[1], BT, e, seq_offsets, chunk_index);
  if (chunk.rows <= 0) return;
  const int64 hv = block[0], at = chunk.token * e.HV + hv;
  const Backward::Inputs in = Backward::Inputs{{q, q_stride},
                                               {k, k_stride},
                                               {dO, dO_stride},
                                               v_new,
                                               Tinv,
                                               Gk,
                                               q_rstd,
                                               k_rstd,
                                               h,
                                               dh,
                                               du,
                                               e}
                                  .at(chunk, block[1], hv);

  const Backward state = Backward::at<kScratch.state>(memory);
  const auto work = intra_scratch_at<kScratch.work>(memory);
  const auto d = product_gradients_at<kScratch.d>(memory);
  float* ones = vector_at<kScratch.ones>(memory);
  const auto rates = tile_at<kScratch.rates>(memory);
  const auto gradients = tile_at<kScratch.gradients>(memory);
  const ElementRates erases{rates.data, gradients.data};
  for (int r = 0; r < BT; ++r) ones[r] = 1.0F;

  state.begin(in);
  values_gradient(state.X, rows_in(chunk, v, v_stride, hv * V),
                  rows_in(chunk, write, write_stride, hv * V), in, dv + at * V, dwrite + at * V);
  state.products(in.rows, e.scale, d.dAqk.data, d.dA.data, d.dA.kStride);
  take_diagonal(d, in.rows);
  for (int c = 0; c < K; c += BK) {
    const int columns = K - c < BK ? K - c : BK;
    load_tile(rows_in(chunk, erase, erase_stride, hv * K + c), in.rows, columns, rates);
    clear_rows(gradients, 0, in.rows, columns);
    state.tile(in, c, columns, e.scale, erases);
    IntraBackward<BT, BK, SAFE_GATE, ElementRates>{state.tiles, work,    d,      erases,
                                                   ones,        in.rows, columns}
        .run();
    store_tile(state.tiles.dq, in.rows, columns, dq + at * K + c, in.key_stride());
    store_tile(state.tiles.dk, in.rows, columns, dk + at * K + c, in.key_stride());
    store_tile(state.tiles.dG, in.rows, columns, dGk + at * K + c, in.key_stride());
    store_tile(gradients, in.rows, columns, derase + at * K + c, in.key_stride());
  }
}
