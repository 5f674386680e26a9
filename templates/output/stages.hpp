// Stages that make the output.
#pragma once

#include "templates/tensors.hpp"

namespace wyvern::stages {

// clang-format off
inline constexpr StageDefinition fwd_o{
    "fwd_o", "O = scale ((exp(G) Q) S + P V'), per chunk.",
    {tensor::q,
     tensor::k,
     tensor::v_new,
     tensor::h,
     tensor::state_unit,
     tensor::G.when({constant::SCALAR_GATE}),
     tensor::q_rstd.when({constant::QK_L2NORM}),
     tensor::k_rstd.when({constant::QK_L2NORM}),
     tensor::state_index,
     tensor::output_state_index,
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_index.when({constant::VARLEN}),
     tensor::o},
    {{tunable::BT, tunable::BT, constant::K}, {tunable::BT, constant::V, constant::K}, {tunable::BT, constant::V, tunable::BT}}};

inline constexpr StageDefinition kda_fwd_o{
    "kda_fwd_o", "O = scale (qg S + Aqk V'), per chunk.",
    {tensor::qg,
     tensor::Aqk,
     tensor::v_new,
     tensor::h,
     tensor::state_unit,
     tensor::state_index,
     tensor::output_state_index,
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_index.when({constant::VARLEN}),
     tensor::o},
    {{tunable::BT, constant::V, constant::K}, {tunable::BT, constant::V, tunable::BT}}};
// clang-format on

}  // namespace wyvern::stages
