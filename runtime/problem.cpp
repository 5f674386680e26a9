#include <wyvern/error.hpp>
#include <wyvern/problem.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

namespace wyvern {
namespace {

constexpr std::int64_t kMaxTokens = (std::int64_t{1} << 31) - 1;  // token indices are 32-bit
constexpr std::int64_t kMaxHeads = 65535;                         // a CUDA grid's y and z
constexpr std::int64_t kMaxKeyDim = 256;
constexpr std::int64_t kMaxRow = (std::int64_t{1} << 31) - 1;  // elements of one token, all heads

constexpr std::array<std::string_view, 3> kOperators{"delta_rule", "gated_delta_rule", "kda"};

constexpr std::array kPresets{
    Preset{"qwen3-next-80b", "gated_delta_rule", 16, 32, 128, 128},
    Preset{"qwen3.5-397b", "gated_delta_rule", 16, 64, 128, 128},
    Preset{"qwen3.5-122b", "gated_delta_rule", 16, 64, 128, 128},
    Preset{"qwen3.5-35b", "gated_delta_rule", 16, 32, 128, 128},
    Preset{"qwen3.5-9b", "gated_delta_rule", 16, 32, 128, 128},
    Preset{"qwen3.5-4b", "gated_delta_rule", 16, 32, 128, 128},
    Preset{"qwen3.5-27b", "gated_delta_rule", 16, 48, 128, 128},
    Preset{"qwen3.5-2b", "gated_delta_rule", 16, 16, 128, 128},
    Preset{"qwen3.5-0.8b", "gated_delta_rule", 16, 16, 128, 128},
    Preset{"kimi-linear-48b", "kda", 32, 32, 128, 128, -5.0F},
    Preset{"kda-h64", "kda", 64, 64, 128, 128, -5.0F},
    Preset{"kda-h96", "kda", 96, 96, 128, 128, -5.0F},
    Preset{"fla-deltanet-1.3b", "delta_rule", 16, 16, 128, 128},
    Preset{"fla-gdn-1.3b", "gated_delta_rule", 6, 6, 256, 512},
};

template <class T>
[[noreturn]] void bad(std::string_view name, const T& value, std::string_view legal) {
  throw Error(ErrorKind::kBadInput, fmt::format("{} is {}; it must be {}", name, value, legal));
}

void check_range(std::string_view name, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value < low || value > high) bad(name, value, fmt::format("between {} and {}", low, high));
}

void check_dtype(std::string_view name, DType type, std::initializer_list<DType> legal) {
  if (std::find(legal.begin(), legal.end(), type) != legal.end()) return;
  std::string names;
  for (const DType candidate : legal) {
    if (!names.empty()) names += " or ";
    names += to_string(candidate);
  }
  bad(name, to_string(type), names);
}

void check_sizes(const Problem& p) {
  check_range("B", p.B, 0, kMaxTokens);
  check_range("T", p.T, 0, kMaxTokens);
  check_range("H", p.H, 1, kMaxHeads);
  check_range("HV", p.HV, 1, kMaxHeads);
  check_range("K", p.K, 1, kMaxKeyDim);
  check_range("V", p.V, 1, kMaxRow / p.HV);
  check_range("N", p.N, 0, kMaxTokens);
  if (p.HV % p.H != 0) bad("HV", p.HV, fmt::format("a multiple of H, which is {}", p.H));
  if (p.B * p.T > kMaxTokens) bad("B*T", p.B * p.T, fmt::format("at most {}", kMaxTokens));
  if (!p.packed) {
    if (p.N != p.B) bad("N", p.N, fmt::format("equal to B, which is {}, unless packed", p.B));
    return;
  }
  if (p.B != 1) bad("B", p.B, "1 for a packed batch");
  if (p.N == 0 && p.T != 0) bad("T", p.T, "0 for a packed batch of N = 0 sequences");
}

void check_dtypes(const Problem& p) {
  check_dtype("dtype", p.dtype, {DType::bf16, DType::fp16, DType::fp32});
  // Listing fp32 twice would repeat it in the message.
  if (p.dtype == DType::fp32)
    check_dtype("beta_dtype", p.beta_dtype, {DType::fp32});
  else
    check_dtype("beta_dtype", p.beta_dtype, {p.dtype, DType::fp32});
  if (gate_kind(p) == GateKind::vector)
    check_dtype("g_dtype", p.g_dtype, {DType::fp32, DType::bf16, DType::fp16});
  else if (gate_kind(p) == GateKind::scalar && p.dtype == DType::fp32)
    check_dtype("g_dtype", p.g_dtype, {DType::fp32});
  else if (gate_kind(p) == GateKind::scalar)
    check_dtype("g_dtype", p.g_dtype, {p.dtype, DType::fp32});
  check_dtype("state_dtype", p.state_dtype, {DType::fp32, DType::bf16});
  check_dtype("seqlens_dtype", p.seqlens_dtype, {DType::int32, DType::int64});
  check_dtype("index_dtype", p.index_dtype, {DType::int32, DType::int64});
}

/// Options that mean something for some operators only.
void check_gate(const Problem& p) {
  const GateKind gate = gate_kind(p);
  if (p.use_gate_in_kernel && gate == GateKind::none)
    bad("use_gate_in_kernel", "true", fmt::format("false for {}, which has no gate", p.op));
  if (p.has_dt_bias && !p.use_gate_in_kernel)
    bad("has_dt_bias", "true", "false unless use_gate_in_kernel is true");
  if (p.lower_bound && gate != GateKind::vector)
    bad("lower_bound", *p.lower_bound,
        fmt::format("absent for {}; only kda takes one, in [-5, 0)", p.op));
  if (p.lower_bound && !(*p.lower_bound >= -5.0F && *p.lower_bound < 0.0F))
    bad("lower_bound", *p.lower_bound, "in [-5, 0)");
  if (p.lower_bound && !p.use_gate_in_kernel && !p.safe_gate)
    bad("lower_bound", *p.lower_bound,
        "absent unless use_gate_in_kernel is true (it shapes the gate) or safe_gate is (it is "
        "promised)");
  if (p.safe_gate && !p.lower_bound)
    bad("safe_gate", "true", "false unless lower_bound says what is promised (kda only)");
  if (!p.has_A_log && p.use_gate_in_kernel && !p.lower_bound)
    bad("has_A_log", "false", "true unless lower_bound is given; A_log is missing");
}

void check_recurrent(const Problem& p) {
  const bool recurrent = p.pass == Pass::recurrent;
  if (p.inplace_state && !recurrent)
    bad("inplace_state", "true", "false but for the recurrent pass");
  if (p.inplace_state && p.output_final_state)
    bad("output_final_state", "true", "false with inplace_state, which returns the state in place");
  if (p.state_index && !recurrent) bad("state_index", "true", "false but for the recurrent pass");
  if (p.state_index && !p.initial_state && !p.inplace_state)
    bad("state_index", "true", "false unless initial_state or inplace_state is true");
  if (p.state_index) check_range("state_slots", p.state_slots, 0, kMaxTokens);
}

void check_options(const Problem& p) {
  if (p.scale && !std::isfinite(*p.scale)) bad("scale", *p.scale, "finite");
  if (p.chunk_size && *p.chunk_size != 16 && *p.chunk_size != 32 && *p.chunk_size != 64 &&
      *p.chunk_size != 128)
    bad("chunk_size", *p.chunk_size, "16, 32, 64 or 128");
  check_gate(p);
  check_recurrent(p);
  if (p.pass != Pass::recurrent) {
    if (p.disable_recompute && p.return_intermediate_states)
      bad("return_intermediate_states", "true",
          "false with disable_recompute, which returns the states as h");
    return;
  }
  if (p.disable_recompute) bad("disable_recompute", "true", "false for the recurrent pass");
  if (p.return_intermediate_states)
    bad("return_intermediate_states", "true", "false for the recurrent pass");
}

template <class Integer>
void check_seqlens(const Problem& problem, std::span<const Integer> cu_seqlens) {
  const auto expected = static_cast<std::size_t>(problem.N) + 1;
  if (cu_seqlens.size() != expected)
    bad("the length of cu_seqlens", cu_seqlens.size(), fmt::format("N + 1 = {}", expected));
  if (cu_seqlens.front() != 0) bad("cu_seqlens[0]", cu_seqlens.front(), "0");
  for (std::size_t i = 1; i < expected; ++i)
    if (cu_seqlens[i] < cu_seqlens[i - 1])
      bad(fmt::format("cu_seqlens[{}]", i), cu_seqlens[i],
          fmt::format("at least the entry before it, {}", cu_seqlens[i - 1]));
  if (cu_seqlens.back() != problem.T)
    bad(fmt::format("cu_seqlens[{}]", expected - 1), cu_seqlens.back(),
        fmt::format("T = {}, the packed tokens", problem.T));
}

std::int64_t bucket(std::int64_t count) {
  return count <= 0 ? 0
                    : static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(count)));
}

}  // namespace

