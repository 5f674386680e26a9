#include <wyvern/runtime.hpp>

#include <wyvern/error.hpp>

#include <fmt/chrono.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "autotune/build.hpp"
#include "autotune/gzip.hpp"
#include "autotune/recording.hpp"
#include "autotune/tuner.hpp"
#include "cache/cache.hpp"
#include "runtime/devices/device_impl.hpp"
#include "runtime/plan.hpp"
#include "tools/wyvern/command.hpp"
#include "tools/wyvern/describe.hpp"
#include "tools/wyvern/file.hpp"
#include "tools/wyvern/progress.hpp"
#include "tools/wyvern/selection.hpp"
#include "tools/wyvern/tune.hpp"
#include "tools/wyvern/worker.hpp"

namespace wyvern::cli {
namespace {

volatile std::sig_atomic_t stop_asked = 0;

/// For all remaining calls, when the earlier ones have used the whole budget.
constexpr std::chrono::duration<double> kLeastBudget{0.1};

constexpr std::int64_t kMostProcesses = std::numeric_limits<::pid_t>::max();

std::string note_of(const TuneProgress& at) {
  const std::string best =
      at.best_us > 0 ? fmt::format("best {:.3f} ms", at.best_us / 1e3) : std::string();
  switch (at.phase) {
    case TuneProgress::Phase::searching: return best;
    case TuneProgress::Phase::sweeping: return best + ", every config that is left";
    case TuneProgress::Phase::racing: return "near-ties in turn";
    case TuneProgress::Phase::comparing: return "comparing the best plans";
  }
  return {};
}

TuneResult tune_with_progress(Runtime& runtime, const Device& device, const Problem& problem,
                              const std::string& title, TuneOptions options) {
  const StopOnInterrupt on_interrupt;
  Progress progress(title);
  options.progress = [&](const TuneProgress& at) {
    progress.update(static_cast<std::size_t>(at.done), static_cast<std::size_t>(at.total),
                    note_of(at), at.remaining_s);
  };
  return tune(runtime, device, problem, options);
}

Json counts_json(const TuneCounts& c) {
  return {{"space", c.space},
          {"measured", c.measured},
          {"reused", c.reused},
          {"compiled", c.compiled},
          {"ok", c.ok},
          {"wrong", c.wrong},
          {"crashed", c.crashed},
          {"timeout", c.timeout},
          {"rejected", c.rejected},
          {"illegal", c.illegal},
          {"failed", c.failed},
          {"unjudged", c.unjudged}};
}

Json search_json(const TuneResult& r) {
  return {{"exhaustive", r.exhaustive},
          {"sweep_configs", r.sweep_configs},
          {"sweep_seconds", r.sweep_seconds}};
}

void print_text(const Device& device, const Problem& problem, const TuneResult& r) {
  say("{} on {} ({})", describe(problem), device.info().name, device.info().model);
  put(plan_text(r.plan));
  const auto ms = [](double us) { return us > 0 ? fmt::format("{:.3f}", us / 1e3) : "-"; };
  Table table({"plan", "ms", "spread"});
  table.row({"tuned", ms(r.tuned_us), ms(r.tuned_spread_us)});
  table.row({"default", ms(r.default_us), "-"});
  table.row({"roofline", ms(r.floor_us), "-"});
  put(table.text());
  if (r.plan == default_plan(problem, device.impl().target()))
    say("no plan was faster than the default one beyond noise, so it stays");
  say("of {} {} measured, {} known before; {} wrong, {} failed; compiled {}; {}",
      count_text(r.counts.space, "config"), r.counts.measured, r.counts.reused, r.counts.wrong,
      r.counts.crashed + r.counts.timeout + r.counts.failed,
      count_text(r.counts.compiled, "kernel"), duration_text(r.seconds));
  if (r.sweep_configs > 0)
    say("{}: {} beyond the local search took {}",
        r.exhaustive ? "every config that may matter was measured"
                     : "not every config was measured",
        count_text(r.sweep_configs, "config"), duration_text(r.sweep_seconds));
  if (!r.unjudged.empty())
    say("the machine failed meanwhile ({}); the same command tries the unjudged configs again",
        r.unjudged);
  else if (!r.complete)
    say("the budget ended before the search did; the same command continues from here");
  if (!r.stored && r.unjudged.empty())
    say("the winner could not be stored; the cache says why above");
}

std::string today() { return fmt::format("{:%Y-%m-%d}", std::chrono::system_clock::now()); }

/// The recording of a tuning's results, in memory until it is complete.
class Recorder {
 public:
  Recorder(const Device& device, const Problem& problem, unsigned jobs) {
    head_.device = device.info().name;
    head_.kind = device.info().kind;
    head_.model = device.info().model;
    head_.key = device.info().key;
    head_.driver = device.info().driver;
    head_.day = today();
    head_.problem = problem;
    const Measuring measuring = device.impl().measuring();
    head_.overlap = measuring.beside_compilers;
    head_.jobs = compile_threads(jobs, head_.overlap);
  }
  void take(const SearchSpace& space, const Results& results) {
    text_ = recording_text(head_, space, results);
  }
  void write(const std::string& path) const {
    const std::string data = path.ends_with(".gz") ? gzip(text_) : text_;
    const std::array<std::string_view, 1> pieces{data};
    write_file(path, pieces);
  }

