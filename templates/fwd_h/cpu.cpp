// The state scan of one sequence, value head and block of BV state columns: the state stays in
// scratch from the first chunk to the last.
#include "common/cpu/chunk.hpp"
#include "common/cpu/product.hpp"

constexpr int64 kKeyRow = row_stride(K), kValueRow = row_stride(BV);
constexpr int kKeyHeads = VECTOR_GATE ? HV : H;  // kg has the value heads

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

/// Zeros in the block's columns of the chunk slots that no sequence has, which the sequences share
/// out.
static void clear_unused_slots(DTYPE* h, int64 n, int64 hv, int columns,
                               const int32* chunk_offsets, const Extents& e) {
  for (int64 slot = chunk_offsets[e.N] + n; slot < e.NT; slot += e.N) {
    DTYPE* to = h + (slot * HV + hv) * K * V;
    for (int r = 0; r < K; ++r)
      for (int c = 0; c < columns; ++c) to[r * int64{V} + c] = DTYPE{};
  }
}

/// exp(G_end), of one gate or of each key channel, to `end_decay`, and what a row of V' takes along
/// to the chunk's end, exp(G_end - G_r) and its key's scale, to `decay`: 1 with kg, whose rows have
/// both.
static void load_decays(const float* G, const float* Gk, const float* k_rstd, int rows,
                        float* decay, float* end_decay) {
  if constexpr (VECTOR_GATE) {
    for (int r = 0; r < rows; r += kLanes) store(decay + r, splat(1.0F));
    load_column(Gk + (rows - 1) * (int64{HV} * K), 1, K, end_decay);
    for (int r = 0; r < K; r += kLanes) store(end_decay + r, exp(load(end_decay + r)));
    return;
  }
  load_gates<SCALAR_GATE>(G, HV, rows, decay);
  const float end = decay[rows - 1];
  for (int r = 0; r < rows; r += kLanes) store(decay + r, exp(end - load(decay + r)));
  const f32 fade = exp(splat(end));
  for (int r = 0; r < K; r += kLanes) store(end_decay + r, fade);
  if constexpr (QK_L2NORM && !VECTOR_GATE)
    for (int r = 0; r < rows; ++r) decay[r] *= k_rstd[int64{r} * H];
}

extern "C" void wyvern_kernel(void* const* a, const Extents* e, const int64* block,
                              void* memory) {
  const auto* k = static_cast<const DTYPE*>(a[VECTOR_GATE ? 1 : 0]);
  const auto* w = static_cast<const DTYPE*>(a[2]);
  const auto* u = static_cast<const DTYPE*>(a[3]);
  const auto* G = static_cast<const float*>(a[4]);
  const auto* Gk = static_cast<const float*>(a[5]);
  const auto* k_rstd = static_cast<const float*>(a[6]);
  const auto* initial_state = static_cast<const STATE_DTYPE*>(a[7]);
  const auto* seq_offsets = static_cast<const int32*>(a[8]);
  const auto* chunk_offsets = static_cast<const int32*>(a[9]);
  auto* h = static_cast<DTYPE*>(a[10]);
  auto* v_new = static_cast<DTYPE*>(a[11]);
  auto* final_state = static_cast<float*>(a[12]);

  const int first_column = static_cast<int>(block[0]) * BV;
  const int columns = V - first_column < BV ? V - first_column : BV;
  const int64 hv = block[1], n = block[2];
  const int64 head = hv / (HV / H), key_head = hv / (HV / kKeyHeads);
  const int64 first = VARLEN ? seq_offsets[n] : n * e->T;
  const int64 length = (VARLEN ? seq_offsets[n + 1] : (n + 1) * e->T) - first;
  int64 slot = VARLEN ? chunk_offsets[n] : n * ((e->T + BT - 1) / BT);

  Scratch scratch(memory);
  float* state = scratch.tile(K, BV);
  float* keys = scratch.tile(BT, K);  // W's rows, then K's
  float* values = scratch.tile(BT, BV);
  float* decay = scratch.vector(BT);
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

    load_decays(G + at, Gk + at * K, k_rstd + token * H + head, rows, decay, end_decay);
    load_tile(w + at * K, int64{HV} * K, rows, K, keys, kKeyRow);
    multiply(rows, columns, K, keys, kKeyRow, state, kValueRow, values, kValueRow);
    const int64 values_at = at * V + first_column;
    new_values(u + values_at, v_new + values_at, rows, columns, decay, values);
    load_tile(k + (token * kKeyHeads + key_head) * K, int64{kKeyHeads} * K, rows, K, keys, kKeyRow);
    multiply_add<Layout::columns>(K, columns, rows, keys, kKeyRow, values, kValueRow, state,
                                  kValueRow, end_decay);
  }
  if constexpr (VARLEN && KEEP_STATES)
    clear_unused_slots(h + first_column, n, hv, columns, chunk_offsets, *e);
  if constexpr (FINAL_STATE && STATE_V_FIRST)
    transpose<false>(state, kValueRow, K, columns, final_state + state_at, K);
  else if constexpr (FINAL_STATE)
    store_tile(state, kValueRow, K, columns, final_state + state_at, V);
}
