#include <wyvern/error.hpp>
#include <wyvern/runtime.hpp>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/devices/device_impl.hpp"
#include "runtime/plan.hpp"
#include "tools/wyvern/check.hpp"
#include "tools/wyvern/command.hpp"
#include "tools/wyvern/describe.hpp"
#include "tools/wyvern/launch.hpp"
#include "tools/wyvern/progress.hpp"
#include "tools/wyvern/sweep.hpp"

namespace wyvern::cli {
namespace {

struct Flags {
  std::string op;
  std::optional<std::string> pass, device, dtype, precision;
  std::string count = "0";
  std::string seed = "0";
};

/// Launches twice, each time into poisoned outputs; whether both wrote the same bytes. The outputs
/// are those of the second launch.
bool launch_twice(const Device& device, const Operator& op, const DeviceArguments& placed,
                  const Tensors& outputs) {
  const std::shared_ptr<void> workspace = device.allocate(op.workspace_bytes());
  std::vector<std::vector<char>> first;
  bool same = true;
  for (int run = 0; run < 2; ++run) {
    placed.poison();
    device.fill(workspace.get(), kPoison, op.workspace_bytes());
    device.synchronize();
    op.launch(placed.arguments(), workspace.get());
    device.synchronize();
    placed.fetch_outputs();
    std::size_t at = 0;
    for (const auto& [name, tensor] : outputs) {
      const char* bytes = static_cast<const char*>(tensor.data.get());
      if (run == 0)
        first.emplace_back(bytes, bytes + tensor.bytes());
      else
        same = same && std::memcmp(first[at++].data(), bytes, tensor.bytes()) == 0;
    }
  }
  return same;
}

/// Runs one case against the oracle.
Json run_case(Runtime& runtime, const Device& device, const Case& c) {
  const Problem& problem = c.selection.problem;
  Json row{{"case", describe(c)},
           {"seed", c.seed},
           {"options", options_of(c)},
           {"problem", to_json(problem)}};
  try {
    validate(problem);
    Tensors inputs = make_inputs(c);
    add_kept(runtime, device, c.selection, inputs);
    const Tensors outputs = make_outputs(problem, inputs);
    const Arguments host = host_arguments(c.selection, inputs, outputs);
    const DeviceArguments placed(device, problem, host);
    const Operator op = runtime.prepare(device, problem);
    row["plan"] = to_json(op.plan());
    row["repeatable"] = launch_twice(device, op, placed, outputs);
    row["checks"] = Oracle(problem, host_inputs(c.selection, inputs)).check(host);
    row["ok"] = row["repeatable"].get<bool>() && passed(row["checks"]);
  } catch (const Error& error) {
    row["message"] = error.what();
    row["ok"] = false;
  }
  return row;
}

/// Whether some plan carries out the problem on the device.
bool has_plan(const Device& device, const Problem& problem) {
  try {
    return !default_plan(problem, device.impl().target()).empty();
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kUnavailable) return false;
    throw;
  }
}

/// The largest error of a quantity over the cases of a pass, dtype and precision.
void gather(const Json& checked, Json& rows) {
  const Json& problem = checked["problem"];
  for (const Json& check : checked.value("checks", Json::array())) {
    const auto same = [&](const Json& row) {
      return row["pass"] == problem["pass"] && row["dtype"] == problem["dtype"] &&
             row["precision"] == problem["precision"] && row["quantity"] == check["quantity"];
    };
    auto row = std::find_if(rows.begin(), rows.end(), same);
    if (row == rows.end()) {
      rows.push_back({{"pass", problem["pass"]},
                      {"dtype", problem["dtype"]},
                      {"precision", problem["precision"]},
                      {"quantity", check["quantity"]},
                      {"cases", 0},
                      {"error", 0.0},
                      {"bound", check["bound"]},
                      {"ok", true},
                      {"worst", ""}});
      row = rows.end() - 1;
    }
    (*row)["cases"] = (*row)["cases"].get<int>() + 1;
    (*row)["ok"] = (*row)["ok"].get<bool>() && check["ok"].get<bool>();
    // An error that is not finite is null, and stays the worst.
    const Json& worst = (*row)["error"];
    if (worst.is_null() || (!check["error"].is_null() && check["error"] < worst)) continue;
    (*row)["error"] = check["error"];
    (*row)["bound"] = check["bound"];
    (*row)["worst"] = checked["case"];
  }
}

/// By pass, dtype and precision, in the order in which they are swept.
void sort_rows(Json& rows) {
  constexpr std::array<std::string_view, 9> kOrder{
      "forward", "backward", "recurrent", "bf16", "fp16", "fp32", "tf32x3", "tf32", "ieee"};
  const auto key = [&](const Json& row) {
    std::array<std::ptrdiff_t, 3> places{};
    constexpr std::array<const char*, 3> kFields{"pass", "dtype", "precision"};
    for (std::size_t i = 0; i < places.size(); ++i)
      places[i] = std::find(kOrder.begin(), kOrder.end(), row[kFields[i]].get<std::string>()) -
                  kOrder.begin();
    return places;
  };
  std::stable_sort(rows.begin(), rows.end(),
                   [&](const Json& a, const Json& b) { return key(a) < key(b); });
}

/// Runs every case; whether all are good.
bool run_cases(Runtime& runtime, const Device& device, const std::vector<Case>& cases,
               Json& document) {
  Progress progress("verifying");
  bool good = true;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    document["cases"].push_back(run_case(runtime, device, cases[i]));
    const Json& checked = document["cases"].back();
    gather(checked, document["rows"]);
    good = good && checked["ok"].get<bool>();
    progress.update(i + 1, cases.size(), "");
  }
  sort_rows(document["rows"]);
  return good;
}

