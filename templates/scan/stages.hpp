// The state scan and its reverse, whole and by segments. A template that scans whole sequences
// covers segment, combine and resume at once.
#pragma once

#include "templates/tensors.hpp"

namespace wyvern::stages {

// clang-format off
inline constexpr StageDefinition fwd_h_segment{
    "fwd_h_segment", "What each segment but a sequence's last, with SUMMARY it too, does to a state: S -> M S + R.",
    {tensor::k.when({!constant::VECTOR_GATE}),
     tensor::kg.when({constant::VECTOR_GATE}),
     tensor::w,
     tensor::u,
     tensor::G.when({constant::SCALAR_GATE}),
     tensor::Gk.when({constant::VECTOR_GATE}),
     tensor::k_rstd.when({constant::QK_L2NORM, !constant::VECTOR_GATE}),
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::segment_M.out(),
     tensor::segment_R.out()},
    {{tunable::BT, constant::V, constant::K}, {constant::K, constant::V, tunable::BT}, {tunable::BT, constant::K, constant::K}, {constant::K, constant::K, tunable::BT}},
    Scan::segment};

inline constexpr StageDefinition fwd_h_combine{
    "fwd_h_combine", "The states that enter segments, from what each segment does to a state.",
    {tensor::segment_M,
     tensor::segment_R,
     tensor::initial_state.when({constant::INITIAL_STATE, !constant::INPLACE_STATE}),
     tensor::state,
     tensor::state_index,
     tensor::output_state_index,
     tensor::has_initial_state,
     tensor::state_scale,
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::segment_state.out()},
    {{constant::K, constant::V, constant::K}},
    Scan::segments};

inline constexpr StageDefinition fwd_h{
    "fwd_h", "The state scan of all segments at once, from the states that enter them.",
    {tensor::k.when({AllOf{!constant::VECTOR_GATE}, AllOf{constant::CHECKPOINT_OFFSETS}}),
     tensor::kg.when({constant::VECTOR_GATE}),
     tensor::w,
     tensor::u,
     tensor::G.when({constant::SCALAR_GATE}),
     tensor::Gk.when({constant::VECTOR_GATE}),
     tensor::k_rstd.when({constant::QK_L2NORM, !constant::VECTOR_GATE}),
     tensor::segment_state,
     tensor::state_index,
     tensor::output_state_index,
     tensor::state_scale,
     tensor::checkpoint_offsets,
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_offsets.when({constant::VARLEN}),
     tensor::h.out(),
     tensor::v_new.out(),
     tensor::state_unit.out(),
     tensor::final_state.when({constant::FINAL_STATE}),
     tensor::state.inout(),
     tensor::checkpoints},
    {{tunable::BT, constant::V, constant::K}, {constant::K, constant::V, tunable::BT}},
    Scan::sequence};

inline constexpr StageDefinition fwd_h_summary{
    "fwd_h_summary", "What each sequence does to a state, S -> M S + R, from what its segments do; R from initial_state.",
    {tensor::segment_M,
     tensor::segment_R,
     tensor::initial_state.when({constant::INITIAL_STATE}),
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::summary},
    {{constant::K, constant::SUMMARY_COLUMNS, constant::K}},
    Scan::segments};

inline constexpr StageDefinition fold{
    "fold", "The states that enter ranges of tokens, or the gradients that leave them, from what each does.",
    {tensor::summaries, tensor::order, tensor::range_states.out()},
    {{constant::K, constant::V, constant::K}},
    Scan::segments};

inline constexpr StageDefinition bwd_dhu_segment{
    "bwd_dhu_segment", "What each segment but a first one, with SUMMARY it too, does to a state's gradient: dS -> dM dS + dR.",
    {tensor::q.when({!constant::VECTOR_GATE}),
     tensor::qg.when({constant::VECTOR_GATE}),
     tensor::k.when({!constant::VECTOR_GATE}),
     tensor::kg.when({constant::VECTOR_GATE}),
     tensor::w,
     tensor::do_,
     tensor::dv_local,
     tensor::G.when({constant::SCALAR_GATE}),
     tensor::Gk.when({constant::VECTOR_GATE}),
     tensor::q_rstd.when({constant::QK_L2NORM, !constant::VECTOR_GATE}),
     tensor::k_rstd.when({constant::QK_L2NORM, !constant::VECTOR_GATE}),
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::segment_dM.out(),
     tensor::segment_dR.out()},
    {{tunable::BT, constant::V, constant::K}, {constant::K, constant::V, tunable::BT}, {constant::K, constant::V, tunable::BT}, {tunable::BT, constant::K, constant::K}, {constant::K, constant::K, tunable::BT}, {constant::K, constant::K, tunable::BT}},
    Scan::segment};

inline constexpr StageDefinition bwd_dhu_combine{
    "bwd_dhu_combine", "The gradients of the states that leave segments, from what each does to them.",
    {tensor::segment_dM,
     tensor::segment_dR,
     tensor::dht.when({constant::FINAL_STATE}),
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::segment_dstate.out()},
    {{constant::K, constant::V, constant::K}},
    Scan::segments};

inline constexpr StageDefinition bwd_dhu_summary{
    "bwd_dhu_summary", "The gradient of the state that enters each sequence, from what its segments do to gradients.",
    {tensor::segment_dM,
     tensor::segment_dR,
     tensor::dht.when({constant::FINAL_STATE}),
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::dsummary},
    {{constant::K, constant::V, constant::K}},
    Scan::segments};

inline constexpr StageDefinition bwd_dhu{
    "bwd_dhu", "The reverse state scan of all segments at once, from the gradients at their ends.",
    {tensor::q.when({!constant::VECTOR_GATE}),
     tensor::qg.when({constant::VECTOR_GATE}),
     tensor::k.when({!constant::VECTOR_GATE}),
     tensor::kg.when({constant::VECTOR_GATE}),
     tensor::w,
     tensor::do_,
     tensor::dv_local,
     tensor::G.when({constant::SCALAR_GATE}),
     tensor::Gk.when({constant::VECTOR_GATE}),
     tensor::q_rstd.when({constant::QK_L2NORM, !constant::VECTOR_GATE}),
     tensor::k_rstd.when({constant::QK_L2NORM, !constant::VECTOR_GATE}),
     tensor::segment_dstate,
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_offsets.when({constant::VARLEN}),
     tensor::dh.out(),
     tensor::du.out(),
     tensor::dstate_unit.out(),
     tensor::dinitial_state.when({constant::INITIAL_STATE})},
    {{tunable::BT, constant::V, constant::K}, {constant::K, constant::V, tunable::BT}, {constant::K, constant::V, tunable::BT}},
    Scan::sequence};
// clang-format on

}  // namespace wyvern::stages
