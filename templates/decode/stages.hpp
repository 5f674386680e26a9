// Stages that go token by token.
#pragma once

#include "templates/tensors.hpp"

namespace wyvern::stages {

// clang-format off
inline constexpr StageDefinition recurrent{
    "recurrent", "The recurrence token by token, for a few tokens a sequence.",
    {tensor::q,
     {"k", Access::in, constant::DTYPE, {extent::B, extent::nT, constant::H, constant::K}},
     {"v", Access::in, constant::DTYPE, {extent::B, extent::nT, constant::HV, constant::V}},
     {"beta", Access::in, constant::BETA_DTYPE, {extent::B, extent::nT, constant::HV}, {!constant::ERASE_WRITE}},
     tensor::erase,
     tensor::write,
     {"g", Access::in, constant::G_DTYPE, {extent::B, extent::T, constant::GATE_HEADS}, {constant::GATED}},
     tensor::A_log.when({constant::HAS_A_LOG}),
     {"dt_bias", Access::in, DType::fp32, {constant::GATE_HEADS}, {constant::GATE_IN_KERNEL, constant::HAS_DT_BIAS}},
     tensor::norm_weight,
     tensor::norm_gate,
     tensor::cu_seqlens.when({constant::VARLEN}),
     {"state_index", Access::in, constant::INDEX_DTYPE, {extent::N, extent::M}, {constant::STATE_INDEX}},
     tensor::output_state_index,
     tensor::has_initial_state,
     tensor::state_scale,
     {"num_accepted", Access::in, constant::INDEX_DTYPE, {extent::N}, {constant::INDEX_COLUMNS}},
     {"intermediate_index", Access::in, constant::INDEX_DTYPE, {extent::N}, {constant::INTERMEDIATE_STATES}},
     {"parent", Access::in, constant::INDEX_DTYPE, {extent::N, extent::D}, {constant::PARENT}},
     {"initial_state", Access::in, constant::STATE_DTYPE, {extent::S, constant::HV, constant::STATE_ROWS, constant::STATE_COLS}, {constant::INITIAL_STATE, !constant::INPLACE_STATE}},
     tensor::o,
     tensor::final_state.when({constant::FINAL_STATE}),
     tensor::state.inout(),
     {"intermediate_states", Access::inout, constant::STATE_DTYPE, {extent::R, extent::D, constant::HV, constant::STATE_ROWS, constant::STATE_COLS}, {constant::INTERMEDIATE_STATES}}}};
// clang-format on

}  // namespace wyvern::stages
