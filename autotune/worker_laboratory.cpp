#include "autotune/worker_laboratory.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "autotune/blame.hpp"
#include "autotune/protocol.hpp"
#include "runtime/kernel_store.hpp"

namespace wyvern {
namespace {

using nlohmann::json;

/// Spills below this are a few values outside the inner loops; they cost little.
constexpr std::int64_t kBearableSpill = 512;
/// Registers are allocated to warps in steps of this many a thread.
constexpr std::int64_t kRegisterStep = 8;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// The outcome of a candidate whose worker did not answer.
Outcome outcome_of(const Reply& reply) {
  Outcome outcome;
  outcome.status = reply.kind == Reply::Kind::timeout ? Status::timeout : Status::crashed;
  const bool killed = reply.signal != 0 && !own_fault(reply.signal);
  if (killed || names_shortage(reply.detail)) outcome.status = Status::unjudged;
  outcome.detail = reply.detail;
  outcome.ran = true;
  return outcome;
}

/// An answer about a plan, or nothing when it is not one.
std::optional<Outcome> read(const json& value) {
  std::optional<Outcome> outcome = outcome_from(value);
  if (outcome) outcome->ran = true;
  return outcome;
}

/// The answers about `count` plans, or nothing when there is not one for each.
std::optional<std::vector<Outcome>> read_all(const json& value, std::size_t count) {
  const auto answers = value.find("plans");
  if (answers == value.end() || !answers->is_array() || answers->size() != count) return {};
  std::vector<Outcome> outcomes;
  for (const json& answer : *answers) {
    auto outcome = read(answer);
    if (!outcome) return {};
    outcomes.push_back(std::move(*outcome));
  }
  return outcomes;
}

/// Whether a config gets a second try: the machine may have failed, not the config. (A wrong output
/// is the config's fault, even if it is rare.)
bool doubtful(Status status) {
  return status == Status::crashed || status == Status::timeout || status == Status::illegal ||
         status == Status::failed;
}

/// The outcome; unjudged if this process lacks a resource, so that the failure may not be the
/// config's.
Outcome in_health(Outcome outcome) {
  if (!doubtful(outcome.status)) return outcome;
  if (const std::string lack = shortage(); !lack.empty()) {
    outcome.status = Status::unjudged;
    outcome.detail += fmt::format(" (this process is short of {})", lack);
  }
  return outcome;
}

Outcome failed_build(const BuildResult& result) {
  const bool own = result.kind == ErrorKind::kCompile && !names_shortage(result.error);
  return in_health({own ? Status::failed : Status::unjudged, result.error, {}, 0, false, false});
}

/// The number under `name`, 0 when there is none.
std::int64_t number(const json& value, const char* name) {
  const auto at = value.find(name);
  return at != value.end() && at->is_number_integer() ? at->get<std::int64_t>() : 0;
}

/// The text under `name`, empty when there is none.
std::string text(const json& value, const char* name) {
  const auto at = value.find(name);
  return at != value.end() && at->is_string() ? at->get<std::string>() : std::string();
}

Outcome nonsense(const json& value) {
  return {Status::crashed, fmt::format("the worker answered {}", value.dump()), {}, 0, false, true};
}

}  // namespace

bool same_extents(const Setting& a, const Setting& b) {
  return a.B == b.B && a.T == b.T && a.N == b.N && a.lengths == b.lengths;
}

WorkerLaboratory::WorkerLaboratory(const SearchSpace& space, Builder& builder, Cache& cache,
                                   LaboratoryOptions options)
    : space_(space),
      builder_(builder),
      cache_(cache),
      options_(std::move(options)),
      ahead_(builder, options_.jobs, options_.overlap),
      worker_(options_.worker_command),
      spill_free_(space.groups.size(), 0),
      repeats_(space.groups.size(), 0) {}

KernelSpec WorkerLaboratory::spec_of(std::size_t group, std::size_t config) const {
  const Group& own = space_.groups[group];
  return {own.template_id, own.constants, own.configs[config]};
}

/// The kernels of the plan the candidate is measured in, its own first.
std::vector<KernelSpec> WorkerLaboratory::needs(const Candidate& candidate) const {
  const Group& own = space_.groups[candidate.group];
  std::vector<KernelSpec> specs{spec_of(candidate.group, candidate.config)};
  for (std::size_t i = 0; i < own.context.size(); ++i)
    if (i != own.step)
      specs.push_back(spec_of(own.context[i], space_.groups[own.context[i]].default_config));
  return specs;
}

const std::string& WorkerLaboratory::key_of(const Candidate& candidate) {
  std::string& key = keys_[candidate];
  if (key.empty()) key = builder_.key(spec_of(candidate.group, candidate.config));
  return key;
}

std::optional<Outcome> WorkerLaboratory::recall(const Candidate& candidate) {
  const Group& group = space_.groups[candidate.group];
  const std::vector<MeasurementRow> rows =
      cache_.find_measurements(options_.device, options_.problem, group.template_id,
                               group.configs[candidate.config].to_string());
  // Times of two shapes that share a key, or of two machines, are not comparable.
  const auto row = std::ranges::find_if(rows, [&](const MeasurementRow& of) {
    return of.driver == options_.driver && of.artifact_key == key_of(candidate) &&
           same_extents(of.setting, options_.setting) && of.setting.host == options_.setting.host &&
           of.setting.unit == options_.setting.unit;
  });
  if (row == rows.end()) return {};
  const auto status = parse_status(row->status);
  if (!status || *status == Status::unjudged || (*status == Status::ok && row->samples_us.empty()))
    return {};
  Outcome outcome{*status, row->detail, row->samples_us, row->error, true, false};
  if (const auto artifact = cache_.find_artifact(row->artifact_key))
    if (const auto known = from_row(*artifact)) {
      outcome.resources = known->resources;
      outcome.compile_ms = known->compile_ms;
    }
  settle(candidate, outcome);
  return outcome;
}

/// Records the group's best time, against which later configs are measured.
void WorkerLaboratory::settle(const Candidate& candidate, const Outcome& outcome) {
  if (outcome.status != Status::ok) return;
  int& repeats = repeats_[candidate.group];
  if (repeats == 0) repeats = repeats_for(summarize(outcome.samples).median);
}

std::optional<Resources> WorkerLaboratory::resources(const Candidate& candidate) {
  const auto built = ahead_.finished(spec_of(candidate.group, candidate.config));
  if (!built) return {};
  return built->resources;
}

void WorkerLaboratory::announce(std::span<const Candidate> candidates) {
  std::vector<KernelSpec> specs;
  for (const Candidate& candidate : candidates)
    for (KernelSpec& spec : needs(candidate)) specs.push_back(std::move(spec));
  ahead_.announce(specs);
}

std::optional<Outcome> WorkerLaboratory::measure(const Candidate& candidate, double bar) {
  const std::vector<KernelSpec> specs = needs(candidate);
  std::vector<BuildResult> results;
  for (const KernelSpec& spec : specs) {
    std::optional<BuildResult> result = ahead_.wait(spec, options_.interrupted);
    if (!result) return {};
    if (!result->built && result->kind == ErrorKind::kUnavailable)
      throw Error(ErrorKind::kUnavailable, result->error);
    results.push_back(std::move(*result));
  }
  if (BuildResult& first = results.front(); !first.built) {
    first = try_build(builder_, specs.front());
    if (first.built && first.built->compiled) ++compiled_besides_;
  }
  std::optional<Outcome> outcome;
  if (!results.front().built) {
    outcome = failed_build(results.front());
  } else if (const auto bad = std::find_if(results.begin(), results.end(),
                                           [](const BuildResult& r) { return !r.built; });
             bad != results.end()) {
    // Not the candidate's fault: not stored.
    return Outcome{Status::unjudged, bad->error, {}, 0, false, false};
  } else {
    outcome = unfit(candidate, *results.front().built);
    if (!outcome) outcome = run(candidate, bar);
  }
  if (!outcome || outcome->status == Status::unjudged) return outcome;
  if (results.front().built) {
    outcome->resources = results.front().built->resources;
    outcome->compile_ms = results.front().built->compile_ms;
  }
  if (outcome->status == Status::ok && outcome->resources->spill_bytes == 0)
    spill_free_[candidate.group] = 1;
  settle(candidate, *outcome);
  remember(candidate, *outcome);
  return outcome;
}

/// The outcome of a compiled kernel that need not run; nothing if it must run.
std::optional<Outcome> WorkerLaboratory::unfit(const Candidate& candidate,
                                               const Built& built) const {
  const std::int64_t registers = (built.resources.registers + kRegisterStep - 1) / kRegisterStep *
                                 kRegisterStep * built.threads;
  if (options_.registers_per_block != 0 && registers > options_.registers_per_block)
    return Outcome{
        Status::illegal,
        fmt::format("{} threads of {} registers are more than the {} a block may have",
                    built.threads, built.resources.registers, options_.registers_per_block),
        {},
        0,
        false,
        false};
  if (built.resources.spill_bytes > kBearableSpill && spill_free_[candidate.group] != 0)
    return Outcome{Status::rejected,
                   fmt::format("spills {} bytes where another config spills none",
                               built.resources.spill_bytes),
                   {},
                   0,
                   false,
                   false};
  return {};
}

/// A candidate has failed only when it fails in a new worker too.
std::optional<Outcome> WorkerLaboratory::run(const Candidate& candidate, double bar) {
  std::optional<Outcome> outcome = run_once(candidate, bar);
  if (outcome && doubtful(outcome->status)) {
    worker_.kill();
    outcome = run_once(candidate, bar);
  }
  if (outcome) outcome = in_health(std::move(*outcome));
  return outcome;
}

std::optional<Outcome> WorkerLaboratory::run_once(const Candidate& candidate, double bar) {
  if (!worker_.running() && !open_worker()) return {};
  const json request{{"measure",
                      {{"plan", to_json(plan_of(space_, candidate))},
                       {"step", space_.groups[candidate.group].step},
                       {"bar_us", bar},
                       {"repeats", repeats_[candidate.group]}}}};
  const auto start = std::chrono::steady_clock::now();
  const Reply reply = worker_.ask(request, timeout(), options_.interrupted);
  if (reply.kind == Reply::Kind::interrupted) return {};
  if (reply.kind != Reply::Kind::answer) return outcome_of(reply);
  Outcome outcome = read(reply.value).value_or(nonsense(reply.value));
  outcome.measure_ms = 1e3 * seconds_since(start);
  if (outcome.pace_us > 0) paces_us_.push_back(outcome.pace_us);
  compiled_besides_ += number(reply.value, "compiled");
  if (outcome.status == Status::crashed || outcome.status == Status::unjudged) worker_.kill();
  slowest_answer_s_ = std::max(slowest_answer_s_, seconds_since(start));
  return outcome;
}

/// Starts a worker; false when interrupted meanwhile. A worker that cannot be opened is no
/// candidate's fault: throws.
bool WorkerLaboratory::open_worker() {
  worker_.start();
  const Reply reply = worker_.ask(options_.open, options_.open_timeout_s, options_.interrupted);
  if (reply.kind == Reply::Kind::interrupted) return false;
  if (reply.kind == Reply::Kind::answer && reply.value.contains("ready")) return true;
  worker_.kill();
  if (const std::string said = text(reply.value, "error"); !said.empty())
    throw Error(
        text(reply.value, "kind") == "input" ? ErrorKind::kBadInput : ErrorKind::kUnavailable,
        said);
  throw Error(ErrorKind::kUnavailable,
              fmt::format("the tuning worker '{}' does not start: {}",
                          fmt::join(options_.worker_command, " "),
                          reply.kind == Reply::Kind::answer ? reply.value.dump() : reply.detail));
}

double WorkerLaboratory::timeout() const {
  if (slowest_answer_s_ == 0) return options_.first_timeout_s;
  return std::max(options_.least_timeout_s, 10 * slowest_answer_s_);
}

void WorkerLaboratory::remember(const Candidate& candidate, const Outcome& outcome) {
  const Group& group = space_.groups[candidate.group];
  MeasurementRow row;
  row.device = options_.device;
  row.problem = options_.problem;
  row.template_id = group.template_id;
  row.config = group.configs[candidate.config].to_string();
  row.artifact_key = key_of(candidate);
  row.driver = options_.driver;
  row.status = to_string(outcome.status);
  row.detail = outcome.detail;
  row.samples_us = outcome.samples;
  row.median_us = summarize(outcome.samples).median;
  row.error = outcome.error;
  row.setting = options_.setting;
  row.clocks_mhz = outcome.clocks_mhz;
  if (!row.clocks_mhz.empty()) row.setting.clock_mhz = median_of(row.clocks_mhz);
  if (const int repeats = repeats_[candidate.group]; repeats > 0 && !outcome.samples.empty())
    row.setting.regime = fmt::format("{} launch{} a sample, {}", repeats, repeats > 1 ? "es" : "",
                                     options_.cold ? "cold" : "warm");
  cache_.store_measurement(row);
}

std::optional<std::vector<Series>> WorkerLaboratory::race(std::span<const Candidate> candidates,
                                                          double seconds) {
  if (!worker_.running() && !open_worker()) return {};
  json plans = json::array();
  for (const Candidate& candidate : candidates)
    plans.push_back(to_json(plan_of(space_, candidate)));
  const std::size_t group = candidates.front().group;
  const json request{{"race",
                      {{"plans", std::move(plans)},
                       {"step", space_.groups[group].step},
                       {"repeats", repeats_[group]},
                       {"seconds", seconds}}}};
  const double patience = options_.first_timeout_s + 2 * seconds;
  const Reply reply = worker_.ask(request, patience, options_.interrupted);
  if (reply.kind == Reply::Kind::interrupted) return {};
  std::vector<Series> series(candidates.size());
  auto outcomes =
      reply.kind == Reply::Kind::answer ? read_all(reply.value, candidates.size()) : std::nullopt;
  if (!outcomes) {
    worker_.kill();
    return series;
  }
  compiled_besides_ += number(reply.value, "compiled");
  for (std::size_t i = 0; i < candidates.size(); ++i)
    if (Outcome& outcome = (*outcomes)[i]; outcome.status == Status::ok)
      series[i] = {std::move(outcome.samples), std::move(outcome.clocks_mhz)};
  return series;
}

std::vector<PlanTiming> WorkerLaboratory::compare(std::span<const Plan> plans, double seconds) {
  std::vector<PlanTiming> timings;
  for (const Plan& plan : plans) timings.push_back({plan, Status::ok, "", {}});
  // A plan that ends the worker twice is left out of the next try.
  std::map<const PlanTiming*, int> strikes;
  for (bool settled = false; !settled;) {
    std::vector<PlanTiming*> running;
    for (PlanTiming& timing : timings)
      if (timing.status == Status::ok) running.push_back(&timing);
    settled = running.empty() || compare_once(running, seconds, strikes);
  }
  return timings;
}

/// One comparison. False when a plan ended the worker: it is marked the second time. True when the
/// answers are in, or when interrupted, which leaves no samples.
bool WorkerLaboratory::compare_once(std::span<PlanTiming* const> running, double seconds,
                                    std::map<const PlanTiming*, int>& strikes) {
  if (!worker_.running() && !open_worker()) return true;
  json list = json::array();
  for (const PlanTiming* timing : running) list.push_back(to_json(timing->plan));
  json request{{"compare", {{"plans", std::move(list)}, {"seconds", seconds}}}};
  const double patience = options_.first_timeout_s + 2 * seconds;
  std::size_t at = 0;
  Reply reply = worker_.ask(request, patience, options_.interrupted);
  while (reply.kind == Reply::Kind::answer && reply.value.contains("at")) {
    const auto last = static_cast<std::int64_t>(running.size()) - 1;
    at = static_cast<std::size_t>(std::clamp(number(reply.value, "at"), std::int64_t{0}, last));
    reply = worker_.ask(nullptr, patience, options_.interrupted);
  }
  if (reply.kind == Reply::Kind::interrupted) return true;
  if (reply.kind == Reply::Kind::answer && take_answers(reply.value, running)) return true;
  worker_.kill();
  if (++strikes[running[at]] < 2) return false;
  const Outcome outcome =
      in_health(reply.kind == Reply::Kind::answer ? nonsense(reply.value) : outcome_of(reply));
  running[at]->status = outcome.status;
  running[at]->detail = outcome.detail;
  return false;
}

/// False when the reply does not hold an answer for each.
bool WorkerLaboratory::take_answers(const json& value, std::span<PlanTiming* const> running) {
  const auto outcomes = read_all(value, running.size());
  if (!outcomes) return false;
  for (std::size_t i = 0; i < running.size(); ++i) {
    running[i]->status = (*outcomes)[i].status;
    running[i]->detail = (*outcomes)[i].detail;
    running[i]->samples = (*outcomes)[i].samples;
    running[i]->clocks_mhz = (*outcomes)[i].clocks_mhz;
  }
  compiled_besides_ += number(value, "compiled");
  return true;
}

std::int64_t WorkerLaboratory::compiled() const { return ahead_.compiled() + compiled_besides_; }

}  // namespace wyvern
