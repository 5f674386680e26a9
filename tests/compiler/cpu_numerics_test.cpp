// The arithmetic that CPU block functions build by hand (exp, sigmoid, softplus, conversions), seen
// through stages whose results are one such value each, and held to a few units in the last place.

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "compiler/compiler.hpp"

namespace wyvern {
namespace {

constexpr std::int64_t kBT = 64;
constexpr std::int64_t kWidth = 16;  ///< K and V

Constants constants_of(DType dtype) {
  Constants c;
  c.H = c.HV = 1;
  c.K = c.V = kWidth;
  c.DTYPE = c.U_DTYPE = dtype;
  c.INITIAL_STATE = true;
  c.SCALAR_GATE = true;
  return c;
}

/// Compiles a stage for this processor and runs all its blocks over one sequence of T tokens.
class CpuNumerics : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string problem = compiler_problem(DeviceKind::cpu); !problem.empty())
      GTEST_SKIP() << problem;
  }

  static void run(const std::string& stage, const Constants& constants, std::int64_t T,
                  std::vector<void*> arguments) {
    const Template* t = find_template(stage + ".cpu");
    ASSERT_NE(t, nullptr);
    const Target target = host_target();
    const auto config = default_config(*t, constants, target.limits, Precision::ieee,
                                       {.shape = {t->tunable("BT") == nullptr ? 0 : kBT}});
    ASSERT_TRUE(config);
    const Artifact artifact = compile({t, constants, *config, target});
    const int file = memfd_create("kernel", 0);
    ASSERT_EQ(write(file, artifact.code.data(), artifact.code.size()),
              static_cast<ssize_t>(artifact.code.size()));
    void* library = dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_NOW);
    ASSERT_NE(library, nullptr) << dlerror();
    using Entry = void (*)(void* const*, const Extents*, const long*, void*);
    const auto entry = reinterpret_cast<Entry>(dlsym(library, artifact.entry.c_str()));
    ASSERT_NE(entry, nullptr);

    const Extents extents{.B = 1,
                          .T = T,
                          .N = 1,
                          .NT = chunk_slots(1, T, 1, false, kBT),
                          .scale = 1.0F,
                          .gate_floor = -24.0F};
    const Spec spec(constants, *config);
    std::vector<std::int64_t> strides;  // behind the tensors
    for (const Parameter& p : t->parameters)
      if (p.strided) strides.push_back(dense_stride(p, spec, extents));
    for (std::int64_t& stride : strides) arguments.push_back(&stride);
    const Geometry geometry = t->geometry(spec, extents, target.limits);
    std::vector<float> scratch(static_cast<std::size_t>(geometry.shared_bytes) / 4 + 16);
    const auto start = (reinterpret_cast<std::uintptr_t>(scratch.data()) + 63) / 64 * 64;
    for (long x = 0; x < geometry.grid[0]; ++x)
      for (long y = 0; y < geometry.grid[1]; ++y) {
        const long block[3] = {x, y, 0};
        entry(arguments.data(), &extents, block, reinterpret_cast<void*>(start));
      }
    dlclose(library);
    close(file);
  }

  /// W and U where Tinv is the identity and all keys are 1: w = beta exp(G), u = beta v.
  template <class T>
  static void run_identity(const Constants& constants, T one, std::vector<float>& beta,
                           std::vector<float>& G, std::vector<T>& v, std::vector<T>& w,
                           std::vector<T>& u) {
    const std::size_t tokens = G.size();
    std::vector<T> k(tokens * kWidth, one), inverse(tokens * kBT);
    for (std::size_t t = 0; t < tokens; ++t) inverse[t * kBT + t % kBT] = one;
    w.resize(k.size());
    u.resize(k.size());
    run("recompute_w_u", constants, static_cast<std::int64_t>(tokens),
        {k.data(), v.data(), beta.data(), inverse.data(), G.data(), nullptr, nullptr, nullptr,
         w.data(), u.data()});
  }
};

/// Difference from the exact value in units of its last place in fp32.
double ulps(float value, double exact) {
  const auto nearest = static_cast<float>(std::fabs(exact));
  const double unit = std::nextafter(nearest, std::numeric_limits<float>::infinity()) - nearest;
  return std::fabs(value - exact) / unit;
}

std::vector<float> sweep(std::size_t count, float low, float high) {
  std::mt19937 engine(std::random_device{}());
  std::uniform_real_distribution<float> uniform(low, high);
  std::vector<float> values(count);
  for (float& value : values) value = uniform(engine);
  return values;
}

TEST_F(CpuNumerics, ExpIsAccurateExactAtZeroAndVanishes) {
  std::vector<float> G = sweep(4096, -86, 0), beta(G.size(), 1.0F), v(G.size() * kWidth), w, u;
  G[0] = 0;
  G[1] = -86.6F;
  G[2] = -64000;
  run_identity(constants_of(DType::fp32), 1.0F, beta, G, v, w, u);
  EXPECT_EQ(w[0], 1.0F);
  EXPECT_EQ(w[kWidth], 0.0F);
  EXPECT_EQ(w[2 * kWidth], 0.0F);
  for (std::size_t t = 3; t < G.size(); ++t)
    ASSERT_LE(ulps(w[t * kWidth], std::exp(double{G[t]})), 2) << "exp(" << G[t] << ")";
}