std::string_view to_string(Pass pass) noexcept {
  switch (pass) {
    case Pass::forward: return "forward";
    case Pass::backward: return "backward";
    case Pass::recurrent: return "recurrent";
  }
  return "?";
}

GateKind gate_kind(const Problem& problem) noexcept {
  if (problem.op == "kda") return GateKind::vector;
  return problem.op == "delta_rule" ? GateKind::none : GateKind::scalar;
}

std::int64_t kept_chunk_size(const Problem& problem) noexcept {
  if (problem.chunk_size) return *problem.chunk_size;
  if (!problem.disable_recompute) return 64;
  // The backward kernels have a chunk's rows of V in shared memory: 32 KiB of them fit everywhere
  // that 164 KB are.
  const auto row = static_cast<std::int64_t>(size_of(problem.dtype)) * problem.V;
  return row <= 512 ? 64 : row <= 1024 ? 32 : 16;
}

bool gate_is_bounded(const Problem& problem) noexcept {
  return problem.lower_bound && (problem.safe_gate || problem.use_gate_in_kernel);
}

Precision default_precision(DType dtype) noexcept {
  return dtype == DType::fp32 ? Precision::tf32x3 : Precision::tf32;
}

Precision precision_floor(const Problem& problem) noexcept {
  return problem.precision.value_or(default_precision(problem.dtype));
}

