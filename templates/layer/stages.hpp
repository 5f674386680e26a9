// Stages of the layer around an operator.
#pragma once

#include "templates/tensors.hpp"

namespace wyvern::stages {

// clang-format off
inline constexpr StageDefinition output_norm{
    "output_norm", "O = act(norm_gate) norm_weight O_raw / sqrt(mean(O_raw^2) + norm_eps), row by row.",
    {{"o_raw", Access::in, constant::DTYPE, {extent::B, extent::T, constant::HV, constant::V}},
     tensor::norm_weight.when({}),
     tensor::norm_gate.when({}),
     tensor::o}};

inline constexpr StageDefinition output_norm_bwd{
    "output_norm_bwd", "Gradients of O_raw and norm_gate from that of O, and parts of that of norm_weight.",
    {tensor::do_,
     {"o_raw", Access::in, constant::DTYPE, {extent::B, extent::T, constant::HV, constant::V}},
     tensor::norm_weight.when({}),
     tensor::norm_gate.when({}),
     {"do_raw", Access::out, constant::DTYPE, {extent::B, extent::T, constant::HV, constant::V}},
     {"dnorm_gate", Access::out, constant::DTYPE, {extent::B, extent::T, constant::HV, constant::V}},
     {"dnorm_weight_part", Access::out, DType::fp32, {extent::P, constant::V}}}};

inline constexpr StageDefinition layer_sum{
    "layer_sum", "The gradient of norm_weight from its parts.",
    {{"dnorm_weight_part", Access::in, DType::fp32, {extent::P, constant::V}},
     {"dnorm_weight", Access::out, DType::fp32, {constant::V}}}};
// clang-format on

}  // namespace wyvern::stages
