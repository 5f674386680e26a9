#include <wyvern/runtime.hpp>

#include <csignal>
#include <memory>
#include <optional>
#include <string>

#include "autotune/tuner.hpp"
#include "cache/cache.hpp"
#include "tools/wyvern/command.hpp"
#include "tools/wyvern/describe.hpp"
#include "tools/wyvern/progress.hpp"
#include "tools/wyvern/selection.hpp"
#include "tools/wyvern/worker.hpp"

namespace wyvern::cli {
namespace {

struct Flags {
  SelectionFlags selection;
  OptionFlags options;
  std::optional<std::string> device, problem;
  std::string budget = "60s";
  std::string jobs = "0";
  bool force = false;
  bool exhaustive = false;
};

volatile std::sig_atomic_t stop_asked = 0;

/// While it lives SIGINT asks the tuner to stop; a second one ends the program at once.
class StopOnInterrupt {
 public:
  StopOnInterrupt() {
    struct sigaction action{};
    action.sa_handler = [](int) { stop_asked = 1; };
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    sigaction(SIGINT, &action, &before_);
  }
  ~StopOnInterrupt() { sigaction(SIGINT, &before_, nullptr); }
  StopOnInterrupt(const StopOnInterrupt&) = delete;
  StopOnInterrupt& operator=(const StopOnInterrupt&) = delete;

 private:
  struct sigaction before_{};
};

TuneResult tune_with_progress(Runtime& runtime, const Device& device, const Problem& problem,
                              TuneOptions options) {
  const StopOnInterrupt on_interrupt;
  Progress progress("tuning");
  options.worker_command = worker_command();
  options.interrupted = [] { return stop_asked != 0; };
  options.progress = [&](const TuneProgress& at) {
    const std::string note = at.phase == TuneProgress::Phase::comparing ? "comparing the best plans"
                             : at.best_us > 0 ? fmt::format("best {:.3f} ms", at.best_us / 1e3)
                                              : "";
    progress.update(static_cast<std::size_t>(at.done), static_cast<std::size_t>(at.total), note,
                    at.remaining_s);
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

void print_text(const Device& device, const Problem& problem, const TuneResult& r) {
  say("{} on {} ({})", describe(problem), device.info().name, device.info().model);
  put(plan_text(r.plan));
  const auto ms = [](double us) { return us > 0 ? fmt::format("{:.3f}", us / 1e3) : "-"; };
  Table table({"plan", "ms", "spread"});
  table.row({"tuned", ms(r.tuned_us), ms(r.tuned_spread_us)});
  table.row({"default", ms(r.default_us), "-"});
  put(table.text());
  say("of {} configs {} measured, {} known before; {} wrong, {} failed; compiled {} kernels; {}",
      r.counts.space, r.counts.measured, r.counts.reused, r.counts.wrong,
      r.counts.crashed + r.counts.timeout + r.counts.failed, r.counts.compiled,
      duration_text(r.seconds));
  if (!r.unjudged.empty())
    say("the machine failed meanwhile ({}); the same command tries again what it could not judge",
        r.unjudged);
  else if (!r.complete)
    say("the budget ended before the search did; the same command goes on from here");
  if (!r.stored && r.unjudged.empty())
    say("the winner could not be stored; the cache says why above");
}

Problem problem_of(const Flags& flags) {
  const SelectionFlags& selection = flags.selection;
  if (!flags.problem) return select(selection, flags.options).problem;
  bool others = selection.preset || selection.shape || selection.seqlens || selection.tokens ||
                selection.batch;
  for (const ProblemField& field : problem_fields())
    others |=
        flags.options.find(field.name) != nullptr || selection.fields.find(field.name) != nullptr;
  if (others)
    throw Error(ErrorKind::kBadInput,
                "--problem is given beside other options that name a problem; it must be alone");
  return problem_from_fields(selection.op, *flags.problem);
}

int execute(const Flags& flags, bool json) {
  const Problem problem = problem_of(flags);
  TuneOptions options;
  options.budget = std::chrono::duration<double>(parse_seconds("--budget", flags.budget));
  options.jobs = static_cast<unsigned>(parse_integer("--jobs", flags.jobs, 0, 1024));
  options.force = flags.force;
  options.exhaustive = flags.exhaustive;
  const Device device = open_device(flags.device);
  Runtime runtime({.cache = nullptr, .plans = nullptr, .compile_jobs = options.jobs});
  const TuneResult result = tune_with_progress(runtime, device, problem, options);
  if (result.interrupted)
    throw Error(ErrorKind::kUnavailable,
                "tuning was interrupted; what was measured is kept and the same command goes on "
                "from there");
  if (json)
    print_document({{"operator", problem.op},
                    {"device", device.info().name},
                    {"model", device.info().model},
                    {"problem", to_json(problem)},
                    {"plan", to_json(result.plan)},
                    {"tuned_ms", result.tuned_us / 1e3},
                    {"spread_ms", result.tuned_spread_us / 1e3},
                    {"default_ms", result.default_us / 1e3},
                    {"counts", counts_json(result.counts)},
                    {"seconds", result.seconds},
                    {"complete", result.complete},
                    {"stored", result.stored},
                    {"cache", runtime.cache().file().string()}});
  else
    print_text(device, problem, result);
  return kDone;
}

}  // namespace

void add_tune(Command& command) {
  const auto flags = std::make_shared<Flags>();
  CLI::App& verb = command.verb("tune", "find and remember the fastest plan for a problem",
                                [flags](bool json) { return execute(*flags, json); });
  add_selection(verb, flags->selection);
  verb.add_option("--problem", flags->problem,
                  "every field that matters, such as T=64,H=2,K=128,use_qk_l2norm=true, instead of "
                  "--preset or --shape and the options below");
  add_device(verb, flags->device);
  verb.add_option("--budget", flags->budget, "time to spend, such as 60s (default) or 2m");
  verb.add_option("--jobs", flags->jobs, "threads that compile (default 0: one per core)");
  add_switch(verb, "--force", flags->force, "measure again what is known");
  add_switch(verb, "--exhaustive", flags->exhaustive, "every config instead of a local search");
  add_options(verb, flags->options);
}

}  // namespace wyvern::cli
