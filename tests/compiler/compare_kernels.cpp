// Compares the machine code of Hopper kernels between this build's sources and another tree's: the
// gate of a change that is to move or rename code and leave what it does.
//
//   compare_kernels TEMPLATES STEP [ID...]
//
// TEMPLATES is the other tree's templates/ (git worktree add ../before HEAD^). Each STEP-th kernel
// of the templates that these beginnings of ids name (all), of those whose text differs, is
// compiled from both for sm_90a: the presets' kernels in bf16 and fp16, then those of problems(). A
// kernel is the same byte for byte, or equal in registers, spills, the counts of some instructions
// and of PTX opcodes that move data, synchronize or compute floats; the rest is printed and makes
// the exit status 1.

#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <regex>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "compiler/backend.hpp"
#include "runtime/base/parallel.hpp"
#include "runtime/operators/preset_calls.hpp"
#include "runtime/plan.hpp"
#include "tests/support/stage_data.hpp"

namespace wyvern {
namespace {

using Counts = std::map<std::string, int>;

// ---- the kernels --------------------------------------------------------------------------------

class Kernels {
 public:
  void add_presets() {
    for (const DType dtype : {DType::bf16, DType::fp16})
      for (const Preset& preset : presets())
        for (const PresetCall& call : preset_calls(preset.name, dtype)) {
          Problem p = call.problem;
          if (p.T == 0) p.T = p.pass == Pass::recurrent ? 1 : 8192;
          if (call.finish != nullptr) call.finish(p);
          const Plan plan = default_plan(p, target_);
          const CheckedPlan checked = check_plan(p, stage_uses(p), plan, target_, true);
          for (std::size_t i = 0; i < plan.size(); ++i)
            add(*find_template(plan[i].template_id), checked.constants[i], plan[i].config);
        }
  }

  /// For each width of columns the first config of the template's space.
  void add(const Template& t, const Problem& p) {
    if (t.variant != "hopper" || !testing::exercises(t, p)) return;
    const Constants constants = problem_constants(p);
    std::set<std::int64_t> widths;
    for (const Config& config : space(t, constants, target_.limits))
      if (widths.insert(config.contains("BV") ? config.integer("BV") : 0).second)
        add(t, constants, config);
  }

  std::vector<CompileRequest> requests;

 private:
  void add(const Template& t, const Constants& constants, const Config& config) {
    CompileRequest request{&t, constants, config, target_};
    if (t.variant == "hopper" && known_.insert(code_key(request)).second)
      requests.push_back(std::move(request));
  }

