// An optional group of stages in front of an operator's other stages. For one gate a head, or none,
// two kernels compute the whole backward pass: the scan and its reverse, then all gradients chunk
// by chunk. A plan that has the group needs no other stage.
//
// In a chunk, with b = beta (its magnitude at least 2^-40, since it is a divisor), a_r = exp(G_r),
// d_r = exp(G_C - G_r), D_rs = exp(G_r - G_s), and rows of q and k normalized if the problem says
// so, the two scans compute
//   T  = (I + strict(K K^T * D) diag(b))^-1     P = scale tril(Q K^T * D) diag(b)
//   Z  = T (V - a K S)                          S' = exp(G_C) S + K^T (d b Z)
//   x  = P^T dO + d b (K dS')                   dV = T^T x
//   dS = exp(G_C) dS' + Q^T (scale a dO) - K^T (a dV)
// where dV / b has all digits however small b is, as dbeta needs. With norms the reverse scan also
// leaves row_scales, 1 / norm of a chunk's rows of q, then of k. Then, chunk by chunk,
//   N  = dV Z^T    dbeta = diag(N) / b          M  = -strict(N * D) diag(b)
//   F  = scale strict(dO Z^T * D) diag(b)       o  = scale b diag(dO Z^T)
//   dQ = scale a (dO S^T) + F K + o K
//   R  = -a (dV S^T) + M K     I = d b (Z dS'^T)     C = I + F^T Q + M^T K
//   dK = R + C + o Q
//   dG = rowsum(Q dQ) + rowsum(K R) - rowsum(K C), without the terms of o; the last row also has
//        exp(G_C) <S, dS'> + sum(K I); dg is the sum of dG from a row to the chunk's last
//
// kda has a decay a channel and three kernels. The first computes all that needs no state; its rows
// include factors that the scans would else apply:
//   decayed_rows: -a K, b d K, scale a Q    squares: T - I, P    decay = exp(G_C)
//   row_scales, as above
// For a summary the reverse scan alone comes next, which needs neither v nor Z. dG has a product
// for each channel, not sums over channels. `dv` is dV.
//
// With ERASE_WRITE (gdn2) b = 1, the scans' V is written = write v, and K is erase k where it reads
// the state: on the left of T's K K^T, in a K S, K^T (a dV) and rowsum(K R). So dwritten = T^T x,
//   R  = -a (dV S^T) + M K     C = I + F^T Q + M^T (erase K)
//   dK = erase R + C + o Q     derase = K R     dv = write dwritten     dwrite = v dwritten
#pragma once

#include "templates/tensors.hpp"

