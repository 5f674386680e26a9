// The reverse state scan's walk through chunks, from the last to the first, for the templates that
// scan whole sequences, segments for their effect on a state's gradient, and segments from a known
// one. A block has BV columns of the gradient of the state of one value head, which stays in
// scratch from the last chunk to the first.
#pragma once

#include "device/cpu/chunk.hpp"
#include "device/cpu/product.hpp"

namespace wyvern::cpu {

constexpr int64 kKeyRow = row_stride(K), kValueRow = row_stride(BV);
constexpr int kKeyHeads = VECTOR_GATE ? HV : H;  // qg and kg have the value heads
constexpr bool kScaledKeys = QK_L2NORM && !VECTOR_GATE;

/// Tensors that a walk reads, at its first token and its head; `q` and `k` are qg and kg with a
/// vector gate, and `dO` and `dv_local` start at the block's first column.
struct ScanInputs {
  const DTYPE* q;
  const DTYPE* k;
  const DTYPE* w;
  const DTYPE* dO;
  const DTYPE* dv_local;
  const float* G;
  const float* Gk;
  const float* q_rstd;
  const float* k_rstd;

  /// The same for whole tensors: where a walk that starts at `token` finds them.
  ScanInputs at(int64 token, int64 hv, int first_column) const {
    const int64 row = token * HV + hv, key_row = token * kKeyHeads + hv / (HV / kKeyHeads);
    return {.q = q + key_row * K,
            .k = k + key_row * K,
            .w = w + row * K,
            .dO = dO + row * V + first_column,
            .dv_local = dv_local + row * V + first_column,
            .G = G + row,
            .Gk = Gk + row * K,
            .q_rstd = q_rstd + key_row,
            .k_rstd = k_rstd + key_row};
  }
};

/// Factors of one chunk.
struct Decays {
  float* from_start;  ///< scale exp(G_r), with the query's scale, for each row
  float* to_end;      ///< exp(G_end - G_r), with the key's scale; qg and kg have all but `scale`
  float* end;         ///< exp(G_end), of the head or of each key channel, for each row of the state
};

static void load_decays(const float* G, const float* Gk, const float* q_rstd, const float* k_rstd,
                        int rows, float scale, const Decays& decay) {
  load_gates<SCALAR_GATE>(G, HV, rows, decay.to_end);
  const float end = decay.to_end[rows - 1];
  for (int r = 0; r < rows; r += kLanes) {
    const f32 gate = load(decay.to_end + r);
    store(decay.from_start + r, exp(gate) * scale);
    store(decay.to_end + r, exp(end - gate));
  }
  if constexpr (kScaledKeys)
    for (int r = 0; r < rows; ++r) {
      decay.from_start[r] *= q_rstd[int64{r} * H];
      decay.to_end[r] *= k_rstd[int64{r} * H];
    }
  if constexpr (VECTOR_GATE) load_column(Gk + (rows - 1) * (int64{HV} * K), 1, K, decay.end);
  for (int r = 0; r < K; r += kLanes)
    store(decay.end + r, exp(VECTOR_GATE ? load(decay.end + r) : splat(end)));
}

/// Scratch of a walk.
struct ScanScratch {
  float *state, *keys, *values;
  Decays decay;

  explicit ScanScratch(void* memory) {
    Scratch scratch(memory);
    state = scratch.tile(K, BV);
    keys = scratch.tile(2 * BT, K);     // K's rows, then W's and after them Q's
    values = scratch.tile(2 * BT, BV);  // -dU's rows and after them dO's
    decay = {scratch.vector(BT), scratch.vector(BT), scratch.vector(K)};
  }
};

/// dU = dv_local + diag(decay) K dS for one chunk, or only the second part without `Values`, to du
/// where `Stored`; -dU replaces K dS in `tile`.
template <bool Values, bool Stored>
static void value_gradient(const DTYPE* dv_local, DTYPE* du, int rows, int columns,
                           const float* decay, float* tile) {
  const int whole = columns / kLanes * kLanes;
  for (int r = 0; r < rows; ++r) {
    const int64 at = r * (int64{HV} * V);
    float* row = tile + r * kValueRow;
    for (int c = 0; c < whole; c += kLanes) {
      const f32 value = (Values ? load(dv_local + at + c) : f32{}) + load(row + c) * decay[r];
      if constexpr (Stored) store(du + at + c, value);
      store(row + c, -value);
    }
    if (whole < columns) {
      const f32 value = (Values ? load_part(dv_local + at + whole, columns - whole) : f32{}) +
                        load(row + whole) * decay[r];
      if constexpr (Stored) store_part(du + at + whole, value, columns - whole);
      store(row + whole, -value);
    }
  }
}

/// Takes the state's gradient through `length` tokens that start at a chunk, last chunk to first;
/// dO and dv_local take part where there are `Values`. Where `Stored`, the gradient of the state
/// that leaves each chunk goes to `dh` and dU to `du`, both at the first chunk's first element.
template <bool Values, bool Stored>
static void scan_chunks(const ScanScratch& s, const ScanInputs& in, int64 length, int columns,
                        float scale, DTYPE* dh, DTYPE* du) {
  for (int64 chunk = (length + BT - 1) / BT - 1; chunk >= 0; --chunk) {
    const int64 done = chunk * BT;
    const int rows = static_cast<int>(length - done < BT ? length - done : BT);
    const int64 at = done * HV, key_at = done * kKeyHeads;
    if constexpr (Stored)
      store_tile(s.state, kValueRow, K, columns, dh + chunk * (int64{HV} * K * V), V);
    load_decays(in.G + at, in.Gk + at * K, in.q_rstd + key_at, in.k_rstd + key_at, rows, scale,
                s.decay);

    load_tile(in.k + key_at * K, int64{kKeyHeads} * K, rows, K, s.keys, kKeyRow);
    multiply(rows, columns, K, s.keys, kKeyRow, s.state, kValueRow, s.values, kValueRow);
    value_gradient<Values, Stored>(in.dv_local + at * V, du + at * V, rows, columns, s.decay.to_end,
                                   s.values);

    // Both parts of the update in one product: W's rows above Q's, -dU's above dO's.
    load_tile(in.w + at * K, int64{HV} * K, rows, K, s.keys, kKeyRow);
    if constexpr (Values) {
      load_tile(in.q + key_at * K, int64{kKeyHeads} * K, rows, K, s.keys + rows * kKeyRow, kKeyRow);
      load_tile<true>(in.dO + at * V, int64{HV} * V, rows, columns, s.values + rows * kValueRow,
                      kValueRow, s.decay.from_start);
    }
    multiply_add<Layout::columns>(K, columns, Values ? 2 * rows : rows, s.keys, kKeyRow, s.values,
                                  kValueRow, s.state, kValueRow, s.decay.end);
  }
}

}  // namespace wyvern::cpu
