// The state scan of one sequence, value head and block of BV state columns: the state stays in
// scratch from the first chunk to the last.
#include "common/cpu/chunk.hpp"
#include "common/cpu/product.hpp"

constexpr int64 kKeyRow = row_stride(K), kValueRow = row_stride(BV);

/// V' = U - W S for one chunk, to v_new; what its rows add to the state at the chunk's end,
/// exp(G_end - G_r) V'_r (times the key's scale), replaces W S in `tile`.
static void new_values(const DTYPE* u, DTYPE* v_new, int rows, int columns, const float* decay,
                       float* tile) {
  const int whole = columns / kLanes * kLanes;
  for (int r = 0; r < rows; ++r) {
    const DTYPE* from = u + r * (int64{HV} * V);
    DTYPE* to = v_new + r * (int64{HV} * V);
    float* row = tile + r * kValueRow;
    for (int c = 0; c < whole; c += kLanes) {
      const f32 value = load(from + c) - load(row + c);
      store(to + c, value);
      store(row + c, value * decay[r]);
    }
    if (whole < columns) {
      const f32 value = load_part(from + whole, columns - whole) - load(row + whole);
      store_part(to + whole, value, columns - whole);
      store(row + whole, value * decay[r]);
    }
  }
}

extern "C" void wyvern_kernel(void* const* a, const Extents* e, const int64* block,
                              void* memory) {
  const auto* k = static_cast<const DTYPE*>(a[0]);
  const auto* w = static_cast<const DTYPE*>(a[1]);
  const auto* u = static_cast<const DTYPE*>(a[2]);
  const auto* G = static_cast<const float*>(a[3]);
  const auto* k_rstd = static_cast<const float*>(a[4]);
  const auto* initial_state = static_cast<const STATE_DTYPE*>(a[5]);
  const auto* seq_offsets = static_cast<const int32*>(a[6]);
  const auto* chunk_offsets = static_cast<const int32*>(a[7]);
  auto* h = static_cast<DTYPE*>(a[8]);
  auto* v_new = static_cast<DTYPE*>(a[9]);
  auto* final_state = static_cast<float*>(a[10]);

  const int first_column = static_cast<int>(block[0]) * BV;
  const int columns = V - first_column < BV ? V - first_column : BV;
  const int64 hv = block[1], head = hv / (HV / H), n = block[2];
  const int64 first = VARLEN ? seq_offsets[n] : n * e->T;
  const int64 length = (VARLEN ? seq_offsets[n + 1] : (n + 1) * e->T) - first;
  int64 slot = VARLEN ? chunk_offsets[n] : n * ((e->T + BT - 1) / BT);

  Scratch scratch(memory);
  float* state = scratch.tile(K, BV);
  float* keys = scratch.tile(BT, K);  // W's rows, then K's
  float* values = scratch.tile(BT, BV);
  float* gate = scratch.vector(BT);
  float* decay = scratch.vector(BT);
  float* key_scale = scratch.vector(BT);
  float* end_decay = scratch.vector(round_up(K, kTileRows));

  const int64 state_at = (n * HV + hv) * K * V + (STATE_V_FIRST ? first_column * K : first_column);
  if constexpr (!INITIAL_STATE)
    clear_rows(state, kValueRow, 0, K, columns);
  else if constexpr (STATE_V_FIRST)
    transpose<true>(initial_state + state_at, K, columns, K, state, kValueRow);
  else
    load_tile(initial_state + state_at, V, K, columns, state, kValueRow);

  for (int64 done = 0; done < length; done += BT, ++slot) {
    const int rows = static_cast<int>(length - done < BT ? length - done : BT);
    const int64 token = first + done;
    const int64 at = token * HV + hv;
    store_tile(state, kValueRow, K, columns, h + (slot * HV + hv) * K * V + first_column, V);

    load_column(G + at, HV, rows, gate);
    const float end = gate[rows - 1];
    for (int r = 0; r < rows; r += kLanes) store(decay + r, exp(end - load(gate + r)));
    if constexpr (QK_L2NORM) {
      load_column(k_rstd + token * H + head, H, rows, key_scale);
      scale_column(decay, key_scale, rows);
    }
    const f32 fade = exp(splat(end));
    for (int r = 0; r < K; r += kLanes) store(end_decay + r, fade);

    load_tile(w + at * K, int64{HV} * K, rows, K, keys, kKeyRow);
    multiply(rows, columns, K, keys, kKeyRow, state, kValueRow, values, kValueRow);
    const int64 values_at = at * V + first_column;
    new_values(u + values_at, v_new + values_at, rows, columns, decay, values);
    load_tile(k + (token * H + head) * K, int64{H} * K, rows, K, keys, kKeyRow);
    multiply_add<Layout::columns>(K, columns, rows, keys, kKeyRow, values, kValueRow, state,
                                  kValueRow, end_decay);
  }
  if constexpr (FINAL_STATE && STATE_V_FIRST)
    transpose<false>(state, kValueRow, K, columns, final_state + state_at, K);
  else if constexpr (FINAL_STATE)
    store_tile(state, kValueRow, K, columns, final_state + state_at, V);
}
