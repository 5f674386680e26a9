// The recurrence token by token for one sequence, value head and BV columns of the state (all with
// OUTPUT_NORM), which stay in scratch. The first of a token's steps decays the state, the last
// reads it with q: in the others the decay is 1 and q is 0.
#include "decode/recurrent/cpu_layout.hpp"
#include "device/cpu/decode.hpp"
#include "device/drafts.hpp"

constexpr recurrent::ScratchLayout kScratch{Spec{}};
using StateTile = TileAt<kScratch.state>;
constexpr int kColumns = recurrent::block_columns(Spec{});
using Step = decode::Step<Spec, StateTile, GATED, ERASE_WRITE>;

WYVERN_BLOCK {
  const int64 head = block[1], n = block[2];
  const int64 begin = decode::sequence_start<VARLEN>(cu_seqlens, n, e);
  const int64 end = decode::sequence_start<VARLEN>(cu_seqlens, n + 1, e);
  const StateSlots slots =
      find_starting_state<Spec>(n, static_cast<int>(head), e, state_stride, state_index,
                                output_state_index, num_accepted, intermediate_index);
  constexpr int kStateRows = STATE_V_FIRST ? kColumns : K;

  const StateTile tile = cpu::tile_at<kScratch.state>(memory);
  decode::Token t{.k = vector_at<kScratch.k>(memory),
                  .erasing = vector_at<kScratch.erasing>(memory),
                  .q = vector_at<kScratch.q>(memory),
                  .decay = vector_at<kScratch.decay>(memory),
                  .u = vector_at<kScratch.u>(memory)};
  float* out = vector_at<kScratch.out>(memory);
  float* with_k = vector_at<kScratch.with_k>(memory);
  float* with_q = vector_at<kScratch.with_q>(memory);

  const int first_column = OUTPUT_NORM ? 0 : static_cast<int>(block[0]) * BV;
  const int columns = V - first_column < kColumns ? V - first_column : kColumns;
  const int64 tile_at = int64{first_column} * (STATE_V_FIRST ? K : 1);
  const auto load_start = [&] {
    if ((INPLACE_STATE || INITIAL_STATE) && !slots.null &&
        starts_from_slot<Spec>(n, has_initial_state))
      decode::load_state<Spec>((INPLACE_STATE ? state : initial_state) + slots.from + tile_at,
                               columns, tile, scale_at<Spec>(state_scale, slots.from_scale));
    else
      clear_rows(tile, 0, kStateRows, STATE_V_FIRST ? K : columns);
  };
  load_start();
  if (slots.null) {
    clear_output(end - begin, columns, o + begin * o_stride + head * V + first_column, o_stride);
    if constexpr (FINAL_STATE)
      decode::store_state<Spec>(tile, columns, final_state + (n * e.HV + head) * (K * V) + tile_at);
    return;
  }
  // With PARENT: the tokens that have a state, a bit for each, and the token whose state is in the
  // tile.
  [[maybe_unused]] unsigned live = 0;
  [[maybe_unused]] int held = -1;
  for (int64 i = begin * STEPS; i < end * STEPS; ++i) {
    const int64 token = i / STEPS;
    if constexpr (PARENT) {
      const int from = parent_of(n, token - begin, e, parent, live);
      if (from == kNoToken) {
        clear_output(1, columns, o + token * o_stride + head * V + first_column, o_stride);
        continue;
      }
      if (from != held && from >= 0)
        decode::load_state<Spec>(
            intermediate_states + tile_at +
                intermediate_state<Spec>(n, from, static_cast<int>(head), e, intermediate_index),
            columns, tile);
      else if (from != held)
        load_start();
      held = static_cast<int>(token - begin);
      live |= 1U << held;
    }
    const bool first = i % STEPS == 0, last = i % STEPS == STEPS - 1;
    const int64 keys = head / GROUP * K;
    decode::load_vector(k + i * k_stride + keys, K, t.k);
    if (last)
      decode::load_vector(q + token * q_stride + keys, K, t.q);
    else
      decode::fill_keys<Spec>(t.q, 0.0F);
    decode::load_vector(v + i * v_stride + head * V + first_column, columns, t.u);
    if constexpr (ERASE_WRITE) {
      decode::load_vector(k + i * k_stride + keys, K, t.erasing);
      decode::multiply_vector(erase + i * erase_stride + head * K, K, t.erasing);
      decode::multiply_vector(write + i * write_stride + head * V + first_column, columns, t.u);
      t.rate = 1.0F;
    } else {
      load_beta<BETA_SIGMOID, NEG_EIGVAL>(
          TokenRows<const BETA_DTYPE>{beta, beta_stride}.at(i, head), 1, with_k);
      t.rate = with_k[0];
    }
    t.kq = decode::dot<Spec>(t.k, t.q);
    t.k_rstd = decode::norm_scale<Spec>(t.k);
    t.q_rstd = decode::norm_scale<Spec>(t.q);
    t.rate *= t.k_rstd;
    if constexpr (GATED) {
      if (first)
        decode::load_decay<Spec, VECTOR_GATE>(g + token * g_stride + head * GATE_K, A_log, dt_bias,
                                              head, e.lower_bound, t.decay);
      else
        decode::fill_keys<Spec>(t.decay, 1.0F);
    }
    Step::run(tile, t, columns, with_k, with_q, e.scale, out);
    DTYPE* to = o + token * o_stride + head * V + first_column;
    if (OUTPUT_NORM && last)
      decode::store_normalized<Spec>(out, norm_gate + token * norm_gate_stride + head * V,
                                     norm_weight, e.norm_eps, to);
    else if (last)
      decode::store_vector(out, columns, to);
    if constexpr (INDEX_COLUMNS && !KEEP_POOL) {
      const StateSlots own =
          token_slot<Spec>(n, token - begin, static_cast<int>(head), e, state_stride, state_index);
      if (!own.null)
        decode::store_state<Spec>(tile, columns, state + own.to + tile_at,
                                  scale_at<Spec>(state_scale, own.to_scale));
    }
    if constexpr (INTERMEDIATE_STATES) {
      const int64 to =
          intermediate_state<Spec>(n, token - begin, static_cast<int>(head), e, intermediate_index);
      if (to != kNoState)
        decode::store_state<Spec>(tile, columns, intermediate_states + to + tile_at);
    }
  }
  if constexpr (INPLACE_STATE && !INDEX_COLUMNS && !KEEP_POOL)
    decode::store_state<Spec>(tile, columns, state + slots.to + tile_at,
                              scale_at<Spec>(state_scale, slots.to_scale));
  if constexpr (FINAL_STATE)
    decode::store_state<Spec>(tile, columns, final_state + slots.to + tile_at);
}
