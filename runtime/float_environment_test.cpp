// Modes of the processor's arithmetic that a caller has set change neither kernels nor results.
#include "runtime/float_environment.hpp"

#include <wyvern/runtime.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cache/cache.hpp"
#include "cache/cache_testing.hpp"
#include "compiler/compiler.hpp"
#include "runtime/launch_testing.hpp"

namespace wyvern {
namespace {

/// The modes of the calling thread, without what has happened in it.
unsigned modes() {
#if defined(__x86_64__)
  return _mm_getcsr() & ~0x3FU;
#else
  return static_cast<unsigned>(std::fegetround());
#endif
}

/// Some modes of the calling thread, until the end of the scope.
class Modes {
 public:
  explicit Modes(const std::function<void()>& set) {
    std::fegetenv(&before_);
    set();
  }
  ~Modes() { std::fesetenv(&before_); }
  Modes(const Modes&) = delete;
  Modes& operator=(const Modes&) = delete;

 private:
  std::fenv_t before_{};
};

void round_up() { std::fesetround(FE_UPWARD); }
void trap_all() {
  std::feclearexcept(FE_ALL_EXCEPT);
  ::feenableexcept(FE_ALL_EXCEPT);
}
void flush_subnormals() {
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040U);
#endif
}

/// Values from ordinary to subnormal, the gate's at most 0.
void fill(testing::LaunchMemory& memory) {
  std::mt19937 random(7);
  std::uniform_real_distribution<float> uniform(-1.0F, 1.0F);
  for (const testing::LaunchMemory::Tensor& tensor : memory.tensors) {
    if (tensor.spec.access != TensorAccess::in) continue;
    auto* const values = static_cast<float*>(tensor.memory.get());
    for (std::size_t i = 0; i < tensor.bytes / sizeof(float); ++i) {
      values[i] = uniform(random) * (i % 7 == 0 ? 1e-39F : 1.0F);
      if (tensor.spec.name == "g") values[i] = -std::abs(values[i]);
    }
  }
}

struct Outcome {
  std::string outputs;
  std::vector<std::string> code;  ///< of the kernels, by key
};

/// Opens the device, prepares from an empty cache and launches, each in the modes that are set.
Outcome run(void (*set)()) {
  const testing::TempDirectory directory;
  RuntimeOptions options;
  options.cache = std::make_shared<Cache>(directory.path());
  Runtime runtime(options);
  Problem problem;
  problem.op = "gated_delta_rule";
  problem.T = 100, problem.H = 2, problem.HV = 4, problem.K = 32, problem.V = 32;
  problem.dtype = problem.beta_dtype = DType::fp32;
  problem.output_final_state = true;
  const auto in_modes = [set](auto call) {
    const Modes changed(set);
    const unsigned before = modes();
    auto result = call();
    EXPECT_EQ(modes(), before) << "the caller's modes must come back";
    return result;
  };
  const Device device = in_modes([] { return Device::open("cpu"); });
  const Operator op = in_modes([&] { return runtime.prepare(device, problem); });
  testing::LaunchMemory memory(device, op);
  fill(memory);
  in_modes([&] {
    op.launch(memory.arguments, memory.workspace.get(), op.workspace_bytes());
    return 0;
  });
  Outcome outcome;
  for (const testing::LaunchMemory::Tensor& tensor : memory.tensors)
    if (tensor.spec.access != TensorAccess::in)
      outcome.outputs.append(static_cast<const char*>(tensor.memory.get()), tensor.bytes);
  for (const ArtifactRow& row : options.cache->list_artifacts())
    outcome.code.push_back(row.key + options.cache->find_artifact(row.key).value().code);
  std::sort(outcome.code.begin(), outcome.code.end());
  return outcome;
}

class FloatEnvironment : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string problem = compiler_problem(DeviceKind::cpu); !problem.empty())
      GTEST_SKIP() << problem;
  }
};

TEST_F(FloatEnvironment, OfTheCallerChangesNeitherKernelsNorResults) {
  const Outcome usual = run([] {});
  ASSERT_FALSE(usual.code.empty());
  ASSERT_NE(usual.outputs.find_first_not_of('\0'), std::string::npos);
  for (void (*const set)() : {&round_up, &flush_subnormals, &trap_all}) {
    SCOPED_TRACE(set == &round_up ? "rounding up" : set == &trap_all ? "traps" : "flushing");
    const Outcome here = run(set);
    EXPECT_TRUE(here.code == usual.code);
    EXPECT_TRUE(here.outputs == usual.outputs);
  }
}

TEST_F(FloatEnvironment, IsTheDefaultWithinAScopeAndForThreadsStartedInIt) {
  const unsigned usual = modes();
  const Modes changed([] { round_up(), flush_subnormals(); });
  const unsigned before = modes();
  ASSERT_NE(before, usual);
  unsigned inside = 0, in_thread = 0;
  {
    const DefaultFloatEnvironment plain;
    inside = modes();
    std::thread([&] { in_thread = modes(); }).join();
  }
  EXPECT_EQ(inside, usual);
  EXPECT_EQ(in_thread, usual);
  EXPECT_EQ(modes(), before);
}

}  // namespace
}  // namespace wyvern
