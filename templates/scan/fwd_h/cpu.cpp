// The state scan of one sequence, value head and block of BV state columns.
#include "device/cpu/scan.hpp"
#include "device/cpu/state.hpp"

using Scan = ForwardScan<Spec>;
using State = CallerState<Spec>;
constexpr ForwardScanLayout<Spec> kScratch{Spec{}};

WYVERN_BLOCK {
  const Scan::Inputs tensors{Scan::key_rows(k, k_stride, kg), w, u, G, Gk, k_rstd};
  const int first_column = static_cast<int>(block[0]) * BV;
  const int columns = V - first_column < BV ? V - first_column : BV;
  const int64 hv = block[1], n = block[2];
  const int64 first = VARLEN ? seq_offsets[n] : n * e.T;
  const int64 length = (VARLEN ? seq_offsets[n + 1] : (n + 1) * e.T) - first;
  const int64 slot = VARLEN ? chunk_offsets[n] : n * ((e.T + BT - 1) / BT);
  const int64 state_at = State::start(n, hv, first_column);

  const Scan::Work work = Scan::work_at<kScratch>(memory);
  if constexpr (INITIAL_STATE)
    State::load(initial_state + state_at, columns, work.state);
  else
    clear_rows(work.state, 0, K, columns);
  Scan::run<true, true>(work, tensors.at(first, hv, first_column), length, columns,
                        h + (slot * HV + hv) * K * V + first_column,
                        v_new + (first * HV + hv) * V + first_column);
  if constexpr (VARLEN && KEEP_STATES)
    Scan::clear_unused_slots(h + first_column, n, hv, columns, chunk_offsets, e);
  if constexpr (FINAL_STATE) State::store(work.state, columns, final_state + state_at);
}
