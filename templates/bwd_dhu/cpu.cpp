// The reverse state scan of one sequence, value head and block of BV state columns: the state's
// gradient stays in scratch from the last chunk to the first.
#include "common/cpu/chunk.hpp"
#include "common/cpu/product.hpp"

constexpr int64 kKeyRow = row_stride(K), kValueRow = row_stride(BV);
constexpr int kKeyHeads = VECTOR_GATE ? HV : H;  // qg and kg have the value heads
constexpr bool kScaledKeys = QK_L2NORM && !VECTOR_GATE;

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

/// dU = dv_local + diag(decay) K dS for one chunk, to du; -dU replaces K dS in `tile`.
static void value_gradient(const DTYPE* dv_local, DTYPE* du, int rows, int columns,
                           const float* decay, float* tile) {
  const int whole = columns / kLanes * kLanes;
  for (int r = 0; r < rows; ++r) {
    const DTYPE* from = dv_local + r * (int64{HV} * V);
    DTYPE* to = du + r * (int64{HV} * V);
    float* row = tile + r * kValueRow;
    for (int c = 0; c < whole; c += kLanes) {
      const f32 value = load(from + c) + load(row + c) * decay[r];
      store(to + c, value);
      store(row + c, -value);
    }
    if (whole < columns) {
      const f32 value = load_part(from + whole, columns - whole) + load(row + whole) * decay[r];
      store_part(to + whole, value, columns - whole);
      store(row + whole, -value);
    }
  }
}

extern "C" void wyvern_kernel(void* const* a, const Extents* e, const int64* block,
                              void* memory) {
  const auto* q = static_cast<const DTYPE*>(a[VECTOR_GATE ? 1 : 0]);
  const auto* k = static_cast<const DTYPE*>(a[VECTOR_GATE ? 3 : 2]);
  const auto* w = static_cast<const DTYPE*>(a[4]);
  const auto* dO = static_cast<const DTYPE*>(a[5]);
  const auto* dv_local = static_cast<const DTYPE*>(a[6]);
  const auto* G = static_cast<const float*>(a[7]);
  const auto* Gk = static_cast<const float*>(a[8]);
  const auto* q_rstd = static_cast<const float*>(a[9]);
  const auto* k_rstd = static_cast<const float*>(a[10]);
  const auto* dht = static_cast<const float*>(a[11]);
  const auto* seq_offsets = static_cast<const int32*>(a[12]);
  const auto* chunk_offsets = static_cast<const int32*>(a[13]);
  auto* dh = static_cast<DTYPE*>(a[14]);
  auto* du = static_cast<DTYPE*>(a[15]);
  auto* dinitial_state = static_cast<float*>(a[16]);

  const int first_column = static_cast<int>(block[0]) * BV;
  const int columns = V - first_column < BV ? V - first_column : BV;
  const int64 hv = block[1], n = block[2], key_head = hv / (HV / kKeyHeads);
  const int64 first = VARLEN ? seq_offsets[n] : n * e->T;
  const int64 length = (VARLEN ? seq_offsets[n + 1] : (n + 1) * e->T) - first;
  const int64 first_slot = VARLEN ? chunk_offsets[n] : n * ((e->T + BT - 1) / BT);

  Scratch scratch(memory);
  float* state = scratch.tile(K, BV);
  float* keys = scratch.tile(2 * BT, K);     // K's rows, then W's and after them Q's
  float* values = scratch.tile(2 * BT, BV);  // -dU's rows and after them dO's
  const Decays decay{scratch.vector(BT), scratch.vector(BT), scratch.vector(K)};

  const int64 state_at = (n * HV + hv) * K * V + (STATE_V_FIRST ? first_column * K : first_column);
  if constexpr (!FINAL_STATE)
    clear_rows(state, kValueRow, 0, K, columns);
  else if constexpr (STATE_V_FIRST)
    transpose<true>(dht + state_at, K, columns, K, state, kValueRow);
  else
    load_tile(dht + state_at, V, K, columns, state, kValueRow);

  for (int64 chunk = (length + BT - 1) / BT - 1; chunk >= 0; --chunk) {
    const int64 done = chunk * BT;
    const int rows = static_cast<int>(length - done < BT ? length - done : BT);
    const int64 at = (first + done) * HV + hv;
    const int64 key_at = (first + done) * kKeyHeads + key_head;
    const int64 values_at = at * V + first_column;
    store_tile(state, kValueRow, K, columns,
               dh + ((first_slot + chunk) * HV + hv) * K * V + first_column, V);
    load_decays(G + at, Gk + at * K, q_rstd + key_at, k_rstd + key_at, rows, e->scale, decay);

    load_tile(k + key_at * K, int64{kKeyHeads} * K, rows, K, keys, kKeyRow);
    multiply(rows, columns, K, keys, kKeyRow, state, kValueRow, values, kValueRow);
    value_gradient(dv_local + values_at, du + values_at, rows, columns, decay.to_end, values);

    // Both parts of the update in one product: W's rows above Q's, -dU's above dO's.
    load_tile(w + at * K, int64{HV} * K, rows, K, keys, kKeyRow);
    load_tile(q + key_at * K, int64{kKeyHeads} * K, rows, K, keys + rows * kKeyRow, kKeyRow);
    load_tile<true>(dO + values_at, int64{HV} * V, rows, columns, values + rows * kValueRow,
                    kValueRow, decay.from_start);
    multiply_add<Layout::columns>(K, columns, 2 * rows, keys, kKeyRow, values, kValueRow, state,
                                  kValueRow, decay.end);
  }
  if constexpr (INITIAL_STATE && STATE_V_FIRST)
    transpose<false>(state, kValueRow, K, columns, dinitial_state + state_at, K);
  else if constexpr (INITIAL_STATE)
    store_tile(state, kValueRow, K, columns, dinitial_state + state_at, V);
}
