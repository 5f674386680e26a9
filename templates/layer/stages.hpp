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
// clang-format on

}  // namespace wyvern::stages