TEST_F(CpuNumerics, SigmoidIsAccurateAndSaturates) {
  std::vector<float> beta = sweep(4096, -80, 20), G(beta.size()), v(beta.size() * kWidth, 1.0F);
  std::vector<float> w, u;
  beta[0] = 0;
  beta[1] = 1000;
  beta[2] = -1000;
  Constants constants = constants_of(DType::fp32);
  constants.BETA_SIGMOID = true;
  run_identity(constants, 1.0F, beta, G, v, w, u);
  EXPECT_EQ(u[0], 0.5F);
  EXPECT_EQ(u[kWidth], 1.0F);
  EXPECT_EQ(u[2 * kWidth], 0.0F);
  for (std::size_t t = 3; t < beta.size(); ++t)
    ASSERT_LE(ulps(u[t * kWidth], 1 / (1 + std::exp(-double{beta[t]}))), 4)
        << "sigmoid(" << beta[t] << ")";
}

TEST_F(CpuNumerics, SoftplusIsAccurateAtBothEnds) {
  std::vector<float> g = sweep(4096, -80, 40), result(g.size());
  float A_log = 0;
  g[0] = 1000;
  g[1] = -1000;
  run("gate", constants_of(DType::fp32), static_cast<std::int64_t>(g.size()),
      {g.data(), &A_log, nullptr, result.data()});
  EXPECT_EQ(result[0], -1000.0F);
  EXPECT_EQ(result[1], 0.0F);
  for (std::size_t t = 2; t < g.size(); ++t)
    ASSERT_LE(ulps(-result[t], std::log1p(std::exp(double{g[t]}))), 4)
        << "softplus(" << g[t] << ")";
}

class CpuConversions : public CpuNumerics, public ::testing::WithParamInterface<DType> {
 protected:
  static std::uint16_t narrow(float value) {
    return GetParam() == DType::bf16 ? float_to_bf16(value) : float_to_fp16(value);
  }
  static float widen(std::uint16_t bits) {
    return GetParam() == DType::bf16 ? bf16_to_float(bits) : fp16_to_float(bits);
  }
};

TEST_P(CpuConversions, EveryFiniteValueComesBack) {
  constexpr std::size_t kPatterns = 65536;
  std::vector<std::uint16_t> v(kPatterns), w, u;
  for (std::size_t i = 0; i < kPatterns; ++i)
    v[i] = std::isfinite(widen(static_cast<std::uint16_t>(i))) ? static_cast<std::uint16_t>(i) : 0;
  std::vector<float> G(kPatterns / kWidth), beta(G.size(), 1.0F);
  run_identity(constants_of(GetParam()), narrow(1.0F), beta, G, v, w, u);
  for (std::size_t i = 0; i < kPatterns; ++i)
    ASSERT_EQ(widen(u[i]), widen(v[i])) << "bits " << v[i];
}

TEST_P(CpuConversions, RoundsToNearestEven) {
  // The first chunk's state is the initial state, rounded: fp32 patterns of every kind, among them
  // ties of both formats and their neighbours.
  std::mt19937 engine(std::random_device{}());
  std::vector<float> state(kWidth * kWidth);
  for (std::size_t i = 0; i < state.size(); ++i) {
    std::uint32_t bits = static_cast<std::uint32_t>(engine());
    if (i % 4 == 1) bits = (bits & 0xFFFF0000U) | 0x8000U;
    if (i % 4 == 2) bits = (bits & 0x8FFFE000U) | 0x30001000U;
    if (i % 4 == 3) bits = (bits & 0x8FFFFFFFU) | 0x30000000U;
    state[i] = std::bit_cast<float>(bits);
  }
  state[0] = std::numeric_limits<float>::infinity();
  state[4] = -std::numeric_limits<float>::quiet_NaN();
  state[8] = std::numeric_limits<float>::max();
  std::vector<std::uint16_t> zeros(kWidth), h(state.size()), v_new(kWidth);
  float G = 0;
  run("fwd_h", constants_of(GetParam()), 1,
      {zeros.data(), nullptr, zeros.data(), zeros.data(), &G,      nullptr, nullptr,
       state.data(), nullptr, nullptr,      nullptr,      nullptr, nullptr, nullptr,
       nullptr,      nullptr, h.data(),     v_new.data(), nullptr, nullptr});
  for (std::size_t i = 0; i < state.size(); ++i) {
    if (std::isnan(state[i]))
      ASSERT_TRUE(std::isnan(widen(h[i])));
    else
      ASSERT_EQ(widen(h[i]), widen(narrow(state[i]))) << state[i];
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, CpuConversions, ::testing::Values(DType::bf16, DType::fp16),
                         [](const auto& format) { return std::string(to_string(format.param)); });

}  // namespace
}  // namespace wyvern
