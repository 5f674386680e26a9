#include "autotune/neighbourhood.hpp"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

namespace wyvern {
namespace {

constexpr std::size_t kStep = 2;

}  // namespace

Neighbourhood::Neighbourhood(std::span<const Config> configs) : count_(configs.size()) {
  std::map<std::string, std::size_t, std::less<>> columns;
  for (const Config& config : configs)
    for (const auto& [name, value] : config.items()) columns.emplace(name, columns.size());
  tunables_ = columns.size();
  codes_.assign(count_ * tunables_, 0);  // 0: the config has no such tunable
  std::vector<std::map<Value, std::uint16_t>> seen(tunables_);
  for (std::size_t i = 0; i < count_; ++i)
    for (const auto& [name, value] : configs[i].items()) {
      const std::size_t column = columns.find(name)->second;
      const auto next = static_cast<std::uint16_t>(seen[column].size() + 1);
      codes_[i * tunables_ + column] = seen[column].emplace(value, next).first->second;
    }
  connect();
}

std::size_t Neighbourhood::distance(std::size_t a, std::size_t b) const {
  std::size_t differences = 0;
  for (std::size_t i = 0; i < tunables_; ++i)
    if (codes_[a * tunables_ + i] != codes_[b * tunables_ + i]) ++differences;
  return differences;
}

std::vector<std::size_t> Neighbourhood::of(std::size_t config) const {
  std::vector<std::size_t> near;
  for (std::size_t i = 0; i < count_; ++i)
    if (i != config && distance(i, config) <= kStep) near.push_back(i);
  for (const Bridge& bridge : bridges_) {
    if (bridge.a == config) near.push_back(bridge.b);
    if (bridge.b == config) near.push_back(bridge.a);
  }
  std::ranges::stable_sort(near, {}, [&](std::size_t i) { return distance(i, config); });
  return near;
}

/// Grows the connected part of the first config: by steps while there are any, else by the shortest
/// bridge.
void Neighbourhood::connect() {
  std::vector<std::size_t> reached, rest;
  for (std::size_t i = 1; i < count_; ++i) rest.push_back(i);
  if (count_ > 0) reached.push_back(0);
  std::size_t looked_at = 0;
  while (!rest.empty()) {
    for (; looked_at < reached.size(); ++looked_at) {
      const std::size_t from = reached[looked_at];
      const auto far = std::stable_partition(
          rest.begin(), rest.end(), [&](std::size_t i) { return distance(i, from) > kStep; });
      reached.insert(reached.end(), far, rest.end());
      rest.erase(far, rest.end());
    }
    if (rest.empty()) return;
    Bridge best{reached.front(), rest.front()};
    for (const std::size_t a : reached)
      for (const std::size_t b : rest)
        if (distance(a, b) < distance(best.a, best.b)) best = {a, b};
    bridges_.push_back(best);
    reached.push_back(best.b);
    std::erase(rest, best.b);
  }
}

}  // namespace wyvern
