#include "autotune/bench.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "autotune/blame.hpp"
#include "autotune/choose.hpp"
#include "autotune/statistics.hpp"
#include "runtime/plan.hpp"

namespace wyvern {
namespace {

constexpr std::size_t kLeastSamples = 3;

constexpr std::size_t kMostRounds = 100;
constexpr std::size_t kPaceSamples = 5;

RuntimeOptions options_for(std::shared_ptr<Cache> cache) {
  RuntimeOptions options;
  options.cache = std::move(cache);
  return options;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

Bench::Trial::Trial(const Device& device, const Problem& problem, std::uint64_t seed,
                    Runtime& runtime, float gates)
    : tensors(device, problem, seed, true, gates),
      reference(wyvern::reference(problem, tensors.host())) {
  tensors.keep(runtime);
}

Bench::Bench(const Device& device, const Problem& problem, std::shared_ptr<Cache> cache,
             std::uint64_t seed, std::vector<std::int64_t> cu_seqlens)
    : device_(device),
      runtime_(options_for(std::move(cache))),
      full_(device, problem, seed, false, 1, std::move(cu_seqlens)),
      compared_{full_.device()},
      seed_(seed),
      small_(device, reduced(problem), seed + 1, runtime_),
      stream_(device.impl().make_stream()),
      timer_(device.impl().make_timer()),
      clock_([device] { return device.impl().state().clock_mhz; }) {
  full_.keep(runtime_);
  if (gates_matter(problem)) compared_.push_back(full_.with_gates(kSlowDecay, seed + 3));
  if (!device.impl().measuring().cold) return;
  flush_bytes_ = static_cast<std::size_t>(2 * device.impl().cache_bytes());
  flush_ = device.allocate(flush_bytes_);
}

Outcome Bench::measure(const Plan& plan, std::size_t step, double bar, int repeats) {
  Outcome outcome;
  outcome.ran = true;
  check(small_, plan, outcome);
  if (outcome.status != Status::ok) return outcome;
  if (!pacemaker_) set_pace(plan);
  const auto op = prepare(full_.problem(), plan, outcome);
  if (!op) return outcome;
  run_before(*op, step);
  bool rejected = false;
  Series series = sample_step(*op, step, bar, repeats, rejected);
  outcome.samples = std::move(series.samples);
  outcome.clocks_mhz = std::move(series.clocks_mhz);
  outcome.pace_us = last_pace_us_;
  if (rejected) {
    outcome.status = Status::rejected;
    outcome.detail =
        fmt::format("{:.1f} us where another config takes {:.1f} us", outcome.samples.back(), bar);
  }
  return outcome;
}

/// The operator, or nothing with the outcome saying why.
std::optional<Operator> Bench::prepare(const Problem& problem, const Plan& plan, Outcome& outcome) {
  try {
    return runtime_.prepare(device_, problem, plan);
  } catch (const Error& error) {
    outcome.status = blame(error, device_.info().kind == to_string(DeviceKind::cpu));
    outcome.detail = error.what();
    return {};
  }
}

/// Runs the plan on the trial's problem, outputs and workspace poisoned, against the oracle.
void Bench::check(Trial& trial, const Plan& plan, Outcome& outcome) {
  const ProblemTensors& tensors = trial.tensors;
  const auto op = prepare(tensors.problem(), plan, outcome);
  if (!op) return;
  grow(small_workspace_, device_, op->workspace_bytes());
  void* const memory = small_workspace_.memory.get();
  tensors.poison();
  if (op->workspace_bytes() != 0) device_.fill(memory, 0xFF, op->workspace_bytes());
  device_.synchronize();
  op->launch(tensors.device(), memory, stream_.get());
  device_.synchronize(stream_.get());
  tensors.fetch();
  outcome.status = Status::ok;
  for (const auto& [name, wanted] : trial.reference) {
    const double error = relative_error(tensors.host().tensor(name), wanted);
    const double bound = error_bound(tensors.problem(), name);
    outcome.error = std::max(outcome.error, error);
    if (error <= bound) continue;
    outcome.status = Status::wrong;
    outcome.detail = fmt::format("{} is off by {:.2e}; the bound is {:.0e}", name, error, bound);
  }
}

/// The same on sequences of several segments (the reduced problem's have one), with decay so slow
/// that a segment's state reaches the next. The oracle takes seconds, so only finalists are
/// checked.
void Bench::check_segments(const Plan& plan, Outcome& outcome) {
  const PlanShape shape = shape_of(plan);
  const std::int64_t segment = shape.BT * shape.SEG;
  if (2 * segment <= small_.tensors.problem().T) return;
  const auto [at, is_new] =
      long_.try_emplace(segment, device_, reduced(full_.problem(), segment), seed_ + 2, runtime_,
                        6.0F / static_cast<float>(segment));
  check(at->second, plan, outcome);
}

/// All checks of a plan, except those that it has already passed in this process.
void Bench::check_whole(const Plan& plan, Outcome& outcome) {
  const std::string text = canonical_text(plan);
  outcome.status = Status::ok;
  if (right_.contains(text)) return;
  check(small_, plan, outcome);
  if (outcome.status == Status::ok) check_segments(plan, outcome);
  if (outcome.status == Status::ok) right_.insert(text);
}

/// Makes room; false when there was enough. New memory is touched once, so that no first launch
/// pays for its pages.
bool Bench::grow(Workspace& workspace, const Device& device, std::size_t bytes) {
  if (bytes <= workspace.bytes) return false;
  workspace = {};
  workspace.memory = device.allocate(bytes);
  workspace.bytes = bytes;
  device.fill(workspace.memory.get(), 0, bytes);
  device.synchronize();
  return true;
}

/// Memory for the full problem's intermediates; its content survives unless it must grow.
void* Bench::workspace(const Operator& op) {
  if (grow(full_workspace_, device_, op.workspace_bytes())) prefix_.clear();
  return full_workspace_.memory.get();
}

/// Makes sure the step finds its inputs: runs the steps before it, unless the workspace still holds
/// their outputs from the last candidate. (No candidate for a step writes an input of that step.)
void Bench::run_before(const Operator& op, std::size_t step) {
  void* const memory = workspace(op);
  Plan before = op.plan();
  before.resize(step);
  std::string prefix = canonical_text(before);
  for (const Binding& binding : op.impl().steps[step].bindings)
    prefix += fmt::format(" {}:{}", static_cast<int>(binding.from), binding.index);
  if (prefix == prefix_) return;
  op.impl().enqueue(tensors_of(full_.device()), memory, stream_.get(), 0, step);
  device_.synchronize(stream_.get());
  prefix_ = std::move(prefix);
}

std::unique_ptr<Replay> Bench::record(const Operator& op, const Arguments& arguments,
                                      std::size_t first, std::size_t last, int repeats) {
  const auto tensors = tensors_of(arguments);
  void* const memory = workspace(op);
  return device_.impl().capture([&op, tensors, memory, first, last, repeats](Stream stream) {
    for (int i = 0; i < repeats; ++i) op.impl().enqueue(tensors, memory, stream, first, last);
  });
}

/// One replay in us, with a flushed cache if the device is measured that way.
double Bench::time_once(Replay& replay) {
  if (flush_) device_.fill(flush_.get(), 0, flush_bytes_, stream_.get());
  timer_->start(stream_.get());
  replay.launch(stream_.get());
  timer_->stop(stream_.get());
  return timer_->elapsed_us();
}

Series Bench::sample_step(const Operator& op, std::size_t step, double bar, int repeats,
                          bool& rejected) {
  auto replay = record(op, full_.device(), step, step + 1, 1);
  const double first = time_once(*replay);
  // Beyond four times the bar cold first launches are enough, unless one was a hiccup.
  if (bar > 0 && first > 4 * bar) {
    const double second = time_once(*replay);
    rejected = second > 4 * bar;
    if (rejected) return {{first, second}, {}};
  }
  const bool free = repeats == 0;
  int launches = free ? repeats_for(first) : repeats;
  Series series;
  for (int attempt = 0; attempt < 2; ++attempt) {
    if (launches > 1) {
      replay = record(op, full_.device(), step, step + 1, launches);
      time_once(*replay);  // the first launch of a graph uploads it
    }
    std::vector<Series> windows;
    const std::size_t steady =
        steady_window([&] { windows.push_back(sample_window(*replay, launches, bar, rejected)); },
                      [&] { return pace(); });
    series = std::move(windows[steady]);
    // The first launch may have been slow: the median gives other configs the same number.
    const int wanted = repeats_for(summarize(series.samples).median);
    if (!free || rejected || wanted == launches) break;
    launches = wanted;
    replay = record(op, full_.device(), step, step + 1, launches);
  }
  return series;
}

/// Right after a sample.
void Bench::note_clock(std::vector<double>& clocks) {
  if (const double mhz = clock_.mhz(); mhz > 0) clocks.push_back(mhz);
}

/// As many samples as the device's kind allows.
Series Bench::sample_window(Replay& replay, int repeats, double bar, bool& rejected) {
  const Measuring measuring = device_.impl().measuring();
  Series series;
  std::vector<double>& samples = series.samples;
  double spent = 0;
  while (samples.size() < kLeastSamples ||
         (samples.size() < measuring.samples && spent < measuring.samples_us)) {
    const double sample = time_once(replay);
    spent += sample;
    samples.push_back(sample / repeats);
    note_clock(series.clocks_mhz);
    rejected = samples.size() < kLeastSamples && clearly_slower(samples, bar);
    if (rejected) break;
  }
  return series;
}

/// From now on pace() times the reduced problem by this plan.
void Bench::set_pace(const Plan& plan) {
  Outcome outcome;
  pacemaker_ = prepare(small_.tensors.problem(), plan, outcome);
  if (!pacemaker_) return;
  grow(pace_workspace_, device_, pacemaker_->workspace_bytes());
  const auto tensors = tensors_of(small_.tensors.device());
  void* const memory = pace_workspace_.memory.get();
  const std::size_t steps = pacemaker_->impl().steps.size();
  const auto capture = [&](int repeats) {
    pace_ = device_.impl().capture([&, tensors, memory, steps, repeats](Stream stream) {
      for (int i = 0; i < repeats; ++i)
        pacemaker_->impl().enqueue(tensors, memory, stream, 0, steps);
    });
    time_once(*pace_);
  };
  capture(1);
  capture(repeats_for(time_once(*pace_)));
}

/// The device's present speed, measured by work that is always the same.
Timing Bench::pace() {
  std::vector<double> samples;
  for (std::size_t i = 0; pace_ && i < kPaceSamples; ++i) samples.push_back(time_once(*pace_));
  const Timing timing = summarize(samples);
  last_pace_us_ = timing.median;
  return timing;
}

std::vector<Outcome> Bench::race(const std::vector<Plan>& plans, std::size_t step, int repeats,
                                 double seconds) {
  std::vector<Outcome> outcomes(plans.size());
  std::vector<std::optional<Operator>> operators(plans.size());
  for (std::size_t i = 0; i < plans.size(); ++i) {
    outcomes[i].ran = true;
    operators[i] = prepare(full_.problem(), plans[i], outcomes[i]);
    if (operators[i]) workspace(*operators[i]);
  }
  // Recorded now that the workspace has its final size and place.
  std::vector<std::unique_ptr<Replay>> replays(plans.size());
  for (std::size_t i = 0; i < plans.size(); ++i) {
    if (!operators[i]) continue;
    outcomes[i].status = Status::ok;
    run_before(*operators[i], step);
    replays[i] = record(*operators[i], full_.device(), step, step + 1, std::max(repeats, 1));
    time_once(*replays[i]);
  }
  const auto time_round = [&] {
    std::vector<double> round(plans.size(), 0);
    for (std::size_t i = 0; i < plans.size(); ++i) {
      if (!replays[i]) continue;
      run_before(*operators[i], step);
      round[i] = time_once(*replays[i]) / std::max(repeats, 1);
      note_clock(outcomes[i].clocks_mhz);
    }
    return round;
  };
  const auto start = std::chrono::steady_clock::now();
  const std::size_t most = std::max(device_.impl().measuring().samples, kLeastSamples);
  for (std::size_t round = 0; round < most; ++round) {
    if (round >= kLeastSamples && seconds_since(start) >= seconds) break;
    const std::vector<double> times = time_round();
    for (std::size_t i = 0; i < plans.size(); ++i)
      if (replays[i]) outcomes[i].samples.push_back(times[i]);
  }
  return outcomes;
}

/// All steps, with each of compared().
std::vector<std::unique_ptr<Replay>> Bench::record_whole(const Operator& op) {
  std::vector<std::unique_ptr<Replay>> replays;
  for (const Arguments& arguments : compared_)
    replays.push_back(record(op, arguments, 0, op.impl().steps.size(), 1));
  return replays;
}

std::vector<Outcome> Bench::compare(const std::vector<Plan>& plans, double seconds,
                                    const std::function<void(std::size_t)>& at) {
  std::vector<Outcome> outcomes(plans.size());
  std::vector<std::optional<Operator>> operators(plans.size());
  for (std::size_t i = 0; i < plans.size(); ++i) {
    at(i);
    check_whole(plans[i], outcomes[i]);
    if (outcomes[i].status == Status::ok)
      operators[i] = prepare(full_.problem(), plans[i], outcomes[i]);
    if (!operators[i]) continue;
    for (const auto& replay : record_whole(*operators[i])) time_once(*replay);
  }
  // Recorded again now that the workspace has its final size and place.
  std::vector<std::vector<std::unique_ptr<Replay>>> replays(plans.size());
  for (std::size_t i = 0; i < plans.size(); ++i)
    if (operators[i]) replays[i] = record_whole(*operators[i]);
  const auto start = std::chrono::steady_clock::now();
  for (std::size_t round = 0; round < kMostRounds; ++round) {
    if (round >= kLeastSamples && seconds_since(start) >= seconds) break;
    for (std::size_t i = 0; i < plans.size(); ++i) {
      const std::size_t plan = (i + round) % plans.size();
      if (replays[plan].empty()) continue;
      double sum = 0;
      for (const auto& replay : replays[plan]) sum += time_once(*replay);
      outcomes[plan].samples.push_back(sum / static_cast<double>(replays[plan].size()));
      note_clock(outcomes[plan].clocks_mhz);
    }
  }
  prefix_.clear();
  return outcomes;
}

}  // namespace wyvern
