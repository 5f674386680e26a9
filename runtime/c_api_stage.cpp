// The C API's stages: one kernel on its own, its tensors by the names of its contract.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "runtime/base/nearest_names.hpp"
#include "runtime/bind.hpp"
#include "runtime/c_api.hpp"
#include "runtime/devices/device_impl.hpp"
#include "runtime/operator_impl.hpp"
#include "runtime/plan.hpp"
#include "templates/cost.hpp"

struct wyvern_stage {
  wyvern::Stage stage;
  std::vector<std::string> names;           ///< of its tensors, with their NULs
  std::vector<wyvern::TensorSpec> tensors;  ///< with these names
  std::shared_ptr<const wyvern::OperatorImpl> bound;
};

namespace wyvern {
namespace {

/// A template of that name for the device's kind.
const Template& template_of(const std::string& name, DeviceKind device) {
  const Template* found = nullptr;
  std::set<std::string_view> names;
  for (const Template& t : all_templates()) {
    if (t.device != device) continue;
    names.insert(t.name);
    if (t.name == name) found = &t;
  }
  if (found == nullptr)
    bad_input(fmt::format("name is '{}'; for {} it must be one of {}", name, to_string(device),
                          nearest_names(name, names)));
  return *found;
}

/// The cheapest template of that name whose needs the target meets.
PlanStep step_of(const std::string& name, const Problem& problem, const Target& target) {
  constexpr std::int64_t kUsual = 64;
  const Constants constants = problem_constants(problem);
  const Workload work = work_of(problem, target, problem.chunk_size.value_or(kUsual), Rows::tokens);
  std::optional<PlanStep> best;
  double least = 0;
  for (const Template& t : all_templates()) {
    if (t.device != target.device || t.name != name) continue;
    auto config = default_config(t, constants, target.limits, precision_floor(problem), work);
    if (!config) continue;
    const double us = cost_of(t, Spec(constants, *config), work, target.limits);
    if (best && us >= least) continue;
    best = PlanStep{t.id(), *std::move(config)};
    least = us;
  }
  if (best) return *std::move(best);
  throw Error(ErrorKind::kBadInput,
              fmt::format("{} has no config for a chunk_size of {} and these dimensions on {}",
                          template_of(name, target.device).name,
                          problem.chunk_size.value_or(kUsual), target.name()));
}

/// The place of a tensor of that name among the stage's.
std::size_t place_of(const wyvern_stage& stage, const char* name) {
  const auto found = std::find(stage.names.begin(), stage.names.end(), name);
  if (found == stage.names.end())
    bad_input(fmt::format("'{}' is not the name of a tensor of {}; its tensors are {}", name,
                          stage.stage.step().template_id, nearest_names(name, stage.names)));
  return static_cast<std::size_t>(found - stage.names.begin());
}

void launch(const wyvern_stage& stage, const wyvern_launch& from) {
  std::array<TensorView, kMaxArguments> tensors;
  std::array<bool, kMaxArguments> seen{};
  each_tensor(from, [&](const wyvern_tensor& tensor) {
    if (tensor.name == nullptr) bad_input("the name of a tensor is null; it must not be");
    const std::size_t at = place_of(stage, tensor.name);
    if (std::exchange(seen[at], true))
      bad_input(fmt::format("{} is given twice; it must be given once", tensor.name));
    read_tensor(tensor, tensors[at]);
  });
  stage.stage.launch(std::span(tensors).first(stage.names.size()), from.stream);
}

}  // namespace
}  // namespace wyvern

using namespace wyvern;

wyvern_status wyvern_prepare_stage(wyvern_runtime* runtime, const wyvern_device* device,
                                   const wyvern_problem* problem, const char* name,
                                   wyvern_stage** stage) {
  return guarded([&] {
    given(stage, "stage") = nullptr;
    const Device& on = given(device, "device").device;
    const Problem& what = given(problem, "problem").problem;
    Runtime& own = given(runtime, "runtime").runtime;
    const std::string wanted = &given(name, "name");
    validate(what);
    const PlanStep step = step_of(wanted, what, on.impl().target());
    std::shared_ptr<const OperatorImpl> bound = bind_stage(on, what, step);
    auto handle = std::make_unique<wyvern_stage>(
        wyvern_stage{own.prepare_stage(on, step, what), {}, bound->expected(), bound});
    for (const TensorSpec& tensor : handle->tensors) handle->names.emplace_back(tensor.name);
    for (std::size_t i = 0; i < handle->names.size(); ++i)
      handle->tensors[i].name = handle->names[i];
    *stage = handle.release();
  });
}

void wyvern_stage_destroy(wyvern_stage* stage) { delete stage; }

wyvern_status wyvern_stage_tensors(const wyvern_stage* stage, wyvern_tensor_spec* specs,
                                   size_t spec_size, size_t capacity, size_t* count) {
  return guarded(
      [&] { write_specs(given(stage, "stage").tensors, specs, spec_size, capacity, count); });
}

wyvern_status wyvern_stage_takes(const wyvern_stage* stage, const wyvern_tensor* tensor,
                                 size_t tensor_size, int32_t* takes) {
  return guarded([&] {
    const wyvern_stage& prepared = given(stage, "stage");
    const wyvern_tensor own = one_tensor(tensor, tensor_size);
    const std::size_t place = place_of(prepared, &given(own.name, "tensor.name"));
    TensorView view;
    read_tensor(own, view);
    given(takes, "takes") = prepared.bound->takes(place, view) ? 1 : 0;
  });
}

wyvern_status wyvern_stage_launch(const wyvern_stage* stage, const wyvern_launch* launch_of) {
  return guarded(
      [&] { launch(given(stage, "stage"), read_options(&given(launch_of, "launch"), "launch")); });
}
