#include "compiler/compiler.hpp"
#include "templates/source.hpp"

#include <gtest/gtest.h>
#include <wyvern/error.hpp>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace wyvern {
namespace {

/// A template that lists too few of the constants that its source uses, so that no compiler accepts
/// it.
Template lacking_constants(DeviceKind device) {
  Template t;
  t.name = "lacking";
  t.variant = device == DeviceKind::cuda ? "portable" : "cpu";
  t.device = device;
  t.constants = {constant::DTYPE, constant::K};
  t.tunables = {{tunable::BT, {std::int64_t{32}, std::int64_t{64}}}};
  t.source =
      device == DeviceKind::cuda ? "intra/solve_tril/portable.cu" : "intra/solve_tril/cpu.cpp";
  return t;
}

Constants constants() {
  Constants c;
  c.DTYPE = DType::bf16;
  c.K = 128;
  return c;
}
Config config() { return {{"BT", std::int64_t{64}}}; }

CompileRequest request(const Template& t) {
  return {&t, constants(), config(), usual_target(t.device)};
}

void expect_has(const std::string& text, const std::string& piece) {
  EXPECT_NE(text.find(piece), std::string::npos) << "'" << piece << "' is not in: " << text;
}

template <class Call>
std::string bad_input(Call call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kBadInput);
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

TEST(Target, CudaArchitectures) {
  const Target hopper = cuda_target("sm_90a");
  EXPECT_EQ(hopper.name(), "sm_90a");
  EXPECT_EQ(hopper.device, DeviceKind::cuda);
  EXPECT_EQ(hopper.limits.compute_capability, 90);
  EXPECT_EQ(hopper.limits.shared_bytes, 227 * 1024);
  EXPECT_EQ(cuda_target("sm_80").limits.shared_bytes, 163 * 1024);
  EXPECT_EQ(cuda_target("sm_86").limits.shared_bytes, 99 * 1024);
  EXPECT_EQ(cuda_target("sm_89").limits.shared_bytes, 99 * 1024);
  EXPECT_EQ(cuda_target("sm_100a").limits.shared_bytes, 227 * 1024);
  EXPECT_EQ(cuda_target("sm_120a").limits.shared_bytes, 99 * 1024);
  EXPECT_EQ(cuda_target("sm_120a").limits.compute_capability, 120);
  const std::string message = bad_input([] { cuda_target("sm_75"); });
  expect_has(message, "sm_75");
  expect_has(message, "sm_80, sm_86");
}

TEST(Target, UsualGpusOfArchitectures) {
  const Limits hopper = on_usual_gpu(cuda_target("sm_90a")).limits;
  EXPECT_EQ(hopper.multiprocessors, 132);  // of an H200
  EXPECT_EQ(hopper.bytes_per_us, 4.8e6);
  EXPECT_TRUE(hopper.wgmma);
  EXPECT_EQ(on_usual_gpu(cuda_target("sm_90")).limits.multiprocessors, 132);
  const Limits unknown = on_usual_gpu(cuda_target("sm_87")).limits;
  EXPECT_EQ(unknown.multiprocessors, 0);
  EXPECT_EQ(unknown.bytes_per_us, 0);
  EXPECT_EQ(on_usual_gpu(host_target()).limits.multiprocessors, 0);
}

TEST(Target, Host) {
  const Target& host = host_target();
  EXPECT_EQ(host.device, DeviceKind::cpu);
  EXPECT_FALSE(host.arch.empty());
  EXPECT_GT(host.limits.shared_bytes, 0);
  EXPECT_EQ(host.name().rfind("cpu-" + host.arch + "-", 0), 0U);
#if defined(__x86_64__)
  const int bits = __builtin_cpu_supports("avx512f") ? 512
                   : __builtin_cpu_supports("avx")   ? 256
                                                     : 128;
  EXPECT_EQ(host.limits.vector_bits, bits);
#endif
  EXPECT_EQ(parse_target("native-cpu").name(), host.name());
  EXPECT_EQ(parse_target("sm_89").name(), "sm_89");
  expect_has(bad_input([] { parse_target("gfx942"); }), "native-cpu");
}

class ArtifactKey : public testing::TestWithParam<DeviceKind> {
 protected:
  void SetUp() override {
    const std::string problem = compiler_problem(GetParam());
    if (!problem.empty()) GTEST_SKIP() << problem;
  }
};

INSTANTIATE_TEST_SUITE_P(, ArtifactKey, testing::Values(DeviceKind::cpu, DeviceKind::cuda),
                         [](const auto& kind) { return std::string(to_string(kind.param)); });

TEST_P(ArtifactKey, ChangesWithEachIngredient) {
  const Template t = lacking_constants(GetParam());
  const CompileRequest base = request(t);
  std::set<std::string> keys{artifact_key(base)};

  CompileRequest changed = base;
  changed.config.set("BT", std::int64_t{32});
  EXPECT_TRUE(keys.insert(artifact_key(changed)).second) << "tunable";
  changed = base;
  changed.constants.K = 64;
  EXPECT_TRUE(keys.insert(artifact_key(changed)).second) << "constant";
  changed = base;
  changed.constants.DTYPE = DType::fp16;
  EXPECT_TRUE(keys.insert(artifact_key(changed)).second) << "dtype";
  changed = base;
  changed.target.arch = "sm_80";
  EXPECT_TRUE(keys.insert(artifact_key(changed)).second) << "architecture";
  changed = base;
  changed.target.features += " more";
  EXPECT_TRUE(keys.insert(artifact_key(changed)).second) << "features";
  Template other = t;
  other.tunables.push_back({tunable::BK, {std::int64_t{64}}});
  changed = base;
  changed.source_template = &other;
  changed.config.set("BK", std::int64_t{64});
  EXPECT_TRUE(keys.insert(artifact_key(changed)).second) << "source";

  EXPECT_FALSE(keys.insert(artifact_key(base)).second) << "the same request has the same key";
  changed = base;
  changed.constants.V = 1;
  EXPECT_EQ(artifact_key(changed), artifact_key(base)) << "what the source does not name";
}

TEST_P(ArtifactKey, IsHexadecimal) {
  const Template t = lacking_constants(GetParam());
  const std::string key = artifact_key(request(t));
  EXPECT_EQ(key.size(), 64U);
  EXPECT_EQ(key.find_first_not_of("0123456789abcdef"), std::string::npos);
  std::printf("key=%s\n", key.c_str());  // what the next test reads from another process
}

TEST_P(ArtifactKey, IsTheSameInAnotherProcess) {
  const Template t = lacking_constants(GetParam());
  // The shell would be another /proc/self.
  std::array<char, 4096> self{};
  ASSERT_GT(readlink("/proc/self/exe", self.data(), self.size() - 1), 0);
  const std::string command = "'" + std::string(self.data()) +
                              "' --gtest_filter=ArtifactKey.IsHexadecimal/" +
                              std::string(to_string(GetParam()));
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  ASSERT_NE(pipe, nullptr);
  std::string output;
  for (int c = 0; (c = std::fgetc(pipe.get())) != EOF;) output += static_cast<char>(c);
  expect_has(output, "key=" + artifact_key(request(t)));
}

class Compile : public ArtifactKey {};

INSTANTIATE_TEST_SUITE_P(, Compile, testing::Values(DeviceKind::cpu, DeviceKind::cuda),
                         [](const auto& kind) { return std::string(to_string(kind.param)); });

TEST_P(Compile, ErrorShowsTemplateConfigAndMessage) {
  const Template t = lacking_constants(GetParam());
  try {
    compile(request(t));
    ADD_FAILURE() << "it compiled";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kCompile);
    expect_has(error.what(), t.id());
    expect_has(error.what(), "BT=64");
    expect_has(error.what(), "DTYPE=bf16");
    expect_has(error.what(), t.source);
    expect_has(error.what(), "HV");
  }
}

