// Rates of the special-function unit and of what stands in for it, beside fp32 FMA.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "tools/benchmark/hopper/bench.hpp"

namespace wyvern::hopper {
namespace {

constexpr unsigned kChains = 8;  // independent values a thread, so that latency is hidden
constexpr unsigned kRounds = 4;  // applications of the operation in one iteration
constexpr unsigned kThreads = 512;

/// An operation on one 32-bit register. The host's version takes and gives floats; packed ones
/// work on both halves.
struct Operation {
  const char* name;
  const char* type;  ///< of the register: float or u32
  const char* code;  ///< an asm statement's template with the one operand %0
  int results;       ///< values that one application makes
  enum class Packed { no, f16, bf16, to_bf16 } packed;
  double (*host)(double);
  double bound;          ///< of the relative error of one application
  const char* expected;  ///< results per clock and SM
};

double negated_exp2(double x) { return std::exp2(-x); }
double log2_of_magnitude(double x) { return std::log2(std::fabs(x)); }
double reciprocal(double x) { return 1 / (x + 1); }
double reciprocal_root(double x) { return 1 / std::sqrt(std::fabs(x)); }
double fused(double x) { return x * 0.5 + 0.25; }
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double identity(double x) { return x; }

const std::array kOperations{
    Operation{"fma", "float", "fma.rn.f32 %0, %0, 0f3F000000, 0f3E800000;", 1,
              Operation::Packed::no, fused, 1e-6, "128"},
    Operation{"ex2", "float", "{.reg .f32 n; neg.f32 n, %0; ex2.approx.ftz.f32 %0, n;}", 1,
              Operation::Packed::no, negated_exp2, 1e-6, "16"},
    // Round to an integer, a polynomial of degree 4 in what is left, the integer into the exponent.
    Operation{"ex2 by polynomial", "float",
              "{.reg .f32 x, t, r, f; .reg .b32 i; neg.f32 x, %0; add.rn.f32 t, x, 0f4B400000; "
              "sub.rn.f32 r, t, 0f4B400000; sub.rn.f32 f, x, r; "
              "fma.rn.f32 r, f, 0f3C1D955B, 0f3D635847; fma.rn.f32 r, r, f, 0f3E75FDF0; "
              "fma.rn.f32 r, r, f, 0f3F317218; fma.rn.f32 r, r, f, 0f3F800000; "
              "mov.b32 i, t; shl.b32 i, i, 23; .reg .b32 p; mov.b32 p, r; add.s32 p, p, i; "
              "mov.b32 %0, p;}",
              1, Operation::Packed::no, negated_exp2, 1e-4, "16"},
    Operation{"tanh", "float", "tanh.approx.f32 %0, %0;", 1, Operation::Packed::no, std::tanh, 1e-3,
              "16"},
    // The addition keeps ptxas from cancelling pairs of reciprocals.
    Operation{"rcp", "float", "{.reg .f32 n; add.f32 n, %0, 0f3F800000; rcp.approx.ftz.f32 %0, n;}",
              1, Operation::Packed::no, reciprocal, 1e-6, "16"},
    Operation{"rsqrt", "float", "{.reg .f32 n; abs.f32 n, %0; rsqrt.approx.ftz.f32 %0, n;}", 1,
              Operation::Packed::no, reciprocal_root, 1e-6, "16"},
    Operation{"lg2", "float", "{.reg .f32 n; abs.f32 n, %0; lg2.approx.ftz.f32 %0, n;}", 1,
              Operation::Packed::no, log2_of_magnitude, 1e-5, "16"},
    Operation{"ex2.f16x2", "u32", "ex2.approx.f16x2 %0, %0;", 2, Operation::Packed::f16,
              [](double x) { return std::exp2(x); }, 2e-3, "32"},
    Operation{"ex2.bf16x2", "u32", "ex2.approx.ftz.bf16x2 %0, %0;", 2, Operation::Packed::bf16,
              [](double x) { return std::exp2(x); }, 1e-2, "32"},
    Operation{"tanh.f16x2", "u32", "tanh.approx.f16x2 %0, %0;", 2, Operation::Packed::f16,
              std::tanh, 2e-3, "32"},
    Operation{"tanh.bf16x2", "u32", "tanh.approx.bf16x2 %0, %0;", 2, Operation::Packed::bf16,
              std::tanh, 1e-2, "32"},
    Operation{"sigmoid by tanh", "float",
              "{.reg .f32 n; mul.f32 n, %0, 0f3F000000; tanh.approx.f32 n, n; "
              "fma.rn.f32 %0, n, 0f3F000000, 0f3F000000;}",
              1, Operation::Packed::no, sigmoid, 2e-3, "16"},
    Operation{"sigmoid by ex2 and rcp", "float",
              "{.reg .f32 n; mul.f32 n, %0, 0fBFB8AA3B; ex2.approx.ftz.f32 n, n; "
              "add.f32 n, n, 0f3F800000; rcp.approx.ftz.f32 %0, n;}",
              1, Operation::Packed::no, sigmoid, 1e-5, "8"},
    Operation{"two floats to bf16x2", "float",
              "{.reg .b32 n; cvt.rn.bf16x2.f32 n, %0, %0; mov.b32 %0, n;}", 2,
              Operation::Packed::to_bf16, identity, 5e-3, "128 (64 conversions)"},
};

std::string kernel_name(const Operation& operation, bool once) {
  std::string name = fmt::format("op_{}", operation.name);
  for (char& c : name)
    if (c == '.' || c == ' ') c = '_';
  return name + (once ? "_once" : "_many");
}

Program program() {
  std::string source = fmt::format(R"CUDA(
#define KERNEL(NAME, TYPE, CONSTRAINT, CODE, ROUNDS)                                              \
  extern "C" __global__ __launch_bounds__(512) void NAME(const TYPE* in, TYPE* out,               \
                                                          int iterations, u64* clocks) {{         \
    TYPE x[{0}];                                                                                  \
    for (int j = 0; j < {0}; ++j) x[j] = in[threadIdx.x * {0} + j];                               \
    __syncthreads();                                                                              \
    const u64 start = clocks_now();                                                               \
    for (int i = 0; i < iterations; ++i)                                                          \
      _Pragma("unroll") for (int r = 0; r < ROUNDS; ++r)                                          \
        _Pragma("unroll") for (int j = 0; j < {0}; ++j) asm volatile(CODE : CONSTRAINT(x[j]));    \
    __syncthreads();                                                                              \
    const u64 stop = clocks_now();                                                                \
    if (threadIdx.x == 0) clocks[blockIdx.x] = stop - start;                                      \
    for (int j = 0; j < {0}; ++j)                                                                 \
      out[(blockIdx.x * blockDim.x + threadIdx.x) * {0} + j] = x[j];                              \
  }}
)CUDA",
                                   kChains);
  for (const Operation& operation : kOperations) {
    const bool real = std::string(operation.type) == "float";
    for (const bool once : {true, false})
      source += fmt::format("KERNEL({}, {}, \"{}\", \"{}\", {})\n", kernel_name(operation, once),
                            operation.type, real ? "+f" : "+r", operation.code, once ? 1 : kRounds);
  }
  return {"special_functions", source};
}

float from_f16(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const float mantissa = static_cast<float>(bits & 1023);
  const float magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024.0F + mantissa, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

/// The values in one register.
std::vector<double> values_of(const Operation& operation, std::uint32_t bits) {
  const auto low = static_cast<std::uint16_t>(bits);
  const auto high = static_cast<std::uint16_t>(bits >> 16);
  switch (operation.packed) {
    case Operation::Packed::f16: return {from_f16(low), from_f16(high)};
    case Operation::Packed::bf16:
    case Operation::Packed::to_bf16: return {from_bf16(low), from_bf16(high)};
    case Operation::Packed::no: break;
  }
  return {std::bit_cast<float>(bits)};
}

/// A register of random values in [0.3, 1.8], where every operation is well conditioned.
std::uint32_t random_register(const Operation& operation, Random& random) {
  const auto half = [&]() -> std::uint32_t {
    if (operation.packed == Operation::Packed::bf16) return to_bf16(random.uniform(0.3F, 1.8F));
    return 0x3400U + static_cast<std::uint32_t>(random.uniform(0, 2900));  // f16, 0.25 to 1.8
  };
  if (std::string(operation.type) == "u32") {
    const std::uint32_t low = half();
    return low | half() << 16;
  }
  return std::bit_cast<std::uint32_t>(random.uniform(0.3F, 1.8F));
}

double error_of_one(const Operation& operation, const std::vector<std::uint32_t>& in,
                    const std::vector<std::uint32_t>& out) {
  double largest = 0;
  for (std::size_t i = 0; i < in.size(); ++i) {
    const std::vector<double> got = values_of(operation, out[i]);
    std::vector<double> given = values_of(operation, in[i]);
    if (operation.packed == Operation::Packed::to_bf16)
      given.assign(2, std::bit_cast<float>(in[i]));
    for (std::size_t j = 0; j < got.size(); ++j) {
      const double wanted = operation.host(given[j]);
      const double error = std::fabs(got[j] - wanted) / std::max(std::fabs(wanted), 0.1);
      if (!(error <= largest)) largest = error;  // keeps a NaN
    }
  }
  return largest;
}

}  // namespace

std::vector<Program> special_function_programs() { return {program()}; }

void run_special_functions(const Report& report) {
  const unsigned blocks = open_gpu().multiprocessors;
  constexpr int kIterations = 1000;
  const Memory out(std::size_t{blocks} * kThreads * kChains * sizeof(std::uint32_t));
  const Memory clocks(blocks * sizeof(std::uint64_t));
  for (const Operation& operation : kOperations) {
    Random random(7);
    std::vector<std::uint32_t> values(kThreads * kChains);
    for (std::uint32_t& value : values) value = random_register(operation, random);
    const auto in = upload(values);
    launch(kernel(program(), kernel_name(operation, true)), {1, kThreads}, in->address(),
           out.address(), 1, clocks.address());
    const double error =
        error_of_one(operation, values, download<std::uint32_t>(out, values.size()));
    const Kernel many = kernel(program(), kernel_name(operation, false));
    for (const unsigned threads : {128U, 256U, kThreads}) {
      const Sample sample = measure_clocks(clocks, blocks, [&] {
        launch(many, {blocks, threads}, in->address(), out.address(), kIterations,
               clocks.address());
      });
      const double made =
          static_cast<double>(threads) * kChains * kRounds * kIterations * operation.results;
      Row row{"special",
              fmt::format("{}, {} warps", operation.name, threads / 32),
              made / sample.median,
              "results/clk/SM",
              sample.spread_percent,
              operation.expected,
              ""};
      set_check(row, error, operation.bound);
      report(row);
    }
  }
}

}  // namespace wyvern::hopper
