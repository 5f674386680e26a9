// Stages between per-token rows and per-step rows, STEPS of them a token.
#pragma once

#include "templates/tensors.hpp"

namespace wyvern::stages {

// clang-format off
inline constexpr StageDefinition step_seqlens{
    "step_seqlens", "The boundaries of a packed batch's sequences in steps.",
    {tensor::cu_seqlens,
     {"cu_seqlens_steps", Access::out, constant::SEQLENS_DTYPE, {extent::N1}}}};

inline constexpr StageDefinition expand_steps{
    "expand_steps", "A token's row at its first or last step, zeros at its others.",
    {{"x", Access::in, constant::DTYPE, {extent::B, extent::T, constant::H, constant::K}},
     {"x_steps", Access::out, constant::DTYPE, {extent::B, extent::nT, constant::H, constant::K}}}};

inline constexpr StageDefinition compress_steps{
    "compress_steps", "The row of each token's first or last step.",
    {{"x_steps", Access::in, constant::DTYPE, {extent::B, extent::nT, constant::H, constant::K}},
     {"x", Access::out, constant::DTYPE, {extent::B, extent::T, constant::H, constant::K}}}};
// clang-format on

}  // namespace wyvern::stages
