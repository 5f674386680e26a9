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

/// One use of a stage by an operator. Tensors are connected by logical name: an argument is known
/// by its contract's name unless `rename` gives another, and a name written again
/// stands for the newer tensor from then on.
struct StageUse {
  const StageDefinition* stage = nullptr;                  ///< lives forever; never null
  std::map<std::string, std::string, std::less<>> rename;  ///< contract's name -> logical name
  Values constants;  ///< where this use differs from the problem's constants
  Rows rows = Rows::tokens;
  /// Above 0: this use and the ones after it, so many in all, are an optional group of stages. A
  /// plan covers all of them or none; the use behind the group reads the group's results where they
  /// exist, and has no constants of its own.
  std::size_t optional_group = 0;
  /// A plan that covers this use covers so many uses behind it too.
  std::size_t replaces = 0;
};

/// Before an input's name: the caller's tensor, whatever a step wrote under that name since.
inline constexpr std::string_view kCallers = "caller.";

/// The stages of the problem's operator and pass, in order, without the stages that its options
/// leave out.
std::vector<StageUse> stage_uses(const Problem& problem);

/// What a launch of a plan of the shape counts, without what is no size.
Extents sizes_of(const Problem& problem, PlanShape shape, Rows rows);

/// Every constant of spec and shapes that the problem sets (templates/README.md lists them).
Constants problem_constants(const Problem& problem);

/// The constants of one step: the problem's, with the overrides of the first stage it covers.
Constants step_constants(const Problem& problem, std::span<const StageUse> covered);

/// Which use each of a template's covered stages is, and how many uses that makes: optional stages
/// that the operator leaves out are none.
struct Coverage {
  static constexpr std::size_t kNone = ~std::size_t{0};
  std::vector<std::size_t>
      use_of;             ///< for each of the template's covers: an index of `uses`, or none
  std::size_t count = 0;  ///< uses in a row, from the first
};
/// Nothing unless the template carries out uses[first] and the uses behind it, all of which count
/// the same rows.
std::optional<Coverage> coverage(const Template& t, std::span<const StageUse> uses,
                                 std::size_t first);

/// A template that carries out `count` uses in a row.
struct Covering {
  const Template* source_template = nullptr;
  std::size_t count = 0;
};
/// The templates for `device` that carry out uses[first] and the uses behind it, by name.
std::vector<Covering> covers(std::span<const StageUse> uses, std::size_t first, DeviceKind device);

/// Which uses each step of the plan covers: step i starts at result[i]; result.back() is the number
/// of uses. Throws Error(kBadInput) when the templates do not carry out the problem in order.
std::vector<std::size_t> match(std::span<const StageUse> uses, const Plan& plan);

/// A legal plan, and what its check computed.
struct CheckedPlan {
  std::vector<std::size_t> starts;   ///< as match() returns them
  std::vector<Constants> constants;  ///< of each step
  PlanShape shape;
};
/// Throws Error(kBadInput) that names the step and what is wrong unless the plan is legal: its
/// templates are for the target's kind of device and carry out `uses`, the problem's, in order;
/// each step's config is one that config_problem() has no objection to; they have one chunk size,
/// one that the problem's tensors allow, and one segment length; of a batch_invariant problem it is
/// the default plan. Asks nothing of a contract before its step's values were checked. Tens of
/// microseconds at most, of a batch_invariant problem as long as default_plan() more, but for a
/// plan that `is_default`: one that default_plan() made of the problem just now.
CheckedPlan check_plan(const Problem& problem, std::span<const StageUse> uses, const Plan& plan,
                       const Target& target, bool is_default = false);

/// Empty where check_plan() has no objection, else what it says.
std::string plan_problem(const Problem& problem, const Plan& plan, const Target& target);

/// Empty when the step's template is part of the build and for the target's kind of device, and
/// its config one that config_problem() has no objection to; else one sentence that names them.
std::string step_problem(const PlanStep& step, const Constants& constants, const Target& target,
                         Precision floor);

/// All ways to cover the problem's stages on a target with this BT, default configs; fewest kernels
/// first. Empty when some stage has no legal config. Of a batch_invariant problem the default plan
/// alone.
std::vector<Plan> enumerate_plans(const Problem& problem, const Target& target, std::int64_t BT);

/// What there is to do for a plan of the shape, of a step that counts such rows.
Workload work_of(const Problem& problem, const Target& target, PlanShape shape, Rows rows);

/// Microseconds by cost_of(), of all steps of a legal plan. Throws Error(kBadInput) for another.
double plan_cost(const Problem& problem, const Plan& plan, const Target& target);

/// The plan for an untuned problem: of all chunk sizes, segments and templates the cheapest by
/// cost_of(). Where the device is an architecture alone, the fewest kernels. Of a batch_invariant
/// problem it does not depend on B, T and N: forward that of one sequence, recurrent that of a
/// batch of 64. Throws Error(kUnavailable) when there is none for any chunk size, or where
/// the target has no plan that is batch_invariant.
Plan default_plan(const Problem& problem, const Target& target);

/// Chunk sizes a plan of the problem may have, in the order to try them: all that the templates
/// offer, or the one that the problem names or its tensors' shapes need.
std::span<const std::int64_t> chunk_sizes(const Problem& problem, DeviceKind device);

/// The first uses of scans that templates for `device` carry out whole as well as in segments.
std::vector<std::size_t> splittable_scans(std::span<const StageUse> uses, DeviceKind device);

/// The chunks a segment may have where a scan is split, in the order to try them.
std::vector<std::int64_t> segment_lengths(DeviceKind device);

/// The BT and SEG that the plan's steps agree on, 0 where no step has one. Throws Error(kBadInput)
/// when they do not agree.
PlanShape shape_of(const Plan& plan);

/// JSON text [{"template": id, "config": "BT=64,..."}...] and back; parsing gives nothing for a
/// text that is not a plan of this build's templates.
std::string plan_to_json(const Plan& plan);
std::optional<Plan> plan_from_json(std::string_view text);

}  // namespace wyvern
