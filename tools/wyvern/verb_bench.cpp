#include <wyvern/error.hpp>
#include <wyvern/runtime.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "autotune/floor.hpp"
#include "autotune/inputs.hpp"
#include "cache/rows.hpp"
#include "cache/transfer.hpp"
#include "runtime/devices/device_impl.hpp"
#include "runtime/plan.hpp"
#include "tools/wyvern/bench_builds.hpp"
#include "tools/wyvern/check.hpp"
#include "tools/wyvern/command.hpp"
#include "tools/wyvern/describe.hpp"
#include "tools/wyvern/example.hpp"
#include "tools/wyvern/launch.hpp"
#include "tools/wyvern/progress.hpp"
#include "tools/wyvern/selection.hpp"

namespace wyvern::cli {
namespace {

struct Flags {
  SelectionFlags selection;
  OptionFlags options;
  std::optional<std::string> device, compare;
};

/// One of the plans that are compared.
struct Entrant {
  std::string name;
  Origin origin;
  Operator op;
  std::shared_ptr<void> workspace;
  std::unique_ptr<Replay> replay;
  std::vector<double> samples_us;
  Json checks;

  Entrant(std::string label, Origin from, Operator prepared, const Device& device)
      : name(std::move(label)),
        origin(from),
        op(std::move(prepared)),
        workspace(device.allocate(op.workspace_bytes())) {}
};

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Median absolute deviation.
double spread(const std::vector<double>& values) {
  const double centre = median(values);
  std::vector<double> distances;
  for (const double value : values) distances.push_back(std::fabs(value - centre));
  return median(distances);
}

constexpr std::size_t kFewestRuns = 5;
constexpr std::size_t kMostRuns = 100;
constexpr double kSecondsEach = 3;
constexpr std::int64_t kLargestFlush = std::int64_t{256} << 20;

/// Times the entrants in turn: replayed launches (a graph on CUDA), caches displaced before each
/// one, outside the timed region.
void measure(const Device& device, const Arguments& arguments, std::vector<Entrant>& entrants) {
  DeviceImpl& impl = device.impl();
  const std::shared_ptr<void> stream = impl.make_stream();
  const std::unique_ptr<Timer> timer = impl.make_timer();
  const auto flush_bytes =
      static_cast<std::size_t>(std::min(2 * impl.cache_bytes(), kLargestFlush));
  const std::shared_ptr<void> flushed = device.allocate(flush_bytes);
  for (Entrant& entrant : entrants) {
    entrant.replay =
        impl.capture([&](Stream on) { entrant.op.launch(arguments, entrant.workspace.get(), on); });
    entrant.replay->launch(stream.get());
  }
  device.synchronize(stream.get());

  Progress progress("timing");
  const auto started = std::chrono::steady_clock::now();
  const double most_seconds = kSecondsEach * static_cast<double>(entrants.size());
  for (std::size_t run = 0; run < kMostRuns; ++run) {
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - started;
    if (run >= kFewestRuns && elapsed.count() > most_seconds) break;
    for (Entrant& entrant : entrants) {
      device.fill(flushed.get(), static_cast<unsigned char>(run), flush_bytes, stream.get());
      timer->start(stream.get());
      entrant.replay->launch(stream.get());
      timer->stop(stream.get());
      entrant.samples_us.push_back(timer->elapsed_us());
    }
    progress.update(run + 1, kMostRuns, "");
  }
}

/// The selection, or its first tokens where the oracle would take long on all of it. Heads and
/// dimensions stay, so the very same kernels are checked.
Selection checked_selection(const Selection& whole) {
  const Problem& p = whole.problem;
  // Updates of a state's elements; seconds.
  const double most_updates = p.pass == Pass::backward ? 8e9 : 4e10;
  const double per_token = static_cast<double>(p.HV * p.K * p.V);
  const double most_tokens = most_updates / per_token;
  if (static_cast<double>(p.B) * static_cast<double>(p.T) <= most_tokens) return whole;
  Selection part = whole;
  Problem& q = part.problem;
  if (!p.packed) {
    q.B = q.N = std::min<std::int64_t>(p.B, 2);
    q.T = std::max<std::int64_t>(1, static_cast<std::int64_t>(most_tokens) / q.B);
    return part;
  }
  const auto each = std::max<std::int64_t>(1, static_cast<std::int64_t>(most_tokens) / p.N);
  for (std::size_t n = 0; n + 1 < part.cu_seqlens.size(); ++n)
    part.cu_seqlens[n + 1] =
        part.cu_seqlens[n] + std::min(each, whole.cu_seqlens[n + 1] - whole.cu_seqlens[n]);
  q.T = part.cu_seqlens.back();
  return part;
}

/// Runs each entrant's plan on the checked selection and compares with the oracle.
void verify(Runtime& runtime, const Device& device, const Selection& selection,
            std::vector<Entrant>& entrants) {
  Tensors inputs = make_example(selection, 1);
  add_kept(runtime, device, selection, inputs);
  const Tensors outputs = make_outputs(selection.problem, inputs);
  const Arguments host = host_arguments(selection, inputs, outputs);
  const DeviceArguments placed(device, selection.problem, host);
  const Oracle oracle(selection.problem, host_inputs(selection, inputs));
  for (Entrant& entrant : entrants) {
    const Operator op = runtime.prepare(device, selection.problem, entrant.op.plan());
    const std::shared_ptr<void> workspace = device.allocate(op.workspace_bytes());
    placed.poison();
    op.launch(placed.arguments(), workspace.get());
    device.synchronize();
    placed.fetch_outputs();
    entrant.checks = oracle.check(host);
  }
}

Json entrant_json(const Entrant& entrant, const Work& work, const Peak& peak) {
  const double floor_s = floor_time(work, peak);
  const double ms = median(entrant.samples_us) / 1e3;
  return {{"name", entrant.name},
          {"origin", to_string(entrant.origin)},
          {"plan", to_json(entrant.op.plan())},
          {"ms", ms},
          {"spread_ms", spread(entrant.samples_us) / 1e3},
          {"runs", entrant.samples_us.size()},
          {"tb_per_s", work.bytes / ms / 1e9},
          {"tflop_per_s", work.flops / ms / 1e9},
          {"percent_of_floor", 100 * floor_s * 1e3 / ms},
          {"percent_of_peak_flops", 100 * work.flops / ms * 1e3 / peak.flops_per_s},
          {"workspace_bytes", entrant.op.workspace_bytes()},
          {"checks", entrant.checks},
          {"verified", passed(entrant.checks)}};
}

void print_text(const Json& document, const Device& device, const Selection& selection) {
  say("{} on {} ({})", describe(selection.problem), device.info().name, device.info().model);
  Table table({"plan", "from", "ms", "of default", "spread", "TB/s", "TFLOP/s", "% of FLOPs",
               "% of roofline", "workspace", "correct"});
  for (const Json& row : document["plans"])
    table.row({row["name"], row["origin"], fmt::format("{:.4f}", row["ms"].get<double>()),
               fmt::format("{:.3f}", row["ratio"].get<double>()),
               fmt::format("{:.4f}", row["spread_ms"].get<double>()),
               fmt::format("{:.3f}", row["tb_per_s"].get<double>()),
               fmt::format("{:.2f}", row["tflop_per_s"].get<double>()),
               fmt::format("{:.1f}", row["percent_of_peak_flops"].get<double>()),
               fmt::format("{:.1f}", row["percent_of_floor"].get<double>()),
               bytes_text(row["workspace_bytes"].get<double>()),
               row["verified"].get<bool>() ? "yes" : "NO"});
  const Json& floor = document["floor"];
  table.row({"roofline", "-", fmt::format("{:.4f}", floor["ms"].get<double>()), "-", "-",
             fmt::format("{:.3f}", floor["bytes_per_s"].get<double>() / 1e12),
             fmt::format("{:.2f}", floor["flops_per_s"].get<double>() / 1e12), "-", "100.0", "-",
             "-"});
  put(table.text());
  say("roofline: {:.1f} MB to move, {:.2f} GFLOP; {}", floor["bytes"].get<double>() / 1e6,
      floor["flops"].get<double>() / 1e9, floor["basis"].get<std::string>());
  say("checked against the float64 oracle: {}", document["checked"].get<std::string>());
}

/// The plan that another cache or a pack has for the problem: the exact one, else the nearest.
std::optional<PlanChoice> compared_plan(const std::string& path, const DeviceInfo& device,
                                        const ProblemKey& key) {
  std::optional<PlanChoice> best;
  double least = 0;
  for (const WinnerRow& row : read_contents(path).winners) {
    if (row.device != device.key || row.family != key.family) continue;
    const double distance = extents_apart(row.tokens, row.sequences, key.tokens, key.sequences);
    auto plan = plan_from_json(row.plan);
    if (!plan || (best && distance >= least)) continue;
    best = {std::move(*plan), distance == 0 ? Origin::exact : Origin::nearest};
    least = distance;
  }
  return best;
}

/// Median over neighbouring samples of other / first.
double paired_ratio(const Entrant& other, const Entrant& first) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < std::min(other.samples_us.size(), first.samples_us.size()); ++i)
    ratios.push_back(other.samples_us[i] / first.samples_us[i]);
  return median(ratios);
}

