// Gated DeltaNet: the delta rule after a decay of one value a head.
#include "runtime/operators/chunked.hpp"

namespace wyvern::gated_delta_rule {
namespace {

constexpr std::string_view kName = "gated_delta_rule";

constexpr std::array kTransformers{CallStyle{.library = "transformers", .packs_training = true},
                                   CallStyle{.library = "transformers, layers",
                                             .gate_in_kernel = true,
                                             .beta_sigmoid = true,
                                             .packs_training = true,
                                             .layer = Activation::silu,
                                             .decodes_in_place = true}};
constexpr std::array kFla{CallStyle{.library = "fla",
                                    .gate_in_kernel = true,
                                    .beta_sigmoid = true,
                                    .state_v_first = true,
                                    .short_prefill = 64,
                                    .packs_masked = true},
                          CallStyle{.library = "fla, layers",
                                    .gate_in_kernel = true,
                                    .beta_sigmoid = true,
                                    .state_v_first = true,
                                    .packs_masked = true,
                                    .layer = Activation::silu}};

constexpr std::array kPresets{
    ModelPreset{{"qwen3-next-80b", kName, 16, 32, 128, 128}, kTransformers},
    ModelPreset{{"qwen3.5-397b", kName, 16, 64, 128, 128}, kTransformers},
    ModelPreset{{"qwen3.5-122b", kName, 16, 64, 128, 128}, kTransformers},
    ModelPreset{{"qwen3.5-35b", kName, 16, 32, 128, 128}, kTransformers},
    ModelPreset{{"qwen3.5-9b", kName, 16, 32, 128, 128}, kTransformers},
    ModelPreset{{"qwen3.5-4b", kName, 16, 32, 128, 128}, kTransformers},
    ModelPreset{{"qwen3.5-27b", kName, 16, 48, 128, 128}, kTransformers},
    ModelPreset{{"qwen3.5-2b", kName, 16, 16, 128, 128}, kTransformers},
    ModelPreset{{"qwen3.5-0.8b", kName, 16, 16, 128, 128}, kTransformers},
    ModelPreset{{"fla-gdn-1.3b", kName, 6, 6, 256, 512}, kFla},
};

}  // namespace

const OperatorDefinition& definition() {
  static const ChunkedDeltaRule& definition = *new ChunkedDeltaRule(
      {.name = kName,
       .summary = "the delta rule with one decay a head (Gated DeltaNet)",
       .source = "arXiv 2412.06464",
       .gate = GateKind::scalar,
       .beta = true,
       .presets = kPresets},
      join({row_tensors(), beta_tensors(), gate_tensors(), state_tensors(), kept_tensors()}),
      scalar_gate_stages());
  return definition;
}

}  // namespace wyvern::gated_delta_rule
