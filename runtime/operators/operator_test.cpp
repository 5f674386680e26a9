// Every operator's definition: what holds for all of them, whichever they are.
#include "runtime/operators/operator.hpp"

#include <wyvern/error.hpp>
#include <wyvern/reference.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <stdexcept>

#include "runtime/operators/chunked.hpp"
#include "runtime/operators/preset_calls.hpp"
#include "runtime/problem_fields.hpp"

namespace wyvern {
namespace {

constexpr Pass kPasses[] = {Pass::forward, Pass::backward, Pass::recurrent};

Problem problem_of(const OperatorFacts& op, Pass pass) {
  Problem p;
  p.op = op.name, p.pass = pass;
  p.T = 100, p.H = 2, p.HV = 4;
  return p;
}

/// Problems with every option that adds a tensor or a stage.
std::vector<Problem> problems_of(const OperatorFacts& op) {
  std::vector<Problem> problems;
  for (const Pass pass : kPasses)
    for (const bool everything : {false, true}) {
      Problem p = problem_of(op, pass);
      p.packed = p.use_qk_l2norm = p.initial_state = p.output_final_state = everything;
      p.use_gate_in_kernel = p.has_dt_bias = everything && op.gated();
      if (everything && op.householder) p.num_householder = 3;
      problems.push_back(p);
      if (pass == Pass::recurrent) continue;
      p.disable_recompute = true;
      problems.push_back(p);
      p.disable_recompute = false;
      p.summary = true, p.transition = pass == Pass::forward && everything;
      (pass == Pass::forward ? p.output_final_state : p.initial_state) = false;
      problems.push_back(p);
    }
  return problems;
}

class EveryOperator : public ::testing::TestWithParam<const OperatorDefinition*> {
 protected:
  const OperatorFacts& facts() const { return GetParam()->facts(); }
};

TEST_P(EveryOperator, IsFoundByItsName) {
  EXPECT_EQ(find_operator(facts().name), GetParam());
  EXPECT_EQ(&definition_of(problem_of(facts(), Pass::forward)), GetParam());
  EXPECT_FALSE(facts().summary.empty());
  EXPECT_FALSE(facts().source.empty());
  for (const Preset& preset : facts().presets) EXPECT_EQ(preset.op, facts().name);
}

TEST_P(EveryOperator, CallsOfPresetsAreLegal) {
  for (const Preset& preset : facts().presets) {
    const std::vector<PresetCall> calls = preset_calls(preset.name, DType::bf16);
    ASSERT_FALSE(calls.empty()) << preset.name;
    EXPECT_TRUE(calls.front().name.ends_with(": first prefill")) << calls.front().name;
    for (const PresetCall& call : calls) {
      EXPECT_NO_THROW(validate(call.problem)) << preset.name << ", " << call.name;
      EXPECT_EQ(call.problem.op, facts().name);
      EXPECT_EQ(call.problem.HV, preset.HV);
      Problem last = call.problem;
      if (call.finish != nullptr) call.finish(last);
      EXPECT_NO_THROW(validate(last)) << preset.name << ", " << call.name;
    }
  }
}

TEST_P(EveryOperator, EveryTensorThatIsThereHasAShape) {
  for (const Problem& p : problems_of(facts())) {
    ASSERT_NO_THROW(validate(p));
    const std::vector<TensorSpec> specs = tensor_specs(p);
    ASSERT_EQ(specs.size(), kOperatorTensors);
    for (std::size_t i = 0; i < specs.size(); ++i) {
      EXPECT_EQ(specs[i].name, kArguments[i].name);
      EXPECT_EQ(specs[i].rank > 0, GetParam()->rule(i) != nullptr) << specs[i].name;
      EXPECT_LE(specs[i].present, specs[i].rank > 0) << specs[i].name;
    }
  }
}

/// What PyTorch's operators are told of a tensor is what its rule says.
TEST_P(EveryOperator, TensorsArePassedByTheirRoles) {
  for (const Problem& p : problems_of(facts()))
    for (const ArgumentTensor& tensor : kArguments) {
      const TensorRule* const rule = GetParam()->rule(argument_index(tensor.name));
      if (rule == nullptr) continue;
      SCOPED_TRACE(tensor.name);
      switch (tensor.passing) {
        case Passing::required:
          EXPECT_EQ(rule->role, TensorRole::input);
          EXPECT_TRUE(rule->present(p) || p.summary);
          break;
        case Passing::input: EXPECT_EQ(rule->role, TensorRole::input); break;
        case Passing::output_gradient:
          EXPECT_EQ(rule->role, TensorRole::input);
          EXPECT_LE(rule->present(p), p.pass == Pass::backward);
          break;
        case Passing::beside:
          EXPECT_EQ(rule->role, TensorRole::input);
          EXPECT_LE(rule->present(p), p.pass != Pass::backward);
          break;
        case Passing::updated: EXPECT_EQ(rule->role, TensorRole::updated); break;
        case Passing::kept: EXPECT_EQ(rule->role, TensorRole::kept); break;
        case Passing::output:
          EXPECT_TRUE(rule->role == TensorRole::output || rule->role == TensorRole::inside);
          EXPECT_LE(rule->present(p), p.pass != Pass::backward);
          break;
        case Passing::gradient:
          EXPECT_EQ(rule->role, TensorRole::output);
          EXPECT_LE(rule->present(p), p.pass == Pass::backward);
          break;
        case Passing::summary:
          EXPECT_EQ(rule->role, TensorRole::output);
          EXPECT_LE(rule->present(p), p.summary);
          break;
        case Passing::segments:
          EXPECT_EQ(rule->role, TensorRole::shared);
          EXPECT_EQ(rule->present(p), p.segment_chunks.has_value());
          break;
      }
      const DType dtype = rule->dtype(p);
      const bool integers = dtype == DType::int32 || dtype == DType::int64;
      EXPECT_EQ(tensor.elements == Elements::integers, integers);
      EXPECT_EQ(tensor.elements == Elements::booleans, dtype == DType::boolean);
    }
}

/// A stage's tensors are renamed by name, so a name that the stage does not have would change
/// nothing.
TEST_P(EveryOperator, StagesAreJoinedByTensorsThatTheyHave) {
  for (Problem p : problems_of(facts()))
    for (const std::int64_t HV : {2, 4}) {
      p.HV = HV;
      for (const StageUse& use : stage_uses(p)) {
        for (const auto& [argument, name] : use.rename) {
          EXPECT_NE(use.stage->find(argument), nullptr) << use.stage->name << " " << argument;
          EXPECT_FALSE(name.empty()) << use.stage->name << " " << argument;
        }
        EXPECT_NO_THROW(Constants().with(use.constants)) << use.stage->name;
      }
    }
}

/// Every input but integers has a gradient of its shape where the pass is backward, of a summary
/// none.
TEST_P(EveryOperator, GradientsLookLikeTheirInputs) {
  for (const Problem& p : problems_of(facts())) {
    if (p.pass != Pass::backward || p.summary) continue;
    for (const TensorSpec& spec : tensor_specs(p)) {
      if (!spec.present || spec.access != TensorAccess::out) continue;
      const TensorRule& input = GetParam()->rule(spec.name.substr(1));
      EXPECT_EQ(input.role, TensorRole::input) << spec.name;
      EXPECT_TRUE(input.present(p)) << spec.name;
      EXPECT_EQ(symbols_of(input, p), symbols_of(GetParam()->rule(spec.name), p)) << spec.name;
      EXPECT_GT(error_bound(p, spec.name), 0) << spec.name;
    }
    for (const TensorRule& rule : GetParam()->tensors()) {
      const bool differentiable = rule.role == TensorRole::input && rule.present(p) &&
                                  is_floating(rule.dtype(p)) && rule.name != "do" &&
                                  rule.name != "dht" && rule.name != "dfinal_conv_state";
      if (!differentiable) continue;
      EXPECT_TRUE(GetParam()->rule("d" + std::string(rule.name)).present(p)) << rule.name;
    }
  }
}

TEST_P(EveryOperator, EveryPassHasStagesAndWork) {
  for (const Problem& p : problems_of(facts())) {
    EXPECT_FALSE(stage_uses(p).empty());
    const Work work = work_of(p);
    EXPECT_GT(work.bytes, 0);
    EXPECT_GT(work.flops, 0);
    for (const DeviceKind device : {DeviceKind::cpu, DeviceKind::cuda}) {
      const auto sizes = GetParam()->chunk_sizes(p, device);
      EXPECT_EQ(std::set(sizes.begin(), sizes.end()), (std::set<std::int64_t>{16, 32, 64, 128}));
    }
  }
}

/// What a field's scope leaves out is refused, or makes no difference to any plan.
TEST_P(EveryOperator, OptionsOutOfScopeDoNothing) {
  for (const Pass pass : kPasses)
    for (const ProblemField& field : problem_fields()) {
      if (applies(field, facts(), pass)) continue;
      Problem p = problem_of(facts(), pass);
      const std::string key = problem_key(p).to_string();
      visit_field(field, p, [](auto& value) {
        using T = std::decay_t<decltype(value)>;
        if constexpr (std::is_same_v<T, bool>) value = !value;
        if constexpr (std::is_same_v<T, std::int64_t>) value += 1;
        if constexpr (std::is_same_v<T, DType>) value = DType::bf16;
        if constexpr (std::is_same_v<T, std::optional<float>>) value = -1.0F;
      });
      try {
        validate(p);
        EXPECT_EQ(problem_key(p).to_string(), key) << field.name;
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find(field.name), std::string::npos) << error.what();
      }
    }
}

INSTANTIATE_TEST_SUITE_P(, EveryOperator,
                         ::testing::ValuesIn(operator_definitions().begin(),
                                             operator_definitions().end()),
                         [](const auto& each) { return std::string(each.param->facts().name); });

TEST(OperatorDefinition, RulesMustNameTensorsOnce) {
  const OperatorFacts facts{.name = "test", .summary = "", .source = ""};
  const auto make = [&](const TensorRules& rules) {
    ChunkedDeltaRule definition(facts, rules, scalar_gate_stages());
  };
  EXPECT_NO_THROW(make(row_tensors()));
  TensorRules rules = row_tensors();
  rules.push_back(rules.front());
  EXPECT_THROW(make(rules), std::logic_error);
  rules.back().name = "qq";
  EXPECT_THROW(make(rules), std::logic_error);
}

TEST(OperatorDefinition, UnknownOperatorsAreNamed) {
  Problem p;
  p.op = "softmax";
  EXPECT_EQ(gate_kind(p), GateKind::none);
  try {
    definition_of(p);
    FAIL() << "found";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kBadInput);
    for (const char* word : {"op is 'softmax'", "delta_rule", "gated_delta_rule", "kda"})
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
  }
}

