// Operators as sequences of stages, and plans: covers of these stages by templates.
#pragma once

#include <wyvern/problem.hpp>
#include <wyvern/runtime.hpp>

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "compiler/compiler.hpp"
#include "templates/template.hpp"

namespace wyvern {

/// The unit of a stage use's T, in which its rows and chunks are counted: tokens, or steps,
/// num_householder of them per token (the rows of k).
enum class Rows : std::uint8_t { tokens, steps };

/// One use of a stage by an operator. Logical names connect tensors: an argument has its contract's
/// name unless `rename` gives another one. After a second stage writes a name, the name means that
/// newer tensor.
struct StageUse {
  const StageDefinition* stage = nullptr;                  ///< lives forever; never null
  std::map<std::string, std::string, std::less<>> rename;  ///< contract's name -> logical name
  Values constants;  ///< overrides of the problem's constants for this use
  Rows rows = Rows::tokens;
  /// Above 0: an optional group of this many uses begins here. A plan covers all of them or none.
  /// The use after the group reads the group's results where they exist, and has no constants of
  /// its own.
  std::size_t optional_group = 0;
  /// A plan that covers this use also covers this many uses after it.
  std::size_t replaces = 0;
};

/// Prefix of an input's name: the caller's tensor, even where a step has written that name.
inline constexpr std::string_view kCallers = "caller.";

/// The stages of the problem's operator and pass, in order, without those that its options omit.
std::vector<StageUse> stage_uses(const Problem& problem);

/// The sizes of a launch of a plan of this shape; other members of Extents have their defaults.
Extents sizes_of(const Problem& problem, PlanShape shape, Rows rows);

/// Every constant of spec and shapes that the problem sets (templates/README.md lists them).
Constants problem_constants(const Problem& problem);

/// The constants of one step: the problem's, with the overrides of the first stage it covers.
Constants step_constants(const Problem& problem, std::span<const StageUse> covered);

/// Maps a template's covered stages to uses. Optional stages that the operator omits have no use.
struct Coverage {
  static constexpr std::size_t kNone = ~std::size_t{0};
  std::vector<std::size_t>
      use_of;             ///< for each stage that the template covers: an index of `uses`, or kNone
  std::size_t count = 0;  ///< consecutive uses from the first
};
/// The coverage of the uses from uses[first] on by a template; nothing where it does not compute
/// them or where they count different rows.
std::optional<Coverage> coverage(const Template& t, std::span<const StageUse> uses,
                                 std::size_t first);

/// A template that computes `count` consecutive uses.
struct Covering {
  const Template* source_template = nullptr;
  std::size_t count = 0;
};
/// The templates for `device` that compute uses[first] and uses after it, sorted by name.
std::vector<Covering> covers(std::span<const StageUse> uses, std::size_t first, DeviceKind device);

/// Which uses each step of the plan covers: step i starts at result[i]; result.back() is the number
/// of uses. Throws Error(kBadInput) when the templates do not compute the problem in order.
std::vector<std::size_t> match(std::span<const StageUse> uses, const Plan& plan);

/// The results of check_plan() for a legal plan.
struct CheckedPlan {
  std::vector<std::size_t> starts;   ///< as match() returns them
  std::vector<Constants> constants;  ///< of each step
  PlanShape shape;
};
/// Throws Error(kBadInput) that names the step and what is wrong unless the plan is legal: its
/// templates are for the target's kind of device and compute `uses`, the problem's, in order;
/// config_problem() accepts each step's config; all steps have one chunk size, which the problem's
/// tensors allow, and one segment length; a batch_invariant problem has its default plan. Checks a
/// step's values before it calls the step's contract. Takes tens of microseconds at most, and for a
/// batch_invariant problem the time of default_plan() too unless `is_default`: the caller just got
/// the plan from default_plan() for this problem.
CheckedPlan check_plan(const Problem& problem, std::span<const StageUse> uses, const Plan& plan,
                       const Target& target, bool is_default = false);

/// Empty where check_plan() accepts the plan, else its message.
std::string plan_problem(const Problem& problem, const Plan& plan, const Target& target);

/// Empty when the build has the step's template, the template is for the target's kind of device
/// and config_problem() accepts the config; else one sentence that names them.
std::string step_problem(const PlanStep& step, const Constants& constants, const Target& target,
                         Precision floor);

/// All plans with this BT on a target, with default configs; fewest kernels first. Empty when some
/// stage has no legal config. For a batch_invariant problem the default plan alone.
std::vector<Plan> enumerate_plans(const Problem& problem, const Target& target, std::int64_t BT);

/// The work of a step that counts such rows, in a plan of this shape.
Workload work_of(const Problem& problem, const Target& target, PlanShape shape, Rows rows);

/// The sum of cost_of() over the plan's steps, microseconds. Throws Error(kBadInput) for a plan
/// that is not legal.
double plan_cost(const Problem& problem, const Plan& plan, const Target& target);

/// The plan for an untuned problem: the cheapest by cost_of() over all chunk sizes, segment lengths
/// and templates; the one with the fewest kernels where only the target's architecture is known.
/// For a batch_invariant problem it does not depend on B, T and N: SPECIFICATION.md, section 10,
/// says which one it is. Throws Error(kUnavailable) when no chunk size has a plan, or the target
/// has no batch_invariant one.
Plan default_plan(const Problem& problem, const Target& target);

/// The chunk sizes that a plan of the problem may have, in the order to try them: all that
/// templates offer, or the only one that the problem or its tensors' shapes allow.
std::span<const std::int64_t> chunk_sizes(const Problem& problem, DeviceKind device);

/// The first uses of scans that templates for `device` compute both whole and in segments.
std::vector<std::size_t> splittable_scans(std::span<const StageUse> uses, DeviceKind device);

/// The lengths in chunks that segments of a split scan may have, in the order to try them: all that
/// templates offer, or segment_chunks.
std::vector<std::int64_t> segment_lengths(const Problem& problem, DeviceKind device);

/// Whether no plan of the problem walks whole sequences.
bool always_split(const Problem& problem);

/// The problem whose summary returns the segments that `problem`, with segment_chunks, takes.
Problem summary_of(Problem problem);

/// The chunk size and segment_chunks by which a summary, with `transition` or not, and the forward
/// pass `problem` behind it share segments where their default plans then cost less than those of
/// both alone; {0, 0} where they do not.
PlanShape shared_segments(const Problem& problem, bool transition, const Target& target);

/// The BT and SEG of the plan's steps, 0 where no step has one. Throws Error(kBadInput) where steps
/// have different ones.
PlanShape shape_of(const Plan& plan);

/// Convert between a plan and JSON text [{"template": id, "config": "BT=64,..."}...]. Parsing
/// returns nothing for a text that is no plan of this build's templates.
std::string plan_to_json(const Plan& plan);
std::optional<Plan> plan_from_json(std::string_view text);

}  // namespace wyvern
