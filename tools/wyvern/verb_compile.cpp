#include <wyvern/error.hpp>

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "compiler/compiler.hpp"
#include "runtime/base/nearest_names.hpp"
#include "runtime/plan.hpp"
#include "tools/wyvern/command.hpp"
#include "tools/wyvern/describe.hpp"
#include "tools/wyvern/file.hpp"
#include "tools/wyvern/reject.hpp"
#include "tools/wyvern/selection.hpp"
#include "tools/wyvern/stage_problem.hpp"

namespace wyvern::cli {
namespace {

struct Flags {
  std::string stage;
  std::optional<std::string> arch, config, shape, emit, output;
  std::string dtype = "bf16";
};

/// A template by its id, or by stage or group name: of several the first that the target can have.
const Template& choose_template(const std::string& name, const Target& target) {
  const DeviceKind device = target.device;
  std::vector<const Template*> found;
  std::set<std::string> names;
  for (const Template& t : all_templates()) {
    if (t.device != device) continue;
    names.insert(t.name);
    if (t.id() == name) return t;
    if (t.name == name) found.push_back(&t);
  }
  if (found.empty())
    reject("STAGE is '{}'; for {} it must be one of {}", name, to_string(device),
           nearest_names(name, names));
  const auto fits = [&](const Template* t) { return t->needs.missing(target.limits).empty(); };
  const auto first = std::ranges::find_if(found, fits);
  return first == found.end() ? *found.front() : **first;
}

void check_tunables(const Template& t, const Config& given) {
  for (const auto& [name, value] : given.items()) {
    const Tunable* tunable = t.tunable(name);
    if (tunable == nullptr) {
      std::vector<std::string> names;
      for (const Tunable& known : t.tunables) names.push_back(known.name);
      reject("{} is no tunable of {}; its tunables are [{}]", name, t.id(),
             nearest_names(name, names));
    }
    if (std::find(tunable->values.begin(), tunable->values.end(), value) != tunable->values.end())
      continue;
    std::vector<std::string> legal;
    for (const Value& v : tunable->values) legal.push_back(to_string(v));
    reject("{} is {}; for {} it must be one of {}", name, to_string(value), t.id(),
           fmt::join(legal, ", "));
  }
}

/// The given values over the template's default for their chunk size.
Config complete(const Template& t, const Constants& constants, const Target& target,
                const Config& given) {
  check_tunables(t, given);
  if (const std::string missing = t.needs.missing(target.limits); !missing.empty())
    throw Error(ErrorKind::kBadInput,
                fmt::format("{} is not for {}: {}", t.id(), target.name(), missing));
  const auto all = chunk_sizes(Problem{}, target.device);
  std::vector<std::int64_t> sizes(all.begin(), all.end());
  if (given.contains("BT")) sizes = {given.integer("BT")};
  std::string reason;
  for (const std::int64_t BT : sizes) {
    const auto base = default_config(t, constants, target.limits, Precision::tf32, {.shape = {BT}});
    if (!base) continue;
    const Config config = base->merged(given);
    reason = t.problem(Spec(constants, config), target.limits);
    if (reason.empty()) return config;
    reason = fmt::format("--config {} is illegal for {} on {}: {}", config.to_string(), t.id(),
                         target.name(), reason);
  }
  // A given value may rule the default's others out: the first legal config that has them all.
  for (const Config& config : space(t, constants, target.limits))
    if (config.merged(given) == config) return config;
  if (reason.empty())
    reason = fmt::format("{} has no legal config with [{}] on {}", t.id(), given.to_string(),
                         target.name());
  reject("{}", reason);
}

Emit parse_emit(const std::string& text) {
  constexpr std::array kAll{Emit::source,  Emit::ptx,      Emit::cubin,
                            Emit::llvm_ir, Emit::assembly, Emit::object};
  std::vector<std::string_view> names;
  for (const Emit emit : kAll) {
    if (to_string(emit) == text) return emit;
    names.push_back(to_string(emit));
  }
  reject("--emit is '{}'; it must be one of {}", text, nearest_names(text, names));
}

Extents extents_of(const Problem& p, const Config& config) {
  Extents e;
  e.B = p.B;
  e.T = p.T;
  e.N = p.N;
  e.NT = chunk_slots(p.B, p.T, p.N, p.packed, config.contains("BT") ? config.integer("BT") : 64);
  e.scale = scale_of(p);
  return e;
}

int execute(const Flags& flags, bool json) {
  if (flags.stage.empty()) reject("STAGE is missing; `wyvern stages` lists them");
  const Target target =
      parse_target(require(flags.arch, "--arch", "sm_80, sm_90a, ... or native-cpu"));
  const Emit what =
      parse_emit(require(flags.emit, "--emit", "one of source, ptx, cubin, llvm-ir, asm, object"));
  const std::string& file = require(flags.output, "--output", "the file to write");
  const Template& t = choose_template(flags.stage, target);
  Problem problem = stage_problem(t);
  problem.dtype = problem.beta_dtype = parse_element_type("--dtype", flags.dtype);
  if (flags.shape) problem = parse_shape(*flags.shape, problem, {});
  if (problem.packed) problem.B = problem.N = 1;
  validate(problem);

  CompileRequest request{&t, problem_constants(problem), {}, target};
  request.config = complete(t, request.constants, target, Values::parse(flags.config.value_or("")));
  const Geometry geometry = t.geometry(Spec(request.constants, request.config),
                                       extents_of(problem, request.config), target.limits);
  const Emitted emitted = emit(request, what);
  const std::string_view text = emitted.text;
  write_file(file, {&text, 1});

  const Resources& r = emitted.resources;
  if (json)
    print_document({{"template", t.id()},
                    {"target", target.name()},
                    {"constants", to_json(request.constants.values())},
                    {"config", to_json(request.config)},
                    {"emit", to_string(what)},
                    {"output", file},
                    {"bytes", emitted.text.size()},
                    {"registers", r.registers},
                    {"static_shared_bytes", r.shared_bytes},
                    {"dynamic_shared_bytes", geometry.shared_bytes},
                    {"spill_bytes", r.spill_bytes},
                    {"stack_bytes", r.stack_bytes},
                    {"code_bytes", r.code_bytes},
                    {"threads", geometry.threads},
                    {"compile_ms", emitted.compile_ms}});
  else {
    say("{} for {}: {}", t.id(), target.name(), request.config.to_string());
    say("{}, {:.0f} ms", resources_text(target, r, geometry.shared_bytes), emitted.compile_ms);
    say("wrote {} ({}, {} bytes)", file, to_string(what), emitted.text.size());
  }
  return kDone;
}

}  // namespace

void add_compile(Command& command) {
  const auto flags = std::make_shared<Flags>();
  CLI::App& verb = command.verb("compile", "compile one template and show its code or resources",
                                [flags](bool json) { return execute(*flags, json); });
  verb.add_option("STAGE", flags->stage, "a name that `wyvern stages` lists");
  verb.add_option("--arch", flags->arch, "sm_80, sm_89, sm_90a, sm_100a, ... or native-cpu");
  verb.add_option("--config", flags->config, "values of tunables, BT=64,...; others by default");
  verb.add_option("--shape", flags->shape, "H=16,HV=32,K=128,V=128 where it says nothing else");
  add_dtype(verb, flags->dtype);
  verb.add_option("--emit", flags->emit, "source, ptx, cubin, llvm-ir, asm or object");
  verb.add_option("-o,--output", flags->output, "file to write");
}

}  // namespace wyvern::cli
