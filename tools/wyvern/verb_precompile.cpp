#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "autotune/protocol.hpp"
#include "cache/shipped_code.hpp"
#include "cache/transfer.hpp"
#include "compiler/compiler.hpp"
#include "runtime/base/json_text.hpp"
#include "runtime/base/parallel.hpp"
#include "runtime/kernel_store.hpp"
#include "runtime/operators/operator.hpp"
#include "runtime/operators/preset_calls.hpp"
#include "runtime/plan.hpp"
#include "tools/wyvern/command.hpp"
#include "tools/wyvern/output.hpp"
#include "tools/wyvern/progress.hpp"
#include "tools/wyvern/reject.hpp"
#include "tools/wyvern/selection.hpp"

namespace wyvern::cli {
namespace {

struct Flags {
  std::optional<std::string> arch, output;
  std::vector<std::string> presets, packs;
  std::vector<std::int64_t> splits = {1}, tokens = {16, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  int multiprocessors = 0;
  std::string dtype = "bf16";
  unsigned jobs = 0;
};

/// The kernels to compile, each once, by code_key().
class Kernels {
 public:
  explicit Kernels(Target target) : target_(std::move(target)) {}

  void add(const Problem& problem, const Plan& plan, bool is_default) {
    const CheckedPlan checked = check_plan(problem, stage_uses(problem), plan, target_, is_default);
    for (std::size_t i = 0; i < plan.size(); ++i) {
      CompileRequest request{find_template(plan[i].template_id), checked.constants[i],
                             plan[i].config, target_};
      std::string key = code_key(request);
      const auto [known, is_new] = known_.try_emplace(key, wanted_.size());
      if (is_new) wanted_.emplace_back(std::move(key), std::move(request));
      of_pass_[{problem.op, problem.pass}].insert(known->second);
    }
  }
  void add_default(const Problem& problem) {
    validate(problem);
    add(problem, default_plan(problem, target_), true);
  }

  const std::vector<std::pair<std::string, CompileRequest>>& wanted() const { return wanted_; }
  /// Places in wanted(), by operator and pass.
  const std::map<std::pair<std::string, Pass>, std::set<std::size_t>>& of_pass() const {
    return of_pass_;
  }

