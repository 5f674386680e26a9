#include "autotune/space.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <map>
#include <optional>
#include <set>
#include <span>

#include "templates/template.hpp"

namespace wyvern {
namespace {

/// Parallel scans (sequences times value heads) that keep a large GPU busy.
constexpr std::int64_t kManyChains = 128;

/// The constants a group's kernels and their sizes depend on.
Values relevant(const Template& t, const Constants& constants) {
  std::set<std::string, std::less<>> names;
  for (const AnyConstant& constant : t.constants) names.emplace(name_of(constant));
  for (const Parameter& parameter : t.parameters)
    for (const Dim& dim : parameter.shape) names.insert(dim.text());
  Values result;
  for (const AnyConstant& constant : all_constants())
    if (names.contains(name_of(constant)))
      result.set(std::string(name_of(constant)), value_of(constant, constants));
  return result;
}

class Builder {
 public:
  Builder(const Problem& problem, const Target& target)
      : target_(target),
        floor_(precision_floor(problem)),
        problem_(problem),
        uses_(stage_uses(problem)),
        scans_(splittable_scans(uses_, target.device)) {}

  SearchSpace build() {
    space_.uses = uses_.size();
    space_.default_plan = default_plan(problem_, target_);
    const std::vector<std::set<std::size_t>> choices = split_choices();
    for (const std::int64_t BT : chunk_sizes(problem_, target_.device)) {
      if (!always_split(problem_)) add_layer({BT, 0}, {});
      for (const std::int64_t SEG : lengths_to_try(BT))
        for (const std::set<std::size_t>& split : choices) add_layer({BT, SEG}, split);
    }
    if (space_.layers.empty())
      throw Error(ErrorKind::kUnavailable,
                  fmt::format("no chunk size has a legal config for every stage of {} on {}",
                              problem_.op, target_.name()));
    drop_unused_groups();
    return std::move(space_);
  }

 private:
  /// Chunks a segment worth trying: splitting pays with too few scans to fill a device, and
  /// sequences of several segments; by the costs powers of two are near any other length but the
  /// default plan's. A summary is always split, and a pass that takes its segments.
  std::vector<std::int64_t> lengths_to_try(std::int64_t BT) const {
    if (always_split(problem_)) return segment_lengths(problem_, target_.device);
    if (problem_.N == 0 || problem_.N * problem_.HV > kManyChains) return {};
    std::vector<std::int64_t> lengths = segment_lengths(problem_, target_.device);
    const std::int64_t chosen = shape_of(space_.default_plan).SEG;
    std::erase_if(lengths, [&](std::int64_t SEG) {
      const bool near = std::has_single_bit(static_cast<std::uint64_t>(SEG)) || SEG == chosen;
      return !near || problem_.B * problem_.T < 2 * SEG * BT * problem_.N;
    });
    return lengths;
  }

  /// Every way to split at least one scan, all of them first.
  std::vector<std::set<std::size_t>> split_choices() const {
    if (always_split(problem_)) return {{}};
    std::vector<std::set<std::size_t>> choices;
    for (std::size_t chosen = (std::size_t{1} << scans_.size()) - 1; chosen > 0; --chosen) {
      choices.emplace_back();
      for (std::size_t i = 0; i < scans_.size(); ++i)
        if ((chosen >> i & 1U) != 0) choices.back().insert(scans_[i]);
    }
    return choices;
  }

  void add_layer(PlanShape shape, const std::set<std::size_t>& split) {
    Layer layer{shape.BT, shape.SEG, {}};
    for (std::size_t first = 0; first < uses_.size(); ++first)
      for (const auto& [t, count] : covers(uses_, first, target_.device)) {
        const std::size_t last = first + count;
        if (!belongs(*t, first, last, split)) continue;
        const Constants constants =
            step_constants(problem_, std::span(uses_).subspan(first, count));
        if (const auto group = group_of(*t, constants, shape, uses_[first].rows))
          layer.edges.push_back({first, last, *group});
      }
    if (keep_connected(layer)) {
      set_contexts(layer);
      space_.layers.push_back(std::move(layer));
    }
  }

