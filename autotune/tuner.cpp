#include "autotune/tuner.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "autotune/contest.hpp"
#include "autotune/floor.hpp"
#include "autotune/inputs.hpp"
#include "autotune/loop.hpp"
#include "autotune/protocol.hpp"
#include "autotune/worker_laboratory.hpp"
#include "cache/cache.hpp"
#include "runtime/devices/device_impl.hpp"
#include "runtime/plan.hpp"
#include "runtime/setting.hpp"

namespace wyvern {
namespace {

/// The candidates' tensors are the same in every tuning, so that two of them can be compared.
constexpr std::uint64_t kSeed = 20;

/// Rows have the lengths of at most this many sequences: rows are text, and there are many of them.
constexpr std::size_t kMostLengths = 1024;

std::vector<std::int64_t> offsets_of(const Problem& problem, const TuneOptions& options) {
  if (!problem.packed) return {};
  if (options.cu_seqlens.empty()) return uneven_offsets(problem, kSeed);
  validate_seqlens(problem, options.cu_seqlens);
  return options.cu_seqlens;
}

Setting setting_with(const Device& device, const Problem& problem,
                     const std::vector<std::int64_t>& cu_seqlens) {
  Setting setting = setting_of(device, problem);
  for (std::size_t n = 1; n < cu_seqlens.size() && cu_seqlens.size() <= kMostLengths; ++n)
    setting.lengths.push_back(cu_seqlens[n] - cu_seqlens[n - 1]);
  return setting;
}

class Tuning {
 public:
  Tuning(Runtime& runtime, const Device& device, const Problem& problem, const TuneOptions& options)
      : cache_(runtime.cache()),
        device_(device),
        info_(device.info()),
        measuring_(device.impl().measuring()),
        key_(problem_key(problem)),
        cu_seqlens_(offsets_of(problem, options)),
        setting_(setting_with(device, problem, cu_seqlens_)),
        problem_(problem),
        options_(options),
        space_(build_space(problem, device.impl().target())),
        builder_(cache_, device.impl().target(), problem),
        laboratory_(space_, builder_, cache_, laboratory_options(device.impl().target(), problem)),
        results_(space_),
        contest_(space_, laboratory_, results_, incumbent()) {}

  TuneResult run() {
    LoopEnd end;
    if (!options_.force) {
      end = search_until(0, Search(space_, options_.exhaustive));
      if (const auto known = end.complete ? stored_winner() : std::nullopt) {
        result_ = *known;
        return finish(end);
      }
    }
    const Search search(space_, options_.exhaustive);
    const double deadline = options_.budget.count() - compare_seconds() - race_seconds();
    end = search_until(deadline, search);
    if (!end.interrupted && !race()) end.interrupted = true;
    // Measured in turn, another config may be a group's best, with neighbours of its own.
    if (end.complete && !end.interrupted) {
      const LoopEnd more = search_until(deadline, search);
      end.complete = more.complete;
      end.exhaustive = more.exhaustive;
      end.interrupted = more.interrupted;
      end.sweep_configs += more.sweep_configs;
      end.sweep_s += more.sweep_s;
    }
    if (end.interrupted) return finish(end);
    compare_and_store();
    return finish(end);
  }

 private:
  LaboratoryOptions laboratory_options(const Target& target, const Problem& problem) const {
    LaboratoryOptions options;
    options.worker_command = options_.worker_command;
    options.open = {{"open",
                     {{"device", info_.name},
                      {"problem", to_json(problem)},
                      {"cache", cache_.file().parent_path().string()},
                      {"cu_seqlens", cu_seqlens_},
                      {"seed", kSeed}}}};
    options.device = info_.key;
    options.driver = info_.driver;
    options.problem = key_.to_string();
    options.setting = setting_;
    options.jobs = options_.jobs;
    options.overlap = measuring_.beside_compilers;
    options.cold = measuring_.cold;
    options.registers_per_block = target.registers_per_block;
    options.interrupted = options_.interrupted;
    return options;
  }

  double elapsed() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

  /// The time for the final comparison.
  double compare_seconds() const {
    return std::min(0.15 * options_.budget.count(), measuring_.compare_s);
  }