float scale_of(const Problem& problem) noexcept {
  if (problem.scale) return *problem.scale;
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(problem.K)));
}

void validate(const Problem& problem) {
  if (std::find(kOperators.begin(), kOperators.end(), problem.op) == kOperators.end())
    bad("op", fmt::format("'{}'", problem.op),
        fmt::format("one of: {}", fmt::join(kOperators, ", ")));
  check_sizes(problem);
  check_dtypes(problem);
  check_options(problem);
}

void validate_seqlens(const Problem& problem, std::span<const std::int64_t> cu_seqlens) {
  check_seqlens(problem, cu_seqlens);
}

void validate_seqlens(const Problem& problem, const TensorView& cu_seqlens) {
  const auto count = static_cast<std::size_t>(cu_seqlens.elements());
  if (cu_seqlens.dtype == DType::int32)
    check_seqlens(problem, std::span(static_cast<const std::int32_t*>(cu_seqlens.data), count));
  else
    check_seqlens(problem, std::span(static_cast<const std::int64_t*>(cu_seqlens.data), count));
}

std::string ProblemKey::to_string() const {
  return fmt::format("{}/tokens={}/sequences={}", family, tokens, sequences);
}

ProblemKey problem_key(const Problem& p) {
  const bool gated = gate_kind(p) != GateKind::none;
  std::string family =
      fmt::format("{}/{}/H={},HV={},K={},V={}/{},beta={}", p.op, to_string(p.pass), p.H, p.HV, p.K,
                  p.V, to_string(p.dtype), to_string(p.beta_dtype));
  if (gated) family += fmt::format(",g={}", to_string(p.g_dtype));
  family += fmt::format("/floor={}", to_string(precision_floor(p)));
  // A dtype of an absent tensor is left out: it makes no difference to any plan.
  if (p.packed) family += fmt::format("/packed={}", to_string(p.seqlens_dtype));
  if (p.initial_state) family += fmt::format("/initial_state={}", to_string(p.state_dtype));
  if (p.output_final_state) family += "/final_state";
  if (p.state_v_first &&
      (p.initial_state || p.output_final_state || p.inplace_state || p.return_intermediate_states))
    family += "/state_v_first";
  if (p.use_qk_l2norm) family += "/qk_l2norm";
  if (p.use_gate_in_kernel) {
    family += p.has_dt_bias ? "/gate,dt_bias" : "/gate";
    if (p.lower_bound) family += p.has_A_log ? ",bounded" : ",bounded,no_A_log";
  } else if (gate_is_bounded(p)) {
    family += "/safe_gate";
  }
  if (p.use_beta_sigmoid) family += p.allow_neg_eigval ? "/beta_sigmoid,neg" : "/beta_sigmoid";
  if (p.chunk_size) family += fmt::format("/chunk_size={}", *p.chunk_size);
  if (p.disable_recompute) family += "/kept";
  if (p.return_intermediate_states) family += "/intermediate_states";
  if (p.inplace_state) family += fmt::format("/inplace={}", to_string(p.state_dtype));
  if (p.state_index) family += fmt::format("/state_index={}", to_string(p.index_dtype));
  return {std::move(family), bucket(p.B * p.T), bucket(p.N)};
}

std::span<const Preset> presets() { return kPresets; }

const Preset& find_preset(std::string_view name) {
  const auto found = std::find_if(kPresets.begin(), kPresets.end(),
                                  [&](const Preset& preset) { return preset.name == name; });
  if (found != kPresets.end()) return *found;
  std::string names;
  for (const Preset& preset : kPresets) {
    if (!names.empty()) names += ", ";
    names += preset.name;
  }
  bad("preset", fmt::format("'{}'", name), fmt::format("one of: {}", names));
}

std::span<const std::string_view> operators() { return kOperators; }

}  // namespace wyvern
