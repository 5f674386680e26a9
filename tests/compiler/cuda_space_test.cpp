// Every CUDA template, over a sample of its space, compiled for five architectures without a GPU;
// in the short suite for two.
//
// The sample is the same in every run: for each architecture the default config of a common
// problem, one more config for each dtype and other heads, then as many more as it takes for every
// value of every tunable to be compiled once; in the short suite legal once, and one more config
// compiled. Spills are reported; what does not compile, could not be launched, or reads registers
// that nothing set, fails.

#include <gtest/gtest.h>
#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "compiler/compiler.hpp"
#include "runtime/operators/operator.hpp"
#include "runtime/plan.hpp"
#include "tests/compiler/ptx_flow.hpp"
#include "tests/support/full_suite.hpp"
#include "tests/support/stage_data.hpp"

namespace wyvern {
namespace {

/// An architecture, the dtype of its common problem, and whether the short suite has it too.
struct Arch {
  const char* name;
  DType dtype;
  bool always = false;
};
constexpr std::array kArchs{Arch{"sm_80", DType::fp32, true}, Arch{"sm_89", DType::fp16},
                            Arch{"sm_90a", DType::bf16, true}, Arch{"sm_100a", DType::fp32},
                            Arch{"sm_120a", DType::bf16}};
constexpr std::array kDTypes{DType::bf16, DType::fp16, DType::fp32};

struct Heads {
  std::int64_t H, HV, K, V;
};
constexpr std::array kHeads{Heads{16, 32, 128, 128}, Heads{6, 6, 256, 512}, Heads{2, 4, 100, 60},
                            Heads{1, 3, 64, 64}};

/// A problem with the options that are drawn.
Problem draw_problem(const Template& t, const Heads& heads, DType dtype, std::mt19937& random) {
  const auto flag = [&random] { return (random() >> 16) % 2 == 0; };
  Problem p;
  p.op = operators()[(random() >> 16) % operators().size()];
  if (definition_of(p).facts().householder)
    p.num_householder = 1 + static_cast<std::int64_t>((random() >> 16) % 3);
  const bool decodes = t.carries_out("recurrent") || t.carries_out("short_conv_step");
  const bool convolves = t.carries_out("short_conv") || t.carries_out("short_conv_step") ||
                         t.carries_out("short_conv_bwd") || (t.carries_out("layer_sum") && flag());
  p.pass = decodes                                                       ? Pass::recurrent
           : t.carries_out("short_conv") || t.carries_out("output_norm") ? Pass::forward
                                                                         : Pass::backward;
  p.H = heads.H, p.HV = heads.HV, p.K = heads.K, p.V = heads.V;
  p.dtype = dtype;
  p.beta_dtype = flag() ? dtype : DType::fp32;
  p.g_dtype = flag() ? dtype : DType::fp32;
  p.state_dtype = flag() ? DType::fp32 : flag() ? DType::bf16 : DType::fp16;
  p.seqlens_dtype = flag() ? DType::int32 : DType::int64;
  p.index_dtype = flag() ? DType::int32 : DType::int64;
  p.packed = flag();
  p.use_qk_l2norm = flag();
  p.use_beta_sigmoid = flag();
  p.allow_neg_eigval = flag();
  p.initial_state = flag();
  p.output_final_state = flag();
  p.state_v_first = flag();
  p.disable_recompute = flag();
  p.return_intermediate_states = flag();
  p.inplace_state = flag();
  p.state_index = flag();
  p.output_state_index = p.state_index && p.inplace_state && flag();
  p.has_initial_state = p.inplace_state && flag();
  if (p.pass == Pass::recurrent && definition_of(p).facts().beta &&
      !definition_of(p).facts().householder) {
    p.index_columns = p.state_index && p.inplace_state && !p.output_state_index && flag() ? 4 : 0;
    p.disable_state_update = p.inplace_state && !p.output_state_index && flag();
    if (flag()) p.intermediate_rows = 4, p.draft_tokens = p.T = 4;
    p.parent = p.intermediate_rows && !p.output_final_state &&
               p.disable_state_update == p.inplace_state && flag();
  }
  if (flag()) p.output_norm = flag() ? Activation::silu : Activation::sigmoid;
  if (t.carries_out("output_quantize")) {
    p.pass = Pass::forward;
    p.output_norm = Activation::silu, p.output_dtype = DType::float8_e4m3;
    p.V = (p.V + 127) / 128 * 128;
    p.output_scale_tokens_last = p.V != 128;
  }
  if (p.inplace_state && definition_of(p).facts().beta && !definition_of(p).facts().householder &&
      !p.intermediate_rows && !t.needs.wgmma && flag())
    p.state_dtype = flag() ? DType::float8_e4m3 : DType::float8_e5m2;
  p.checkpoint_offsets = p.pass == Pass::forward && !definition_of(p).facts().householder &&
                         !has_state_scale(p) && flag();
  p.fp32_checkpoints = p.checkpoint_offsets && flag();
  if (convolves) {
    p.short_conv = 2 + static_cast<std::int64_t>((random() >> 16) % 3);
    p.conv_activation = flag() ? Activation::silu : Activation::none;
    p.has_conv_bias = flag();
    p.conv_dtype = flag() ? dtype : DType::fp32;
    p.inplace_conv_state = p.inplace_state;
    p.initial_conv_state = !p.inplace_state && flag();
    p.output_conv_state = !p.inplace_state && !p.parent && flag();
    p.conv_tokens_first = p.inplace_state && flag();
    if (p.inplace_state && flag()) p.conv_columns = *p.short_conv + 2;
    p.checkpoint_offsets = p.fp32_checkpoints = false;
  }
  p.use_gate_in_kernel = flag();
  p.has_dt_bias = p.use_gate_in_kernel && flag();
  if (gate_kind(p) == GateKind::vector && flag()) p.lower_bound = -5.0F;
  p.safe_gate = p.lower_bound && flag();
  p.has_A_log = !p.lower_bound || flag();
  p.summary = p.pass != Pass::recurrent && flag();
  return p;
}

/// The constants of a problem that uses the template; options are drawn.
Constants draw_constants(const Template& t, const Limits& limits, const Heads& heads, DType dtype,
                         std::mt19937& random) {
  for (int tries = 0; tries < 1000; ++tries)
    if (const Problem p = testing::within_reach(t, limits, draw_problem(t, heads, dtype, random));
        testing::exercises(t, p))
      return problem_constants(p);
  throw std::logic_error("no problem uses " + t.id());
}

/// Chooses requests until every value of every tunable has been in one.
class Sampler {
 public:
  explicit Sampler(const Template& t) : template_(t), random_(2026) {
    for (const Arch& arch : kArchs) {
      if (!arch.always && !testing::full_suite()) continue;
      const Target target = cuda_target(arch.name);
      Problem usual;
      usual.K = usual.V = 128;
      usual = testing::within_reach(t, target.limits, usual);
      if (testing::takes(t, target.limits, usual)) {
        targets_.push_back(target);
        add_default(target, arch.dtype);
      } else {
        EXPECT_TRUE(space(t, problem_constants(usual), target.limits).empty()) << arch.name;
      }
    }
    for (const Tunable& tunable : t.tunables)
      for (const Value& value : tunable.values) unseen_.emplace(tunable.name, value);
  }

