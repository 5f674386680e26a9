#include "tests/support/stage_data.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/plan.hpp"

namespace wyvern::testing {
namespace {

StageContext make_context(const OperatorData& data, std::int64_t BT) {
  const Problem& p = data.problem;
  StageContext c;
  c.layout = p.packed ? packed_layout(data.cu_seqlens, BT,
                                      chunk_slots(p.B, p.T, p.N, p.packed, BT))
                      : equal_layout(p.B, p.T, BT);
  c.dims = {p.H, p.HV, p.K, p.V};
  c.scale = scale_of(p);
  c.gate_floor = -std::numeric_limits<double>::infinity();
  c.beta_sigmoid = p.use_beta_sigmoid;
  c.neg_eigval = p.use_beta_sigmoid && p.allow_neg_eigval;
  c.state_v_first = p.state_v_first;
  return c;
}

/// A log decay matters through its exponential: next to 1, fp32 does not tell apart what differs by
/// less than half a unit in the last place, so a gate that all but keeps everything (g near -1e-30)
/// is held to that much beside the relative bound.
double decay_resolution(std::string_view output, const Vector& reference) {
  if (output != "g_log" && output != "G") return 0;
  double norm = 0;
  for (const double x : reference) norm += x * x;
  return norm == 0 ? 0 : 6e-8 * std::sqrt(static_cast<double>(reference.size()) / norm);
}

/// Runs the references in order, storing each output as its contract does before the next reads it.
class Chain {
 public:
  Chain(const OperatorData& data, std::int64_t BT) : p_(data.problem) {
    out_.problem = p_;
    out_.context = make_context(data, BT);
    for (const auto& [name, tensor] : data.tensors) add(name, tensor);
  }

  StageData run() {
    const std::int64_t BT = out_.context.layout.BT;
    const auto NT = static_cast<std::int64_t>(out_.context.layout.slots.size());
    const Shape scalars{p_.B, p_.T, p_.HV}, square{p_.B, p_.T, p_.HV, BT};
    const Shape state = p_.state_v_first ? Shape{p_.N, p_.HV, p_.V, p_.K}
                                         : Shape{p_.N, p_.HV, p_.K, p_.V};
    run("chunk_index");
    store("seq_offsets", DType::int32, {p_.N + 1});
    store("chunk_offsets", DType::int32, {p_.N + 1});
    store("chunk_index", DType::int32, {NT, 2});
    add("x", rows_of_many_lengths());
    run("l2norm");
    store("y", p_.dtype, {p_.B, p_.T, p_.H, p_.K});
    run("l2norm_rstd");
    store("rstd", DType::fp32, {p_.B, p_.T, p_.H});
    for (const std::string name : {"q", "k"})
      if (p_.use_qk_l2norm)
        add(name + "_rstd", HostTensor(DType::fp32, {p_.B, p_.T, p_.H},
                                       l2norm_rstd(values_.at(name), p_.K)));
    if (p_.use_gate_in_kernel) {
      run("gate");
      store("g_log", DType::fp32, scalars);
    }
    run("chunk_local_cumsum");
    store("G", DType::fp32, scalars);
    run("scaled_dot_kkt");
    store("A", DType::fp32, square);
    run("solve_tril");
    store("Tinv", p_.dtype, square);
    run("recompute_w_u");
    store("w", p_.dtype, {p_.B, p_.T, p_.HV, p_.K});
    store("u", p_.dtype, {p_.B, p_.T, p_.HV, p_.V});
    run("fwd_h");
    store("h", p_.dtype, {NT, p_.HV, p_.K, p_.V});
    store("v_new", p_.dtype, {p_.B, p_.T, p_.HV, p_.V});
    store("final_state", DType::fp32, state);
    run("fwd_o");
    store("o", p_.dtype, {p_.B, p_.T, p_.HV, p_.V});
    return std::move(out_);
  }