 private:
  RecordingHead head_;
  std::string text_;
};

bool names_by_options(const TuneFlags& flags) {
  const SelectionFlags& selection = flags.selection;
  bool named = selection.preset || selection.shape || selection.seqlens || selection.tokens ||
               selection.batch;
  for (const ProblemField& field : problem_fields())
    named |=
        flags.options.find(field.name) != nullptr || selection.fields.find(field.name) != nullptr;
  return named;
}

std::vector<SelectedCall> calls_of(const TuneFlags& flags, std::vector<LeftOutCall>& left_out) {
  // A recording is of one problem.
  if (flags.record && !flags.problem) return {{"", select(flags.selection, flags.options)}};
  if (!flags.problem) return select_calls(flags.selection, flags.options, left_out);
  if (names_by_options(flags))
    throw Error(ErrorKind::kBadInput,
                "--problem is given beside other options that name a problem; it must be alone");
  return {{"", {problem_from_fields(flags.selection.op, *flags.problem), {}}}};
}

/// The document of one call of a preset, or of the problem; it prints the text where that is
/// wanted.
Json tune_one(const TuneFlags& flags, const SelectedCall& call, const std::string& title,
              Runtime& runtime, const Device& device, TuneOptions options, bool json) {
  const Problem& problem = call.selection.problem;
  options.cu_seqlens = call.selection.cu_seqlens;
  Recorder recorder(device, problem, options.jobs);
  if (flags.record)
    options.examine = [&](const SearchSpace& space, const Results& results) {
      recorder.take(space, results);
    };
  const TuneResult result = tune_with_progress(runtime, device, problem, title, std::move(options));
  if (result.interrupted)
    throw Error(
        ErrorKind::kUnavailable,
        "tuning was interrupted; its measurements are stored and the same command continues "
        "from there");
  if (flags.record) {
    if (!result.complete)
      throw Error(ErrorKind::kUnavailable,
                  "the budget ended before every config was measured, so nothing was recorded; "
                  "the same command with a longer --budget continues from there");
    recorder.write(*flags.record);
  }
  if (!json) {
    if (!call.name.empty()) say("{}", call.name);
    print_text(device, problem, result);
  }
  Json document = tune_document(device, problem, result, runtime.cache().file().string());
  if (!call.name.empty()) document["call"] = call.name;
  return document;
}

/// Tunes the problem, or every call of a preset in turn within one budget: each gets an equal part
/// of what is left.
int tune_calls(const TuneFlags& flags, bool json) {
  using Clock = std::chrono::steady_clock;
  std::vector<LeftOutCall> left_out;
  const std::vector<SelectedCall> calls = calls_of(flags, left_out);
  TuneOptions options = tune_options(flags);
  const auto budget = options.budget;
  const Device device = open_device(flags.device);
  Runtime runtime({.cache = nullptr, .plans = nullptr, .compile_jobs = options.jobs});
  if (!json) say_left_out("", left_out);
  Json documents = Json::array();
  const Clock::time_point start = Clock::now();
  for (const SelectedCall& call : calls) {
    const std::size_t done = documents.size(), left = calls.size() - done;
    const std::chrono::duration<double> rest = budget - (Clock::now() - start);
    options.budget = std::max(rest, kLeastBudget) / static_cast<double>(left);
    const std::string title =
        calls.size() == 1 ? "tuning" : fmt::format("tuning {} of {}", done + 1, calls.size());
    documents.push_back(tune_one(flags, call, title, runtime, device, options, json));
  }
  if (!json) return kDone;
  Json document = documents.front();
  if (calls.size() > 1) document["calls"] = std::move(documents);
  if (!left_out.empty()) document["left_out"] = left_out_json(left_out);
  print_document(document);
  return kDone;
}

void require_alone(const TuneFlags& flags, std::string_view option) {
  if (!flags.selection.op.empty() || flags.selection.preset || flags.selection.shape ||
      flags.problem)
    throw Error(ErrorKind::kBadInput,
                fmt::format("{} takes its problems from a file; OP, --preset, --shape and "
                            "--problem must be left out",
                            option));
}

int execute(const TuneFlags& flags, bool json) {
  if (!flags.replay.empty()) {
    require_alone(flags, "--replay");
    return replay_recordings(flags, json);
  }
  if (flags.manifest) {
    require_alone(flags, "--manifest");
    if (flags.record)
      throw Error(ErrorKind::kBadInput, "--record takes one problem, not a --manifest");
    return tune_manifest(flags, json);
  }
  if (flags.shard)
    throw Error(ErrorKind::kBadInput, "--shard is a part of a --manifest, which is missing");
  if (flags.within || flags.missing)
    throw Error(ErrorKind::kBadInput, fmt::format("{} is for a --manifest, which is missing",
                                                  flags.within ? "--within" : "--missing"));
  if (flags.device == "all")
    throw Error(ErrorKind::kBadInput,
                "--device is 'all', which only a --manifest takes; it must be cpu or cuda:N here");
  if (flags.record && !flags.exhaustive)
    throw Error(ErrorKind::kBadInput,
                "--record keeps whole spaces; --exhaustive must be given with it");
  return tune_calls(flags, json);
}

}  // namespace

StopOnInterrupt::StopOnInterrupt() {
  struct sigaction action{};
  action.sa_handler = [](int) { stop_asked = 1; };
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, &before_);
}
StopOnInterrupt::~StopOnInterrupt() { sigaction(SIGINT, &before_, nullptr); }
bool StopOnInterrupt::asked() { return stop_asked != 0; }

