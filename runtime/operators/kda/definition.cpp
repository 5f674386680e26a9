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

/// FLA's layer and KDAConfig have no bound unless they are given one.
constexpr CallStyle fla_without_bound() {
  CallStyle style = kFla;
  style.library = "fla, no lower bound";
  style.no_lower_bound = true;
  return style;
}

// The second computes the gate itself, without a bound.
constexpr std::array kStyles{kFla, CallStyle{.library = "transformers"}, fla_without_bound()};

constexpr std::array kPresets{
    ModelPreset{{"kimi-linear-48b", "kda", 32, 32, 128, 128, -5.0F}, kStyles},
    ModelPreset{{"kda-h64", "kda", 64, 64, 128, 128, -5.0F}, std::span(kStyles).first<1>()},
    ModelPreset{{"kda-h96", "kda", 96, 96, 128, 128, -5.0F}, std::span(kStyles).first<1>()},
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
