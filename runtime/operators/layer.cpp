#include "runtime/operators/layer.hpp"

#include <string>
#include <utility>

#include "templates/layer/stages.hpp"

namespace wyvern {
namespace {

/// Lets all uses that read or write the tensor `name` call it `other`.
void rename_all(std::vector<StageUse>& uses, const std::string& name, const std::string& other) {
  for (StageUse& use : uses) {
    for (auto& [argument, logical] : use.rename)
      if (logical == name) logical = other;
    if (use.stage->find(name) != nullptr) use.rename.try_emplace(name, other);
  }
}

}  // namespace

TensorRules layer_tensors() {
  using enum TensorRole;
  using enum Quantity;
  const Dims weight{TensorDim::V}, each{TensorDim::B, TensorDim::T, TensorDim::HV, TensorDim::V};
  const auto with_norm = [](const Problem& p) { return p.output_norm.has_value(); };
  const auto with_gradient = [](const Problem& p) { return in_backward(p) && p.output_norm; };
  const auto with_rows = [](const Problem& p) {
    return p.output_norm && (in_backward(p) || p.keep_output);
  };
  const Dims channel_taps{TensorDim::conv_channels, TensorDim::conv_width};
  const Dims window{TensorDim::N, TensorDim::conv_channels, TensorDim::conv_before};
  const Dims initial{TensorDim::slots, TensorDim::conv_channels, TensorDim::conv_before};
  const Dims pool{TensorDim::slots, TensorDim::conv_rows, TensorDim::conv_columns};
  const Dims drafts{TensorDim::states_inside, TensorDim::drafts, TensorDim::conv_draft_rows,
                    TensorDim::conv_draft_columns};
  const auto dtype_of_taps = [](const Problem& p) { return p.conv_dtype; };
  const auto with_conv = [](const Problem& p) { return p.short_conv.has_value(); };
  const auto with_bias = [](const Problem& p) { return p.has_conv_bias; };
  const auto with_window = [](const Problem& p) { return p.initial_conv_state; };
  const auto with_last = [](const Problem& p) { return p.output_conv_state && !in_backward(p); };
  const auto with_dconv = [](const Problem& p) { return in_backward(p) && p.short_conv; };
  const auto with_dbias = [](const Problem& p) { return in_backward(p) && p.has_conv_bias; };
  const auto with_dwindow = [](const Problem& p) { return in_backward(p) && p.initial_conv_state; };
  const auto with_dlast = [](const Problem& p) { return in_backward(p) && p.output_conv_state; };
  return {
      {"conv_weight", input, taps, channel_taps, dtype_of_taps, with_conv},
      {"conv_bias", input, taps, {TensorDim::conv_channels}, dtype_of_taps, with_bias},
      {"initial_conv_state", input, values, initial, dtype_of_rows, with_window},
      {"final_conv_state", output, computed, window, dtype_of_rows, with_last},
      {"conv_state", updated, values, pool, dtype_of_rows,
       [](const Problem& p) { return p.inplace_conv_state; }, kStrided},
      {"intermediate_conv_states", updated, values, drafts, dtype_of_rows,
       [](const Problem& p) { return p.short_conv && p.intermediate_rows; }},
      {"dfinal_conv_state", input, values, window, dtype_of_rows, with_dlast},
      {"dconv_weight", output, computed, channel_taps, always_fp32, with_dconv},
      {"dconv_bias", output, computed, {TensorDim::conv_channels}, always_fp32, with_dbias},
      {"dinitial_conv_state", output, computed, window, dtype_of_rows, with_dwindow},
      {"norm_weight", input, values, weight, always_fp32, with_norm},
      {"norm_gate", input, values, each, dtype_of_rows, with_norm, kStrided},
      {"o_raw", kept, values, each, dtype_of_rows, with_rows},
      {"o_scale",
       output,
       computed,
       {TensorDim::scale_rows, TensorDim::scale_columns},
       always_fp32,
       [](const Problem& p) { return p.output_dtype.has_value(); }},
      {"dnorm_weight", output, computed, weight, always_fp32, with_gradient},
      {"dnorm_gate", output, computed, each, dtype_of_rows, with_gradient, kStrided},
  };
}

void add_layer_stages(const Problem& p, std::vector<StageUse>& uses) {
  const bool backward = in_backward(p);
  if (p.short_conv) {
    const bool by_token = p.pass == Pass::recurrent;
    StageUse rows{by_token ? &stages::short_conv_step : &stages::short_conv,
                  {{"q_conv", "q"}, {"k_conv", "k"}, {"v_conv", "v"}},
                  {}};
    if (backward) {
      // The problem's CONV_FINAL says that its gradient is given.
      rows.constants.set("CONV_FINAL", false);
      for (const std::string name : {"dq", "dk", "dv"}) rename_all(uses, name, name + "_conv");
      StageUse gradients{&stages::short_conv_bwd, {}, {}};
      for (const std::string name : {"q", "k", "v"})
        gradients.rename.emplace(name, std::string(kCallers) + name);
      uses.push_back(std::move(gradients));
    }
    uses.insert(uses.begin(), std::move(rows));
  }
  if (p.pass == Pass::forward && p.output_norm) {
    rename_all(uses, "o", "o_raw");
    uses.push_back({&stages::output_norm, {}, {}});
  }
  if (p.output_dtype) {
    rename_all(uses, "o", "o_norm");
    uses.push_back({&stages::output_quantize, {}, {}});
  }
  if (backward && p.output_norm)
    uses.insert(uses.begin(), {&stages::output_norm_bwd, {{"do_raw", "do"}}, {}});
  if (backward && (p.output_norm || p.short_conv)) uses.push_back({&stages::layer_sum, {}, {}});
}

}  // namespace wyvern