TuneOptions tune_options(const TuneFlags& flags) {
  TuneOptions options;
  options.budget = std::chrono::duration<double>(parse_seconds("--budget", flags.budget));
  options.jobs = static_cast<unsigned>(parse_integer("--jobs", flags.jobs, 0, 1024));
  options.force = flags.force;
  options.exhaustive = flags.exhaustive;
  options.worker_command = worker_command();
  options.interrupted = StopOnInterrupt::asked;
  if (flags.parent) {
    const auto parent = parse_integer("--parent", *flags.parent, 1, kMostProcesses);
    options.interrupted = [parent] { return StopOnInterrupt::asked() || ::getppid() != parent; };
  }
  return options;
}

Json tune_document(const Device& device, const Problem& problem, const TuneResult& result,
                   const std::string& cache) {
  return {{"operator", problem.op},
          {"device", device.info().name},
          {"model", device.info().model},
          {"problem", to_json(problem)},
          {"plan", to_json(result.plan)},
          {"tuned_ms", result.tuned_us / 1e3},
          {"spread_ms", result.tuned_spread_us / 1e3},
          {"default_ms", result.default_us / 1e3},
          {"floor_ms", result.floor_us / 1e3},
          {"counts", counts_json(result.counts)},
          {"search", search_json(result)},
          {"seconds", result.seconds},
          {"complete", result.complete},
          {"stored", result.stored},
          {"cache", cache}};
}

void say_left_out(std::string_view where, const std::vector<LeftOutCall>& calls) {
  std::map<std::string_view, std::vector<std::string_view>> by_reason;
  for (const LeftOutCall& call : calls) by_reason[call.reason].push_back(call.name);
  for (const auto& [reason, names] : by_reason)
    say("{}left out: {} ({})", where, fmt::join(names, "; "), reason);
}

Json left_out_json(const std::vector<LeftOutCall>& calls) {
  Json array = Json::array();
  for (const LeftOutCall& call : calls)
    array.push_back({{"call", call.name}, {"reason", call.reason}});
  return array;
}

void add_tune(Command& command) {
  const auto flags = std::make_shared<TuneFlags>();
  CLI::App& verb = command.verb("tune", "find and remember the fastest plan for a problem",
                                [flags](bool json) { return execute(*flags, json); });
  add_selection(verb, flags->selection, true);
  verb.add_option("--problem", flags->problem,
                  "every field that matters, such as T=64,H=2,K=128,use_qk_l2norm=true, instead of "
                  "--preset or --shape and the options below");
  verb.add_option("--device", flags->device,
                  "cpu or cuda:N (default: the first GPU, else the CPU); with --manifest also all: "
                  "every GPU");
  verb.add_option(
      "--budget", flags->budget,
      "time to spend, such as 60s (default) or 2m; of a preset on all its calls together");
  verb.add_option("--jobs", flags->jobs,
                  "threads that compile (default 0: one a core that measuring does not need)");
  add_switch(verb, "--force", flags->force, "measure configs again that have results");
  add_switch(verb, "--exhaustive", flags->exhaustive,
             "measure every config, also beyond the budget");
  verb.add_option("--record", flags->record,
                  "with --exhaustive: write the space and all measurements to a file (.gz: "
                  "compressed)");
  verb.add_option("--replay", flags->replay,
                  "recordings: try the search on them instead, and report regret, agreement and "
                  "time");
  verb.add_option("--seeds", flags->seeds, "tunings of each recording (default 20)");
  verb.add_option("--manifest", flags->manifest,
                  "problems, one JSON object a line with the names of these options");
  verb.add_option("--shard", flags->shard,
                  "I/N: the I-th of N parts of the manifest, from 0; N alone: I from "
                  "SLURM_ARRAY_TASK_ID or JOB_COMPLETION_INDEX");
  verb.add_option("--parent", flags->parent,
                  "stop, as by ^C, when the process of this number, which started this one, ends");
  verb.add_option("--within", flags->within,
                  "with --manifest: begin no tuning that would not end within this time");
  add_switch(verb, "--missing", flags->missing,
             "with --manifest: pass over problems that the cache or a pack has an answer to");
  add_options(verb, flags->options);
}

}  // namespace wyvern::cli