  std::vector<CompileRequest> sample() {
    // Every combination of heads, dtype and architecture once around; the next differs in all
    // three.
    const std::size_t around = kHeads.size() * kDTypes.size() * targets_.size();
    std::size_t drawn = 0;
    for (std::size_t i = 0, last = 0; i < last + around; ++i) {
      const bool any = drawn < (testing::full_suite() ? kDTypes.size() : 1);
      if (!any && unseen_.empty()) break;
      const std::size_t target = i + i / (kHeads.size() * kDTypes.size());
      if (!add(targets_[target % targets_.size()], kHeads[(i + 1) % kHeads.size()],
               kDTypes[i % kDTypes.size()], any))
        continue;
      ++drawn;
      last = i + 1;
    }
    return std::move(requests_);
  }

  /// "BT=16": values that no config drawn has, legal for none of the problems and architectures.
  std::string never_legal() const {
    std::string names;
    for (const auto& [name, value] : unseen_) names += name + "=" + to_string(value) + " ";
    return names;
  }

 private:
  std::size_t news(const Config& config) const {
    return static_cast<std::size_t>(std::count_if(
        config.items().begin(), config.items().end(),
        [this](const auto& item) { return unseen_.contains({item.first, item.second}); }));
  }

  void take(const Target& target, Constants constants, const Config& config) {
    for (const auto& [name, value] : config.items()) unseen_.erase({name, value});
    requests_.push_back({&template_, std::move(constants), config, target});
  }

  void add_default(const Target& target, DType dtype) {
    Constants constants = draw_constants(template_, target.limits, kHeads[0], dtype, random_);
    // Where a block has little shared memory, whole rows of several tensors fit with small chunks.
    auto config =
        default_config(template_, constants, target.limits, Precision::tf32, {.shape = {64}});
    if (!config)
      config =
          default_config(template_, constants, target.limits, Precision::tf32, {.shape = {32}});
    EXPECT_TRUE(config.has_value()) << template_.id() << " has no default for " << target.arch;
    if (config) take(target, std::move(constants), *config);
  }

  /// Adds the config with the most unseen values; with `any`, also when it has none. Returns
  /// whether it added one.
  bool add(const Target& target, const Heads& heads, DType dtype, bool any) {
    Constants constants = draw_constants(template_, target.limits, heads, dtype, random_);
    std::vector<Config> configs = space(template_, constants, target.limits);
    if (configs.empty()) return false;
    std::shuffle(configs.begin(), configs.end(), random_);
    const auto best =
        std::max_element(configs.begin(), configs.end(),
                         [this](const Config& a, const Config& b) { return news(a) < news(b); });
    if (!any && news(*best) == 0) return false;
    take(target, std::move(constants), *best);
    if (!any && !testing::full_suite()) requests_.pop_back();
    return true;
  }

