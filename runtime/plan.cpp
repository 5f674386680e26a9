#include "runtime/plan.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "runtime/base/json_text.hpp"
#include "runtime/devices/device_impl.hpp"
#include "runtime/operators/operator.hpp"
#include "runtime/problem_fields.hpp"
#include "templates/cost.hpp"
#include "templates/legality.hpp"

namespace wyvern {
namespace {

/// Appends every plan that starts with `plan` and covers uses[first] and all uses after it.
void extend(const Problem& problem, std::span<const StageUse> uses, std::size_t first,
            const Target& target, std::int64_t BT, Plan& plan, std::vector<Plan>& plans) {
  if (first == uses.size()) {
    plans.push_back(plan);
    return;
  }
  for (const auto& [t, count] : covers(uses, first, target.device)) {
    const Constants constants = step_constants(problem, uses.subspan(first, count));
    const PlanShape shape{BT, problem.segment_chunks.value_or(0)};
    const auto config = default_config(*t, constants, target.limits, precision_floor(problem),
                                       work_of(problem, target, shape, uses[first].rows));
    if (!config) continue;
    plan.push_back({t->id(), *config});
    extend(problem, uses, first + count, target, BT, plan, plans);
    plan.pop_back();
  }
}

/// One template's step of a plan, and its cost.
struct Priced {
  PlanStep step;
  double us = 0;
};

/// The cheapest plans of one problem, chunk size by chunk size.
class Cheapest {
 public:
  /// `sizes`: the problem whose sequences and tokens the costs are for.
  Cheapest(const Problem& problem, const Problem& sizes, std::span<const StageUse> uses,
           const Target& target)
      : problem_(problem), sizes_(sizes), uses_(uses), target_(target) {
    for (std::size_t first = 0; first < uses.size(); ++first)
      covers_.push_back(covers(uses, first, target.device));
  }

  /// Searches all plans with chunks of BT, split or not.
  void search(std::int64_t BT) {
    whole_.clear();
    try_shortest_path({BT, 0});
    const Workload work = work_of(sizes_, target_, {BT, 0}, Rows::tokens);
    for (const std::int64_t SEG : segment_lengths(problem_, target_.device))
      if (always_split(problem_) || work.longest * problem_.num_householder >= 2 * SEG * BT)
        try_shortest_path({BT, SEG});
  }

  const std::optional<Plan>& plan() const { return plan_; }
  /// Its cost; infinite where there is none.
  double us() const { return us_; }

 private:
  struct Node {
    double us = std::numeric_limits<double>::infinity();
    std::size_t next = 0;
    const PlanStep* step = nullptr;
  };

  /// Keeps the shortest path through all uses if it is the cheapest plan so far. Templates of
  /// segments need a SEG.
  void try_shortest_path(PlanShape shape) {
    std::map<std::pair<std::size_t, const Template*>, std::optional<Priced>> split;
    std::vector<Node> nodes(uses_.size() + 1);
    nodes.back().us = 0;
    for (std::size_t first = uses_.size(); first-- > 0;)
      for (const auto& [t, count] : covers_[first]) {
        const bool splits = t->tunable("SEG") != nullptr;
        const Node& rest = nodes[first + count];
        if ((splits && shape.SEG == 0) || std::isinf(rest.us)) continue;
        const auto [known, is_new] = (splits ? split : whole_).try_emplace({first, t});
        if (is_new) known->second = priced(*t, first, count, shape);
        if (!known->second || known->second->us + rest.us >= nodes[first].us) continue;
        nodes[first] = {known->second->us + rest.us, first + count, &known->second->step};
      }
    if (nodes.front().us >= us_) return;
    us_ = nodes.front().us;
    plan_.emplace();
    for (std::size_t use = 0; use < uses_.size(); use = nodes[use].next)
      plan_->push_back(*nodes[use].step);
  }

