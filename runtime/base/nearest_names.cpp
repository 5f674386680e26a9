#include "runtime/base/nearest_names.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace wyvern {
namespace {

constexpr std::size_t kMost = 8;

/// Levenshtein's: how many characters must be inserted, removed or replaced to make one the other.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string nearest_names(std::string_view wanted, std::vector<std::string_view> names) {
  if (names.size() <= kMost) return fmt::format("{}", fmt::join(names, ", "));
  std::vector<std::pair<std::size_t, std::string_view>> ranked;
  for (const std::string_view name : names)
    ranked.emplace_back(
        name.find(wanted) == std::string_view::npos ? 1 + edit_distance(wanted, name) : 0, name);
  std::ranges::stable_sort(ranked, {}, [](const auto& one) { return one.first; });
  for (std::size_t i = 0; i < kMost; ++i) names[i] = ranked[i].second;
  return fmt::format("{} and {} more", fmt::join(names.begin(), names.begin() + kMost, ", "),
                     names.size() - kMost);
}

}  // namespace wyvern
