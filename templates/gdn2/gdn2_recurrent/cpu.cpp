// gdn2's recurrence token by token for one sequence, value head and BV columns of the state, which
// stays in scratch.
#include "device/cpu/decode.hpp"
#include "device/state_slots.hpp"
#include "gdn2/gdn2_recurrent/cpu_layout.hpp"

constexpr gdn2_recurrent::ScratchLayout kScratch{Spec{}};
using StateTile = TileAt<kScratch.state>;
using Step = decode::Step<Spec, StateTile, /*Decays=*/true, /*Erases=*/true>;

WYVERN_BLOCK {
  const int first_column = static_cast<int>(block[0]) * BV;
  const int columns = V - first_column < BV ? V - first_column : BV;
  const int64 head = block[1], n = block[2];
  const int64 begin = decode::sequence_start<VARLEN>(cu_seqlens, n, e);
  const int64 end = decode::sequence_start<VARLEN>(cu_seqlens, n + 1, e);
  const StateSlots slots = find_states<Spec>(n, static_cast<int>(head), e, state_stride,
                                             state_index, output_state_index);
  const int64 tile_at = int64{first_column} * (STATE_V_FIRST ? K : 1);
  constexpr int kStateRows = STATE_V_FIRST ? BV : K;

  const StateTile tile = cpu::tile_at<kScratch.state>(memory);
  decode::Token t{.k = vector_at<kScratch.k>(memory),
                  .erasing = vector_at<kScratch.erasing>(memory),
                  .q = vector_at<kScratch.q>(memory),
                  .decay = vector_at<kScratch.decay>(memory),
                  .u = vector_at<kScratch.u>(memory)};
  float* out = vector_at<kScratch.out>(memory);
  float* with_k = vector_at<kScratch.with_k>(memory);
  float* with_q = vector_at<kScratch.with_q>(memory);

  if ((INPLACE_STATE || INITIAL_STATE) && !slots.null &&
      starts_from_slot<Spec>(n, has_initial_state))
    decode::load_state<Spec>((INPLACE_STATE ? state : initial_state) + slots.from + tile_at,
                             columns, tile);
  else
    clear_rows(tile, 0, kStateRows, STATE_V_FIRST ? K : columns);
  if (slots.null) {
    clear_output(end - begin, columns, o + begin * o_stride + head * V + first_column, o_stride);
    if constexpr (FINAL_STATE)
      decode::store_state<Spec>(tile, columns, final_state + (n * e.HV + head) * (K * V) + tile_at);
    return;
  }
  for (int64 token = begin; token < end; ++token) {
    const int64 keys = head / GROUP * K;
    decode::load_vector(k + token * k_stride + keys, K, t.k);
    decode::load_vector(k + token * k_stride + keys, K, t.erasing);
    decode::multiply_vector(erase + token * erase_stride + head * K, K, t.erasing);
    decode::load_vector(q + token * q_stride + keys, K, t.q);
    decode::load_vector(v + token * v_stride + head * V + first_column, columns, t.u);
    decode::multiply_vector(write + token * write_stride + head * V + first_column, columns, t.u);
    t.kq = decode::dot<Spec>(t.k, t.q);
    t.k_rstd = t.rate = decode::norm_scale<Spec>(t.k);
    t.q_rstd = decode::norm_scale<Spec>(t.q);
    decode::load_decay<Spec, true>(g + token * g_stride + head * K, A_log, dt_bias, head,
                                   e.lower_bound, t.decay);
    Step::run(tile, t, columns, with_k, with_q, e.scale, out);
    decode::store_vector(out, columns, o + token * o_stride + head * V + first_column);
  }
  if constexpr (INPLACE_STATE) decode::store_state<Spec>(tile, columns, state + slots.to + tile_at);
  if constexpr (FINAL_STATE)
    decode::store_state<Spec>(tile, columns, final_state + slots.to + tile_at);
}
