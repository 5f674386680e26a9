#include "runtime/bind.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <limits>

namespace wyvern {
namespace {

// exp(-24) is 4e-11, far below fp32's resolution of 6e-8: a state after such a decay is lost in the
// rounding of later updates. A lower floor would cost the chunk's other gates digits, since they
// are differences of sums that include this one.
constexpr float kGateFloor = -24.0F;

constexpr std::size_t kWorkspaceAlignment = 256;

TensorSpec expected_tensor(const Argument& argument, const BoundStep& step) {
  const Spec spec(step.constants, step.step.config);
  TensorSpec tensor;
  tensor.name = argument.name;
  tensor.access = argument.access == Access::in    ? TensorAccess::in
                  : argument.access == Access::out ? TensorAccess::out
                                                   : TensorAccess::inout;
  tensor.dtype = argument.type.of(step.constants);
  tensor.rank = static_cast<int>(argument.shape.size());
  for (std::size_t i = 0; i < argument.shape.size(); ++i)
    tensor.shape[i] = argument.shape[i].value(spec, step.extents);
  tensor.present = is_present(argument, step.constants);
  tensor.outer_dims = outer_dims(argument);
  return tensor;
}

std::size_t buffer_bytes(const TensorSpec& tensor) {
  return (bytes_of(tensor) + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

/// A broken promise of g >= lower_bound costs accuracy, but does not overflow: gates are clamped a
/// little below it.
float gate_floor_of(const Problem& problem) {
  return gate_is_bounded(problem) ? 1.2F * *problem.lower_bound : kGateFloor;
}

/// A stage on its own takes gates unclamped where it writes their sums or reads them; where it sums
/// them for its own use the floor applies, as in operators.
float stage_gate_floor(const Template& t, const Constants& constants, const Problem& problem) {
  const bool sums_are_seen = std::ranges::any_of(t.parameters, [&](const Parameter& parameter) {
    return (parameter.name == "G" || parameter.name == "Gk") && is_present(parameter, constants);
  });
  return sums_are_seen ? -std::numeric_limits<float>::infinity() : gate_floor_of(problem);
}

Extents extents_of(const Problem& problem, PlanShape shape, float gate_floor, Rows rows) {
  Extents e = sizes_of(problem, shape, rows);
  e.first_slot = problem.null_slot_zero ? 1 : 0;
  e.scale = scale_of(problem);
  e.norm_eps = norm_eps_of(problem);
  e.lower_bound = problem.lower_bound.value_or(0.0F);
  e.gate_floor = gate_floor;
  return e;
}

/// Throws if one launch cannot have that many blocks: the driver reads 32 bits of each dimension.
void check_grid(const BoundStep& step, const Target& target, const DeviceInfo& device) {
  const auto& grid = step.geometry.grid;
  const auto& most = target.max_grid;
  for (std::size_t i = 0; i < grid.size(); ++i) {
    if (most[i] == 0 || grid[i] <= most[i]) continue;
    const Extents& e = step.extents;
    const Constants& c = step.constants;
    throw Error(ErrorKind::kBadInput,
                fmt::format("B = {}, T = {}, N = {}, HV = {}, K = {}, V = {} is too much for one "
                            "launch: {} needs {} blocks in {}, {} takes at most {}; give it fewer "
                            "sequences, tokens or heads",
                            e.B, e.T, e.N, c.HV, c.K, c.V, step.source_template->id(), grid[i],
                            "xyz"[i], device.name, most[i]));
  }
}

/// Everything of a legal step but its bindings.
BoundStep make_step(const Device& device, const PlanStep& plan_step, const Constants& constants,
                    const Extents& extents) {
  const Target& target = device.impl().target();
  BoundStep step;
  step.source_template = find_template(plan_step.template_id);
  const Template& t = *step.source_template;
  step.step = plan_step;
  step.constants = constants;
  step.extents = extents;
  step.extents.H = static_cast<int>(constants.H);
  step.extents.HV = static_cast<int>(constants.HV);
  const Spec spec(step.constants, plan_step.config);
  step.geometry = t.geometry(spec, extents, target.limits);
  check_grid(step, target, device.info());
  step.argument_count = t.parameters.size();
  for (std::size_t i = 0; i < t.parameters.size(); ++i)
    if (t.parameters[i].strided)
      step.strides.push_back({i, dense_stride(t.parameters[i], spec, extents)});
  if (is_empty(step.geometry)) return step;
  for (const TensorMapUse& use : t.tensor_maps) {
    BoundView bound{use.view(spec, extents), t.parameters[use.parameter].type.of(constants),
                    BoundView::kNone};
    for (std::size_t i = 0; i < step.strides.size(); ++i)
      if (step.strides[i].argument == use.parameter) bound.stride = i;
    step.maps.push_back({use.parameter, device.impl().encode(bound.view, bound.dtype)});
    step.views.push_back(bound);
  }
  return step;
}

/// An intermediate tensor and the steps between which its bytes are in use.
struct Buffer {
  std::size_t bytes = 0;
  std::size_t first = 0, last = 0;
  std::size_t offset = 0;
};

/// First fit: each buffer at the lowest offset that no buffer alive at the same time covers.
std::size_t place(std::vector<Buffer>& buffers) {
  std::size_t total = 0;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    Buffer& buffer = buffers[i];
    std::vector<const Buffer*> alive;
    for (std::size_t j = 0; j < i; ++j)
      if (buffers[j].last >= buffer.first) alive.push_back(&buffers[j]);
    std::sort(alive.begin(), alive.end(),
              [](const Buffer* a, const Buffer* b) { return a->offset < b->offset; });
    for (const Buffer* other : alive)
      if (buffer.offset + buffer.bytes > other->offset)
        buffer.offset = std::max(buffer.offset, other->offset + other->bytes);
    total = std::max(total, buffer.offset + buffer.bytes);
  }
  return total;
}

/// Connects the steps' arguments by logical name.
class Wiring {
 public:
  explicit Wiring(OperatorImpl& op) : op_(op) {
    for (std::size_t i = 0; i < op.expected().size(); ++i) {
      const TensorSpec& tensor = op.expected()[i];
      if (!tensor.present) continue;
      const Binding binding{Binding::From::caller, i};
      // Outputs are not connected until a step writes them.
      if (tensor.access != TensorAccess::in) outputs_[tensor.name] = binding;
      if (tensor.access == TensorAccess::out) continue;
      environment_[std::string(tensor.name)] = binding;
      environment_[fmt::format("{}{}", kCallers, tensor.name)] = binding;
    }
  }

  /// `uses` are the operator's; the step carries out the uses from `first` on.
  void connect(std::size_t index, std::span<const StageUse> uses, std::size_t first) {
    BoundStep& step = op_.steps[index];
    const Template& t = *step.source_template;
    const Coverage covered = *coverage(t, uses, first);
    std::vector<std::pair<std::string, Binding>> written;
    for (std::size_t i = 0; i < t.parameters.size(); ++i) {
      const Parameter& parameter = t.parameters[i];
      const TensorSpec tensor = expected_tensor(parameter, step);
      if (!tensor.present) continue;
      if (parameter.access == Access::scratch) {
        step.bindings[i] = scratch(tensor, index);
        continue;
      }
      const std::string name = logical_name(t, parameter, covered, uses);
      if (parameter.access != Access::out) {
        step.bindings[i] = read(name, index, step);
      } else {
        step.bindings[i] = write(name, tensor, index);
        written.emplace_back(name, step.bindings[i]);
      }
    }
    for (auto& [name, binding] : written) environment_[name] = binding;
  }

  /// Turns buffer numbers into workspace offsets.
  void finish() {
    op_.workspace_bytes = place(buffers_);
    for (BoundStep& step : op_.steps)
      for (std::size_t i = 0; i < step.argument_count; ++i) {
        Binding& binding = step.bindings[i];
        if (binding.from != Binding::From::workspace) continue;
        const Buffer& buffer = buffers_[binding.index];
        binding.index = buffer.offset;
        if (step.source_template->parameters[i].access == Access::scratch)
          step.zeroed.push_back({buffer.offset, buffer.bytes});
      }
  }

 private:
  /// The operator's name of a parameter's tensor: its name in the first covered stage that has it
  /// and that the operator uses, or the name to which this use renames it.
  static std::string logical_name(const Template& t, const Parameter& parameter,
                                  const Coverage& covered, std::span<const StageUse> uses) {
    for (std::size_t i = parameter.cover; i < t.covers.size(); ++i) {
      if (covered.use_of[i] == Coverage::kNone) continue;
      for (const Argument& argument : t.covers[i].stage->arguments) {
        if (t.covers[i].local(argument.name) != parameter.name) continue;
        const auto& rename = uses[covered.use_of[i]].rename;
        const auto it = rename.find(argument.name);
        return it == rename.end() ? std::string(argument.name) : it->second;
      }
    }
    return std::string(parameter.name);
  }

  Binding read(const std::string& name, std::size_t index, const BoundStep& step) {
    const auto it = environment_.find(name);
    if (it == environment_.end())
      throw Error(ErrorKind::kBadInput, fmt::format("{} reads {}, which no earlier step writes",
                                                    step.source_template->id(), name));
    if (it->second.from == Binding::From::workspace) buffers_[it->second.index].last = index;
    return it->second;
  }

  Binding write(const std::string& name, const TensorSpec& tensor, std::size_t index) {
    if (const auto output = outputs_.find(name); output != outputs_.end()) return output->second;
    buffers_.push_back({buffer_bytes(tensor), index, index, 0});
    return {Binding::From::workspace, buffers_.size() - 1};
  }

  Binding scratch(const TensorSpec& tensor, std::size_t index) {
    buffers_.push_back({buffer_bytes(tensor), index, index, 0});
    return {Binding::From::workspace, buffers_.size() - 1};
  }

  OperatorImpl& op_;
  std::map<std::string, Binding, std::less<>> environment_;
  std::map<std::string_view, Binding, std::less<>> outputs_;
  std::vector<Buffer> buffers_;
};

}  // namespace

std::shared_ptr<OperatorImpl> bind_operator(const Device& device, const Problem& problem,
                                            const Plan& plan, bool is_default) {
  const std::vector<StageUse> uses = stage_uses(problem);
  const CheckedPlan checked = check_plan(problem, uses, plan, device.impl().target(), is_default);
  const std::vector<std::size_t>& starts = checked.starts;
  auto op = std::make_shared<OperatorImpl>(device);
  op->problem = problem;
  op->plan = plan;
  op->expect(tensor_specs(problem));
  for (std::size_t i = 0; i < plan.size(); ++i) {
    const Extents extents =
        extents_of(problem, checked.shape, gate_floor_of(problem), uses[starts[i]].rows);
    op->steps.push_back(make_step(device, plan[i], checked.constants[i], extents));
  }
  Wiring wiring(*op);
  for (std::size_t i = 0; i < plan.size(); ++i) wiring.connect(i, uses, starts[i]);
  wiring.finish();
  op->find_strided();
  return op;
}

std::shared_ptr<OperatorImpl> bind_fold(const Device& device, const FoldOptions& options) {
  const auto check = [](std::string_view name, std::int64_t value, std::int64_t most) {
    if (value < 1 || value > most)
      throw Error(ErrorKind::kBadInput,
                  fmt::format("{} is {}; it must be between 1 and {}", name, value, most));
  };
  constexpr std::int64_t kMaxRow = (std::int64_t{1} << 30) - 1;  // so that V + K is an int
  check("ranges", options.ranges, kMaxRanges);
  check("HV", options.HV, kMaxRow);
  check("K", options.K, 256);
  check("V", options.V, kMaxRow / options.HV);

  const Target& target = device.impl().target();
  const Template& t = *std::ranges::find_if(all_templates(), [&](const Template& one) {
    return one.name == "fold" && one.device == target.device;
  });
  Extents extents;
  extents.N = options.ranges;
  Constants constants;
  constants.H = constants.HV = options.HV;
  constants.K = options.K;
  constants.V = options.V;
  constants.TRANSITION = options.transition;
  constants.SUMMARY_COLUMNS = options.V + (options.transition ? options.K : 0);
  auto op = std::make_shared<OperatorImpl>(device);
  for (const bool backwards : {false, true}) {
    constants.BACKWARDS = backwards;
    const auto config = default_config(t, constants, target.limits, Precision::ieee, {});
    if (!config)
      throw Error(ErrorKind::kUnavailable,
                  fmt::format("no config of {} for K = {}, V = {} fits {}", t.id(), options.K,
                              options.V, device.info().name));
    op->plan.push_back({t.id(), *config});
    op->steps.push_back(make_step(device, op->plan.back(), constants, extents));
    for (std::size_t i = 0; i < t.parameters.size(); ++i)
      op->steps.back().bindings[i] = {Binding::From::caller, i};
  }
  std::vector<TensorSpec> expected;
  for (const Parameter& parameter : t.parameters)
    expected.push_back(expected_tensor(parameter, op->steps.front()));
  expected.back().name = "states";
  op->expect(std::move(expected));
  return op;
}

std::shared_ptr<OperatorImpl> bind_stage(const Device& device, const Problem& problem,
                                         const PlanStep& plan_step) {
  const Constants constants = problem_constants(problem);
  // On its own a stage has no outputs that the problem's floor speaks of.
  const std::string reason =
      step_problem(plan_step, constants, device.impl().target(), Precision::tf32);
  if (!reason.empty()) throw Error(ErrorKind::kBadInput, reason);
  const Template& t = *find_template(plan_step.template_id);
  auto op = std::make_shared<OperatorImpl>(device);
  op->problem = problem;
  op->plan = {plan_step};
  op->origin = Origin::given;
  // A stage that does not depend on BT may still take a tensor with a row for each chunk slot.
  PlanShape shape = shape_of(op->plan);
  if (shape.BT == 0) shape.BT = kept_chunk_size(problem);
  op->steps.push_back(
      make_step(device, plan_step, constants,
                extents_of(problem, shape, stage_gate_floor(t, constants, problem), Rows::tokens)));
  BoundStep& step = op->steps.front();
  std::vector<TensorSpec> expected;
  for (std::size_t i = 0; i < step.argument_count; ++i) {
    const Parameter& parameter = step.source_template->parameters[i];
    if (parameter.access == Access::scratch && is_present(parameter, step.constants))
      throw Error(ErrorKind::kBadInput,
                  fmt::format("template {} needs scratch memory, which a stage on its own has not",
                              step.source_template->id()));
    expected.push_back(expected_tensor(parameter, step));
    if (expected.back().present) step.bindings[i] = {Binding::From::caller, i};
  }
  op->expect(std::move(expected));
  op->find_strided();
  return op;
}

}  // namespace wyvern