 private:
  /// Rows whose squared lengths lie on both sides of l2norm's 1e-6, some of them zero.
  HostTensor rows_of_many_lengths() const {
    Engine engine(static_cast<std::uint64_t>(p_.T));
    HostTensor x = unit_rows(engine, p_.dtype, {p_.B, p_.T, p_.H, p_.K});
    std::uniform_real_distribution<double> exponent(-4, 1);
    for (std::int64_t row = 0; row < x.elements(); row += p_.K) {
      const double length = row / p_.K % 7 == 6 ? 0 : std::pow(10.0, exponent(engine));
      for (std::int64_t i = row; i < row + p_.K; ++i) x.set(i, length * x.at(i));
    }
    return x;
  }

  void add(const std::string& name, const HostTensor& tensor) {
    out_.tensors[name] = tensor;
    values_[name] = tensor.values();
  }
  void run(std::string_view stage) { run_reference(stage, out_.context, values_); }
  void store(const std::string& name, DType dtype, Shape shape) {
    add(name, HostTensor(dtype, std::move(shape), values_.at(name)));
  }

  const Problem& p_;
  StageData out_;
  TensorMap values_;
};

}  // namespace

StageData make_stage_data(const Problem& problem, std::int64_t BT, Gate gate, std::uint64_t seed,
                          const std::vector<std::int64_t>& lengths) {
  const OperatorData data = make_data(problem, gate, seed, lengths);
  return Chain(data, BT).run();
}

TensorMap reference_outputs(const Template& t, const StageData& data) {
  TensorMap values;
  for (const Argument& argument : t.arguments)
    if (argument.access == Access::in)
      if (const auto at = data.tensors.find(argument.name); at != data.tensors.end())
        values[argument.name] = at->second.values();
  for (const std::string& stage : t.stages) run_reference(stage, data.context, values);
  return values;
}

Written written_elements(const StageData& data) {
  const std::int64_t one = data.problem.HV * data.problem.K * data.problem.V;
  return [&slots = data.context.layout.slots, one](const std::string& name, std::int64_t i) {
    return name != "h" || slots[static_cast<std::size_t>(i / one)].sequence >= 0;
  };
}

double stage_bound(const StageData& data, const Config& config, std::string_view output) {
  const HostTensor& tensor = data.tensors.find(output)->second;
  if (tensor.dtype() == DType::int32) return 0;
  // A running sum of up to 128 terms of one sign: each addition rounds to half a unit (6e-8) and
  // the roundings add up as a random walk, below 128^0.5 * 6e-8 = 7e-7.
  if (output == "G" && !data.problem.use_gate_in_kernel) return 1e-6;
  const bool scalar = output == "G" || output == "g_log" || output == "y" || output == "rstd";
  const Value* precision = config.find("precision");
  const bool tf32 = precision != nullptr && std::get<Precision>(*precision) == Precision::tf32;
  if (data.problem.dtype != DType::fp32)
    return output == "A" || (scalar && output != "y") ? 1e-5 : 5e-3;
  return tf32 && !scalar ? 1e-3 : 1e-5;
}

void expect_stage_matches(const Device& device, const PlanStep& step, const StageData& data,
                          DeviceTensor::Guards guards) {
  SCOPED_TRACE(step.template_id + " {" + step.config.to_string() + "} " +
               describe(data.problem));
  const Template& t = *find_template(step.template_id);
  const Written written = written_elements(data);
  const Stage stage = test_runtime().prepare_stage(device, step, data.problem);
  const HostTensors outputs = run_stage(device, stage, problem_constants(data.problem),
                                        data.tensors, guards, written);
  const TensorMap expected = reference_outputs(t, data);
  for (const auto& [name, actual] : outputs) {
    const auto select = [&, &tensor = name](std::int64_t i) { return written(tensor, i); };
    const Vector& reference = expected.find(name)->second;
    if (actual.dtype() == DType::int32)
      EXPECT_EQ(actual.values(), reference) << name;
    else
      EXPECT_LE(rms_error(actual, reference, select),
                stage_bound(data, step.config, name) + decay_resolution(name, reference))
          << name;
  }
}

}  // namespace wyvern::testing
