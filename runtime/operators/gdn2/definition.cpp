// The second gated delta rule: kda with an erase gate and a write gate in the place of beta.
#include "runtime/operators/gdn2/recurrence.hpp"
#include "templates/backward/stages.hpp"

namespace wyvern::gdn2 {
namespace {

/// erase b, by which a key is multiplied where it reads the state, and write w, by which a value
/// is.
TensorRules gate_pair_tensors() {
  const Dims keys{TensorDim::B, TensorDim::T, TensorDim::HV, TensorDim::K},
      values{TensorDim::B, TensorDim::T, TensorDim::HV, TensorDim::V};
  return {
      {"erase", TensorRole::input, Quantity::rates, keys, dtype_of_rates, always, kStrided},
      {"write", TensorRole::input, Quantity::rates, values, dtype_of_rates, always, kStrided},
      {"derase", TensorRole::output, Quantity::computed, keys, dtype_of_rates, with_gradients},
      {"dwrite", TensorRole::output, Quantity::computed, values, dtype_of_rates, with_gradients},
  };
}

/// The vector-gate stages, with the optional group that has the backward pass in three kernels: the
/// values of both scans are `written`, write v.
const ChunkedStages& own_stages() {
  static const ChunkedStages& all = *new ChunkedStages([] {
    ChunkedStages own = vector_gate_stages();
    own.whole_pass = {{&stages::kda_bwd_prepare, {}, {}},
                      {&stages::kda_scans, {{"v", "written"}, {"dv", "dwritten"}}, {}},
                      {&stages::kda_gradient, {}, {}}};
    // The reverse scan reads no values: others are in their place.
    own.whole_summary = {{&stages::kda_bwd_prepare, {{"v", "do"}}, {}},
                         {&stages::kda_scans_summary, {}, {}}};
    return own;
  }());
  return all;
}

class Gdn2 final : public ChunkedDeltaRule {
 public:
  using ChunkedDeltaRule::ChunkedDeltaRule;

  Values constants(const Problem&) const override {
    return {{std::string(constant::ERASE_WRITE.name), true}};
  }
  std::unique_ptr<Recurrence> recurrence(const Problem& problem, const Arguments& host,
                                         std::int64_t sequence, std::int64_t head) const override {
    return gdn2::recurrence(problem, host, sequence, head);
  }
};

}  // namespace

const OperatorDefinition& definition() {
  static const Gdn2& definition =
      *new Gdn2({.name = "gdn2",
                 .summary = "the delta rule with decay, erase and write gates a channel",
                 .source = "flash-linear-attention, chunk_gdn2",
                 .gate = GateKind::vector,
                 .lower_bound = true},
                join({row_tensors(), gate_pair_tensors(), gate_tensors({TensorDim::K}),
                      state_tensors(), kept_tensors(), kept_decayed_tensors()}),
                own_stages());
  return definition;
}

}  // namespace wyvern::gdn2
