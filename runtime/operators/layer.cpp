#include "runtime/operators/layer.hpp"

#include <string>

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
  const Dims window{TensorDim::N, TensorDim::conv_channels, TensorDim::conv_columns};
  const auto dtype_of_taps = [](const Problem& p) { return p.conv_dtype; };
  const auto with_conv = [](const Problem& p) { return p.short_conv.has_value(); };
  const auto with_bias = [](const Problem& p) { return p.has_conv_bias; };
  const auto with_window = [](const Problem& p) { return p.initial_conv_state; };
  const auto with_last = [](const Problem& p) { return p.output_conv_state; };
  return {
      {"conv_weight", input, taps, channel_taps, dtype_of_taps, with_conv},
      {"conv_bias", input, taps, {TensorDim::conv_channels}, dtype_of_taps, with_bias},
      {"initial_conv_state", input, values, window, dtype_of_rows, with_window},
      {"final_conv_state", output, computed, window, dtype_of_rows, with_last},
      {"norm_weight", input, values, weight, always_fp32, with_norm},
      {"norm_gate", input, values, each, dtype_of_rows, with_norm, kStrided},
      {"o_raw", kept, values, each, dtype_of_rows, with_rows},
      {"dnorm_weight", output, computed, weight, always_fp32, with_gradient},
      {"dnorm_gate", output, computed, each, dtype_of_rows, with_gradient, kStrided},
  };
}

void add_layer_stages(const Problem& p, std::vector<StageUse>& uses) {
  if (p.short_conv)
    uses.insert(uses.begin(),
                {&stages::short_conv, {{"q_conv", "q"}, {"k_conv", "k"}, {"v_conv", "v"}}, {}});
  if (!p.output_norm) return;
  if (p.pass == Pass::forward) {
    rename_all(uses, "o", "o_raw");
    uses.push_back({&stages::output_norm, {}, {}});
  } else if (p.pass == Pass::backward) {
    uses.insert(uses.begin(), {&stages::output_norm_bwd, {{"do_raw", "do"}}, {}});
    uses.push_back({&stages::layer_sum, {}, {}});
  }
}

}  // namespace wyvern
