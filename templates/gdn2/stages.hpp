// Stages of gdn2 where kda's have beta: the state is read by the key times an erase gate b per key
// channel, and written with the value times a write gate per value channel.
#pragma once

#include "templates/tensors.hpp"

namespace wyvern::tensor {

// clang-format off
inline constexpr Argument erase{"erase", Access::in, BETA_DTYPE, {B, T, HV, K}};
inline constexpr Argument write{"write", Access::in, BETA_DTYPE, {B, T, HV, V}};
inline constexpr Argument derase{"derase", Access::out, BETA_DTYPE, {B, T, HV, K}};
inline constexpr Argument dwrite{"dwrite", Access::out, BETA_DTYPE, {B, T, HV, V}};
// clang-format on

}  // namespace wyvern::tensor

namespace wyvern::stages {

// clang-format off
inline constexpr StageDefinition gdn2_intra{
    "gdn2_intra", "Aqk = lower part of q_r . exp(Gk_r - Gk_s) k_s, A the same of erase_r k_r, per chunk.",
    {tensor::q,
     tensor::k,
     tensor::erase,
     tensor::Gk,
     tensor::q_rstd.when({constant::QK_L2NORM}),
     tensor::k_rstd.when({constant::QK_L2NORM}),
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_index.when({constant::VARLEN}),
     tensor::Aqk.out(),
     tensor::A.out()}};

inline constexpr StageDefinition gdn2_recompute_w_u{
    "gdn2_recompute_w_u", "W = Tinv (erase exp(Gk) K), U = Tinv (write V), decayed q and k, per chunk.",
    {tensor::q,
     tensor::k,
     tensor::v,
     tensor::erase,
     tensor::write,
     tensor::Tinv,
     tensor::Gk,
     tensor::q_rstd.when({constant::QK_L2NORM}),
     tensor::k_rstd.when({constant::QK_L2NORM}),
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_index.when({constant::VARLEN}),
     tensor::w.out(),
     tensor::qg.out(),
     tensor::kg.out(),
     tensor::u.out()}};

inline constexpr StageDefinition gdn2_chunk_bwd{
    "gdn2_chunk_bwd", "dq, dk, dv, derase, dwrite and dGk of a chunk.",
    {tensor::q,
     tensor::k,
     tensor::v,
     tensor::v_new,
     tensor::erase,
     tensor::write,
     tensor::Tinv,
     tensor::Gk,
     tensor::q_rstd.when({constant::QK_L2NORM}),
     tensor::k_rstd.when({constant::QK_L2NORM}),
     tensor::h,
     tensor::dh,
     tensor::do_,
     tensor::du,
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_index.when({constant::VARLEN}),
     tensor::dq,
     tensor::dk,
     tensor::dv,
     tensor::derase,
     tensor::dwrite,
     tensor::dGk}};

inline constexpr StageDefinition gdn2_recurrent{
    "gdn2_recurrent", "gdn2's recurrence token by token, for a few tokens a sequence.",
    {tensor::q,
     tensor::k,
     tensor::v,
     tensor::erase,
     tensor::write,
     {"g", Access::in, constant::G_DTYPE, {extent::B, extent::T, constant::HV, constant::K}},
     tensor::A_log.when({constant::HAS_A_LOG}),
     {"dt_bias", Access::in, DType::fp32, {constant::HV, constant::K}, {constant::GATE_IN_KERNEL, constant::HAS_DT_BIAS}},
     tensor::cu_seqlens.when({constant::VARLEN}),
     tensor::state_index,
     tensor::output_state_index,
     tensor::has_initial_state,
     {"initial_state", Access::in, constant::STATE_DTYPE, {extent::S, constant::HV, constant::STATE_ROWS, constant::STATE_COLS}, {constant::INITIAL_STATE, !constant::INPLACE_STATE}},
     tensor::o,
     tensor::final_state.when({constant::FINAL_STATE}),
     tensor::state.inout()}};
// clang-format on

}  // namespace wyvern::stages