  /// The time for running near-ties in turn.
  double race_seconds() const {
    return std::min(0.1 * options_.budget.count(), measuring_.compare_s);
  }

  bool race() {
    if (elapsed() >= options_.budget.count() - compare_seconds()) return true;
    report_phase(TuneProgress::Phase::racing, 0, race_seconds() + compare_seconds());
    contest_.race(race_seconds());
    return !(options_.interrupted && options_.interrupted());
  }

  /// With a deadline of 0, only stored results are looked up.
  LoopEnd search_until(double deadline_s, const Search& search) {
    LoopLimits limits;
    limits.elapsed_s = [this] { return elapsed(); };
    limits.deadline_s = deadline_s;
    limits.force = options_.force;
    limits.interrupted = options_.interrupted;
    limits.progress = options_.progress;
    return run_search(space_, search, laboratory_, limits, results_);
  }

  /// The plan in use for the problem, with any driver: the first winner whose configs are in the
  /// space; empty if there is none.
  Plan incumbent() const {
    for (const WinnerRow& row :
         cache_.find_winners(info_.key, key_.family, key_.tokens, key_.sequences))
      if (auto plan = plan_from_json(row.plan); plan && candidates_of(space_, *plan)) return *plan;
    return {};
  }

  /// The winner of an earlier tuning, unless driver or kernels have changed since, or how winners
  /// are measured: one that was measured with fast decay alone may be slow with slow decay.
  std::optional<TuneResult> stored_winner() {
    const std::vector<WinnerRow> rows = cache_.list_winners();  // find_winner() says no extents
    const auto row = std::ranges::find_if(rows, [&](const WinnerRow& of) {
      return of.device == info_.key && of.family == key_.family && of.tokens == key_.tokens &&
             of.sequences == key_.sequences;
    });
    if (row == rows.end() || row->driver != info_.driver || !same_extents(row->setting, setting_) ||
        row->setting.regime != winners_regime())
      return {};
    const auto plan = plan_from_json(row->plan);
    if (!plan || !std::all_of(plan->begin(), plan->end(),
                              [&](const PlanStep& step) { return still_ok(step); }))
      return {};
    TuneResult result;
    result.plan = *plan;
    result.tuned_us = row->median_us;
    result.default_us = row->default_us;
    result.floor_us = row->floor_us;
    result.stored = true;
    return result;
  }

  /// Whether a stored row of the same kernel says the step is ok.
  bool still_ok(const PlanStep& step) {
    for (std::size_t g = 0; g < space_.groups.size(); ++g) {
      const Group& group = space_.groups[g];
      if (group.template_id != step.template_id) continue;
      const auto at = std::find(group.configs.begin(), group.configs.end(), step.config);
      if (at == group.configs.end()) continue;
      const auto outcome =
          laboratory_.recall({g, static_cast<std::size_t>(at - group.configs.begin())});
      return outcome && outcome->status == Status::ok;
    }
    return false;
  }

  void compare_and_store() {
    const auto winner = contest_.decide(compare_seconds(), [&](std::size_t plans) {
      report_phase(TuneProgress::Phase::comparing, plans, compare_seconds());
    });
    const std::vector<PlanTiming>& timings = contest_.timings();
    if (!winner) {
      if (options_.interrupted && options_.interrupted()) {
        result_.interrupted = true;
        return;
      }
      throw Error(ErrorKind::kUnavailable,
                  fmt::format("no plan for {} passes its check on {}; the default one is {}: {}",
                              key_.family, info_.name, to_string(timings.front().status),
                              timings.front().detail));
    }
    if (const PlanTiming* lost = contest_.unjudged()) result_.unjudged = lost->detail;
    const Timing timing = summarize(timings[*winner].samples);
    result_.plan = timings[*winner].plan;
    result_.tuned_us = timing.median;
    result_.tuned_spread_us = timing.spread;
    std::vector<double> default_samples;
    for (const PlanTiming& plan : timings)
      if (plan.plan == space_.default_plan) default_samples = plan.samples;
    result_.default_us = summarize(default_samples).median;
    result_.floor_us = floor_us();
    // A stored winner ends the next tuning before it begins, so it is not stored if a plan was
    // unjudged.
    if (result_.unjudged.empty()) store(timings[*winner], default_samples);
  }

