// For tests: a space without templates, whose configs carry their own cost.
#pragma once

#include <cstdint>
#include <string>

#include "autotune/space.hpp"

namespace wyvern {

/// A space of three stage uses and chunk sizes 64 and 32: single templates "a", "b", "c" and "bc"
/// for the last two together. Tunables x and y run from 0 to 3; the default is x=0,y=0.
inline SearchSpace synthetic_space() {
  SearchSpace space;
  space.uses = 3;
  const struct {
    const char* name;
    std::size_t first, last;
  } templates[] = {{"a", 0, 1}, {"b", 1, 2}, {"bc", 1, 3}, {"c", 2, 3}};
  for (const std::int64_t BT : {std::int64_t{64}, std::int64_t{32}}) {
    const std::size_t base = space.groups.size();
    Layer layer{BT, 0, {}};
    for (const auto& t : templates) {
      Group group{t.name, {}, BT, 0, {}, 0, {}, t.first, {}};
      for (std::int64_t x = 0; x < 4; ++x)
        for (std::int64_t y = 0; y < 4; ++y)
          group.configs.push_back({{"BT", BT}, {"x", x}, {"y", y}});
      group.context = t.last - t.first == 2 ? std::vector{base, base + 2}
                                            : std::vector{base, base + 1, base + 3};
      layer.edges.push_back({t.first, t.last, space.groups.size()});
      space.groups.push_back(std::move(group));
    }
    space.layers.push_back(std::move(layer));
  }
  for (const std::size_t group : {0, 2})
    space.default_plan.push_back({space.groups[group].template_id, space.groups[group].configs[0]});
  return space;
}

/// One group of five tunables; contracts allow a third of their combinations.
inline SearchSpace coupled_space() {
  SearchSpace space;
  space.uses = 1;
  Group group{"a", {}, 64, 0, {}, 0, {0}, 0, {}};
  for (std::int64_t i = 0; i < 1024; ++i) {
    Config config{{"BT", std::int64_t{64}}};
    std::int64_t sum = 0;
    for (int digit = 0; digit < 5; ++digit) {
      const std::int64_t value = i >> (2 * digit) & 3;
      config.set(std::string(1, static_cast<char>('s' + digit)), value);
      sum += value;
    }
    if (sum % 3 == 0) group.configs.push_back(std::move(config));
  }
  space.layers.push_back({64, 0, {{0, 1, 0}}});
  space.default_plan.push_back({"a", group.configs.front()});
  space.groups.push_back(std::move(group));
  return space;
}

}  // namespace wyvern
