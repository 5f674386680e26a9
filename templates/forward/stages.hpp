// Optional stages in front of an operator's others, for plans that split sequences into segments
// and compute the rest of the forward pass in one kernel. A plan has both or neither.
#pragma once

#include "templates/tensors.hpp"

namespace wyvern::stages {

// clang-format off
inline constexpr StageDefinition delta_segment{
    "delta_segment", "fwd_h_segment from the operator's inputs; M may be 0 below 2^-30.",
    {tensor::k,
     tensor::v,
     tensor::beta,
     {"g", Access::in, constant::G_DTYPE, {extent::B, extent::T, constant::HV}, {constant::SCALAR_GATE}},
     tensor::A_log.when({constant::GATE_IN_KERNEL}),
     {"dt_bias", Access::in, DType::fp32, {constant::HV}, {constant::HAS_DT_BIAS}},
     tensor::seq_offsets.when({constant::VARLEN}),
     {"share_M", Access::out, DType::fp32, {extent::NS, constant::HV, constant::K, constant::K}},
     {"share_R", Access::out, DType::fp32, {extent::NS, constant::HV, constant::K, constant::V}}}};

inline constexpr StageDefinition delta_resume{
    "delta_resume", "The states that enter segments, for the whole pass that comes next.",
    {tensor::segment_state}};

inline constexpr StageDefinition kda_segment{
    "kda_segment", "fwd_h_segment from the operator's inputs; M may be 0 below 2^-30.",
    {tensor::k,
     tensor::v,
     tensor::beta,
     {"g", Access::in, constant::G_DTYPE, {extent::B, extent::T, constant::HV, constant::K}},
     tensor::A_log.when({constant::HAS_A_LOG}),
     {"dt_bias", Access::in, DType::fp32, {constant::HV, constant::K}, {constant::HAS_DT_BIAS}},
     tensor::seq_offsets.when({constant::VARLEN}),
     {"share_M", Access::out, DType::fp32, {extent::NS, constant::HV, constant::K, constant::K}},
     {"share_R", Access::out, DType::fp32, {extent::NS, constant::HV, constant::K, constant::V}}}};

inline constexpr StageDefinition kda_resume{
    "kda_resume", "The states that enter segments, for the whole pass that comes next.",
    {tensor::segment_state}};
// clang-format on

}  // namespace wyvern::stages
