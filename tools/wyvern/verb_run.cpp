#include <wyvern/runtime.hpp>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "autotune/inputs.hpp"
#include "cache/cache.hpp"
#include "runtime/arguments.hpp"
#include "tools/wyvern/check.hpp"
#include "tools/wyvern/command.hpp"
#include "tools/wyvern/describe.hpp"
#include "tools/wyvern/launch.hpp"
#include "tools/wyvern/operands.hpp"

namespace wyvern::cli {
namespace {

struct Flags {
  std::string op;
  OptionFlags options;
  std::optional<std::string> input, output, device;
  bool verify = false;
};

struct Outcome {
  double first_ms = 0;  ///< prepare and the first launch
  double ms = 0;        ///< one further launch
};

/// Launches twice, each time into poisoned outputs, and fetches the outputs of the second, timed
/// launch.
Outcome execute(Runtime& runtime, const Device& device, const Selection& selection,
                const Arguments& host, std::optional<Operator>& op) {
  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point start) {
    return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
  };
  const DeviceArguments arguments(device, selection.problem, host);
  arguments.poison();
  Outcome outcome;
  const Clock::time_point first = Clock::now();
  op.emplace(runtime.prepare(device, selection.problem));
  const std::shared_ptr<void> workspace = device.allocate(op->workspace_bytes());
  op->launch(arguments.arguments(), workspace.get());
  device.synchronize();
  outcome.first_ms = since(first);

  arguments.poison();
  device.synchronize();
  const Clock::time_point second = Clock::now();
  op->launch(arguments.arguments(), workspace.get());
  device.synchronize();
  outcome.ms = since(second);
  arguments.fetch_outputs();
  return outcome;
}

void print_text(const Flags& flags, const Operator& op, const Device& device,
                const Json& document) {
  say("{} on {} ({})", describe(op.problem()), device.info().name, device.info().model);
  say("plan: {}", origin_text(op.origin()));
  put(plan_text(op.plan()));
  say("one run {:.3f} ms, first call {:.1f} ms, compiled {}", document["ms"].get<double>(),
      document["first_call_ms"].get<double>(),
      count_text(document["compiled"].get<std::int64_t>(), "kernel"));
  say("wrote {}", *flags.output);
  if (flags.verify) put(check_text(document["checks"]));
}

int execute_verb(const Flags& flags, bool json) {
  require_operator(flags.op);
  const std::string& input = require(flags.input, "--input", "a safetensors file to read");
  const std::string& output = require(flags.output, "--output", "a safetensors file to write");
  Tensors inputs = read_safetensors(
      input, [](std::string_view name) { return argument_index(name) < kOperatorTensors; });
  const Selection selection = infer(flags.op, inputs, flags.options);
  const Device device = open_device(flags.device);
  const TensorBytes bytes = tensor_bytes(selection.problem);
  check_memory(device, selection.problem, bytes.outputs, bytes.all);
  const Tensors outputs = make_outputs(selection.problem, inputs);
  const Arguments host = host_arguments(selection, inputs, outputs);

  const Doubts doubts = doubts_about(selection.problem, host_inputs(selection, inputs));
  for (const auto& sentences : {doubts.not_finite, doubts.others})
    for (const std::string& sentence : sentences) warn(sentence);

  Runtime runtime;
  std::optional<Operator> op;
  const Outcome outcome = execute(runtime, device, selection, host, op);
  write_safetensors(output, outputs);

  Json document{{"operator", flags.op},
                {"device", device.info().name},
                {"model", device.info().model},
                {"problem", to_json(selection.problem)},
                {"origin", to_string(op->origin())},
                {"plan", to_json(op->plan())},
                {"workspace_bytes", op->workspace_bytes()},
                {"compiled", runtime.compiled()},
                {"first_call_ms", outcome.first_ms},
                {"ms", outcome.ms},
                {"output", output},
                {"cache", runtime.cache().file().string()}};
  bool good = true;
  if (flags.verify) {
    document["checks"] = Oracle(selection.problem, host_inputs(selection, inputs)).check(host);
    good = passed(document["checks"]);
    document["verified"] = good;
  }
  if (json)
    print_document(document);
  else
    print_text(flags, *op, device, document);
  if (!good)
    warn(doubts.not_finite.empty() ? "an output is further from the float64 oracle than the bound"
                                   : "no output can be verified, since an input is not finite");
  return good ? kDone : kCheckFailed;
}

}  // namespace

void add_run(Command& command) {
  const auto flags = std::make_shared<Flags>();
  CLI::App& verb = command.verb("run", "run an operator on the tensors of a file",
                                [flags](bool json) { return execute_verb(*flags, json); });
  add_operator(verb, flags->op);
  verb.add_option("--input", flags->input,
                  "safetensors file: q k v beta g ...; do dht for the backward pass");
  verb.add_option("--output", flags->output,
                  "safetensors file to write: o final_state, or dq dk dv ...");
  add_device(verb, flags->device);
  add_switch(verb, "--verify", flags->verify,
             "compare with the float64 oracle; inputs must be finite, g at most 0 and, for norms, "
             "the squares of q and k within fp32");
  add_options(verb, flags->options);
}

}  // namespace wyvern::cli
