#include "autotune/results.hpp"

#include <array>
#include <utility>

namespace wyvern {
namespace {

constexpr std::array<std::pair<Status, std::string_view>, 8> kNames{{
    {Status::ok, "ok"},
    {Status::wrong, "wrong"},
    {Status::crashed, "crashed"},
    {Status::timeout, "timeout"},
    {Status::rejected, "rejected"},
    {Status::illegal, "illegal"},
    {Status::failed, "failed"},
    {Status::unjudged, "unjudged"},
}};

}  // namespace

std::string_view to_string(Status status) noexcept {
  for (const auto& [value, name] : kNames)
    if (value == status) return name;
  return "?";
}

std::optional<Status> parse_status(std::string_view text) noexcept {
  for (const auto& [value, name] : kNames)
    if (name == text) return value;
  return {};
}

Results::Results(const SearchSpace& space) {
  for (const Group& group : space.groups) {
    outcomes_.emplace_back(group.configs.size());
    timings_.emplace_back(group.configs.size());
    resources_.emplace_back(group.configs.size());
  }
}

const Outcome* Results::find(const Candidate& candidate) const {
  const auto& outcome = outcomes_[candidate.group][candidate.config];
  return outcome ? &*outcome : nullptr;
}

void Results::put(const Candidate& candidate, Outcome outcome) {
  timings_[candidate.group][candidate.config] =
      outcome.status == Status::ok ? summarize(outcome.samples) : Timing{};
  if (outcome.resources) learn(candidate, *outcome.resources);
  outcomes_[candidate.group][candidate.config] = std::move(outcome);
}

void Results::learn(const Candidate& candidate, const Resources& resources) {
  resources_[candidate.group][candidate.config] = resources;
}

const std::optional<Resources>& Results::resources(const Candidate& candidate) const {
  return resources_[candidate.group][candidate.config];
}

const Timing& Results::timing(const Candidate& candidate) const {
  return timings_[candidate.group][candidate.config];
}

double Results::bar(std::size_t group) const {
  double least = 0;
  for (const Timing& timing : timings_[group])
    if (timing.median > 0 && (least == 0 || timing.median < least)) least = timing.median;
  return least;
}

}  // namespace wyvern
