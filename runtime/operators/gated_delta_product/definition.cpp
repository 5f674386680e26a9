// Gated DeltaProduct: the gated delta rule with several delta-rule steps a token, n of them. A
// token's decay comes before its first step, its output after its last one.
//
// Chunks are runs of steps: with g at each token's first step, q (and do) at its last one and zeros
// elsewhere, the stages of the gated delta rule compute it over n T rows. They read and write
// tensors named ..._steps, with a row per step; the stages expand_steps and compress_steps convert
// between these and the caller's tensors, with a row per token.
#include "runtime/operators/chunked.hpp"
#include "templates/steps/stages.hpp"

namespace wyvern::gated_delta_product {
namespace {

constexpr std::string_view kName = "gated_delta_product";

/// FLA's layer decodes by the delta rule, a step a token.
void decode_steps(Problem& p) {
  p.op = p.has_g ? "gated_delta_rule" : "delta_rule";
  p.T *= p.num_householder;
  p.num_householder = 1;
  p.has_g = true;
}

constexpr std::array kFla{CallStyle{.library = "fla",
                                    .no_gate = true,
                                    .decode = decode_steps,
                                    .short_prefill = 64,
                                    .packs_masked = true},
                          CallStyle{.library = "fla, layers",
                                    .no_gate = true,
                                    .packs_masked = true,
                                    .fp32_beta = true,
                                    .layer = Activation::silu}};

// The defaults of FLA's GatedDeltaProductConfig: 6 heads of 256, twice as many value columns, one
// step a token and no gate.
constexpr std::array kPresets{
    ModelPreset{{"fla-gated-deltaproduct", kName, 6, 6, 256, 512}, kFla},
};

/// The per-token names: tensors with a row per token, called ..._steps in stages that count steps.
constexpr std::string_view kTokenTensors[] = {"cu_seqlens", "q",  "q_rstd", "g",
                                              "o",          "do", "dq",     "dg"};

std::string of_steps(std::string_view name) { return std::string(name) + "_steps"; }

/// The stages of a chunked pass with more than one step a token.
class StepStages {
 public:
  explicit StepStages(const Problem& p)
      : p_(p),
        gated_(gate_kind(p) != GateKind::none),
        log_decay_(p.use_gate_in_kernel ? DType::fp32 : p.g_dtype) {}

  Uses all() && {
    if (p_.packed) uses_.push_back({&stages::step_seqlens, {}, {}});
    add_gate(p_, stages_, uses_);
    if (gated_) expand("g", row(log_decay_, p_.HV, 1, true));
    in_steps([&](Uses& part) {
      add_chunk_tables(p_, part);
      add_row_scales(p_, "k", part);
      add_sums(p_, stages_, part);
      if (p_.pass == Pass::backward && p_.summary) return;
      add_intra(stages_, part);
      if (p_.pass == Pass::backward && p_.disable_recompute) return;
      if (p_.summary)
        add_forward_summary(part);
      else
        add_forward_scan(p_, part);
    });
    if (p_.summary && p_.pass == Pass::forward) return std::move(uses_);
    add_row_scales(p_, "q", uses_);
    expand("q", row(p_.dtype, p_.H, p_.K));
    if (p_.use_qk_l2norm) expand("q_rstd", row(DType::fp32, p_.H, 1));
    if (p_.pass == Pass::forward)
      forward();
    else
      backward();
    return std::move(uses_);
  }

 private:
  void forward() {
    in_steps([&](Uses& part) { add_output(p_, stages_, part); });
    compress("o", "o", row(p_.dtype, p_.HV, p_.V));
  }

  void backward() {
    expand("do", row(p_.dtype, p_.HV, p_.V));
    if (p_.summary) {
      in_steps([&](Uses& part) {
        add_intra(stages_, part, {{"v", of_steps("do")}});
        add_reverse_summary(stages_, part);
      });
      return;
    }
    in_steps([&](Uses& part) {
      add_reverse_scan(stages_, part);
      add_chunk_gradients(p_, stages_, part);
    });
    compress("dq", chunk_gradient(p_, "q"), row(p_.dtype, p_.HV, p_.K));
    add_row_gradient(p_, "q", uses_);
    in_steps([&](Uses& part) { add_row_gradient(p_, "k", part); });
    if (!gated_) return;
    in_steps([&](Uses& part) { add_sums_gradient(p_, stages_, part); });
    const bool raw = p_.use_gate_in_kernel;
    compress("dg", raw ? "dg_log" : "dg", row(log_decay_, p_.HV, 1, true));
    // The raw gate's gradients are summed over chunks of tokens.
    if (raw) add_chunk_tables(p_, uses_);
    add_raw_gate_gradient(p_, stages_, uses_);
  }

  /// Adds the stages that `add` gives, as stages that count steps.
  template <class Add>
  void in_steps(const Add& add) {
    Uses part;
    add(part);
    for (StageUse& use : part) {
      use.rows = Rows::steps;
      for (const std::string_view name : kTokenTensors)
        if (use.stage->find(name) != nullptr)
          use.rename.insert_or_assign(std::string(name), of_steps(name));
      uses_.push_back(std::move(use));
    }
  }

  /// The constants of stages that move rows of `heads` times `width` elements.
  static Values row(DType type, std::int64_t heads, std::int64_t width, bool first_step = false) {
    return Values{{"DTYPE", type}, {"H", heads}, {"K", width}, {"FIRST_STEP", first_step}};
  }

  void expand(const std::string& name, const Values& row) {
    uses_.push_back({&stages::expand_steps, {{"x", name}, {"x_steps", of_steps(name)}}, row});
  }
  void compress(const std::string& name, const std::string& to, const Values& row) {
    uses_.push_back({&stages::compress_steps, {{"x_steps", of_steps(name)}, {"x", to}}, row});
  }

  const Problem& p_;
  bool gated_;
  DType log_decay_;  ///< of g and dg between the stages
  const ChunkedStages& stages_ = scalar_gate_stages();
  Uses uses_;
};

class GatedDeltaProduct final : public ChunkedDeltaRule {
 public:
  using ChunkedDeltaRule::ChunkedDeltaRule;

  std::vector<StageUse> stages(const Problem& problem) const override {
    if (problem.pass == Pass::recurrent || problem.num_householder == 1)
      return ChunkedDeltaRule::stages(problem);
    return StepStages(problem).all();
  }
};

}  // namespace

const OperatorDefinition& definition() {
  static const GatedDeltaProduct& definition = *new GatedDeltaProduct(
      {.name = kName,
       .summary = "the gated delta rule with several steps a token (Gated DeltaProduct)",
       .source = "arXiv 2502.10297",
       .gate = GateKind::scalar,
       .optional_gate = true,
       .beta = true,
       .householder = true,
       .presets = kPresets},
      join({row_tensors(TensorDim::nT), beta_tensors(TensorDim::nT), gate_tensors(),
            state_tensors(), kept_tensors(TensorDim::nT)}),
      scalar_gate_stages());
  return definition;
}

}  // namespace wyvern::gated_delta_product
