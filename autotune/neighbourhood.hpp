// Which configs of a group a search steps to from which.
#pragma once

#include <wyvern/config.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace wyvern {

/// The configs of one group as a graph, every one reachable from every other: a config's
/// neighbours differ from it in one tunable or in two. Contracts couple tunables (a wider tile with
/// more warps), so that a step in one alone would leave parts of a space out of reach. Where even
/// two do not connect it, the nearest configs of the parts are neighbours too. Immutable.
class Neighbourhood {
 public:
  explicit Neighbourhood(std::span<const Config> configs);

  /// Indices of the neighbours of a config, the most similar first.
  std::vector<std::size_t> of(std::size_t config) const;
  /// How many tunables two configs differ in.
  std::size_t distance(std::size_t a, std::size_t b) const;

 private:
  struct Bridge {
    std::size_t a = 0, b = 0;
  };
  void connect();

  std::size_t count_ = 0, tunables_ = 0;
  std::vector<std::uint16_t> codes_;  ///< [count][tunables]: a number for each value met
  std::vector<Bridge> bridges_;
};

}  // namespace wyvern
