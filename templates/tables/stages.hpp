// Stages that only index or move.
#pragma once

#include "templates/tensors.hpp"

namespace wyvern::stages {

// clang-format off
inline constexpr StageDefinition chunk_index{
    "chunk_index", "Sequence and chunk tables of a packed batch.",
    {tensor::cu_seqlens,
     tensor::seq_offsets.out(),
     tensor::chunk_offsets.out(),
     tensor::chunk_index.out()}};

inline constexpr StageDefinition transpose_states{
    "transpose_states", "The states entering every chunk with their value columns first.",
    {tensor::h,
     {"h_v_first", Access::out, constant::DTYPE, {extent::NT, constant::HV, constant::V, constant::K}}}};
// clang-format on

}  // namespace wyvern::stages