 private:
  Target target_;
  std::map<std::string, std::size_t> known_;
  std::map<std::pair<std::string, Pass>, std::set<std::size_t>> of_pass_;
  std::vector<std::pair<std::string, CompileRequest>> wanted_;
};

/// The calls of a preset's models, with their heads split over `split` devices.
void add_preset(const Flags& flags, const Preset& preset, std::int64_t split, Kernels& kernels) {
  if (preset.H % split != 0 || preset.HV % split != 0) return;
  for (const PresetCall& call :
       preset_calls(preset.name, parse_element_type("--dtype", flags.dtype)))
    for (const std::int64_t tokens : flags.tokens) {
      Problem problem = call.problem;
      problem.H /= split, problem.HV /= split;
      const bool own_tokens = problem.T != 0;
      if (!own_tokens) problem.T = problem.pass == Pass::recurrent ? 1 : tokens;
      if (call.finish != nullptr) call.finish(problem);
      kernels.add_default(problem);
      if (problem.short_conv) {
        // A model in fp32 whose projections autocast makes narrow has such weights.
        problem.conv_dtype = DType::fp32;
        kernels.add_default(problem);
      }
      if (own_tokens || problem.pass == Pass::recurrent) break;  // for any number of tokens
    }
}

/// The plans that a pack's devices were tuned to.
void add_pack(const std::string& file, Kernels& kernels) {
  for (const WinnerRow& row : parse_pack(read_text(file), file).winners) {
    const auto plan = plan_from_json(row.plan);
    if (!plan || row.problem.empty()) continue;
    const Problem problem = problem_from(parse_json(row.problem));
    try {
      kernels.add(problem, *plan, false);
    } catch (const Error&) {  // for a device of another kind
    }
  }
}

std::vector<const Preset*> chosen_presets(const Flags& flags) {
  std::vector<const Preset*> chosen;
  for (const std::string& name : flags.presets) chosen.push_back(&find_preset(name));
  if (chosen.empty())
    for (const Preset& preset : presets()) chosen.push_back(&preset);
  return chosen;
}

void check(const Flags& flags) {
  for (const std::int64_t split : flags.splits)
    if (split < 1) reject("--splits has {}; it must be at least 1", split);
  for (const std::int64_t tokens : flags.tokens)
    if (tokens < 1) reject("--tokens has {}; it must be at least 1", tokens);
}

/// Registers, memory and spills of each operator's and pass's kernels: the maximum of each figure.
Json passes(const Kernels& kernels, std::span<const Artifact> artifacts) {
  Json rows = Json::array();
  for (const auto& [of, places] : kernels.of_pass()) {
    Resources most;
    std::set<std::string> spilling;
    for (const std::size_t i : places) {
      const Resources& own = artifacts[i].resources;
      most.registers = std::max(most.registers, own.registers);
      most.spill_bytes = std::max(most.spill_bytes, own.spill_bytes);
      if (own.spill_bytes > 0) spilling.insert(artifacts[i].template_id);
    }
    rows.push_back({{"operator", of.first},
                    {"pass", to_string(of.second)},
                    {"kernels", places.size()},
                    {"registers", most.registers},
                    {"spill_bytes", most.spill_bytes},
                    {"spilling", spilling}});
  }
  return rows;
}

int execute(const Flags& flags, bool json) {
  Target target = parse_target(require(flags.arch, "--arch", "sm_80, sm_90a, ..."));
  const std::string& folder = require(flags.output, "--output", "the folder to write to");
  if (target.device != DeviceKind::cuda)
    reject("--arch is {}; it must be of a GPU: kernels for a CPU are compiled where it is",
           target.name());
  check(flags);
  target = on_usual_gpu(std::move(target));
  if (flags.multiprocessors > 0) target.limits.multiprocessors = flags.multiprocessors;
  Kernels kernels(target);
  for (const Preset* preset : chosen_presets(flags))
    for (const std::int64_t split : flags.splits) add_preset(flags, *preset, split, kernels);
  for (const std::string& pack : flags.packs) add_pack(pack, kernels);

  const auto& wanted = kernels.wanted();
  std::vector<CompileRequest> requests;
  requests.reserve(wanted.size());
  for (const auto& [key, request] : wanted) requests.push_back(request);
  Progress progress("compiling");
  std::size_t done = 0;
  const std::vector<Artifact> artifacts = compile_all(requests, flags.jobs, [&](std::size_t i) {
    progress.update(++done, requests.size(), requests[i].source_template->id());
  });
  progress.clear();
  std::size_t bytes = 0;
  std::map<std::string, int> spilling;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    ShippedCode::write(folder, wanted[i].first, to_row(artifacts[i]));
    bytes += artifacts[i].code.size();
    if (artifacts[i].resources.spill_bytes > 0) ++spilling[artifacts[i].template_id];
  }
  if (json) {
    print_document({{"target", target.name()},
                    {"multiprocessors", target.limits.multiprocessors},
                    {"output", folder},
                    {"kernels", wanted.size()},
                    {"code_bytes", bytes},
                    {"spilling", spilling},
                    {"passes", passes(kernels, artifacts)}});
    return kDone;
  }
  say("{} for {} in {}: {} of code", count_text(wanted.size(), "kernel"), target.name(), folder,
      bytes_text(static_cast<double>(bytes)));
  for (const auto& [id, count] : spilling) say("{} of {} spill registers", count, id);
  return kDone;
}

}  // namespace

void add_precompile(Command& command) {
  const auto flags = std::make_shared<Flags>();
  CLI::App& verb = command.verb(
      "precompile", "compile the kernels of presets for a GPU that need not be here, to be shipped",
      [flags](bool json) { return execute(*flags, json); });
  verb.add_option("--arch", flags->arch, "sm_80, sm_89, sm_90a, sm_100a, ...");
  verb.add_option("--preset", flags->presets, "of these presets, separated by commas; all")
      ->delimiter(',');
  verb.add_option("--pack", flags->packs, "tuned plans of these packs too")->delimiter(',');
  verb.add_option("--splits", flags->splits, "devices that a model's heads are split over, 1,2,4,8")
      ->delimiter(',')
      ->type_name("TEXT")
      ->default_str("1");
  verb.add_option("--tokens", flags->tokens, "of prefills and training steps")
      ->delimiter(',')
      ->type_name("TEXT")
      ->default_str("16,512,1024,2048,4096,8192,16384,32768");
  verb.add_option("--multiprocessors", flags->multiprocessors,
                  "of the GPU; those of the architecture's largest one")
      ->type_name("TEXT");
  add_dtype(verb, flags->dtype);
  verb.add_option("-j,--jobs", flags->jobs, "compilers at a time; one a core")->type_name("TEXT");
  verb.add_option("-o,--output", flags->output, "folder to write to; WYVERN_CODE names it later");
}

}  // namespace wyvern::cli
