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

/// The question that follows the names; nothing for short names, to which every other one is near.
std::string question(std::string_view wanted, const std::vector<std::string_view>& names) {
  constexpr std::size_t kShortest = 3;
  if (wanted.size() < kShortest) return "";
  std::pair nearest{(wanted.size() + 2) / 3,
                    true};  // edits, and whether it does not contain the text
  std::string_view meant;
  for (const std::string_view name : names) {
    const std::pair this_one{edit_distance(wanted, name), name.find(wanted) == name.npos};
    if (this_one > nearest || (this_one == nearest && !meant.empty())) continue;
    nearest = this_one;
    meant = name;
  }
  return meant.empty() || nearest.first == 0 ? "" : fmt::format(" (did you mean {}?)", meant);
}

}  // namespace

std::string nearest_names(std::string_view wanted, std::vector<std::string_view> names) {
  if (names.size() <= kMost)
    return fmt::format("{}{}", fmt::join(names, ", "), question(wanted, names));
  const std::string asked = question(wanted, names);
  std::vector<std::pair<std::size_t, std::string_view>> ranked;
  for (const std::string_view name : names)
    ranked.emplace_back(
        name.find(wanted) == std::string_view::npos ? 1 + edit_distance(wanted, name) : 0, name);
  std::ranges::stable_sort(ranked, {}, [](const auto& one) { return one.first; });
  for (std::size_t i = 0; i < kMost; ++i) names[i] = ranked[i].second;
  return fmt::format("{} and {} more{}", fmt::join(names.begin(), names.begin() + kMost, ", "),
                     names.size() - kMost, asked);
}

}  // namespace wyvern