  Target target_ = on_usual_gpu(cuda_target("sm_90a"));
  std::set<std::string> known_;
};

struct Size {
  std::int64_t HV, K, V;
};

/// Problems of an operator: states (none, initial and final ones, slots, slots that may be fresh),
/// checkpoints (none, every 256 tokens, offsets), few options or many.
std::vector<Problem> problems(std::string_view op, const Size& size, DType dtype, DType state) {
  std::vector<Problem> all;
  for (const bool many : {false, true})
    for (const int states : {0, 1, 2, 3})
      for (const int checkpoints : {0, 1, 2})
        for (const Pass pass : {Pass::forward, Pass::backward, Pass::recurrent}) {
          Problem p;
          p.op = op, p.pass = pass;
          p.H = 1, p.HV = size.HV, p.K = size.K, p.V = size.V;
          p.dtype = p.beta_dtype = p.g_dtype = dtype;
          p.state_dtype = state;
          p.packed = p.use_qk_l2norm = p.state_v_first = many;
          p.use_beta_sigmoid = many && op != "gdn2";
          p.use_gate_in_kernel = p.has_A_log = p.has_dt_bias = many;
          if (many && gate_kind(p) == GateKind::vector) p.lower_bound = -5.0F;
          p.initial_state = p.output_final_state = states == 1;
          p.inplace_state = p.state_index = states > 1;
          p.has_initial_state = states == 3;
          if (checkpoints == 1) p.checkpoint_every = 256;
          p.checkpoint_offsets = checkpoints == 2;
          all.push_back(p);
        }
  return all;
}

std::vector<CompileRequest> all_kernels() {
  Kernels kernels;
  kernels.add_presets();
  for (const std::string_view op : operators())
    for (const std::int64_t HV : {1, 3})
      for (const std::int64_t K : {64, 128, 256})
        for (const std::int64_t V : {64, 128})
          for (const DType dtype : {DType::bf16, DType::fp16})
            for (const DType state : {DType::fp32, DType::bf16})
              for (const Problem& p : problems(op, {HV, K, V}, dtype, state))
                for (const Template& t : all_templates()) kernels.add(t, p);
  return std::move(kernels.requests);
}

// ---- their code ---------------------------------------------------------------------------------

/// The section .text.wyvern_kernel of a cubin, an ELF file.
std::string machine_code(const std::string& cubin) {
  const auto number = [&](std::uint64_t at, std::size_t bytes) {
    std::uint64_t x = 0;
    std::memcpy(&x, cubin.data() + at, bytes);
    return x;
  };
  const auto section = [&](std::uint64_t i) { return number(0x28, 8) + i * number(0x3a, 2); };
  const std::uint64_t names = number(section(number(0x3e, 2)) + 24, 8);
  for (std::uint64_t i = 0; i < number(0x3c, 2); ++i)
    if (std::string_view(cubin.data() + names + number(section(i), 4)) == ".text.wyvern_kernel")
      return cubin.substr(number(section(i) + 24, 8), number(section(i) + 32, 8));
  throw std::runtime_error("a cubin has no code");
}

/// The low 9 bits of an instruction of 16 bytes are its opcode.
Counts instructions(const std::string& code) {
  static const std::map<unsigned, std::string> kNames{
      {0x1f0, "HGMMA"}, {0x183, "LDL"},   {0x187, "STL"},     {0x11d, "BAR"},
      {0x1a7, "SYNCS"}, {0x1b2, "SYNCS"}, {0x1b4, "UTMALDG"}, {0x1b5, "UTMASTG"}};
  Counts counts;
  for (std::size_t i = 0; i + 16 <= code.size(); i += 16) {
    std::uint16_t low = 0;
    std::memcpy(&low, code.data() + i, sizeof low);
    if (const auto found = kNames.find(low & 0x1ffU); found != kNames.end())
      ++counts[found->second];
  }
  return counts;
}

Counts opcodes(const std::string& ptx) {
  static const std::regex kCounted(
      "wgmma|mma|mbarrier|cp\\.async|bar\\.|fence|ld\\.|st\\.|matrix|ex2|lg2|fma|mul\\.f|add\\.f|"
      "sub\\.f|max\\.f|min\\.f|shfl|setmaxnreg|rsqrt|cvt\\.rn|^atom|^red");
  Counts counts;
  std::istringstream lines(ptx.substr(ptx.find(".entry")));
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string word;
    if (words >> word && word[0] == '@') words >> word;  // a predicate
    if (!word.starts_with("ld.param") && std::regex_search(word, kCounted)) ++counts[word];
  }
  return counts;
}

std::string differences(const Counts& before, const Counts& after) {
  std::string text;
  for (const Counts* counts : {&before, &after})
    for (const auto& [name, count] : *counts) {
      const auto of = [&name](const Counts& from) {
        return from.contains(name) ? from.at(name) : 0;
      };
      if (of(before) != of(after) && (counts == &before || !before.contains(name)))
        text += fmt::format(" {} {}->{}", name, of(before), of(after));
    }
  return text;
}

Counts resources(const Resources& r) {
  return {{"registers", r.registers}, {"spill", static_cast<int>(r.spill_bytes)}};
}

// ---- both trees ---------------------------------------------------------------------------------

SourceOverrides sources_under(const std::filesystem::path& root) {
  SourceOverrides sources;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root)) {
    const std::string extension = entry.path().extension();
    if (extension != ".cu" && extension != ".cuh" && extension != ".hpp") continue;
    std::ostringstream text;
    text << std::ifstream(entry.path()).rdbuf();
    sources.emplace(entry.path().lexically_relative(root), text.str());
  }
  return sources;
}

