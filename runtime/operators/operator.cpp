#include "runtime/operators/operator.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>

#include "runtime/base/nearest_names.hpp"
#include "runtime/operators/layer.hpp"

namespace wyvern {
namespace {

double real(std::int64_t count) { return static_cast<double>(count); }

/// Every tensor once, tensors both read and written twice; of a pool of states only the slots that
/// sequences use.
double tensor_bytes(const Problem& p) {
  double bytes = 0;
  for (const TensorSpec& spec : tensor_specs(p)) {
    if (!spec.present) continue;
    double elements = 1;
    for (int i = 0; i < spec.rank; ++i) elements *= real(spec.shape[static_cast<std::size_t>(i)]);
    const bool pool = p.state_index && (spec.name == "initial_state" || spec.name == "state");
    if (pool && p.state_slots > p.N) elements *= real(p.N) / real(p.state_slots);
    const double times = spec.access == TensorAccess::inout ? 2 : 1;
    bytes += times * elements * real(static_cast<std::int64_t>(size_of(spec.dtype)));
  }
  return bytes;
}

}  // namespace

OperatorDefinition::OperatorDefinition(const OperatorFacts& facts, TensorRules tensors)
    : facts_(facts), tensors_(std::move(tensors)) {
  std::ranges::move(layer_tensors(), std::back_inserter(tensors_));
  for (const TensorRule& rule : tensors_) {
    const std::size_t at = argument_index(rule.name);
    if (at == kOperatorTensors || by_argument_[at] != nullptr)
      throw std::logic_error(
          fmt::format("{}: the rule of tensor '{}' {}", facts_.name, rule.name,
                      at == kOperatorTensors ? "names none of Arguments" : "is there twice"));
    by_argument_[at] = &rule;
  }
}

const TensorRule& OperatorDefinition::rule(std::string_view name) const {
  const std::size_t at = argument_index(name);
  if (at == kOperatorTensors || by_argument_[at] == nullptr)
    throw Error(ErrorKind::kBadInput, fmt::format("'{}' is not a tensor of {}", name, facts_.name));
  return *by_argument_[at];
}

std::span<const std::int64_t> OperatorDefinition::chunk_sizes(const Problem&, DeviceKind) const {
  // 64 as in all peers; smaller ones fit small shared memories.
  static constexpr std::array<std::int64_t, 4> kChunkSizes{64, 32, 128, 16};
  return kChunkSizes;
}

const OperatorDefinition* find_operator(std::string_view name) noexcept {
  for (const OperatorDefinition* definition : operator_definitions())
    if (definition->facts().name == name) return definition;
  return nullptr;
}

const OperatorDefinition& definition_of(const Problem& problem) {
  if (const OperatorDefinition* definition = find_operator(problem.op)) return *definition;
  throw Error(ErrorKind::kBadInput, fmt::format("op is '{}'; it must be one of: {}", problem.op,
                                                nearest_names(problem.op, operators())));
}

std::string operators_with(bool (*has)(const OperatorFacts&)) {
  std::vector<std::string_view> names;
  for (const OperatorDefinition* definition : operator_definitions())
    if (has(definition->facts())) names.push_back(definition->facts().name);
  return fmt::format("{}", fmt::join(names, " or "));
}

Work work_of(const Problem& problem) {
  const OperatorDefinition& definition = definition_of(problem);
  return {tensor_bytes(problem) + definition.rebuilt_bytes(problem), definition.flops(problem)};
}

std::vector<StageUse> stage_uses(const Problem& problem) {
  std::vector<StageUse> uses = definition_of(problem).stages(problem);
  add_layer_stages(problem, uses);
  return uses;
}

GateKind gate_kind(const Problem& problem) noexcept {
  const OperatorDefinition* definition = find_operator(problem.op);
  return definition == nullptr || !problem.has_g ? GateKind::none : definition->facts().gate;
}

std::span<const std::string_view> operators() {
  // Never destroyed, nor are the presets: the last threads may ask while the process ends.
  static const auto& names = *new std::vector<std::string_view>([] {
    std::vector<std::string_view> all;
    for (const OperatorDefinition* definition : operator_definitions())
      all.push_back(definition->facts().name);
    return all;
  }());
  return names;
}

std::span<const Preset> presets() {
  static const auto& all = *new std::vector<Preset>([] {
    std::vector<Preset> joined;
    for (const OperatorDefinition* definition : operator_definitions())
      joined.insert(joined.end(), definition->facts().presets.begin(),
                    definition->facts().presets.end());
    return joined;
  }());
  return all;
}

}  // namespace wyvern
