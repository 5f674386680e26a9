// The tensors that stages exchange, each described once: name, element type, shape. Signatures say
// where one is an output and which options it depends on. Token-major, contiguous, row-major; the
// meaning of each is in README.md.
#pragma once

#include "templates/signature.hpp"

namespace wyvern::tensor {

// Names of constants, extents and tunables, for this file and the signatures.
using namespace constant;  // NOLINT(google-build-using-namespace)
using extent::B, extent::T, extent::N, extent::N1, extent::NT, extent::NS, extent::S, extent::CP;
using tunable::BT;

// clang-format off
// Inputs of operators.
inline constexpr Argument q{"q", Access::in, DTYPE, {B, T, H, K}};
inline constexpr Argument k{"k", Access::in, DTYPE, {B, T, H, K}};
inline constexpr Argument v{"v", Access::in, DTYPE, {B, T, HV, V}};
inline constexpr Argument beta{"beta", Access::in, BETA_DTYPE, {B, T, HV}};
// Gates in beta's place: the state is read by erase k and written with write v.
inline constexpr Argument erase{"erase", Access::in, BETA_DTYPE, {B, T, HV, K}, {ERASE_WRITE}};
inline constexpr Argument write{"write", Access::in, BETA_DTYPE, {B, T, HV, V}, {ERASE_WRITE}};
inline constexpr Argument initial_state{"initial_state", Access::in, STATE_DTYPE, {N, HV, STATE_ROWS, STATE_COLS}};
// A pool of states in which sequences have slots, and the indices of their slots.
inline constexpr Argument state{"state", Access::in, STATE_DTYPE, {S, HV, STATE_ROWS, STATE_COLS}, {INPLACE_STATE}};
// The rows before a sequence's first, in a pool with the same slots.
inline constexpr Argument conv_state{"conv_state", Access::inout, DTYPE, {S, CONV_SLOT_ROWS, CONV_SLOT_COLS}, {CONV_INPLACE}};
inline constexpr Argument state_index{"state_index", Access::in, INDEX_DTYPE, {N}, {STATE_INDEX}};
inline constexpr Argument state_scale{"state_scale", Access::in, DType::fp32, {S, HV}, {STATE_SCALE}};
inline constexpr Argument output_state_index{"output_state_index", Access::in, INDEX_DTYPE, {N}, {OUTPUT_STATE_INDEX}};
inline constexpr Argument has_initial_state{"has_initial_state", Access::in, DType::boolean, {N}, {HAS_INITIAL_STATE}};
// States inside sequences, and after how many tokens of each.
inline constexpr Argument checkpoints{"checkpoints", Access::inout, CHECKPOINT_DTYPE, {CP, HV, STATE_ROWS, STATE_COLS}, {CHECKPOINTS}};
inline constexpr Argument checkpoint_offsets{"checkpoint_offsets", Access::in, INDEX_DTYPE, {N}, {CHECKPOINT_OFFSETS}};
inline constexpr Argument cu_seqlens{"cu_seqlens", Access::in, SEQLENS_DTYPE, {N1}};
inline constexpr Argument A_log{"A_log", Access::in, DType::fp32, {HV}};
// With OUTPUT_NORM: the weight of a row of o, and the gate's input.
inline constexpr Argument norm_weight{"norm_weight", Access::in, DType::fp32, {V}, {OUTPUT_NORM}};
inline constexpr Argument norm_gate{"norm_gate", Access::in, DTYPE, {B, T, HV, V}, {OUTPUT_NORM}};
inline constexpr Argument do_{"do", Access::in, DTYPE, {B, T, HV, V}};
inline constexpr Argument dht{"dht", Access::in, DType::fp32, {N, HV, STATE_ROWS, STATE_COLS}};

// Index tables of a packed batch.
inline constexpr Argument seq_offsets{"seq_offsets", Access::in, DType::int32, {N1}, {}, true};
inline constexpr Argument chunk_offsets{"chunk_offsets", Access::in, DType::int32, {N1}, {}, true};
inline constexpr Argument chunk_index{"chunk_index", Access::in, DType::int32, {NT, 2}, {}, true};

// Scales of rows, and gates summed inside chunks.
inline constexpr Argument q_rstd{"q_rstd", Access::in, DType::fp32, {B, T, H}};
inline constexpr Argument k_rstd{"k_rstd", Access::in, DType::fp32, {B, T, H}};
inline constexpr Argument G{"G", Access::in, DType::fp32, {B, T, HV}};
inline constexpr Argument Gk{"Gk", Access::in, DType::fp32, {B, T, HV, K}};

// Inside chunks.
inline constexpr Argument A{"A", Access::in, DType::fp32, {B, T, HV, BT}};
inline constexpr Argument Tinv{"Tinv", Access::in, DTYPE, {B, T, HV, BT}};
inline constexpr Argument Aqk{"Aqk", Access::in, DType::fp32, {B, T, HV, BT}};
inline constexpr Argument w{"w", Access::in, DTYPE, {B, T, HV, K}};
inline constexpr Argument u{"u", Access::in, U_DTYPE, {B, T, HV, V}};
inline constexpr Argument qg{"qg", Access::in, DTYPE, {B, T, HV, K}};
inline constexpr Argument kg{"kg", Access::in, DTYPE, {B, T, HV, K}};

// A chunk of kda as its backward pass reads it.
inline constexpr Argument decayed_rows{"decayed_rows", Access::in, DTYPE, {NT, HV, 3, BT, K}};
inline constexpr Argument squares{"squares", Access::in, DTYPE, {NT, HV, 2, BT, BT}};
inline constexpr Argument decay{"decay", Access::in, DType::fp32, {NT, HV, K}};
// With ERASE_WRITE: the values that are written, write v, and their gradient.
inline constexpr Argument written{"written", Access::in, DTYPE, {B, T, HV, V}, {ERASE_WRITE}};
inline constexpr Argument dwritten{"dwritten", Access::in, DTYPE, {B, T, HV, V}};
inline constexpr Argument row_scales{"row_scales", Access::in, DType::fp32, {NT, HV, 2, BT}};

// States.
inline constexpr Argument h{"h", Access::in, DTYPE, {NT, HV, K, V}};
inline constexpr Argument v_new{"v_new", Access::in, DTYPE, {B, T, HV, V}};
inline constexpr Argument state_unit{"state_unit", Access::in, DType::fp32, {NT, HV}, {STATE_UNIT}};
inline constexpr Argument dstate_unit{"dstate_unit", Access::in, DType::fp32, {NT, HV}, {STATE_UNIT}};
inline constexpr Argument states{"states", Access::in, DTYPE, {NT, HV, V, K}};
inline constexpr Argument z{"z", Access::in, DTYPE, {NT, HV, BT, V}};
inline constexpr Argument final_state{"final_state", Access::out, DType::fp32, {N, HV, STATE_ROWS, STATE_COLS}};
inline constexpr Argument segment_M{"segment_M", Access::in, DType::fp32, {NS, HV, K, K}};
inline constexpr Argument segment_R{"segment_R", Access::in, DType::fp32, {NS, HV, K, V}};
inline constexpr Argument segment_state{"segment_state", Access::in, DType::fp32, {NS, HV, K, V}};
// For N ranges of tokens: each one's map of states, R and M side by side, their order, and the
// state that enters each.
inline constexpr Argument summaries{"summaries", Access::in, DType::fp32, {N, HV, K, SUMMARY_COLUMNS}};
inline constexpr Argument order{"order", Access::in, DType::int32, {N}};
inline constexpr Argument range_states{"range_states", Access::out, DType::fp32, {N, HV, K, V}};
// For each sequence the same, and the gradient of the state that enters it.
inline constexpr Argument summary{"summary", Access::out, DType::fp32, {N, HV, K, SUMMARY_COLUMNS}};
inline constexpr Argument dsummary{"dsummary", Access::out, DType::fp32, {N, HV, K, V}};
inline constexpr Argument o{"o", Access::out, DTYPE, {B, T, HV, V}};

// Gradients.
inline constexpr Argument dv_local{"dv_local", Access::in, DTYPE, {B, T, HV, V}};
inline constexpr Argument dh{"dh", Access::in, DTYPE, {NT, HV, K, V}};
inline constexpr Argument dstates{"dstates", Access::in, DTYPE, {NT, HV, V, K}};
inline constexpr Argument du{"du", Access::in, DTYPE, {B, T, HV, V}};
inline constexpr Argument segment_dM{"segment_dM", Access::in, DType::fp32, {NS, HV, K, K}};
inline constexpr Argument segment_dR{"segment_dR", Access::in, DType::fp32, {NS, HV, K, V}};
inline constexpr Argument segment_dstate{"segment_dstate", Access::in, DType::fp32, {NS, HV, K, V}};
inline constexpr Argument dinitial_state{"dinitial_state", Access::out, DType::fp32, {N, HV, STATE_ROWS, STATE_COLS}};
inline constexpr Argument dq{"dq", Access::out, DTYPE, {B, T, HV, K}};
inline constexpr Argument dk{"dk", Access::out, DTYPE, {B, T, HV, K}};
inline constexpr Argument dv{"dv", Access::out, DTYPE, {B, T, HV, V}};
inline constexpr Argument dbeta{"dbeta", Access::out, BETA_DTYPE, {B, T, HV}};
inline constexpr Argument derase{"derase", Access::out, BETA_DTYPE, {B, T, HV, K}, {ERASE_WRITE}};
inline constexpr Argument dwrite{"dwrite", Access::out, BETA_DTYPE, {B, T, HV, V}, {ERASE_WRITE}};
inline constexpr Argument dw{"dw", Access::in, DTYPE, {B, T, HV, K}};
inline constexpr Argument dk_qk{"dk_qk", Access::in, DType::fp32, {B, T, HV, K}};
inline constexpr Argument dG_qk{"dG_qk", Access::in, DType::fp32, {B, T, HV}};
inline constexpr Argument dG{"dG", Access::out, DType::fp32, {B, T, HV}};
inline constexpr Argument dq_inter{"dq_inter", Access::in, DType::fp32, {B, T, HV, K}};
inline constexpr Argument dk_inter{"dk_inter", Access::in, DType::fp32, {B, T, HV, K}};
inline constexpr Argument dGk_inter{"dGk_inter", Access::in, DType::fp32, {B, T, HV, K}};
inline constexpr Argument dbeta_inter{"dbeta_inter", Access::in, DType::fp32, {B, T, HV}};
inline constexpr Argument derase_inter{"derase_inter", Access::in, DType::fp32, {B, T, HV, K}, {ERASE_WRITE}};
inline constexpr Argument dAqk{"dAqk", Access::in, DType::fp32, {B, T, HV, BT}};
inline constexpr Argument dA{"dA", Access::in, DType::fp32, {B, T, HV, BT}};
inline constexpr Argument dGk{"dGk", Access::out, DType::fp32, {B, T, HV, K}};
// clang-format on

}  // namespace wyvern::tensor
