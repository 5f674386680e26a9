// Stages of the layer around an operator.
#pragma once

#include "templates/tensors.hpp"

namespace wyvern::stages {

// clang-format off
inline constexpr StageDefinition short_conv{
    "short_conv", "Rows of q, k and v convolved with the rows before them, channel by channel.",
    {tensor::q,
     {"k", Access::in, constant::DTYPE, {extent::B, extent::nT, constant::H, constant::K}},
     {"v", Access::in, constant::DTYPE, {extent::B, extent::nT, constant::HV, constant::V}},
     {"conv_weight", Access::in, constant::CONV_DTYPE, {constant::CONV_CHANNELS, constant::CONV_WIDTH}},
     {"conv_bias", Access::in, constant::CONV_DTYPE, {constant::CONV_CHANNELS}, {constant::HAS_CONV_BIAS}},
     {"initial_conv_state", Access::in, constant::DTYPE, {extent::N, constant::CONV_CHANNELS, constant::CONV_COLUMNS}, {constant::CONV_INITIAL}},
     tensor::cu_seqlens.when({constant::VARLEN}),
     tensor::state_index.when({constant::CONV_INPLACE, constant::STATE_INDEX}),
     tensor::output_state_index.when({constant::CONV_INPLACE, constant::OUTPUT_STATE_INDEX}),
     tensor::has_initial_state.when({constant::CONV_INPLACE, constant::HAS_INITIAL_STATE}),
     {"q_conv", Access::out, constant::DTYPE, {extent::B, extent::T, constant::H, constant::K}},
     {"k_conv", Access::out, constant::DTYPE, {extent::B, extent::nT, constant::H, constant::K}},
     {"v_conv", Access::out, constant::DTYPE, {extent::B, extent::nT, constant::HV, constant::V}},
     {"final_conv_state", Access::out, constant::DTYPE, {extent::N, constant::CONV_CHANNELS, constant::CONV_COLUMNS}, {constant::CONV_FINAL}},
     tensor::conv_state}};

inline constexpr StageDefinition short_conv_step{
    "short_conv_step", "The same for a few tokens a sequence.",
    {tensor::q,
     {"k", Access::in, constant::DTYPE, {extent::B, extent::nT, constant::H, constant::K}},
     {"v", Access::in, constant::DTYPE, {extent::B, extent::nT, constant::HV, constant::V}},
     {"conv_weight", Access::in, constant::CONV_DTYPE, {constant::CONV_CHANNELS, constant::CONV_WIDTH}},
     {"conv_bias", Access::in, constant::CONV_DTYPE, {constant::CONV_CHANNELS}, {constant::HAS_CONV_BIAS}},
     {"initial_conv_state", Access::in, constant::DTYPE, {extent::S, constant::CONV_CHANNELS, constant::CONV_COLUMNS}, {constant::CONV_INITIAL}},
     tensor::cu_seqlens.when({constant::VARLEN}),
     {"state_index", Access::in, constant::INDEX_DTYPE, {extent::N, extent::M}, {constant::STATE_INDEX}},
     tensor::output_state_index,
     tensor::has_initial_state,
     {"num_accepted", Access::in, constant::INDEX_DTYPE, {extent::N}, {constant::INDEX_COLUMNS}},
     {"intermediate_index", Access::in, constant::INDEX_DTYPE, {extent::N}, {constant::INTERMEDIATE_STATES}},
     {"parent", Access::in, constant::INDEX_DTYPE, {extent::N, extent::D}, {constant::PARENT}},
     {"q_conv", Access::out, constant::DTYPE, {extent::B, extent::T, constant::H, constant::K}},
     {"k_conv", Access::out, constant::DTYPE, {extent::B, extent::nT, constant::H, constant::K}},
     {"v_conv", Access::out, constant::DTYPE, {extent::B, extent::nT, constant::HV, constant::V}},
     {"final_conv_state", Access::out, constant::DTYPE, {extent::N, constant::CONV_CHANNELS, constant::CONV_COLUMNS}, {constant::CONV_FINAL}},
     tensor::conv_state,
     {"intermediate_conv_states", Access::inout, constant::DTYPE, {extent::R, extent::D, constant::CONV_DRAFT_ROWS, constant::CONV_DRAFT_COLS}, {constant::INTERMEDIATE_STATES}}}};

inline constexpr StageDefinition output_norm{
    "output_norm", "O = act(norm_gate) norm_weight O_raw / sqrt(mean(O_raw^2) + norm_eps), row by row.",
    {{"o_raw", Access::in, constant::DTYPE, {extent::B, extent::T, constant::HV, constant::V}},
     tensor::norm_weight.when({}),
     tensor::norm_gate.when({}),
     tensor::o}};

inline constexpr StageDefinition output_quantize{
    "output_quantize", "O = e4m3(O_norm / s), s = max |O_norm| / 448 of each 128 columns.",
    {{"o_norm", Access::in, constant::DTYPE, {extent::B, extent::T, constant::HV, constant::V}},
     {"o", Access::out, DType::float8_e4m3, {extent::B, extent::T, constant::HV, constant::V}},
     {"o_scale", Access::out, DType::fp32, {extent::SR, extent::SC}}}};

inline constexpr StageDefinition output_norm_bwd{
    "output_norm_bwd", "Gradients of O_raw and norm_gate from that of O, and parts of that of norm_weight.",
    {tensor::do_,
     {"o_raw", Access::in, constant::DTYPE, {extent::B, extent::T, constant::HV, constant::V}},
     tensor::norm_weight.when({}),
     tensor::norm_gate.when({}),
     {"do_raw", Access::out, constant::DTYPE, {extent::B, extent::T, constant::HV, constant::V}},
     {"dnorm_gate", Access::out, constant::DTYPE, {extent::B, extent::T, constant::HV, constant::V}},
     {"dnorm_weight_part", Access::out, DType::fp32, {extent::P, constant::V}}}};

inline constexpr StageDefinition short_conv_bwd{
    "short_conv_bwd", "Gradients of q, k and v from those of the convolved ones, and parts of those of the weights.",
    {tensor::q,
     {"k", Access::in, constant::DTYPE, {extent::B, extent::nT, constant::H, constant::K}},
     {"v", Access::in, constant::DTYPE, {extent::B, extent::nT, constant::HV, constant::V}},
     {"conv_weight", Access::in, constant::CONV_DTYPE, {constant::CONV_CHANNELS, constant::CONV_WIDTH}},
     {"conv_bias", Access::in, constant::CONV_DTYPE, {constant::CONV_CHANNELS}, {constant::HAS_CONV_BIAS}},
     {"initial_conv_state", Access::in, constant::DTYPE, {extent::N, constant::CONV_CHANNELS, constant::CONV_COLUMNS}, {constant::CONV_INITIAL}},
     {"dq_conv", Access::in, constant::DTYPE, {extent::B, extent::T, constant::H, constant::K}},
     {"dk_conv", Access::in, constant::DTYPE, {extent::B, extent::nT, constant::H, constant::K}},
     {"dv_conv", Access::in, constant::DTYPE, {extent::B, extent::nT, constant::HV, constant::V}},
     {"dfinal_conv_state", Access::in, constant::DTYPE, {extent::N, constant::CONV_CHANNELS, constant::CONV_COLUMNS}, {constant::CONV_FINAL}},
     tensor::cu_seqlens.when({constant::VARLEN}),
     {"dq", Access::out, constant::DTYPE, {extent::B, extent::T, constant::H, constant::K}},
     {"dk", Access::out, constant::DTYPE, {extent::B, extent::nT, constant::H, constant::K}},
     {"dv", Access::out, constant::DTYPE, {extent::B, extent::nT, constant::HV, constant::V}},
     {"dinitial_conv_state", Access::out, constant::DTYPE, {extent::N, constant::CONV_CHANNELS, constant::CONV_COLUMNS}, {constant::CONV_INITIAL}},
     {"dconv_weight_part", Access::out, DType::fp32, {extent::TP, constant::CONV_CHANNELS, constant::CONV_WIDTH}},
     {"dconv_bias_part", Access::out, DType::fp32, {extent::TP, constant::CONV_CHANNELS}, {constant::HAS_CONV_BIAS}}}};

inline constexpr StageDefinition layer_sum{
    "layer_sum", "The gradients of norm_weight, conv_weight and conv_bias from their parts.",
    {{"dnorm_weight_part", Access::in, DType::fp32, {extent::P, constant::V}, {constant::OUTPUT_NORM}},
     {"dconv_weight_part", Access::in, DType::fp32, {extent::TP, constant::CONV_CHANNELS, constant::CONV_WIDTH}, {constant::SHORT_CONV}},
     {"dconv_bias_part", Access::in, DType::fp32, {extent::TP, constant::CONV_CHANNELS}, {constant::HAS_CONV_BIAS}},
     {"dnorm_weight", Access::out, DType::fp32, {constant::V}, {constant::OUTPUT_NORM}},
     {"dconv_weight", Access::out, DType::fp32, {constant::CONV_CHANNELS, constant::CONV_WIDTH}, {constant::SHORT_CONV}},
     {"dconv_bias", Access::out, DType::fp32, {constant::CONV_CHANNELS}, {constant::HAS_CONV_BIAS}}}};
// clang-format on

}  // namespace wyvern::stages