  /// How a winner's samples are measured. Stored rows are compared with it word for word: another
  /// wording would tune every problem anew.
  std::string winners_regime() const {
    return fmt::format("whole operators in turn, {}{}",
                       gates_matter(problem_) ? "means of gates that fade and that last, " : "",
                       measuring_.cold ? "cold" : "warm");
  }

  /// The problem's least time. A CPU's rates are measured for half a second, too long for a short
  /// budget.
  double floor_us() const {
    constexpr std::chrono::seconds kRoomy{10};
    if (!info_.cuda && options_.budget < kRoomy) return 0;
    return 1e6 * floor_time(work_of(problem_), device_peak(device_, problem_, measuring_.cold));
  }

  void store(const PlanTiming& winner, const std::vector<double>& default_samples) {
    WinnerRow row;
    row.device = info_.key;
    row.family = key_.family;
    row.tokens = key_.tokens;
    row.sequences = key_.sequences;
    row.plan = plan_to_json(result_.plan);
    row.median_us = result_.tuned_us;
    row.default_us = result_.default_us;
    row.driver = info_.driver;
    row.floor_us = result_.floor_us;
    row.setting = setting_;
    row.problem = to_json(problem_).dump();
    row.samples_us = winner.samples;
    row.default_samples_us = default_samples;
    row.clocks_mhz = winner.clocks_mhz;
    row.setting.regime = winners_regime();
    if (!row.clocks_mhz.empty()) row.setting.clock_mhz = median_of(row.clocks_mhz);
    result_.stored = cache_.store_winner(row);
  }

  void report_phase(TuneProgress::Phase phase, std::size_t plans, double seconds) const {
    if (!options_.progress) return;
    TuneProgress progress;
    progress.phase = phase;
    progress.total = static_cast<std::int64_t>(plans);
    progress.elapsed_s = elapsed();
    progress.remaining_s = seconds;
    options_.progress(progress);
  }

  TuneResult finish(const LoopEnd& end) {
    result_.interrupted = result_.interrupted || end.interrupted;
    for (const auto& group : results_.all())
      for (const auto& outcome : group)
        if (outcome && outcome->status == Status::unjudged) result_.unjudged = outcome->detail;
    result_.complete = end.complete && !result_.interrupted && result_.unjudged.empty();
    if (result_.plan.empty()) {
      const std::vector<RankedPlan> best = best_plans(space_, results_, 1);
      result_.plan = best.empty() ? space_.default_plan : best.front().plan;
    }
    if (options_.examine) options_.examine(space_, results_);
    result_.exhaustive = end.exhaustive;
    result_.sweep_configs = static_cast<std::int64_t>(end.sweep_configs);
    result_.sweep_seconds = end.sweep_s;
    result_.counts = count(space_, results_);
    result_.counts.compiled = laboratory_.compiled();
    result_.seconds = elapsed();
    return std::move(result_);
  }

  Cache& cache_;
  const Device& device_;
  const DeviceInfo info_;
  const Measuring measuring_;
  const ProblemKey key_;
  const std::vector<std::int64_t> cu_seqlens_;
  const Setting setting_;
  const Problem problem_;
  const TuneOptions& options_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  const SearchSpace space_;
  CompilingBuilder builder_;
  WorkerLaboratory laboratory_;
  Results results_;
  Contest contest_;
  TuneResult result_;
};

}  // namespace

TuneResult tune(Runtime& runtime, const Device& device, const Problem& problem,
                const TuneOptions& options) {
  validate(problem);
  if (problem.B * problem.T == 0)
    throw Error(ErrorKind::kBadInput,
                fmt::format("B*T is 0 (B = {}, T = {}); there must be tokens to tune for",
                            problem.B, problem.T));
  if (problem.batch_invariant)
    throw Error(ErrorKind::kBadInput,
                "batch_invariant is true; it must be false to tune: such a problem always has the "
                "default plan, since a winner would change a sequence's bits");
  if (options.worker_command.empty())
    throw Error(ErrorKind::kBadInput,
                "worker_command is empty; it must name the program that runs the candidates");
  return Tuning(runtime, device, problem, options).run();
}

}  // namespace wyvern
