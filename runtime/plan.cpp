#include "runtime/plan.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <limits>

#include "runtime/base/json_text.hpp"
#include "runtime/devices/device_impl.hpp"
#include "runtime/operators/operator.hpp"
#include "templates/legality.hpp"

namespace wyvern {
namespace {

/// Appends every plan that starts with `plan` and covers uses[first] and all uses behind it.
void extend(const Problem& problem, std::span<const StageUse> uses, std::size_t first,
            const Target& target, std::int64_t BT, Plan& plan, std::vector<Plan>& plans) {
  if (first == uses.size()) {
    plans.push_back(plan);
    return;
  }
  for (const auto& [t, count] : covers(uses, first, target.device)) {
    const Constants constants = step_constants(problem, uses.subspan(first, count));
    const auto config = default_config(*t, constants, target.limits, precision_floor(problem), BT);
    if (!config) continue;
    plan.push_back({t->id(), *config});
    extend(problem, uses, first + count, target, BT, plan, plans);
    plan.pop_back();
  }
}

/// The plan with the fewest kernels, of equals the one whose templates rank first. With a SEG all
/// scans are split, without none. Of templates with a cost of walks only `walk`, if it is given.
std::optional<Plan> shortest_plan(const Problem& problem, std::span<const StageUse> uses,
                                  const Target& target, PlanShape shape,
                                  const Template* walk = nullptr) {
  struct Best {
    std::size_t kernels = 0, next = 0;  // kernels 0: no way to the end
    PlanStep step;
  };
  const bool splits = shape.SEG != 0;
  shape.sequences = problem.N;
  shape.tokens = problem.packed && problem.N > 0 ? problem.T / problem.N : problem.T;
  const std::vector<std::size_t> scans =
      splits ? splittable_scans(uses, target.device) : std::vector<std::size_t>();
  const auto is_whole_scan = [&](const Template& t, std::size_t first, std::size_t next) {
    return std::any_of(scans.begin(), scans.end(), [&](std::size_t scan) {
      return first <= scan && scan < next && t.carries_out(uses[scan].stage->name);
    });
  };
  std::vector<Best> best(uses.size());
  for (std::size_t first = uses.size(); first-- > 0;)
    for (const auto& [t, count] : covers(uses, first, target.device)) {
      const std::size_t next = first + count;
      if (walk != nullptr && t->walk_cost && t != walk) continue;
      const bool split = t->tunable("SEG") != nullptr;
      if (split ? !splits : is_whole_scan(*t, first, next)) continue;
      if (next < uses.size() && best[next].kernels == 0) continue;
      const std::size_t kernels = 1 + (next < uses.size() ? best[next].kernels : 0);
      if (best[first].kernels != 0 && best[first].kernels <= kernels) continue;
      const Constants constants = step_constants(problem, uses.subspan(first, count));
      const auto config =
          default_config(*t, constants, target.limits, precision_floor(problem), shape);
      if (config) best[first] = {kernels, next, {t->id(), *config}};
    }
  if (best.front().kernels == 0) return {};
  Plan plan;
  for (std::size_t use = 0; use < uses.size(); use = best[use].next) plan.push_back(best[use].step);
  return plan;
}

/// Costs where no template of a pass states its own: the unit is a chunk in one block of a scan. On
/// one H200, 2026-11-21, an estimate of 0.43 brought a forward pass from 0.349 to 0.204 ms, one of
/// 0.38 another from 1.458 to 0.833, and one of 0.74 nothing (0.130 and 0.134).
constexpr WalkCost kWholeScans{.chunk = 1};
constexpr WalkCost kSplitScans{.chunk = 1, .combine = 1, .clear = 0.6};

/// A backward pass by portable kernels, of which some templates with a cost take the place: almost
/// all in proportion to chunks and heads, since its scans are split where few heads would leave a
/// GPU idle (one H200, 2026-11-24: 31 us of a multiprocessor for 64 heads, 51 for 8; of a decay a
/// channel 58 for 64 heads).
constexpr WalkCost kPortableBackward{.chunk = 0, .prepare = 45, .added = 60};
constexpr WalkCost kPortableVectorBackward{.chunk = 0, .prepare = 60, .added = 60};

/// Blocks with so many columns of a state of `columns`.
std::int64_t tiles(std::int64_t columns, std::int64_t width) {
  return (columns + width - 1) / width;
}

/// What a pass costs with segments of SEG chunks, or 0: with none. As long as every block has a
/// multiprocessor to itself all walk side by side, and blocks beyond that take turns, as times of
/// forward passes of 8 to 256 chains on an H200 have it (2026-11-21; D = 128). A split walk goes
/// through its chunks twice, first for what segments do to a state, M (K columns) and R (V
/// columns), then from the states that combine carried past them.
double walk_time(const WalkCost& cost, const Problem& problem, const Target& target,
                 std::int64_t BT, std::int64_t SEG) {
  const auto multiprocessors = static_cast<double>(target.limits.multiprocessors);
  // A chunk in each of so many walks: with states of K or V columns, or of both.
  const auto chunk_of = [&](std::int64_t walks, std::initializer_list<std::int64_t> columns) {
    std::int64_t narrow = 0, wide = 0;
    for (const std::int64_t width : columns) {
      narrow += walks * tiles(width, 64);
      wide += walks * tiles(width, 128);
    }
    const double narrow_turns = static_cast<double>(narrow) / multiprocessors;
    const double wide_turns = static_cast<double>(wide) / multiprocessors;
    return cost.wide > 0 && narrow_turns > 1 ? cost.wide * std::max(1.0, std::ceil(wide_turns))
                                             : cost.chunk * std::max(1.0, narrow_turns);
  };
  const std::int64_t chains = problem.N * problem.HV;
  const std::int64_t chunks = problem.B * problem.T * problem.num_householder / problem.N / BT;
  const double prepared = cost.prepare * static_cast<double>(chunks * chains) / multiprocessors;
  const std::int64_t values = cost.directions * problem.V;
  if (SEG == 0)
    return static_cast<double>(chunks) * chunk_of(chains, {values}) + prepared + cost.added;
  const std::int64_t segments = (chunks + SEG - 1) / SEG;
  // Where blocks choose their columns, a sequence's last segment has none for its M and R.
  const std::int64_t last = cost.wide > 0 ? 1 : 0;
  const double first = chunk_of(chains * (segments - last), {problem.K, values});
  const double second = chunk_of(chains * segments, {values});
  return static_cast<double>(SEG) * (first + second) +
         cost.combine * static_cast<double>(segments) + prepared + cost.added;
}

/// How the default plan walks through sequences.
struct Walk {
  const Template* by = nullptr;  ///< of templates with a cost of walks; null: any
  std::int64_t SEG = 0;
  /// In microseconds, where templates say what walks cost.
  double time = std::numeric_limits<double>::infinity();
};

/// Stands for none of the templates with a cost of walks.
const Template& portable_walk() {
  static const Template& none = *new Template;
  return none;
}

/// The least of several costs in one unit.
class Cheapest {
 public:
  Cheapest(const Problem& problem, const Target& target, std::int64_t BT)
      : problem_(problem),
        target_(target),
        BT_(BT),
        chunks_(problem.B * problem.T * problem.num_householder / problem.N / BT) {}