  /// A layer splits the scans that start at `split` and no other: no plan is in two layers. A
  /// template that splits a scan begins with it or behind it; the optional group in front of all
  /// uses splits all of them. Where problems are always split no scan is whole.
  bool belongs(const Template& t, std::size_t first, std::size_t last,
               const std::set<std::size_t>& split) const {
    if (t.tunable("SEG") == nullptr)
      return std::none_of(split.lower_bound(first), split.lower_bound(last),
                          [&](std::size_t scan) { return t.carries_out(uses_[scan].stage->name); });
    if (always_split(problem_)) return true;
    if (scans_.empty()) return false;
    const auto after = std::upper_bound(scans_.begin(), scans_.end(), first);
    if (after == scans_.begin()) return split.size() == scans_.size();
    return split.contains(*std::prev(after));
  }

  /// The group's index, made on its first use; nothing when the template has no legal config with
  /// this shape.
  std::optional<std::size_t> group_of(const Template& t, const Constants& constants,
                                      PlanShape shape, Rows rows) {
    const std::int64_t BT = t.tunable("BT") != nullptr ? shape.BT : 0;
    const std::int64_t SEG = t.tunable("SEG") != nullptr ? shape.SEG : 0;
    const std::string key =
        fmt::format("{} {} {} {}", t.id(), relevant(t, constants).to_string(), BT, SEG);
    if (const auto known = index_.find(key); known != index_.end()) return known->second;
    Group group{t.id(), constants, BT, SEG, {}, 0, {}, 0, {}};
    group.configs = wyvern::space(t, constants, target_.limits, floor_, shape);
    if (group.configs.empty()) return {};
    const Config preferred = default_config(t, constants, target_.limits, floor_,
                                            work_of(problem_, target_, shape, rows))
                                 .value_or(group.configs.front());
    const auto at = std::find(group.configs.begin(), group.configs.end(), preferred);
    // A default that the space calls redundant is still the config of an untuned run: it takes
    // part.
    if (at == group.configs.end())
      group.configs.insert(group.configs.begin(), preferred);
    else
      group.default_config = static_cast<std::size_t>(at - group.configs.begin());
    for (const Config& config : group.configs)
      group.launches.push_back(
          launch_of(t, Spec(constants, config), problem_, rows, target_.limits));
    index_.emplace(key, space_.groups.size());
    space_.groups.push_back(std::move(group));
    return space_.groups.size() - 1;
  }

  /// Drops edges that are on no path from the first use to the last; false when none is left.
  bool keep_connected(Layer& layer) const {
    std::vector<char> from_start(uses_.size() + 1, 0), to_end(uses_.size() + 1, 0);
    from_start.front() = to_end.back() = 1;
    for (std::size_t use = 0; use < uses_.size(); ++use)
      for (const Edge& edge : layer.edges)
        if (edge.first == use && from_start[use] != 0) from_start[edge.last] = 1;
    for (std::size_t use = uses_.size(); use > 0; --use)
      for (const Edge& edge : layer.edges)
        if (edge.last == use && to_end[use] != 0) to_end[edge.first] = 1;
    std::erase_if(layer.edges, [&](const Edge& edge) {
      return from_start[edge.first] == 0 || to_end[edge.last] == 0;
    });
    return !layer.edges.empty();
  }

  /// Gives each new group of the layer the plan it is measured in: single stages around it.
  void set_contexts(const Layer& layer) {
    for (const Edge& edge : layer.edges) {
      Group& group = space_.groups[edge.group];
      if (!group.context.empty()) continue;
      group.context = path(layer, 0, edge.first);
      group.step = group.context.size();
      group.context.push_back(edge.group);
      const std::vector<std::size_t> rest = path(layer, edge.last, uses_.size());
      group.context.insert(group.context.end(), rest.begin(), rest.end());
    }
  }

  /// Drops groups of a chunk size without a cover, which were made before that was known.
  void drop_unused_groups() {
    std::vector<std::size_t> moved(space_.groups.size(), 0);
    std::vector<Group> kept;
    for (std::size_t i = 0; i < space_.groups.size(); ++i) {
      moved[i] = kept.size();
      if (!space_.groups[i].context.empty()) kept.push_back(std::move(space_.groups[i]));
    }
    for (Group& group : kept)
      for (std::size_t& index : group.context) index = moved[index];
    for (Layer& layer : space_.layers)
      for (Edge& edge : layer.edges) edge.group = moved[edge.group];
    space_.groups = std::move(kept);
  }

