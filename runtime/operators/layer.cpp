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

void add_layer_stages(const Problem& p, std::vector<StageUse>& uses) {
  if (p.pass != Pass::forward || !p.output_norm) return;
  rename_all(uses, "o", "o_raw");
  uses.push_back({&stages::output_norm, {}, {}});
}

}  // namespace wyvern