TEST_P(Compile, AllThrowsTheFirstErrorAfterEveryRequestEnded) {
  const Template t = lacking_constants(GetParam());
  const std::vector<CompileRequest> requests(5, request(t));
  int done = 0;
  EXPECT_THROW(compile_all(requests, 3, [&done](std::size_t) { ++done; }), Error);
  EXPECT_EQ(done, 0);
  EXPECT_TRUE(compile_all({}).empty());
}

/// Constants of a common problem.
Constants problem_constants() {
  Constants c;
  c.H = 2, c.HV = 4, c.GROUP = 2, c.K = c.V = 128, c.GATE_K = 1, c.GATE_HEADS = 4, c.STEPS = 1;
  c.STATE_ROWS = c.STATE_COLS = 128;
  c.DTYPE = c.U_DTYPE = c.BETA_DTYPE = DType::bf16;
  c.SEQLENS_DTYPE = c.INDEX_DTYPE = DType::int32;
  c.SCALAR_GATE = c.GATED = c.GATE_IN_KERNEL = c.HAS_A_LOG = c.VARLEN = c.HAS_DT_BIAS = true;
  c.QK_L2NORM = c.BETA_SIGMOID = true;
  c.INITIAL_STATE = c.FINAL_STATE = c.STATE_V_FIRST = true;
  c.CONV_WIDTH = 4, c.CONV_COLUMNS = 3, c.CONV_CHANNELS = 2 * c.H * c.K + c.HV * c.V;
  return c;
}

