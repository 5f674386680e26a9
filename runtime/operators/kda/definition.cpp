// Kimi Delta Attention: the delta rule after a decay of one value a key channel.
#include "runtime/operators/chunked.hpp"
#include "templates/backward/stages.hpp"
#include "templates/forward/stages.hpp"

namespace wyvern::kda {
namespace {

constexpr CallStyle kFla{.library = "fla",
                         .gate_in_kernel = true,
                         .beta_sigmoid = true,
                         .state_v_first = true,
                         .short_prefill = 64,
                         .packs_masked = true};

constexpr CallStyle as_layers(std::string_view library, CallStyle style) {
  style.library = library;
  style.short_prefill = 0;
  style.layer = Activation::sigmoid;
  return style;
}

/// FLA's layer and KDAConfig have no bound unless they are given one.
constexpr CallStyle without_bound(std::string_view library, CallStyle style) {
  style.library = library;
  style.no_lower_bound = true;
  return style;
}

constexpr CallStyle kFlaLayers = as_layers("fla, layers", kFla);

// Those of transformers have no bound, and compute the gate themselves but for whole layers.
constexpr std::array kStyles{
    kFla,
    kFlaLayers,
    CallStyle{.library = "transformers"},
    CallStyle{.library = "transformers, layers",
              .gate_in_kernel = true,
              .beta_sigmoid = true,
              .no_lower_bound = true,
              .layer = Activation::sigmoid,
              .decodes_in_place = true},
    without_bound("fla, no lower bound", kFla),
    without_bound("fla, layers, no lower bound", kFlaLayers),
};

constexpr std::array kPresets{
    ModelPreset{{"kimi-linear-48b", "kda", 32, 32, 128, 128, -5.0F}, kStyles},
    ModelPreset{{"kda-h64", "kda", 64, 64, 128, 128, -5.0F}, std::span(kStyles).first<2>()},
    ModelPreset{{"kda-h96", "kda", 96, 96, 128, 128, -5.0F}, std::span(kStyles).first<2>()},
};

/// The vector-gate stages, with the optional groups that split long sequences of few heads into
/// segments, and that have the backward pass in three kernels.
const ChunkedStages& own_stages() {
  static const ChunkedStages& all = *new ChunkedStages([] {
    ChunkedStages own = vector_gate_stages();
    own.segment = &stages::kda_segment;
    own.resume = &stages::kda_resume;
    own.whole_pass = {{&stages::kda_bwd_prepare, {}, {}},
                      {&stages::kda_scans, {}, {}},
                      {&stages::kda_gradient, {{"dwritten", "dv"}}, {}}};
    own.whole_summary = {{&stages::kda_bwd_prepare, {}, {}}, {&stages::kda_scans_summary, {}, {}}};
    return own;
  }());
  return all;
}

}  // namespace

const OperatorDefinition& definition() {
  static const ChunkedDeltaRule& definition =
      *new ChunkedDeltaRule({.name = "kda",
                             .summary = "the delta rule with one decay a key channel (Kimi Linear)",
                             .source = "arXiv 2510.26692",
                             .gate = GateKind::vector,
                             .lower_bound = true,
                             .beta = true,
                             .presets = kPresets},
                            join({row_tensors(), beta_tensors(), gate_tensors({TensorDim::K}),
                                  state_tensors(), kept_tensors(), kept_decayed_tensors()}),
                            own_stages());
  return definition;
}

}  // namespace wyvern::kda
