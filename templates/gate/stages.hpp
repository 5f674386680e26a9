// Stages that compute gates, their sums inside chunks, and their gradients.
#pragma once

#include "templates/tensors.hpp"

namespace wyvern::stages {

// clang-format off
inline constexpr StageDefinition gate{
    "gate", "g_log = -exp(A_log) * softplus(g + dt_bias).",
    {{"g", Access::in, constant::G_DTYPE, {extent::B, extent::T, constant::HV}},
     tensor::A_log,
     {"dt_bias", Access::in, DType::fp32, {constant::HV}, {constant::HAS_DT_BIAS}},
     {"g_log", Access::out, DType::fp32, {extent::B, extent::T, constant::HV}}}};

inline constexpr StageDefinition kda_gate{
    "kda_gate", "g_log of a gate per key channel.",
    {{"g", Access::in, constant::G_DTYPE, {extent::B, extent::T, constant::HV, constant::K}},
     tensor::A_log.when({constant::HAS_A_LOG}),
     {"dt_bias", Access::in, DType::fp32, {constant::HV, constant::K}, {constant::HAS_DT_BIAS}},
     {"g_log", Access::out, DType::fp32, {extent::B, extent::T, constant::HV, constant::K}}}};

inline constexpr StageDefinition chunk_local_cumsum{
    "chunk_local_cumsum", "Running sum of the log decay inside each chunk.",
    {{"g", Access::in, constant::G_DTYPE, {extent::B, extent::T, constant::GATE_HEADS}},
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_index.when({constant::VARLEN}),
     {"G", Access::out, DType::fp32, {extent::B, extent::T, constant::GATE_HEADS}}}};

inline constexpr StageDefinition chunk_local_reverse_cumsum{
    "chunk_local_reverse_cumsum", "Gradient of the log decay from that of its running sum inside each chunk.",
    {{"dG", Access::in, DType::fp32, {extent::B, extent::T, constant::GATE_HEADS}},
     {"G", Access::in, DType::fp32, {extent::B, extent::T, constant::GATE_HEADS}},
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_index.when({constant::VARLEN}),
     {"dg", Access::out, constant::DG_DTYPE, {extent::B, extent::T, constant::GATE_HEADS}}}};

inline constexpr StageDefinition gate_bwd{
    "gate_bwd", "Gradients of the raw gate, and each chunk's part of those of A_log and dt_bias.",
    {{"g", Access::in, constant::G_DTYPE, {extent::B, extent::T, constant::HV}},
     tensor::A_log,
     {"dt_bias", Access::in, DType::fp32, {constant::HV}, {constant::HAS_DT_BIAS}},
     {"dg_log", Access::in, DType::fp32, {extent::B, extent::T, constant::HV}},
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_index.when({constant::VARLEN}),
     {"dg_raw", Access::out, constant::G_DTYPE, {extent::B, extent::T, constant::HV}},
     {"dA_part", Access::out, DType::fp32, {extent::NT, constant::HV}},
     {"dbias_part", Access::out, DType::fp32, {extent::NT, constant::HV}, {constant::HAS_DT_BIAS}}}};

inline constexpr StageDefinition kda_gate_bwd{
    "kda_gate_bwd", "Gradients of the raw gate per key channel, and parts of those of its parameters.",
    {{"g", Access::in, constant::G_DTYPE, {extent::B, extent::T, constant::HV, constant::K}},
     tensor::A_log.when({constant::HAS_A_LOG}),
     {"dt_bias", Access::in, DType::fp32, {constant::HV, constant::K}, {constant::HAS_DT_BIAS}},
     {"dg_log", Access::in, DType::fp32, {extent::B, extent::T, constant::HV, constant::K}},
     tensor::seq_offsets.when({constant::VARLEN}),
     tensor::chunk_index.when({constant::VARLEN}),
     {"dg_raw", Access::out, constant::G_DTYPE, {extent::B, extent::T, constant::HV, constant::K}},
     {"dA_part", Access::out, DType::fp32, {extent::NT, constant::HV}, {constant::HAS_A_LOG}},
     {"dbias_part", Access::out, DType::fp32, {extent::NT, constant::HV, constant::K}, {constant::HAS_DT_BIAS}}}};

inline constexpr StageDefinition gate_param_sum{
    "gate_param_sum", "Gradients of A_log and dt_bias from every chunk's part of them.",
    {{"dA_part", Access::in, DType::fp32, {extent::NT, constant::HV}, {constant::HAS_A_LOG}},
     {"dbias_part", Access::in, DType::fp32, {extent::NT, constant::GATE_HEADS}, {constant::HAS_DT_BIAS}},
     {"dA_log", Access::out, DType::fp32, {constant::HV}, {constant::HAS_A_LOG}},
     {"ddt_bias", Access::out, DType::fp32, {constant::GATE_HEADS}, {constant::HAS_DT_BIAS}}}};
// clang-format on

}  // namespace wyvern::stages