int execute(const Flags& flags, bool json) {
  if (flags.compare && is_build(*flags.compare)) {
    const Json document = compare_builds(*flags.compare);
    if (json)
      print_document(document);
    else
      print_builds(document);
    return kDone;
  }
  const Selection selection = select(flags.selection, flags.options);
  const Problem& problem = selection.problem;
  if (problem.B * problem.T == 0)
    throw Error(ErrorKind::kBadInput, "T is 0; a problem to be timed must have tokens");
  const Device device = open_device(flags.device);
  const std::uint64_t bytes = tensor_bytes(problem).all;
  check_memory(device, problem, bytes, bytes);
  Runtime runtime;
  std::vector<Entrant> entrants;
  const Operator best = runtime.prepare(device, problem);
  check_memory(device, problem, bytes, bytes + best.workspace_bytes());
  const bool tuned = best.origin() != Origin::fallback;
  if (tuned) entrants.emplace_back("tuned", best.origin(), best, device);
  if (flags.compare) {
    const auto other = compared_plan(*flags.compare, device.info(), problem_key(problem));
    if (!other)
      throw Error(ErrorKind::kBadInput,
                  fmt::format("--compare is {}, which has no plan for this problem on {}",
                              *flags.compare, device.info().model));
    entrants.emplace_back("compared", other->origin, runtime.prepare(device, problem, other->plan),
                          device);
  }
  const Plan plan = default_plan(problem, device.impl().target());
  entrants.emplace_back("default", Origin::fallback, runtime.prepare(device, problem, plan),
                        device);
  const Selection checked = checked_selection(selection);
  verify(runtime, device, checked, entrants);
  // A CPU's peaks are measured on both sides of the timing: a shared machine has slow spells.
  Peak peak = device_peak(device, problem, true);
  {
    Tensors inputs = make_example(selection, 2);
    add_kept(runtime, device, selection, inputs);
    const Tensors outputs = make_outputs(problem, inputs);
    const DeviceArguments placed(device, problem, host_arguments(selection, inputs, outputs));
    measure(device, placed.arguments(), entrants);
  }
  const Work work = work_of(problem);
  const Peak after = device_peak(device, problem, true);
  peak.bytes_per_s = std::max(peak.bytes_per_s, after.bytes_per_s);
  peak.flops_per_s = std::max(peak.flops_per_s, after.flops_per_s);
  const double floor_s = floor_time(work, peak);

  Json document{{"operator", problem.op},
                {"device", device.info().name},
                {"model", device.info().model},
                {"problem", to_json(problem)},
                {"plans", Json::array()},
                {"floor",
                 {{"ms", floor_s * 1e3},
                  {"bytes", work.bytes},
                  {"flops", work.flops},
                  {"bytes_per_s", peak.bytes_per_s},
                  {"flops_per_s", peak.flops_per_s},
                  {"basis", peak.basis}}},
                {"checked", checked.problem.T == problem.T && checked.problem.B == problem.B
                                ? "the whole problem"
                                : describe(checked.problem)}};
  bool good = true;
  for (const Entrant& entrant : entrants) {
    document["plans"].push_back(entrant_json(entrant, work, peak));
    document["plans"].back()["ratio"] = paired_ratio(entrant, entrants.back());
    good = good && passed(entrant.checks);
  }
  if (json)
    print_document(document);
  else
    print_text(document, device, selection);
  if (selection.problem.batch_invariant)
    note("wyvern: a batch_invariant problem always has its default plan\n");
  else if (!tuned)
    note("wyvern: nothing is tuned for this problem yet; `wyvern tune` does it\n");
  return good ? kDone : kCheckFailed;
}

}  // namespace

void add_bench(Command& command) {
  const auto flags = std::make_shared<Flags>();
  CLI::App& verb =
      command.verb("bench", "time the tuned plan and the default plan, beside the roofline",
                   [flags](bool json) { return execute(*flags, json); });
  add_selection(verb, flags->selection);
  add_device(verb, flags->device);
  verb.add_option("--compare", flags->compare,
                  "another cache or pack, whose plan is timed too; or another build of wyvern");
  add_options(verb, flags->options);
}

}  // namespace wyvern::cli