TEST(TensorRules, StepsMultiplyRows) {
  Problem p;
  p.B = p.N = 2, p.T = 5, p.H = 1, p.HV = 3, p.K = 7, p.V = 11, p.num_householder = 4;
  const TensorRules rules = row_tensors(TensorDim::nT);
  const auto symbols = [&](std::string_view name) {
    for (const TensorRule& rule : rules)
      if (rule.name == name) return symbols_of(rule, p);
    return std::string();
  };
  EXPECT_EQ(symbols("q"), "[B,T,H,K]");
  EXPECT_EQ(symbols("k"), "[B,nT,H,K]");
  EXPECT_EQ(symbols("dv"), "[B,nT,HV,V]");
  EXPECT_EQ(symbols("o"), "[B,T,HV,V]");
}

/// What has rows of k counts once for each step, and a chunk is a run of steps.
TEST(Chunked, StepsMultiplyWork) {
  Problem p;
  p.T = 32, p.num_householder = 2;
  const double KV = 128 * 128, CD = 64 * 128, CC = 64 * 64;
  EXPECT_EQ(chunked_flops(p), 32 * (10 * KV + 12 * CD + 4 * CC));
  p.pass = Pass::backward;
  EXPECT_EQ(chunked_flops(p), 32 * (28 * KV + 42 * CD + 4 * CC));
  EXPECT_EQ(chunked_rebuilt_bytes(p), 2 * KV * 2);
  p.disable_recompute = true;
  EXPECT_EQ(chunked_flops(p), 32 * (20 * KV + 42 * CD + 4 * CC));
  p.pass = Pass::recurrent, p.disable_recompute = false;
  EXPECT_EQ(chunked_flops(p), 32 * 10 * KV);
}

TEST(TensorRules, ChunksOfKeptTensorsCountRowsOfKeys) {
  Problem p;
  p.T = 100, p.disable_recompute = true;
  const auto chunks = [&] { return tensor_specs(p)[argument_index("h")].shape[0]; };
  EXPECT_EQ(chunks(), 2);
  p.num_householder = 3;
  EXPECT_EQ(chunks(), 5);
}

}  // namespace
}  // namespace wyvern
