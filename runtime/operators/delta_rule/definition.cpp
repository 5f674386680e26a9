// DeltaNet: S = S + k u^T with u = beta (v - S^T k), no decay.
#include "runtime/operators/chunked.hpp"

namespace wyvern::delta_rule {
namespace {

constexpr std::array kFla{CallStyle{.library = "fla", .short_prefill = 64, .packs_masked = true}};

constexpr std::array kPresets{
    ModelPreset{{"fla-deltanet-1.3b", "delta_rule", 16, 16, 128, 128}, kFla},
};

}  // namespace

const OperatorDefinition& definition() {
  static const ChunkedDeltaRule& definition = *new ChunkedDeltaRule(
      {.name = "delta_rule",
       .summary = "the delta rule without decay (DeltaNet)",
       .source = "arXiv 2406.06484",
       .gate = GateKind::none,
       .beta = true,
       .presets = kPresets},
      join({row_tensors(), beta_tensors(), state_tensors(), kept_tensors()}), scalar_gate_stages());
  return definition;
}

}  // namespace wyvern::delta_rule