  void compare(const WalkCost& cost, Walk walk) {
    const double time = walk_time(cost, problem_, target_, BT_, walk.SEG) / cost.clear;
    if (any && time >= best.time) return;
    best = {walk.by, walk.SEG, time};
    any = true;
  }
  void compare_segments(const WalkCost& cost, const Template* by) {
    for (const std::int64_t SEG : segment_lengths(target_.device))
      if (chunks_ >= 2 * SEG) compare(cost, {by, SEG});
  }

  Walk best;
  bool any = false;

 private:
  const Problem& problem_;
  const Target& target_;
  std::int64_t BT_, chunks_;
};

/// The cheapest; where the device's multiprocessors are not known, the one with the fewest kernels.
Walk cheapest_walk(const Problem& problem, std::span<const StageUse> uses, const Target& target,
                   std::int64_t BT) {
  if (target.limits.multiprocessors == 0 || problem.pass == Pass::recurrent || problem.N == 0)
    return {};
  Cheapest portable(problem, target, BT);
  portable.compare(kWholeScans, {});
  portable.compare_segments(kSplitScans, nullptr);
  Cheapest walks(problem, target, BT);
  for (std::size_t first = 0; first < uses.size(); ++first)
    for (const auto& [t, count] : covers(uses, first, target.device)) {
      if (!t->walk_cost) continue;
      WalkCost cost = *t->walk_cost;
      // Nothing fades, so that blocks of a walk in one kernel cannot share a sequence out.
      if (gate_kind(problem) == GateKind::none) cost.clear = std::max(cost.clear, 0.8);
      const Constants constants = step_constants(problem, uses.subspan(first, count));
      if (!default_config(*t, constants, target.limits, precision_floor(problem), BT)) continue;
      if (t->tunable("SEG") != nullptr)
        walks.compare_segments(cost, t);
      else
        walks.compare(cost, {t, 0});
    }
  if (!walks.any) return {portable.best.by, portable.best.SEG};
  if (problem.pass == Pass::backward) {
    const bool vector = gate_kind(problem) == GateKind::vector;
    walks.compare(vector ? kPortableVectorBackward : kPortableBackward, {&portable_walk(), 0});
    if (walks.best.by == &portable_walk()) walks.best.SEG = portable.best.SEG;
  }
  return walks.best;
}

/// How U is stored between kernels: as the inputs, or in fp32 where a chunk has at least twice as
/// many rows as keys have elements. Rows of U are as large as values are, whatever K. A state of K
/// rows has no room for what 64 of them add: without decay most of it is overwritten again inside
/// the chunk. The sum over the chunk cancels, the errors of its terms do not, so that at K = 16
/// each rounding to 16 bits counts about twice, and the state and o broke their bounds.
DType u_dtype(const Problem& problem) { return problem.K <= 32 ? DType::fp32 : problem.dtype; }

}  // namespace

Constants problem_constants(const Problem& problem) {
  const OperatorDefinition& definition = definition_of(problem);
  const GateKind gate = problem.has_g ? definition.facts().gate : GateKind::none;
  const std::int64_t gate_K = gate == GateKind::vector ? problem.K : 1;
  const bool gate_in_kernel = problem.use_gate_in_kernel && gate != GateKind::none;
  Constants c;
  c.STEPS = problem.num_householder;
  c.SCALAR_GATE = gate == GateKind::scalar;
  c.VECTOR_GATE = gate == GateKind::vector;
  c.GATED = gate != GateKind::none;
  c.GATE_K = gate_K;
  c.GATE_HEADS = problem.HV * gate_K;
  c.GATE_IN_KERNEL = gate_in_kernel;
  c.HAS_A_LOG = gate_in_kernel && problem.has_A_log;
  c.LOWER_BOUND = gate_in_kernel && problem.lower_bound.has_value();
  c.SAFE_GATE = gate_is_bounded(problem);
  c.DG_DTYPE = gate_in_kernel ? DType::fp32 : problem.g_dtype;
  c.KEEP_INVERSE = problem.pass == Pass::backward || problem.disable_recompute;
  c.KEEP_STATES = problem.disable_recompute || problem.return_intermediate_states;
  c.INPLACE_STATE = problem.inplace_state;
  c.STATE_INDEX = problem.state_index;
  c.OUTPUT_STATE_INDEX = problem.output_state_index;
  c.HAS_INITIAL_STATE = problem.has_initial_state;
  c.INDEX_DTYPE = problem.index_dtype;
  c.BATCH_INVARIANT = problem.batch_invariant;
  c.INDEX_COLUMNS = problem.index_columns != 0;
  c.INTERMEDIATE_STATES = problem.intermediate_rows.has_value();
  c.PARENT = problem.parent;
  c.KEEP_POOL = problem.disable_state_update;
  c.CHECKPOINTS = has_checkpoints(problem);
  c.CHECKPOINT_OFFSETS = problem.checkpoint_offsets;
  c.CHECKPOINT_EVERY = problem.checkpoint_every;
  c.H = problem.H;
  c.HV = problem.HV;
  c.GROUP = problem.HV / problem.H;
  c.K = problem.K;
  c.V = problem.V;
  c.STATE_ROWS = problem.state_v_first ? problem.V : problem.K;
  c.STATE_COLS = problem.state_v_first ? problem.K : problem.V;
  c.DTYPE = problem.dtype;
  c.U_DTYPE = u_dtype(problem);
  c.BETA_DTYPE = problem.beta_dtype;
  c.G_DTYPE = problem.g_dtype;
  c.STATE_DTYPE = problem.state_dtype;
  c.SEQLENS_DTYPE = problem.seqlens_dtype;
  c.VARLEN = problem.packed;
  c.HAS_DT_BIAS = problem.has_dt_bias;
  c.QK_L2NORM = problem.use_qk_l2norm;
  c.BETA_SIGMOID = problem.use_beta_sigmoid;
  c.NEG_EIGVAL = problem.use_beta_sigmoid && problem.allow_neg_eigval;
  c.INITIAL_STATE = problem.initial_state;
  c.FINAL_STATE = problem.output_final_state;
  c.STATE_V_FIRST = problem.state_v_first;
  const Values own = definition.constants(problem);
  return own.empty() ? c : c.with(own);
}

Constants step_constants(const Problem& problem, std::span<const StageUse> covered) {
  const Constants constants = problem_constants(problem);
  const Values& own = covered.front().constants;
  return own.empty() ? constants : constants.with(own);
}

namespace {

/// How many uses from `first` on the template carries out; 0: it does not. `found`, if given, gets
/// the use of each covered stage. An optional stage is the next use, or the problem has none: the
/// template does its work wherever the problem asks for it, and must not do it again.
std::size_t covered_uses(const Template& t, std::span<const StageUse> uses, std::size_t first,
                         std::vector<std::size_t>* found = nullptr) {
  const auto was_before = [&](const Cover& cover) {
    return std::ranges::any_of(uses.first(first),
                               [&](const StageUse& use) { return use.stage == cover.stage; });
  };
  if (first == uses.size()) return 0;  // a step too many
  std::size_t next = first;
  while (uses[next].optional_group != 0 && uses[next].stage != t.covers.front().stage)
    next += uses[next].optional_group;
  for (const Cover& cover : t.covers) {
    if (next < uses.size() && uses[next].stage == cover.stage) {
      if (uses[next].rows != uses[first].rows) return 0;
      if (found != nullptr) found->push_back(next);
      next += 1 + uses[next].replaces;
    } else if (cover.only_when && !was_before(cover)) {
      if (found != nullptr) found->push_back(Coverage::kNone);
    } else {
      return 0;
    }
  }
  return next - first;
}

}  // namespace

std::optional<Coverage> coverage(const Template& t, std::span<const StageUse> uses,
                                 std::size_t first) {
  Coverage result;
  result.count = covered_uses(t, uses, first, &result.use_of);
  if (result.count == 0) return {};
  return result;
}

std::vector<Covering> covers(std::span<const StageUse> uses, std::size_t first, DeviceKind device) {
  std::vector<Covering> found;
  for (const Template& t : all_templates()) {
    if (t.device != device) continue;
    if (const std::size_t count = covered_uses(t, uses, first); count != 0)
      found.push_back({&t, count});
  }
  std::ranges::stable_sort(found, {}, [](const Covering& c) { return c.source_template->rank; });
  return found;
}

std::vector<std::size_t> splittable_scans(std::span<const StageUse> uses, DeviceKind device) {
  std::vector<std::size_t> found;
  for (std::size_t first = 0; first < uses.size(); ++first) {
    if (uses[first].optional_group != 0) continue;  // no scan starts with an optional group
    const std::vector<Covering> all = covers(uses, first, device);
    const auto whole = std::count_if(all.begin(), all.end(), [](const Covering& c) {
      return c.source_template->tunable("SEG") == nullptr;
    });
    if (whole > 0 && std::ssize(all) > whole) found.push_back(first);
  }
  return found;
}

std::vector<std::int64_t> segment_lengths(DeviceKind device) {
  std::vector<std::int64_t> lengths;
  for (const Template& t : all_templates()) {
    const Tunable* tunable = t.device == device ? t.tunable("SEG") : nullptr;
    if (tunable == nullptr) continue;
    for (const Value& value : tunable->values) lengths.push_back(std::get<std::int64_t>(value));
    break;  // they all have the same
  }
  return lengths;
}

std::vector<std::size_t> match(std::span<const StageUse> uses, const Plan& plan) {
  std::vector<std::size_t> starts{0};
  for (const PlanStep& step : plan) {
    const Template* t = find_template(step.template_id);
    if (t == nullptr)
      throw Error(
          ErrorKind::kBadInput,
          fmt::format("template '{}' of the plan is not part of this build", step.template_id));
    const std::size_t count = covered_uses(*t, uses, starts.back());
    if (count == 0)
      throw Error(
          ErrorKind::kBadInput,
          fmt::format("template '{}' of the plan does not carry out the next stage, {}",
                      step.template_id,
                      starts.back() < uses.size() ? uses[starts.back()].stage->name : "(none)"));
    starts.push_back(starts.back() + count);
  }
  if (starts.back() != uses.size())
    throw Error(ErrorKind::kBadInput,
                fmt::format("the plan ends before stage {}", uses[starts.back()].stage->name));
  return starts;
}

std::string step_problem(const PlanStep& step, const Constants& constants, const Target& target,
                         Precision floor) {
  const Template* t = find_template(step.template_id);
  if (t == nullptr) return fmt::format("template '{}' is not part of this build", step.template_id);
  if (t->device != target.device)
    return fmt::format("template {} is for {}, the device is {}", step.template_id,
                       to_string(t->device), to_string(target.device));
  const std::string reason = config_problem(*t, step.config, constants, target.limits, floor);
  if (reason.empty()) return {};
  return fmt::format("config '{}' of {} is illegal on {}: {}", step.config.to_string(),
                     step.template_id, target.name(), reason);
}

CheckedPlan check_plan(const Problem& problem, std::span<const StageUse> uses, const Plan& plan,
                       const Target& target, bool is_default) {
  CheckedPlan checked;
  checked.starts = match(uses, plan);
  const Precision floor = precision_floor(problem);
  for (std::size_t i = 0; i < plan.size(); ++i) {
    const std::size_t first = checked.starts[i];
    const auto covered = uses.subspan(first, checked.starts[i + 1] - first);
    checked.constants.push_back(step_constants(problem, covered));
    const std::string reason = step_problem(plan[i], checked.constants.back(), target, floor);
    if (!reason.empty())
      throw Error(ErrorKind::kBadInput, fmt::format("step {} of the plan: {}", i + 1, reason));
  }
  checked.shape = shape_of(plan);
  const std::span<const std::int64_t> sizes = chunk_sizes(problem, target.device);
  if (checked.shape.BT != 0 && std::ranges::find(sizes, checked.shape.BT) == sizes.end())
    throw Error(ErrorKind::kBadInput,
                fmt::format("the plan's BT is {}; it must be {}, the problem's chunk size",
                            checked.shape.BT, fmt::join(sizes, " or ")));
  if (problem.batch_invariant && !is_default && plan != default_plan(problem, target))
    throw Error(ErrorKind::kBadInput,
                "the plan is not the default one; batch_invariant allows no other: another order "
                "of sums would give other bits");
  return checked;
}

std::string plan_problem(const Problem& problem, const Plan& plan, const Target& target) {
  try {
    check_plan(problem, stage_uses(problem), plan, target);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

std::vector<Plan> enumerate_plans(const Problem& problem, const Target& target, std::int64_t BT) {
  if (problem.batch_invariant) {
    Plan only = default_plan(problem, target);
    const std::int64_t own = shape_of(only).BT;
    return own == 0 || own == BT ? std::vector<Plan>{std::move(only)} : std::vector<Plan>();
  }
  const std::vector<StageUse> uses = stage_uses(problem);
  std::vector<Plan> plans;
  Plan plan;
  extend(problem, uses, 0, target, BT, plan, plans);
  std::stable_sort(plans.begin(), plans.end(),
                   [](const Plan& a, const Plan& b) { return a.size() < b.size(); });
  return plans;
}

/// The plan with chunks of BT tokens; nothing where no template is legal with them.
static std::optional<Plan> plan_of(const Problem& problem, std::span<const StageUse> uses,
                                   const Target& target, std::int64_t BT, const Walk& walk) {
  std::optional<Plan> plan;
  if (walk.SEG != 0) plan = shortest_plan(problem, uses, target, {BT, walk.SEG}, walk.by);
  if (!plan)
    plan = shortest_plan(problem, uses, target, {BT, 0}, walk.SEG == 0 ? walk.by : nullptr);
  return plan;
}

/// The problem that stands for every batch of a batch_invariant one: what is left of it are heads,
/// dimensions, dtypes and options.
static Problem of_one_sequence(Problem problem) {
  problem.B = problem.N = 1;
  problem.T = 64;
  return problem;
}

Plan default_plan(const Problem& asked, const Target& given) {
  const Problem problem = asked.batch_invariant ? of_one_sequence(asked) : asked;
  Target target = given;
  // How much of a device one sequence fills says nothing: the fewest kernels, no segments.
  if (asked.batch_invariant) target.limits.multiprocessors = 0;
  const std::span<const std::int64_t> sizes = chunk_sizes(problem, target.device);
  const std::vector<StageUse> uses = stage_uses(problem);
  // The cheapest, where costs tell; else the first chunk size for which there is a plan.
  std::optional<Plan> best;
  double least = 0;
  for (const std::int64_t BT : sizes) {
    const Walk walk = cheapest_walk(problem, uses, target, BT);
    if (best && walk.time >= least) continue;
    std::optional<Plan> plan = plan_of(problem, uses, target, BT, walk);
    if (!plan) continue;
    best = std::move(plan);
    least = walk.time;
  }
  if (best) return *best;
  throw Error(ErrorKind::kUnavailable,
              fmt::format("{} ({}) with K = {}, V = {}, {}{} fits no template on {} ({} bytes of "
                          "shared memory a block)",
                          problem.op, to_string(problem.pass), problem.K, problem.V,
                          to_string(problem.dtype),
                          sizes.size() == 1 ? fmt::format(", chunk_size = {}", sizes.front()) : "",
                          target.name(), target.limits.shared_bytes));
}

std::span<const std::int64_t> chunk_sizes(const Problem& problem, DeviceKind device) {
  // Of each operator those that divide 64, so that chunks of a sequence that goes on after a
  // multiple of 64 tokens begin where those of the whole do.
  static constexpr std::array<std::int64_t, 3> kDivide64{64, 32, 16};
  const std::span<const std::int64_t> all =
      problem.batch_invariant ? std::span<const std::int64_t>(kDivide64)
                              : definition_of(problem).chunk_sizes(problem, device);
  if (problem.pass == Pass::recurrent) return all.first(1);  // no template has a chunk size
  const bool kept = problem.disable_recompute || problem.return_intermediate_states;
  if (!problem.chunk_size && !kept) return all;
  const auto wanted = std::find(all.begin(), all.end(), kept_chunk_size(problem));
  return {wanted, wanted == all.end() ? 0U : 1U};
}

static std::int64_t shared_tunable(const Plan& plan, std::string_view name) {
  std::int64_t shared = 0;
  for (const PlanStep& step : plan) {
    if (!step.config.contains(name)) continue;
    const std::int64_t own = step.config.integer(name);
    if (shared != 0 && own != shared)
      throw Error(ErrorKind::kBadInput,
                  fmt::format("the plan mixes {0}={1} and {0}={2}; one operator has one {0}", name,
                              shared, own));
    shared = own;
  }
  return shared;
}

PlanShape shape_of(const Plan& plan) {
  return {shared_tunable(plan, "BT"), shared_tunable(plan, "SEG")};
}

std::vector<Plan> plans(const Device& device, const Problem& problem, std::int64_t BT) {
  validate(problem);
  if (BT < 1) throw Error(ErrorKind::kBadInput, fmt::format("BT is {}; it must be at least 1", BT));
  return enumerate_plans(problem, device.impl().target(), BT);
}

std::string plan_to_json(const Plan& plan) {
  auto json = nlohmann::json::array();
  for (const PlanStep& step : plan)
    json.push_back({{"template", step.template_id}, {"config", step.config.to_string()}});
  return json.dump();
}

std::optional<Plan> plan_from_json(std::string_view text) {
  const auto json = parse_json(text);
  if (!json.is_array()) return {};
  Plan plan;
  for (const auto& item : json) {
    if (!item.is_object() || !item.contains("template") || !item["template"].is_string() ||
        !item.contains("config") || !item["config"].is_string())
      return {};
    PlanStep step;
    step.template_id = item["template"].get<std::string>();
    if (find_template(step.template_id) == nullptr) return {};
    try {
      step.config = Values::parse(item["config"].get<std::string>());
    } catch (const Error&) {
      return {};
    }
    plan.push_back(std::move(step));
  }
  return plan;
}

}  // namespace wyvern