/// The kernel's constants and tunables that are not false.
std::string describe(const CompileRequest& r) {
  std::string text = fmt::format("{} {}", r.source_template->id(), r.config.to_string());
  for (const AnyConstant& constant : r.source_template->constants)
    if (const std::string value = to_string(value_of(constant, r.constants)); value != "false")
      text += fmt::format(" {}={}", name_of(constant), value);
  return text;
}

enum class Verdict { same_text, same_bytes, same_code, equal, different };

struct Comparison {
  Verdict verdict;
  std::string text;
};

Comparison compare(const CompileRequest& r, const SourceOverrides& other) {
  const detail::Backend& cuda = detail::backend(DeviceKind::cuda);
  const auto source = [&](const SourceOverrides& overrides) {
    return specialize(*r.source_template, r.constants, r.config, cuda.dialect(), overrides);
  };
  const std::string before = source(other), after = source({});
  if (before == after) return {Verdict::same_text, {}};
  const std::string& id = r.source_template->id();
  const detail::Code old_code = cuda.compile(before, id, r.target, detail::Output::loadable);
  const detail::Code new_code = cuda.compile(after, id, r.target, detail::Output::loadable);
  if (old_code.bytes == new_code.bytes) return {Verdict::same_bytes, {}};
  const std::string old_machine = machine_code(old_code.bytes);
  const std::string new_machine = machine_code(new_code.bytes);
  if (old_machine == new_machine) return {Verdict::same_code, {}};
  const auto ptx = [&](const std::string& text) {
    return opcodes(cuda.compile(text, id, r.target, detail::Output::ptx).bytes);
  };
  const std::string text =
      differences(resources(old_code.resources), resources(new_code.resources)) +
      differences(instructions(old_machine), instructions(new_machine)) +
      differences(ptx(before), ptx(after));
  return {text.empty() ? Verdict::equal : Verdict::different, text};
}

int run(const std::vector<std::string>& arguments) {
  const SourceOverrides other = sources_under(arguments[1]);
  const std::size_t step = std::stoul(arguments[2]);
  const std::span ids(arguments.begin() + 3, arguments.end());
  std::vector<CompileRequest> requests = all_kernels();
  std::erase_if(requests, [&](const CompileRequest& r) {
    const std::string id = r.source_template->id();
    return !ids.empty() &&
           std::ranges::none_of(ids, [&](const std::string& s) { return id.starts_with(s); });
  });
  std::mutex mutex;
  std::map<std::string, std::map<Verdict, int>> verdicts;
  bool differ = false;
  in_parallel((requests.size() + step - 1) / step, 0, [&](std::size_t i) {
    const CompileRequest& r = requests[i * step];
    Comparison found;
    try {
      found = compare(r, other);
    } catch (const Error& error) {
      found = {Verdict::different, std::string(" ") + error.what()};
    }
    const std::lock_guard lock(mutex);
    ++verdicts[r.source_template->id()][found.verdict];
    if (found.verdict != Verdict::different) return;
    differ = true;
    fmt::print("{}:{}\n", describe(r), found.text);
    std::fflush(stdout);
  });
  fmt::print("{:<28} {:>9} {:>10} {:>9} {:>5} {:>9}\n", "kernels of", "same text", "same bytes",
             "same code", "equal", "different");
  for (auto& [id, count] : verdicts)
    fmt::print("{:<28} {:>9} {:>10} {:>9} {:>5} {:>9}\n", id, count[Verdict::same_text],
               count[Verdict::same_bytes], count[Verdict::same_code], count[Verdict::equal],
               count[Verdict::different]);
  return differ ? 1 : 0;
}

}  // namespace
}  // namespace wyvern

int main(int count, char** values) {
  if (count < 3) {
    fmt::print(stderr, "usage: compare_kernels TEMPLATES STEP [ID...]\n");
    return 2;
  }
  try {
    return wyvern::run({values, values + count});
  } catch (const std::exception& error) {
    fmt::print(stderr, "compare_kernels: {}\n", error.what());
    return 1;
  }
}
