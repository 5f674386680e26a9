// The state scan of one sequence, value head and block of BV state columns.
#include "device/cpu/scan.hpp"
#include "device/cpu/state.hpp"
#include "device/state_slots.hpp"

using Scan = ForwardScan<Spec>;
using State = CallerState<Spec>;
constexpr ForwardScanLayout<Spec> kScratch{Spec{}};

WYVERN_BLOCK {
  Scan::Inputs tensors{
      scanned_rows<Spec>(k, k_stride, kg, e), w, u, G, Gk, k_rstd, e, {k, k_stride}};
  const int first_column = static_cast<int>(block[0]) * BV;
  const int columns = V - first_column < BV ? V - first_column : BV;
  const int64 hv = block[1], n = block[2];
  const int64 first = VARLEN ? seq_offsets[n] : n * e.T;
  const int64 length = (VARLEN ? seq_offsets[n + 1] : (n + 1) * e.T) - first;
  const int64 slot = VARLEN ? chunk_offsets[n] : n * ((e.T + BT - 1) / BT);
  const StateSlots slots =
      find_states<Spec>(n, static_cast<int>(hv), e, state_stride, state_index, output_state_index);
  if (slots.null) return;  // h and V' of a null sequence are not read
  const int64 columns_at = State::columns_at(first_column);

  const Scan::Work work = Scan::work_at<kScratch>(memory);
  const auto* const entering = INPLACE_STATE ? state : initial_state;
  const bool starts =
      (INPLACE_STATE || INITIAL_STATE) && starts_from_slot<Spec>(n, has_initial_state);
  const float entering_scale = scale_at<Spec>(state_scale, starts ? slots.from_scale : 0);
  if (starts)
    State::load(entering + slots.from + columns_at, columns, work.state, entering_scale);
  else
    clear_rows(work.state, 0, K, columns);
  const float unit = State::enter_unit(starts ? entering + slots.from : nullptr, entering_scale,
                                       work.state, columns, (length + BT - 1) / BT, e,
                                       first_column == 0 ? state_unit + slot * e.HV + hv : nullptr,
                                       kValueUnit<Spec>);
  tensors.u_factor = kValueUnit<Spec> / unit;
  Scan::run<true, true>(
      work, tensors.at(first, hv, first_column), length, columns,
      h + (slot * e.HV + hv) * K * V + first_column, v_new + (first * e.HV + hv) * V + first_column,
      0, Scan::find_checkpoints(0, n, e, seq_offsets, checkpoint_offsets),
      [&](const auto& checkpoint) {
        State::store(work.state, columns,
                     checkpoints + checkpoint.element(static_cast<int>(hv), e) + columns_at,
                     1.0F / unit);
      });
  if constexpr (VARLEN && KEEP_STATES)
    Scan::clear_unused_slots(h + first_column, n, hv, columns, chunk_offsets, e);
  if constexpr (INPLACE_STATE)
    State::store(work.state, columns, state + slots.to + columns_at,
                 scale_at<Spec>(state_scale, slots.to_scale) / unit);
  if constexpr (FINAL_STATE)
    State::store(work.state, columns, final_state + slots.to + columns_at, 1.0F / unit);
}