  /// Groups that lead from one use to another, shortest edges first; keep_connected() made sure
  /// that every edge can be continued, but not that it ends at `to`, so it backtracks.
  std::vector<std::size_t> path(const Layer& layer, std::size_t from, std::size_t to) const {
    std::vector<std::size_t> groups;
    extend(layer, from, to, groups);
    return groups;
  }

  bool extend(const Layer& layer, std::size_t from, std::size_t to,
              std::vector<std::size_t>& groups) const {
    if (from == to) return true;
    std::vector<Edge> next;
    for (const Edge& edge : layer.edges)
      if (edge.first == from && edge.last <= to) next.push_back(edge);
    std::stable_sort(next.begin(), next.end(),
                     [](const Edge& a, const Edge& b) { return a.last < b.last; });
    for (const Edge& edge : next) {
      groups.push_back(edge.group);
      if (extend(layer, edge.last, to, groups)) return true;
      groups.pop_back();
    }
    return false;
  }

  const Target& target_;
  Precision floor_;
  const Problem& problem_;
  std::vector<StageUse> uses_;
  std::vector<std::size_t> scans_;  ///< first uses of scans that can be split
  SearchSpace space_;
  std::map<std::string, std::size_t> index_;
};

}  // namespace

std::size_t SearchSpace::size() const {
  std::size_t count = 0;
  for (const Group& group : groups) count += group.configs.size();
  return count;
}

SearchSpace build_space(const Problem& problem, const Target& target) {
  return Builder(problem, target).build();
}

Launch launch_of(const Template& t, const Spec& spec, const Problem& problem, Rows rows,
                 const Limits& limits) {
  Extents extents;
  extents.B = problem.B;
  extents.T = problem.T * (rows == Rows::steps ? problem.num_householder : 1);
  extents.N = problem.N;
  const std::int64_t BT = spec.BT != 0 ? spec.BT : 64;
  extents.NT = chunk_slots(extents.B, extents.T, extents.N, problem.packed, BT);
  const Geometry geometry = t.geometry(spec, extents, limits);
  return {geometry.grid[0] * geometry.grid[1] * geometry.grid[2], geometry.threads,
          geometry.shared_bytes};
}

Plan plan_of(const SearchSpace& space, const Candidate& candidate) {
  const Group& own = space.groups[candidate.group];
  Plan plan;
  for (const std::size_t index : own.context) {
    const Group& group = space.groups[index];
    plan.push_back({group.template_id, group.configs[group.default_config]});
  }
  plan[own.step].config = own.configs[candidate.config];
  return plan;
}

std::optional<std::vector<Candidate>> candidates_of(const SearchSpace& space, const Plan& plan) {
  const auto in_layer = [&](const Layer& layer) -> std::optional<std::vector<Candidate>> {
    std::vector<Candidate> found;
    std::size_t use = 0;
    for (const PlanStep& step : plan) {
      const auto edge = std::ranges::find_if(layer.edges, [&](const Edge& e) {
        return e.first == use && space.groups[e.group].template_id == step.template_id;
      });
      if (edge == layer.edges.end()) return {};
      const std::vector<Config>& configs = space.groups[edge->group].configs;
      const auto at = std::ranges::find(configs, step.config);
      if (at == configs.end()) return {};
      found.push_back({edge->group, static_cast<std::size_t>(at - configs.begin())});
      use = edge->last;
    }
    if (use != space.uses) return {};
    return found;
  };
  for (const Layer& layer : space.layers)
    if (auto found = in_layer(layer)) return found;
  return {};
}

std::string describe(const SearchSpace& space, const Candidate& candidate) {
  const Group& group = space.groups[candidate.group];
  const std::string config = group.configs[candidate.config].to_string();
  return config.empty() ? group.template_id : fmt::format("{} {}", group.template_id, config);
}

std::string canonical_text(const Plan& plan) {
  std::string text;
  for (const PlanStep& step : plan)
    text +=
        fmt::format("{}{} {}", text.empty() ? "" : "; ", step.template_id, step.config.to_string());
  return text;
}

}  // namespace wyvern
