// Stages that work row by row on q, k and their gradients.
#pragma once

#include "templates/tensors.hpp"

namespace wyvern::stages {

// clang-format off
inline constexpr StageDefinition l2norm{
    "l2norm", "y = x / sqrt(sum(x^2) + 1e-6) over the last dimension.",
    {{"x", Access::in, constant::DTYPE, {extent::B, extent::T, constant::H, constant::K}},
     {"y", Access::out, constant::DTYPE, {extent::B, extent::T, constant::H, constant::K}}}};

inline constexpr StageDefinition l2norm_rstd{
    "l2norm_rstd", "rstd = 1 / sqrt(sum(x^2) + 1e-6) over the last dimension.",
    {{"x", Access::in, constant::DTYPE, {extent::B, extent::T, constant::H, constant::K}},
     {"rstd", Access::out, DType::fp32, {extent::B, extent::T, constant::H}}}};

inline constexpr StageDefinition l2norm_bwd{
    "l2norm_bwd", "Gradient of x from that of y = x / sqrt(sum(x^2) + 1e-6).",
    {{"x", Access::in, constant::DTYPE, {extent::B, extent::T, constant::H, constant::K}},
     {"rstd", Access::in, DType::fp32, {extent::B, extent::T, constant::H}},
     {"dy", Access::in, constant::DTYPE, {extent::B, extent::T, constant::H, constant::K}},
     {"dx", Access::out, constant::DTYPE, {extent::B, extent::T, constant::H, constant::K}}}};

inline constexpr StageDefinition head_sum{
    "head_sum", "Sum of the gradients of a query or key head over its value heads.",
    {{"dy_heads", Access::in, constant::DTYPE, {extent::B, extent::T, constant::HV, constant::K}},
     {"dy", Access::out, constant::DTYPE, {extent::B, extent::T, constant::H, constant::K}}}};
// clang-format on

}  // namespace wyvern::stages