  std::optional<Priced> priced(const Template& t, std::size_t first, std::size_t count,
                               PlanShape shape) const {
    const Constants constants = step_constants(problem_, uses_.subspan(first, count));
    const Workload work = work_of(sizes_, target_, shape, uses_[first].rows);
    const auto config =
        default_config(t, constants, target_.limits, precision_floor(problem_), work);
    if (!config) return {};
    return Priced{{t.id(), *config}, cost_of(t, Spec(constants, *config), work, target_.limits)};
  }

  const Problem& problem_;
  const Problem& sizes_;
  const std::span<const StageUse> uses_;
  const Target& target_;
  std::vector<std::vector<Covering>> covers_;  ///< by first use
  /// Steps of the current chunk size, for any segment length.
  std::map<std::pair<std::size_t, const Template*>, std::optional<Priced>> whole_;
  std::optional<Plan> plan_;
  double us_ = std::numeric_limits<double>::infinity();
};

/// How U is stored between kernels: as the inputs, or in fp32 if a chunk has at least twice as many
/// rows as keys have elements. Rows of U are as large as values for any K. A state of K rows cannot
/// hold the updates of 64 rows: without decay most of them are overwritten inside the chunk. The
/// sum over the chunk cancels, the rounding errors of its terms do not: at K = 16 each rounding to
/// 16 bits counts about twice, and the state and o exceeded their bounds.
DType u_dtype(const Problem& problem) { return problem.K <= 32 ? DType::fp32 : problem.dtype; }

}  // namespace

Extents sizes_of(const Problem& problem, PlanShape shape, Rows rows) {
  Extents e;
  e.B = problem.B;
  e.T = problem.T * (rows == Rows::steps ? problem.num_householder : 1);
  e.N = problem.N;
  const auto slots = [&](std::int64_t tokens) {
    return tokens == 0 ? 0 : chunk_slots(problem.B, e.T, problem.N, problem.packed, tokens);
  };
  e.NT = slots(shape.BT);
  e.SEG = static_cast<int>(shape.SEG);
  // Every sequence has a segment, however short it is.
  e.NS = std::max(slots(shape.BT * shape.SEG), shape.SEG == 0 ? 0 : problem.N);
  e.S = problem.state_index ? problem.state_slots : problem.N;
  e.M = std::max<std::int64_t>(problem.index_columns, 1);
  e.R = problem.intermediate_rows.value_or(0);
  e.D = draft_tokens_of(problem);
  e.CP = checkpoint_rows(problem);
  e.P = (problem.B * problem.T * problem.HV + kNormPartRows - 1) / kNormPartRows;
  e.TP = (problem.B * problem.T + kConvPartTokens - 1) / kConvPartTokens;
  const ScaleShape scales = output_scale_shape(problem);
  e.SR = scales.rows;
  e.SC = scales.columns;
  return e;
}

Workload work_of(const Problem& problem, const Target& target, PlanShape shape, Rows rows) {
  Workload work;
  work.shape = shape;
  // An architecture alone does not say how many blocks run in parallel.
  if (target.device == DeviceKind::cuda && target.limits.multiprocessors == 0) return work;
  work.extents = sizes_of(problem, shape, rows);
  work.extents.S = problem.N;
  work.longest = longest_sequence(problem) * (rows == Rows::steps ? problem.num_householder : 1);
  return work;
}

Constants problem_constants(const Problem& problem) {
  const OperatorDefinition& definition = definition_of(problem);
  const GateKind gate = problem.has_g ? definition.facts().gate : GateKind::none;
  Constants c;
  set_constants(problem, c);
  c.SCALAR_GATE = gate == GateKind::scalar;
  c.VECTOR_GATE = gate == GateKind::vector;
  c.GATED = gate != GateKind::none;
  c.GATE_K = gate == GateKind::vector ? problem.K : 1;
  c.GATE_HEADS = problem.HV * c.GATE_K;
  c.DG_DTYPE = c.GATE_IN_KERNEL ? DType::fp32 : problem.g_dtype;
  c.KEEP_INVERSE = problem.pass == Pass::backward ||
                   (problem.disable_recompute && definition.facts().gate == GateKind::vector);
  c.KEEP_STATES = problem.disable_recompute || problem.return_intermediate_states;
  c.STATE_SCALE = has_state_scale(problem);
  c.NORM_SILU = problem.output_norm == Activation::silu;
  c.CHECKPOINTS = has_checkpoints(problem);
  c.CHECKPOINT_DTYPE = checkpoint_dtype(problem);
  c.CONV_WIDTH = problem.short_conv.value_or(0);
  c.CONV_CHANNELS = conv_channels(problem);
  c.CONV_COLUMNS = problem.short_conv.value_or(1) - 1;
  c.CONV_LENGTH = conv_columns_of(problem);
  c.CONV_SLOT_ROWS = problem.conv_tokens_first ? c.CONV_LENGTH : c.CONV_CHANNELS;
  c.CONV_SLOT_COLS = problem.conv_tokens_first ? c.CONV_CHANNELS : c.CONV_LENGTH;
  c.CONV_DRAFT_ROWS = problem.conv_tokens_first ? c.CONV_COLUMNS : c.CONV_CHANNELS;
  c.CONV_DRAFT_COLS = problem.conv_tokens_first ? c.CONV_CHANNELS : c.CONV_COLUMNS;
  c.GROUP = problem.HV / problem.H;
  c.STATE_ROWS = problem.state_v_first ? problem.V : problem.K;
  c.STATE_COLS = problem.state_v_first ? problem.K : problem.V;
  c.U_DTYPE = u_dtype(problem);
  // Constants of a fold as a stage on its own; bind_fold() replaces them by the options of a Fold.
  if (!problem.summary) c.TRANSITION = true;
  c.BACKWARDS = problem.pass == Pass::backward;
  c.SUMMARY_COLUMNS = problem.V + (c.TRANSITION ? problem.K : 0);
  const Values own = definition.constants(problem);
  return own.empty() ? c : c.with(own);
}

Constants step_constants(const Problem& problem, std::span<const StageUse> covered) {
  Constants constants = problem_constants(problem);
  // Callers' tensors have no unit.
  constants.STATE_UNIT = problem.dtype == DType::fp16 && !constants.KEEP_STATES;
  const Values& own = covered.front().constants;
  return own.empty() ? constants : constants.with(own);
}

namespace {

/// How many uses from `first` on the template carries out; 0: it does not. `found`, if given, gets
/// the use of each covered stage. An optional stage is the next use, or the problem has none: the
/// template does a stage's work whenever the problem has it, so no other step may have done it.
std::size_t covered_uses(const Template& t, std::span<const StageUse> uses, std::size_t first,
                         std::vector<std::size_t>* found = nullptr) {
  const auto was_before = [&](const Cover& cover) {
    return std::ranges::any_of(uses.first(first),
                               [&](const StageUse& use) { return use.stage == cover.stage; });
  };
  if (first == uses.size()) return 0;  // a step too many
  std::size_t next = first;
  for (const Cover& cover : t.covers) {
    std::size_t at = next;  // behind optional groups that the template leaves out
    while (at < uses.size() && uses[at].optional_group != 0 && uses[at].stage != cover.stage)
      at += uses[at].optional_group;
    if (at < uses.size() && uses[at].stage == cover.stage) {
      next = at;
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

std::vector<std::int64_t> segment_lengths(const Problem& problem, DeviceKind device) {
  if (problem.segment_chunks) return {*problem.segment_chunks};
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
  if (problem.segment_chunks && checked.shape.SEG != *problem.segment_chunks)
    throw Error(ErrorKind::kBadInput,
                fmt::format("the plan's SEG is {}; it must be {}, the problem's segment_chunks",
                            checked.shape.SEG, *problem.segment_chunks));
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

/// The sequences and tokens of each by which every decoding batch's plan is chosen: a server
/// decodes many sequences together, and there templates differ most; one token each, several if
/// drafts are verified. And those for every prefill, too short for segments.
constexpr std::int64_t kDecodedSequences = 64, kDecodedTokens = 2;
constexpr std::int64_t kPrefilledSequences = 8, kPrefilledTokens = 1023;

/// The problem by which all batches of a batch_invariant problem choose one plan: it has the same
/// heads, dimensions, dtypes and options.
static Problem representative(Problem problem) {
  if (problem.pass != Pass::recurrent) {
    problem.packed = false;  // whose chunks are counted more exactly than a pack's
    problem.B = problem.N = kPrefilledSequences;
    problem.T = kPrefilledTokens;
    return problem;
  }
  problem.N = kDecodedSequences;
  problem.B = problem.packed ? 1 : problem.N;
  problem.T = kDecodedTokens * problem.N / problem.B;
  // A sequence may continue from its final state: its pieces differ in which states they have.
  if (!problem.inplace_state) problem.initial_state = problem.output_final_state = true;
  problem.disable_state_update = false;
  return problem;
}

Plan default_plan(const Problem& asked, const Target& target) {
  const Problem sizes = asked.batch_invariant ? representative(asked) : asked;
  Problem problem = sizes;
  problem.packed = asked.packed;
  const std::vector<StageUse> uses = stage_uses(problem);
  const std::span<const std::int64_t> chunks = chunk_sizes(problem, target.device);
  Cheapest cheapest(problem, sizes, uses, target);
  for (const std::int64_t BT : chunks) {
    cheapest.search(BT);
    if (asked.batch_invariant && cheapest.plan()) break;  // the largest that has one
  }
  if (cheapest.plan()) return *cheapest.plan();
  throw Error(
      ErrorKind::kUnavailable,
      fmt::format("{} ({}) with K = {}, V = {}, {}{} fits no template on {} ({} bytes of "
                  "shared memory a block)",
                  problem.op, to_string(problem.pass), problem.K, problem.V,
                  to_string(problem.dtype),
                  chunks.size() == 1 ? fmt::format(", chunk_size = {}", chunks.front()) : "",
                  target.name(), target.limits.shared_bytes));
}

bool always_split(const Problem& problem) { return problem.summary || problem.segment_chunks; }

Problem summary_of(Problem problem) {
  problem.summary = true;
  problem.output_final_state = problem.disable_recompute = problem.return_intermediate_states =
      false;
  problem.output_norm.reset();
  problem.norm_eps.reset();
  problem.output_dtype.reset();
  problem.output_scale_tokens_last = problem.keep_output = false;
  return problem;
}

PlanShape shared_segments(const Problem& problem, bool transition, const Target& target) {
  const auto cost = [&](const Problem& one) {
    const std::vector<StageUse> uses = stage_uses(one);
    Cheapest cheapest(one, one, uses, target);
    for (const std::int64_t BT : chunk_sizes(one, target.device)) cheapest.search(BT);
    return cheapest.us();
  };
  Problem summary = summary_of(problem), pass = problem;
  summary.transition = transition;
  PlanShape best{0, 0};
  double least = cost(summary) + cost(pass);
  for (const std::int64_t BT : chunk_sizes(problem, target.device))
    for (const std::int64_t SEG : {8, 16, 32}) {
      for (Problem* const one : {&summary, &pass}) one->chunk_size = BT, one->segment_chunks = SEG;
      const double us = cost(summary) + cost(pass);
      if (us >= least) continue;
      least = us;
      best = {BT, SEG};
    }
  return best;
}

double plan_cost(const Problem& problem, const Plan& plan, const Target& target) {
  const std::vector<StageUse> uses = stage_uses(problem);
  const CheckedPlan checked = check_plan(problem, uses, plan, target);
  double us = 0;
  for (std::size_t i = 0; i < plan.size(); ++i) {
    const Template& t = *find_template(plan[i].template_id);
    PlanShape shape = checked.shape;
    if (t.tunable("SEG") == nullptr) shape.SEG = 0;  // it goes through whole sequences
    us += cost_of(t, Spec(checked.constants[i], plan[i].config),
                  work_of(problem, target, shape, uses[checked.starts[i]].rows), target.limits);
  }
  return us;
}

std::span<const std::int64_t> chunk_sizes(const Problem& problem, DeviceKind device) {
  // Each operator's chunk sizes that divide 64, so that a sequence that continues after a multiple
  // of 64 tokens has the same chunks as the whole sequence.
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
