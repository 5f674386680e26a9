// What the tests of operators share: a device to run on, and a launch held to the oracle.
#pragma once

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "runtime/bind.hpp"
#include "runtime/devices/device_impl.hpp"
#include "runtime/plan.hpp"
#include "tests/support/coverage.hpp"
#include "tests/support/runner.hpp"
#include "tests/support/strided_rows.hpp"

namespace wyvern::testing {

using Lengths = std::vector<std::int64_t>;
using Guards = DeviceTensor::Guards;

class OperatorTest : public ::testing::Test {
 protected:
  template <typename Which>  // TestDevice or DeviceKind
  void open(Which which) {
    device_ = test_device(which, &skip_reason_);
  }
  const Device& device() const { return *device_; }

  virtual Operator prepare(const Problem& problem) {
    if (is_listing()) return prepare(problem, default_plan(problem, device().impl().target()));
    return prepare_operator(device(), problem);
  }
  Operator prepare(const Problem& problem, const Plan& plan) {
    if (is_listing()) return Operator(bind_operator(device(), problem, plan));  // compiles nothing
    return prepare_operator(device(), problem, plan);
  }

  /// `data` ready for a launch: NaN where nothing is read, and with what the forward pass hands
  /// over, where the problem says so.
  OperatorData complete(OperatorData data, Guards guards = Guards::bands) {
    poison_unread(data);
    if (data.problem.segment_chunks && !data.problem.summary)
      return with_kept(device(), prepare(summary_of(data.problem)), data, guards);
    if (data.problem.pass != Pass::backward || !data.problem.disable_recompute) return data;
    Problem forward = data.problem;
    forward.pass = Pass::forward;
    return with_kept(device(), prepare(forward), data, guards);
  }

  void check(const Operator& op, const OperatorData& data, Guards guards = Guards::bands) {
    SCOPED_TRACE(describe(data.problem));
    SCOPED_TRACE(plan_to_json(op.plan()));
    const OperatorData inputs = complete(data, guards);
    expect_matches_oracle(inputs, run_operator(device(), op, inputs, guards));
  }

  void check(const OperatorData& data) { check(prepare(data.problem), data); }

  /// The same with strided rows everywhere in the first of the two launches, and with dense tensors
  /// in the second: their outputs must agree bit by bit.
  void check_strided_rows(const Operator& op, const OperatorData& data) {
    SCOPED_TRACE(describe(data.problem));
    SCOPED_TRACE(plan_to_json(op.plan()));
    EXPECT_EQ(strided_tensors(op), rows_of_tokens(op));
    const OperatorData inputs = complete(data);
    const Launcher strided = launch_strided_rows(device(), op);
    bool first = true;
    const Launcher launcher = [&](const Arguments& arguments, void* workspace) {
      if (first)
        strided(arguments, workspace);
      else
        op.launch(arguments, workspace);
      first = false;
    };
    expect_matches_oracle(inputs, run_operator(device(), op, inputs, Guards::bands, launcher));
  }

  std::optional<Device> device_;
  std::string skip_reason_;
};

#define WYVERN_OPEN_OR_SKIP(kind) \
  open(kind);                     \
  if (!device_) GTEST_SKIP() << skip_reason_

/// The first plan of 64 tokens a chunk that has a step of this template; nothing where none has.
inline std::optional<Plan> plan_with(const Device& device, const Problem& problem,
                                     std::string_view template_id) {
  for (const Plan& plan : plans(device, problem, 64))
    for (const PlanStep& step : plan)
      if (step.template_id == template_id) return plan;
  return {};
}

/// Plans that have between them every template that any plan with so many rows a chunk has, each
/// with one at least that those before it lack.
std::vector<Plan> plans_with_all(const Device& device, const Problem& problem,
                                 std::int64_t chunk_size);

/// Inputs of a packed problem with states in place and all its options, of eight sequences and 20
/// slots: two keep their slots, one of them empty; one starts from zeros and one goes on, each to
/// another slot; four are null.
OperatorData pool_data(Problem problem, Gate gate, std::uint64_t seed, const Lengths& lengths);

/// Inputs of an operator with a gate in the kernel that are beyond what exp or a product of fp32
/// holds: where decays erase all, bounded gates are steps, and what is finite must stay so.
std::vector<OperatorData> saturated_gates(Problem problem);

/// Gives tokens in turns a beta of 0, of 2^-30 and of 1e-6 (with use_beta_sigmoid next to those),
/// two of six tokens, one and one; the others keep theirs.
void close_rates(OperatorData& data);

/// Inputs of a problem with the norm of o for which o before the norm is very small, of usual size,
/// and very large: beyond the range of fp16 unless the pass stores o in fp16.
std::vector<OperatorData> outputs_of_any_size(Problem problem);

/// An operator and a pass, as a test's name has them: "kda_backward".
struct OperatorPass {
  std::string op;
  Pass pass;
};

/// A launch that changes no state but writes those of slot 0, which are all numbers of a float8
/// type, to slots of other scales; and whether each is the nearest number then.
OperatorData float8_data(const OperatorPass& which, DType type, bool v_first);
void expect_float8_rounded(const OperatorData& data, const HostTensor& after);

std::string name_of(const OperatorPass& which);
/// Every operator with the chunked passes; and with the recurrent pass too.
std::vector<OperatorPass> chunked_passes();
std::vector<OperatorPass> all_passes();

/// A small problem of grouped heads, K = V = 64 and 130 tokens (3 a sequence for the recurrent
/// pass), with a final state; two steps a token where the operator has them.
Problem base(const OperatorPass& which, DType dtype = DType::bf16);

/// Inputs in fp16 of a pass whose states, or with `values` whose values less what the state
/// predicts of them, are beyond fp16 while its outputs are not. K = V = size.
OperatorData beyond_fp16(const OperatorPass& which, bool values, std::int64_t size,
                         std::uint64_t seed);

/// Inputs of one listed or random problem.
struct OperatorCase {
  std::string name;
  Problem problem;
  Gate gate = Gate::typical;
  Lengths lengths;  ///< of a packed problem
};

/// The shapes, dtypes, gates and options that every operator and pass must carry out, by name. On
/// the CPU, where compiling takes most of the time, some are tried in one case.
std::vector<OperatorCase> listed_cases(const OperatorPass& which, DeviceKind kind);

/// Small shapes over every operator, pass and option, repeatable from the seed.
OperatorCase random_case(std::uint64_t seed);

}  // namespace wyvern::testing
