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
  std::optional<std::string> device;
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
                              TuneOptions options) {
  const StopOnInterrupt on_interrupt;
  Progress progress("tuning");
  options.worker_command = worker_command();
  options.interrupted = [] { return stop_asked != 0; };
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
  put(table.text());
  say("of {} configs {} measured, {} known before; {} wrong, {} failed; compiled {} kernels; {}",
      r.counts.space, r.counts.measured, r.counts.reused, r.counts.wrong,
      r.counts.crashed + r.counts.timeout + r.counts.failed, r.counts.compiled,
      duration_text(r.seconds));
  if (r.sweep_configs > 0)
    say("{}: {} configs beyond the local search took {}",
        r.exhaustive ? "every config that may matter was measured"
                     : "not every config was measured",
        r.sweep_configs, duration_text(r.sweep_seconds));
  if (!r.unjudged.empty())
    say("the machine failed meanwhile ({}); the same command tries again what it could not judge",
        r.unjudged);
  else if (!r.complete)
    say("the budget ended before the search did; the same command goes on from here");
  if (!r.stored && r.unjudged.empty())
    say("the winner could not be stored; the cache says why above");
}

int execute(const Flags& flags, bool json) {
  const Selection selection = select(flags.selection, flags.options);
  TuneOptions options;
  options.budget = std::chrono::duration<double>(parse_seconds("--budget", flags.budget));
  options.jobs = static_cast<unsigned>(parse_integer("--jobs", flags.jobs, 0, 1024));
  options.force = flags.force;
  options.exhaustive = flags.exhaustive;
  const Device device = open_device(flags.device);
  Runtime runtime({.cache = nullptr, .plans = nullptr, .compile_jobs = options.jobs});
  const TuneResult result = tune_with_progress(runtime, device, selection.problem, options);
  if (result.interrupted)
    throw Error(ErrorKind::kUnavailable,
                "tuning was interrupted; what was measured is kept and the same command goes on "
                "from there");
  if (json)
    print_document({{"operator", selection.problem.op},
                    {"device", device.info().name},
                    {"model", device.info().model},
                    {"problem", to_json(selection.problem)},
                    {"plan", to_json(result.plan)},
                    {"tuned_ms", result.tuned_us / 1e3},
                    {"spread_ms", result.tuned_spread_us / 1e3},
                    {"default_ms", result.default_us / 1e3},
                    {"counts", counts_json(result.counts)},
                    {"search", search_json(result)},
                    {"seconds", result.seconds},
                    {"complete", result.complete},
                    {"stored", result.stored},
                    {"cache", runtime.cache().file().string()}});
  else
    print_text(device, selection.problem, result);
  return kDone;
}

}  // namespace

void add_tune(Command& command) {
  const auto flags = std::make_shared<Flags>();
  CLI::App& verb = command.verb("tune", "find and remember the fastest plan for a problem",
                                [flags](bool json) { return execute(*flags, json); });
  add_selection(verb, flags->selection);
  add_device(verb, flags->device);
  verb.add_option("--budget", flags->budget, "time to spend, such as 60s (default) or 2m");
  verb.add_option("--jobs", flags->jobs,
                  "threads that compile (default 0: one a core that measuring does not need)");
  add_switch(verb, "--force", flags->force, "measure again what is known");
  add_switch(verb, "--exhaustive", flags->exhaustive,
             "every config, also beyond what the budget has room for at the end of the search");
  add_options(verb, flags->options);
}

}  // namespace wyvern::cli