/// The default config of every template for this kind of device.
std::vector<CompileRequest> defaults(DeviceKind device) {
  const Target target = usual_target(device);
  std::vector<CompileRequest> requests;
  for (const Template& t : all_templates()) {
    if (t.device != device) continue;
    Constants constants = problem_constants();
    // Some are for problems alone that keep chunks' states.
    constants.KEEP_STATES =
        std::ranges::any_of(t.keeps, [](const auto& kept) { return kept.name == "h"; });
    if (std::ranges::any_of(t.tensor_maps,
                            [&](const TensorMapUse& map) { return !map.when.holds(constants); }))
      std::swap(constants.SCALAR_GATE, constants.VECTOR_GATE);
    auto chosen = default_config(t, constants, target.limits, Precision::tf32, {.shape = {64}});
    if (!chosen) {  // some have no grouped heads
      constants.H = constants.HV, constants.GROUP = 1;
      chosen = default_config(t, constants, target.limits, Precision::tf32, {.shape = {64}});
    }
    EXPECT_TRUE(chosen.has_value()) << t.id();
    if (chosen) requests.push_back({&t, constants, *chosen, target});
  }
  return requests;
}

/// Those of all templates are compiled by tests/, each on its own.
TEST_P(Compile, DefaultsOfSeveralTemplatesInParallel) {
  const std::vector<CompileRequest> all = defaults(GetParam());
  std::vector<CompileRequest> requests;
  for (std::size_t i = 0; i < all.size(); i += 6) requests.push_back(all[i]);
  ASSERT_GE(requests.size(), 5U);
  std::multiset<std::size_t> done;
  const std::vector<Artifact> artifacts =
      compile_all(requests, 2, [&done](std::size_t i) { done.insert(i); });
  ASSERT_EQ(artifacts.size(), requests.size());
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const Artifact& artifact = artifacts[i];
    EXPECT_EQ(done.count(i), 1U);
    EXPECT_EQ(artifact.key, artifact_key(requests[i]));
    EXPECT_EQ(artifact.template_id, requests[i].source_template->id());
    EXPECT_EQ(artifact.config, requests[i].config.to_string());
    EXPECT_EQ(artifact.constants, requests[i].constants.values().to_string());
    EXPECT_EQ(artifact.target, requests[i].target.name());
    EXPECT_EQ(artifact.entry, kEntryPoint);
    EXPECT_EQ(artifact.code.substr(0, 4),
              "\x7f"
              "ELF");
    EXPECT_GT(artifact.resources.code_bytes, 0);
    EXPECT_GT(artifact.compile_ms, 0);
  }
}

TEST_P(Compile, EmitsEveryFormOfARealTemplate) {
  const CompileRequest one = defaults(GetParam()).front();
  const std::vector<Emit> forms =
      GetParam() == DeviceKind::cuda
          ? std::vector<Emit>{Emit::source, Emit::ptx, Emit::cubin}
          : std::vector<Emit>{Emit::source, Emit::llvm_ir, Emit::assembly, Emit::object};
  std::set<std::string> texts;
  for (const Emit form : forms) {
    const Emitted emitted = emit(one, form);
    expect_has(emitted.text, "wyvern_kernel");
    texts.insert(emitted.text);
  }
  EXPECT_EQ(texts.size(), forms.size()) << "two forms are the same";
}

TEST_P(Compile, EmitsSourceAndRefusesForeignForms) {
  const Template t = lacking_constants(GetParam());
  expect_has(emit(request(t), Emit::source).text, "constexpr int BT = 64;");
  const bool cuda = GetParam() == DeviceKind::cuda;
  expect_has(bad_input([&] { emit(request(t), cuda ? Emit::assembly : Emit::cubin); }),
             cuda ? "source, ptx, cubin" : "source, llvm-ir, asm, object");
}

TEST_P(Compile, TargetOfAnotherDeviceIsRefused) {
  const Template t = lacking_constants(GetParam());
  CompileRequest mixed = request(t);
  mixed.target = GetParam() == DeviceKind::cuda ? host_target() : cuda_target("sm_80");
  expect_has(bad_input([&] { compile(mixed); }), t.id());
}

TEST_P(Compile, VersionNamesTheCompiler) {
  const std::string version = compiler_version(GetParam());
  EXPECT_EQ(version.rfind(GetParam() == DeviceKind::cuda ? "NVRTC 1" : "LLVM 1", 0), 0U) << version;
}

}  // namespace
}  // namespace wyvern