namespace wyvern::stages {

// A plan with the two stages before `delta_scans` splits long sequences into segments.
// clang-format off
inline constexpr StageDefinition delta_scans_segment{
    "delta_scans_segment", "fwd_h_segment and bwd_dhu_segment from the operator's inputs, with SUMMARY the latter alone; M may be 0 below 2^-30.",
    {tensor::q,
     tensor::k,
     tensor::v,
     tensor::beta,
     {"g", Access::in, constant::G_DTYPE, {extent::B, extent::T, constant::HV}, {constant::SCALAR_GATE}},
     tensor::A_log.when({constant::HAS_A_LOG}),
     {"dt_bias", Access::in, DType::fp32, {constant::HV}, {constant::HAS_DT_BIAS}},
     tensor::do_,
     tensor::seq_offsets.when({constant::VARLEN}),
     {"share_M", Access::out, DType::fp32, {extent::NS, constant::HV, constant::K, constant::K}, {!constant::SUMMARY}},
     {"share_R", Access::out, DType::fp32, {extent::NS, constant::HV, constant::K, constant::V}, {!constant::SUMMARY}},
     {"share_dM", Access::out, DType::fp32, {extent::NS, constant::HV, constant::K, constant::K}},
     {"share_dR", Access::out, DType::fp32, {extent::NS, constant::HV, constant::K, constant::V}}}};

inline constexpr StageDefinition delta_scans_resume{
    "delta_scans_resume", "The states that enter segments and gradients of those that leave, for both scans.",
    {tensor::segment_state,
     tensor::segment_dstate}};

inline constexpr StageDefinition delta_scans{
    "delta_scans", "The scan and its reverse: states that enter chunks, gradients of those that leave.",
    {tensor::q,
     tensor::k,
     tensor::v,
     tensor::beta,
     {"g", Access::in, constant::G_DTYPE, {extent::B, extent::T, constant::HV}, {constant::SCALAR_GATE}},
     tensor::A_log.when({constant::HAS_A_LOG}),
     {"dt_bias", Access::in, DType::fp32, {constant::HV}, {constant::HAS_DT_BIAS}},
     tensor::initial_state.when({constant::INITIAL_STATE}),
     tensor::do_,
     tensor::dht.when({constant::FINAL_STATE}),
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_offsets.when({constant::VARLEN}),
     tensor::states.out(),
     tensor::z.out(),
     tensor::dstates.out(),
     tensor::dv,
     tensor::row_scales.out().when({constant::QK_L2NORM}),
     tensor::dinitial_state.when({constant::INITIAL_STATE})}};

// Where the forward pass has kept h and v_new, V' = b Z, these two are the whole pass.
inline constexpr StageDefinition delta_reverse_resume{
    "delta_reverse_resume", "The gradients of states that leave segments, for the reverse scan that comes next.",
    {tensor::segment_dstate}};

inline constexpr StageDefinition delta_reverse{
    "delta_reverse", "The reverse scan of delta_scans alone: gradients of states that leave chunks.",
    {tensor::q,
     tensor::k,
     tensor::beta,
     {"g", Access::in, constant::G_DTYPE, {extent::B, extent::T, constant::HV}, {constant::SCALAR_GATE}},
     tensor::A_log.when({constant::HAS_A_LOG}),
     {"dt_bias", Access::in, DType::fp32, {constant::HV}, {constant::HAS_DT_BIAS}},
     tensor::do_,
     tensor::dht.when({constant::FINAL_STATE}),
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_offsets.when({constant::VARLEN}),
     tensor::dstates.out(),
     tensor::dv,
     tensor::row_scales.out().when({constant::QK_L2NORM}),
     tensor::dinitial_state.when({constant::INITIAL_STATE})}};

inline constexpr StageDefinition delta_gradient_kept{
    "delta_gradient_kept", "delta_gradient from the states and values that the forward pass has kept.",
    {tensor::q,
     tensor::k,
     tensor::beta,
     {"g", Access::in, constant::G_DTYPE, {extent::B, extent::T, constant::HV}, {constant::SCALAR_GATE}},
     tensor::A_log.when({constant::HAS_A_LOG}),
     {"dt_bias", Access::in, DType::fp32, {constant::HV}, {constant::HAS_DT_BIAS}},
     tensor::row_scales.when({constant::QK_L2NORM}),
     tensor::do_,
     tensor::h,
     tensor::v_new,
     tensor::dstates,
     {"dv", Access::in, constant::DTYPE, {extent::B, extent::T, constant::HV, constant::V}},
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_index.when({constant::VARLEN}),
     {"dq_given", Access::out, constant::DTYPE, {extent::B, extent::T, constant::H, constant::K}},
     {"dk_given", Access::out, constant::DTYPE, {extent::B, extent::T, constant::H, constant::K}},
     tensor::dbeta,
     {"dg_given", Access::out, constant::G_DTYPE, {extent::B, extent::T, constant::HV}, {constant::SCALAR_GATE}},
     {"dA_chunk", Access::out, DType::fp32, {extent::NT, constant::HV}, {constant::HAS_A_LOG}},
     {"dbias_chunk", Access::out, DType::fp32, {extent::NT, constant::HV}, {constant::HAS_DT_BIAS}}}};

inline constexpr StageDefinition delta_gradient{
    "delta_gradient", "Gradients of the inputs q, k, beta and g, chunk by chunk, from both scans' outputs.",
    {tensor::q,
     tensor::k,
     tensor::beta,
     {"g", Access::in, constant::G_DTYPE, {extent::B, extent::T, constant::HV}, {constant::SCALAR_GATE}},
     tensor::A_log.when({constant::HAS_A_LOG}),
     {"dt_bias", Access::in, DType::fp32, {constant::HV}, {constant::HAS_DT_BIAS}},
     tensor::row_scales.when({constant::QK_L2NORM}),
     tensor::do_,
     tensor::states,
     tensor::z,
     tensor::dstates,
     {"dv", Access::in, constant::DTYPE, {extent::B, extent::T, constant::HV, constant::V}},
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_index.when({constant::VARLEN}),
     {"dq_given", Access::out, constant::DTYPE, {extent::B, extent::T, constant::H, constant::K}},
     {"dk_given", Access::out, constant::DTYPE, {extent::B, extent::T, constant::H, constant::K}},
     tensor::dbeta,
     {"dg_given", Access::out, constant::G_DTYPE, {extent::B, extent::T, constant::HV}, {constant::SCALAR_GATE}},
     {"dA_chunk", Access::out, DType::fp32, {extent::NT, constant::HV}, {constant::HAS_A_LOG}},
     {"dbias_chunk", Access::out, DType::fp32, {extent::NT, constant::HV}, {constant::HAS_DT_BIAS}}}};

inline constexpr StageDefinition kda_bwd_prepare{
    "kda_bwd_prepare", "Tensors of each chunk that the backward pass reads and that need no state.",
    {tensor::q,
     tensor::k,
     tensor::v.when({constant::ERASE_WRITE}),
     tensor::beta.when({!constant::ERASE_WRITE}),
     tensor::erase,
     tensor::write,
     {"g", Access::in, constant::G_DTYPE, {extent::B, extent::T, constant::HV, constant::K}},
     tensor::A_log.when({constant::HAS_A_LOG}),
     {"dt_bias", Access::in, DType::fp32, {constant::HV, constant::K}, {constant::HAS_DT_BIAS}},
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_index.when({constant::VARLEN}),
     tensor::decayed_rows.out(),
     tensor::squares.out(),
     tensor::decay.out(),
     tensor::row_scales.out().when({constant::QK_L2NORM}),
     tensor::written.out()}};

inline constexpr StageDefinition kda_scans{
    "kda_scans", "The scan and its reverse over prepared chunks: states that enter them, gradients of those that leave.",
    {tensor::v,
     tensor::decayed_rows,
     tensor::squares,
     tensor::decay,
     tensor::initial_state.when({constant::INITIAL_STATE}),
     tensor::do_,
     tensor::dht.when({constant::FINAL_STATE}),
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_offsets.when({constant::VARLEN}),
     tensor::states.out(),
     tensor::z.out(),
     tensor::dstates.out(),
     tensor::dv,
     tensor::dinitial_state.when({constant::INITIAL_STATE})}};

inline constexpr StageDefinition kda_scans_summary{
    "kda_scans_summary", "The gradient of the state that enters each sequence, by the reverse scan over prepared chunks.",
    {tensor::decayed_rows,
     tensor::squares,
     tensor::decay,
     tensor::do_,
     tensor::dht.when({constant::FINAL_STATE}),
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_offsets.when({constant::VARLEN}),
     tensor::dsummary}};

inline constexpr StageDefinition kda_gradient{
    "kda_gradient", "Gradients of the inputs q, k, beta (erase, write, v) and g, chunk by chunk, from both scans' outputs.",
    {tensor::q,
     tensor::k,
     tensor::v.when({constant::ERASE_WRITE}),
     tensor::beta.when({!constant::ERASE_WRITE}),
     tensor::erase,
     tensor::write,
     {"g", Access::in, constant::G_DTYPE, {extent::B, extent::T, constant::HV, constant::K}},
     tensor::A_log.when({constant::HAS_A_LOG}),
     {"dt_bias", Access::in, DType::fp32, {constant::HV, constant::K}, {constant::HAS_DT_BIAS}},
     tensor::row_scales.when({constant::QK_L2NORM}),
     tensor::do_,
     tensor::states,
     tensor::z,
     tensor::dstates,
     tensor::dwritten,
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_index.when({constant::VARLEN}),
     {"dq_given", Access::out, constant::DTYPE, {extent::B, extent::T, constant::H, constant::K}},
     {"dk_given", Access::out, constant::DTYPE, {extent::B, extent::T, constant::H, constant::K}},
     tensor::dbeta.when({!constant::ERASE_WRITE}),
     tensor::derase,
     tensor::dwrite,
     tensor::dv.when({constant::ERASE_WRITE}),
     {"dg_given", Access::out, constant::G_DTYPE, {extent::B, extent::T, constant::HV, constant::K}},
     {"dA_chunk", Access::out, DType::fp32, {extent::NT, constant::HV}, {constant::HAS_A_LOG}},
     {"dbias_chunk", Access::out, DType::fp32, {extent::NT, constant::HV, constant::K}, {constant::HAS_DT_BIAS}}}};
// clang-format on

}  // namespace wyvern::stages