std::string reason(const Json& checked) {
  if (checked.contains("message")) return checked["message"];
  std::vector<std::string> reasons;
  for (const Json& check : checked["checks"])
    if (!check["ok"].get<bool>())
      reasons.push_back(check["error"].is_null()
                            ? fmt::format("{} is not finite", check["quantity"].get<std::string>())
                            : fmt::format("{} is off by {:.2e}, the bound is {:.0e}",
                                          check["quantity"].get<std::string>(),
                                          check["error"].get<double>(),
                                          check["bound"].get<double>()));
  if (!checked["repeatable"].get<bool>()) reasons.emplace_back("a second launch gave other bytes");
  std::string text;
  for (const std::string& one : reasons) text += (text.empty() ? "" : "; ") + one;
  return text;
}

void print_text(const Json& document, const Device& device) {
  say("{} on {} ({})", document["operator"].get<std::string>(), device.info().name,
      device.info().model);
  Table table({"pass", "dtype", "precision", "quantity", "cases", "largest error", "bound", "ok"});
  for (const Json& row : document["rows"])
    table.row(
        {row["pass"], row["dtype"], row["precision"], row["quantity"], row["cases"].dump(),
         row["error"].is_null() ? "not finite" : fmt::format("{:.2e}", row["error"].get<double>()),
         fmt::format("{:.0e}", row["bound"].get<double>()), row["ok"].get<bool>() ? "yes" : "NO"});
  put(table.text());
  std::size_t failed = 0;
  for (const Json& checked : document["cases"]) {
    if (checked["ok"].get<bool>()) continue;
    ++failed;
    put(printable_lines(
        fmt::format("FAILED: {}: {}\n", checked["case"].get<std::string>(), reason(checked))));
  }
  say("{}, {} failed", count_text(std::ssize(document["cases"]), "case"), failed);
}

int execute(const Flags& flags, bool json) {
  require_operator(flags.op);
  const std::vector<Number> chosen = numbers(flags.dtype, flags.precision);
  const std::int64_t count = parse_integer("--count", flags.count, 0, 100'000);
  const std::uint64_t seed = parse_seed(flags.seed);
  std::vector<Pass> passes{Pass::forward, Pass::backward, Pass::recurrent};
  if (flags.pass) passes = {parse_pass(*flags.pass)};
  const Device device = open_device(flags.device);
  Runtime runtime;

  std::vector<Case> cases;
  for (const Pass pass : passes)
    for (Case& c : make_sweep(flags.op, pass, chosen, count, seed)) cases.push_back(std::move(c));
  std::erase_if(
      cases, [&](const Case& c) { return c.optional && !has_plan(device, c.selection.problem); });
  Json document{{"operator", flags.op},         {"device", device.info().name},
                {"model", device.info().model}, {"seed", seed},
                {"rows", Json::array()},        {"cases", Json::array()}};
  const bool good = run_cases(runtime, device, cases, document);
  document["compiled"] = runtime.compiled();
  document["verified"] = good;
  if (json)
    print_document(document);
  else
    print_text(document, device);
  if (!good) note("wyvern: a case failed; its line says how\n");
  return good ? kDone : kCheckFailed;
}

}  // namespace

void add_verify(Command& command) {
  const auto flags = std::make_shared<Flags>();
  CLI::App& verb = command.verb("verify", "sweep an operator's options against the oracle",
                                [flags](bool json) { return execute(*flags, json); });
  add_operator(verb, flags->op);
  add_pass(verb, flags->pass, "all of them");
  add_device(verb, flags->device);
  verb.add_option("--dtype", flags->dtype, "bf16, fp16 or fp32 (default all of them)");
  verb.add_option("--precision", flags->precision,
                  "least precision of fp32 products: ieee, tf32x3 or tf32 (default all of them)");
  verb.add_option("--count", flags->count, "random cases more for each pass (default 0)");
  verb.add_option("--seed", flags->seed, "of the inputs and the random cases (default 0)");
}

}  // namespace wyvern::cli
