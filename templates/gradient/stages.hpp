// Stages of the backward pass that work chunk by chunk.
#pragma once

#include "templates/tensors.hpp"

namespace wyvern::stages {

// clang-format off
inline constexpr StageDefinition bwd_dv_local{
    "bwd_dv_local", "The chunk's own part of dU: scale P^T dO, per chunk.",
    {tensor::q,
     tensor::k,
     tensor::do_,
     tensor::G.when({constant::SCALAR_GATE}),
     tensor::q_rstd.when({constant::QK_L2NORM}),
     tensor::k_rstd.when({constant::QK_L2NORM}),
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_index.when({constant::VARLEN}),
     tensor::dv_local.out()},
    {{tunable::BT, tunable::BT, constant::K}, {tunable::BT, constant::V, tunable::BT}}};

inline constexpr StageDefinition kda_bwd_dv_local{
    "kda_bwd_dv_local", "dv_local = scale Aqk^T dO, per chunk.",
    {tensor::Aqk,
     tensor::do_,
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_index.when({constant::VARLEN}),
     tensor::dv_local.out()},
    {{tunable::BT, constant::V, tunable::BT}}};

inline constexpr StageDefinition bwd_dqkwg{
    "bwd_dqkwg", "dQ, dW and attention's and the state's part of dK and of the gate's gradient.",
    {tensor::q,
     tensor::k,
     tensor::v_new,
     tensor::do_,
     tensor::h,
     tensor::dh,
     tensor::du,
     tensor::state_unit,
     tensor::dstate_unit,
     tensor::G.when({constant::SCALAR_GATE}),
     tensor::q_rstd.when({constant::QK_L2NORM}),
     tensor::k_rstd.when({constant::QK_L2NORM}),
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_index.when({constant::VARLEN}),
     tensor::dq,
     tensor::dk_qk.out(),
     tensor::dw.out(),
     tensor::dG_qk.out().when({constant::SCALAR_GATE})},
    {{tunable::BT, constant::K, constant::V}, {tunable::BT, constant::K, constant::V}, {tunable::BT, constant::K, constant::V}, {tunable::BT, tunable::BT, constant::V}, {tunable::BT, tunable::BT, constant::K}, {tunable::BT, constant::K, tunable::BT}, {tunable::BT, constant::K, tunable::BT}}};

inline constexpr StageDefinition wy_bwd{
    "wy_bwd", "dV, dbeta, and W's, U's and A's part added to dK and to the gate's gradient.",
    {tensor::k,
     tensor::v,
     tensor::v_new,
     tensor::beta,
     tensor::Tinv,
     tensor::G.when({constant::SCALAR_GATE}),
     tensor::k_rstd.when({constant::QK_L2NORM}),
     tensor::du,
     tensor::dw,
     tensor::state_unit,
     tensor::dstate_unit,
     tensor::dk_qk,
     tensor::dG_qk.when({constant::SCALAR_GATE}),
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_index.when({constant::VARLEN}),
     tensor::dk,
     tensor::dv,
     tensor::dbeta,
     tensor::dG.when({constant::SCALAR_GATE})},
    {{tunable::BT, tunable::BT, constant::K}, {tunable::BT, tunable::BT, constant::V}, {tunable::BT, constant::K, tunable::BT}, {tunable::BT, constant::V, tunable::BT}, {tunable::BT, tunable::BT, tunable::BT}, {tunable::BT, tunable::BT, tunable::BT}, {tunable::BT, constant::K, tunable::BT}, {tunable::BT, tunable::BT, constant::K}}};

inline constexpr StageDefinition kda_bwd_dqkg{
    "kda_bwd_dqkg", "KDA: dv, dAqk and dA, and the parts of dq, dk, dbeta (derase) and dGk through states.",
    {tensor::q,
     tensor::k,
     tensor::v,
     tensor::v_new,
     tensor::beta.when({!constant::ERASE_WRITE}),
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
     tensor::state_unit,
     tensor::dstate_unit,
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_index.when({constant::VARLEN}),
     tensor::dq_inter.out(),
     tensor::dk_inter.out(),
     tensor::dGk_inter.out(),
     tensor::dv,
     tensor::dbeta_inter.out().when({!constant::ERASE_WRITE}),
     tensor::derase_inter.out(),
     tensor::dwrite,
     tensor::dAqk.out(),
     tensor::dA.out()},
    {{tunable::BT, constant::K, constant::V}, {tunable::BT, constant::K, constant::V}, {tunable::BT, constant::K, constant::V}, {tunable::BT, tunable::BT, constant::V}, {tunable::BT, constant::V, tunable::BT}, {tunable::BT, constant::K, tunable::BT}, {tunable::BT, tunable::BT, constant::V}, {tunable::BT, tunable::BT, constant::K}, {tunable::BT, tunable::BT, tunable::BT}, {tunable::BT, tunable::BT, tunable::BT}}};

inline constexpr StageDefinition kda_intra_bwd{
    "kda_intra_bwd", "KDA: dq, dk, dbeta (derase) and dGk, the products inside a chunk added to the other parts.",
    {tensor::q,
     tensor::k,
     tensor::beta.when({!constant::ERASE_WRITE}),
     tensor::erase,
     tensor::Gk,
     tensor::q_rstd.when({constant::QK_L2NORM}),
     tensor::k_rstd.when({constant::QK_L2NORM}),
     tensor::dAqk,
     tensor::dA,
     tensor::dq_inter,
     tensor::dk_inter,
     tensor::dbeta_inter.when({!constant::ERASE_WRITE}),
     tensor::derase_inter,
     tensor::dGk_inter,
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_index.when({constant::VARLEN}),
     tensor::dq,
     tensor::dk,
     tensor::dbeta.when({!constant::ERASE_WRITE}),
     tensor::derase,
     tensor::dGk},
     {{tunable::BT, constant::K, tunable::BT}, {tunable::BT, constant::K, tunable::BT}, {tunable::BT, constant::K, tunable::BT}, {tunable::BT, constant::K, tunable::BT}}};
// clang-format on

}  // namespace wyvern::stages