  const Template& template_;
  std::vector<Target> targets_;  ///< architectures that the template is for, oldest first
  std::mt19937 random_;
  std::set<std::pair<std::string, Value>> unseen_;
  std::vector<CompileRequest> requests_;
};

/// Whether a block of this kernel fits on a multiprocessor.
void expect_launchable(const CompileRequest& request, const Resources& resources) {
  Extents extents;
  extents.B = extents.N = 1;
  extents.T = 1024;
  extents.NT = extents.NS = extents.P = extents.TP = 64;
  const Geometry geometry = request.source_template->geometry(
      Spec(request.constants, request.config), extents, request.target.limits);
  EXPECT_LE(geometry.shared_bytes + resources.shared_bytes, request.target.limits.shared_bytes);
  EXPECT_LE(geometry.threads, 1024);
  // A multiprocessor has 65536 registers, given out to warps in groups of 8 for each thread.
  EXPECT_LE((resources.registers + 7) / 8 * 8 * geometry.threads, 65536)
      << "at " << resources.registers << " registers";
}

void report(const std::vector<CompileRequest>& requests, const std::vector<Emitted>& compiled) {
  int spilling = 0;
  int registers = 0;
  double ms = 0;
  for (std::size_t i = 0; i < compiled.size(); ++i) {
    const Resources& resources = compiled[i].resources;
    registers = std::max(registers, resources.registers);
    ms += compiled[i].compile_ms;
    if (resources.spill_bytes == 0) continue;
    ++spilling;
    const Constants& constants = requests[i].constants;
    fmt::print("{:<26} {:<8} {:<48} {:<5} K={:<3} V={:<3} {:>4} registers {:>6} bytes spilled\n",
               requests[i].source_template->id(), requests[i].target.name(),
               requests[i].config.to_string(), to_string(constants.DTYPE), constants.K, constants.V,
               resources.registers, resources.spill_bytes);
  }
  fmt::print("{:<26} {} compiled, {:.0f} ms each, up to {} registers, {} spill\n",
             requests.front().source_template->id(), compiled.size(),
             ms / static_cast<double>(compiled.size()), registers, spilling);
}

class CudaSpace : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const std::string problem = compiler_problem(DeviceKind::cuda);
    if (!problem.empty()) GTEST_SKIP() << problem;
  }
};

/// NVRTC may drop the initial value of a variable (13.0 does for arrays whose element type is an
/// alias of an array of a class with member initializers), and the emulator's compiler does not. So
/// the PTX is searched, which NVRTC makes on the way to the machine code that `resources` tell of.
TEST_P(CudaSpace, CompilesAndSetsRegistersBeforeReadingThem) {
  Sampler sampler(*find_template(GetParam()));
  const std::vector<CompileRequest> requests = sampler.sample();
  EXPECT_EQ(sampler.never_legal(), "") << "values that no config ever has";
  ASSERT_FALSE(requests.empty());
  std::vector<Emitted> compiled;
  for (const CompileRequest& request : requests) {
    SCOPED_TRACE(fmt::format("{} with {} ({}) for {}", request.source_template->id(),
                             request.config.to_string(), request.constants.values().to_string(),
                             request.target.name()));
    try {
      compiled.push_back(emit(request, Emit::ptx));
    } catch (const Error& error) {
      FAIL() << error.what();
    }
    const auto& [ptx, resources, ms] = compiled.back();
    EXPECT_GT(resources.code_bytes, 0);
    EXPECT_GT(resources.registers, 0);
    expect_launchable(request, resources);
    EXPECT_EQ(testing::registers_read_unset(ptx), std::vector<std::string>{});
  }
  report(requests, compiled);
}

TEST(PtxFlow, FindsUnsetRegistersCarriedByALoop) {
  const std::string head = "\n{\n.reg .f32 %f<3>;\nmov.f32 \t%f1, 0f00000000;\n";
  const std::string loop =
      "$L__BB0_1:\n// begin inline asm\nadd.f32 \t%f2, %f2, %f1; // sum\n"
      "setp.lt.f32 \t%p1, %f2, %f1;\n@%p1 bra \t$L__BB0_1;\n"
      "st.global.f32 \t[%rd1], %f2;\nret;\n}";
  using Names = std::vector<std::string>;
  EXPECT_EQ(testing::registers_read_unset(head + loop), (Names{"%f2", "%rd1"}));
  const std::string sets = "mov.f32 \t%f2, %f1;\nld.param.u64 \t%rd1, [p];\n";
  EXPECT_EQ(testing::registers_read_unset(head + sets + loop), Names{});
}

std::vector<std::string> cuda_templates() {
  std::vector<std::string> ids;
  for (const Template& t : all_templates())
    if (t.device == DeviceKind::cuda) ids.push_back(t.id());
  return ids;
}

INSTANTIATE_TEST_SUITE_P(, CudaSpace, ::testing::ValuesIn(cuda_templates()), [](const auto& id) {
  std::string name = id.param;
  std::replace(name.begin(), name.end(), '.', '_');
  return name;
});

}  // namespace
}  // namespace wyvern
