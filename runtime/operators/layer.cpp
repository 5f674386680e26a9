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
  const auto with_norm = [](const Problem& p) { return p.output_norm.has_value(); };
  return {
      {"norm_weight", TensorRole::input, Quantity::values, {TensorDim::V}, always_fp32, with_norm},
      {"norm_gate",
       TensorRole::input,
       Quantity::values,
       {TensorDim::B, TensorDim::T, TensorDim::HV, TensorDim::V},
       dtype_of_rows,
       with_norm,
       kStrided},
  };
}

void add_layer_stages(const Problem& p, std::vector<StageUse>& uses) {
  if (p.pass != Pass::forward || !p.output_norm) return;
  rename_all(uses, "o", "o_raw");
  uses.push_back({&stages::output_norm, {}, {}});
}

}  // namespace wyvern
