// The state scan of one sequence, value head and block of BV state columns.
#include "common/cpu/scan.hpp"
#include "common/cpu/state.hpp"

extern "C" void wyvern_kernel(void* const* a, const Extents* e, const int64* block, void* memory) {
  const auto* initial_state = static_cast<const STATE_DTYPE*>(a[7]);
  const auto* seq_offsets = static_cast<const int32*>(a[8]);
  const auto* chunk_offsets = static_cast<const int32*>(a[9]);
  auto* h = static_cast<DTYPE*>(a[10]);
  auto* v_new = static_cast<DTYPE*>(a[11]);
  auto* final_state = static_cast<float*>(a[12]);

  const int first_column = static_cast<int>(block[0]) * BV;
  const int columns = V - first_column < BV ? V - first_column : BV;
  const int64 hv = block[1], n = block[2];
  const int64 first = VARLEN ? seq_offsets[n] : n * e->T;
  const int64 length = (VARLEN ? seq_offsets[n + 1] : (n + 1) * e->T) - first;
  const int64 slot = VARLEN ? chunk_offsets[n] : n * ((e->T + BT - 1) / BT);
  const int64 state_at = state_start(n, hv, first_column);

  const ScanScratch scratch(memory);
  if constexpr (INITIAL_STATE)
    load_state(initial_state + state_at, columns, scratch.state);
  else
    clear_rows(scratch.state, kValueRow, 0, K, columns);
  scan_chunks<true, true>(scratch, ScanInputs(a, first, hv, first_column), length, columns,
                          h + (slot * HV + hv) * K * V + first_column,
                          v_new + (first * HV + hv) * V + first_column);
  if constexpr (VARLEN && KEEP_STATES)
    clear_unused_slots(h + first_column, n, hv, columns, chunk_offsets, *e);
  if constexpr (FINAL_STATE) store_state(scratch.state, columns, final_state + state_at);
}
