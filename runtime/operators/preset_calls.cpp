#include "runtime/operators/preset_calls.hpp"

#include <fmt/format.h>

#include "runtime/operators/operator.hpp"

namespace wyvern {
namespace {

struct Call {
  std::string_view name;
  Pass pass;
  bool initial_state, output_final_state;
  bool short_prefill = false;
};

/// Of every model but for the short prefills. A loss depends on no final state, so the backward
/// pass gets no dht. Layers have no short prefills.
constexpr Call kCalls[] = {
    {"first prefill", Pass::forward, false, true},
    {"continued prefill", Pass::forward, true, true},
    {"training, forward", Pass::forward, false, false},
    {"training, backward", Pass::backward, false, false},
    {"decoding", Pass::recurrent, true, true},
    {"short first prefill", Pass::recurrent, false, true, true},
    {"short continued prefill", Pass::recurrent, true, true, true},
};

/// Weights a channel of the convolution in every preset's layers.
constexpr std::int64_t kConvWidth = 4;

const ModelPreset& find_model(std::string_view name) {
  const Preset& preset = find_preset(name);
  for (const ModelPreset& model : find_operator(preset.op)->facts().presets)
    if (model.name == name) return model;
  throw std::logic_error("every preset is an operator's");
}

Problem problem_of(const ModelPreset& preset, const CallStyle& style, DType dtype) {
  Problem p;
  p.op = preset.op;
  p.H = preset.H, p.HV = preset.HV, p.K = preset.K, p.V = preset.V;
  p.dtype = dtype;
  p.beta_dtype = style.fp32_beta ? DType::fp32 : dtype;
  p.g_dtype = style.gate_in_kernel ? dtype : DType::fp32;
  p.use_qk_l2norm = true;
  p.has_g = !style.no_gate;
  p.use_gate_in_kernel = p.has_dt_bias = style.gate_in_kernel;
  if (style.gate_in_kernel && preset.lower_bound != 0 && !style.no_lower_bound)
    p.lower_bound = preset.lower_bound;
  p.use_beta_sigmoid = style.beta_sigmoid;
  p.state_v_first = style.state_v_first;
  p.output_norm = style.layer;
  if (style.layer) p.short_conv = kConvWidth, p.conv_dtype = dtype;
  return p;
}

}  // namespace

std::vector<PresetCall> preset_calls(std::string_view preset, DType dtype) {
  const ModelPreset& model = find_model(preset);
  const bool householder = find_operator(model.op)->facts().householder;
  std::vector<PresetCall> calls;
  for (const CallStyle& style : model.styles)
    for (const bool packed : {false, true})
      for (const Call& call : kCalls) {
        const bool recurrent = call.pass == Pass::recurrent;
        if (recurrent && style.layer && (packed || householder)) continue;
        const bool training = !recurrent && !call.output_final_state;
        if (packed && !style.packs_masked && !(style.packs_training && training)) continue;
        if (call.short_prefill && style.short_prefill == 0) continue;
        Problem p = problem_of(model, style, dtype);
        p.pass = call.pass;
        p.initial_state = call.initial_state;
        p.output_final_state = call.output_final_state;
        p.packed = packed;
        if (recurrent && style.decodes_in_place) {
          p.inplace_state = p.inplace_conv_state = true;
          p.initial_state = p.output_final_state = false;
        } else if (style.layer) {
          p.initial_conv_state = call.initial_state;
          p.output_conv_state = call.output_final_state;
          p.keep_output = training && call.pass == Pass::forward;
        }
        if (recurrent) p.T = call.short_prefill ? style.short_prefill : 1;
        calls.push_back(
            {fmt::format("{}: {}{}", style.library, call.name, packed ? ", packed" : ""),
             std::move(p), recurrent ? style.decode : nullptr});
      }
  return calls;
}

}  // namespace wyvern
