// The search space: every cover of an operator's stages, and every config of every template.
//
// Stage times add up, so each (template, config) is measured once, alone, and plans are composed
// from those times. A Group is one template at one chunk size (and segment length); a Layer holds
// the covers of one of these, as a graph whose edges are groups.
#pragma once

#include <wyvern/config.hpp>
#include <wyvern/problem.hpp>
#include <wyvern/runtime.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "compiler/compiler.hpp"
#include "runtime/plan.hpp"

namespace wyvern {

/// Launch dimensions of a config's kernel.
struct Launch {
  std::int64_t blocks = 0, threads = 0;
  std::int64_t shared_bytes = 0;  ///< dynamic, a block's; scratch on a CPU
};

/// Configs that compete with each other: of one template, for the same constants and chunk size.
struct Group {
  std::string template_id;
  Constants constants;
  std::int64_t BT = 0;               ///< 0: the template has no BT, all layers share the group
  std::int64_t SEG = 0;              ///< the same for SEG
  std::vector<Config> configs;       ///< in tunable order; never empty
  std::size_t default_config = 0;    ///< index in configs
  std::vector<std::size_t> context;  ///< groups of the plan it is measured in, in order
  std::size_t step = 0;              ///< context[step] is this group
  std::vector<Launch> launches;      ///< by config; may be empty: nothing is known
};

/// A group in its place: it carries out stage uses [first, last).
struct Edge {
  std::size_t first = 0, last = 0;
  std::size_t group = 0;
};

/// The covers with one chunk size and one segment length that split the same scans.
struct Layer {
  std::int64_t BT = 0;
  std::int64_t SEG = 0;  ///< 0: no scan is split
  std::vector<Edge> edges;
};

struct SearchSpace {
  std::size_t uses = 0;  ///< stage uses of the operator
  std::vector<Group> groups;
  std::vector<Layer> layers;  ///< preferred chunk size first, unsplit first
  Plan default_plan;

  std::size_t size() const;  ///< configs in all groups
};

/// One config of one group.
struct Candidate {
  std::size_t group = 0, config = 0;
  auto operator<=>(const Candidate&) const = default;
};

/// The space of a problem on a target. Layers with a stage that has no legal config are left out;
/// throws Error(kUnavailable) when none is left.
SearchSpace build_space(const Problem& problem, const Target& target);

/// Launch dimensions of the config's kernel for the problem; `rows` as in StageUse.
Launch launch_of(const Template& t, const Spec& spec, const Problem& problem, Rows rows,
                 const Limits& limits);

/// The group's context with default configs, and the candidate for the group.
Plan plan_of(const SearchSpace& space, const Candidate& candidate);

/// The candidates of a plan's steps; nothing when the space does not have the plan.
std::optional<std::vector<Candidate>> candidates_of(const SearchSpace& space, const Plan& plan);

/// "fwd_h.portable BT=64,BV=32"
std::string describe(const SearchSpace& space, const Candidate& candidate);

/// "fwd_h.portable BT=64,BV=32; fwd_o.portable ...": one spelling per plan, to order ties by.
std::string canonical_text(const Plan& plan);

}  // namespace wyvern
