#include <wyvern/error.hpp>
#include <wyvern/problem.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "runtime/base/nearest_names.hpp"
#include "runtime/operators/operator.hpp"
#include "runtime/problem_fields.hpp"
#include "templates/device/extents.hpp"

namespace wyvern {
namespace {

constexpr std::int64_t kMaxTokens = (std::int64_t{1} << 31) - 1;  // token indices are 32-bit
constexpr std::int64_t kMaxSteps = 1024;                          // of one token
constexpr std::int64_t kMaxHeads = 65535;                         // a CUDA grid's y and z
constexpr std::int64_t kMaxKeyDim = 256;
constexpr std::int64_t kMaxRow = (std::int64_t{1} << 31) - 1;  // elements of one token, all heads

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

/// Rejects fields that are set and do not apply to the pass or operator. A field that says that a
/// tensor is absent may be set for all.
void check_scope(const Problem& p, const OperatorFacts& op) {
  for (const ProblemField& field : problem_fields()) {
    const bool absent = std::holds_alternative<bool Problem::*>(field.member) &&
                        !(p.*std::get<bool Problem::*>(field.member));
    if (field.key.place == 0 || absent || !is_set(field, p) ||
        std::holds_alternative<DType Problem::*>(field.member) || applies(field, op, p.pass))
      continue;
    std::string legal = field_text(field, Problem());
    if (legal.empty()) legal = "absent";
    const std::string value = field_text(field, p);
    if (((field.scope.passes >> static_cast<int>(p.pass)) & 1) == 0)
      bad(field.name, value, fmt::format("{} for the {} pass", legal, to_string(p.pass)));
    bad(field.name, value,
        fmt::format("{} for {}; only {} may set it", legal, op.name,
                    operators_with(field.scope.has)));
  }
}

/// Enumeration values out of range, from a cast or uninitialized memory.
void check_enumerations(const Problem& p) {
  if (p.pass > Pass::recurrent)
    bad("pass", static_cast<int>(p.pass), "forward (0), backward (1) or recurrent (2)");
  if (p.precision && *p.precision > Precision::ieee)
    bad("precision", static_cast<int>(*p.precision), "tf32 (0), tf32x3 (1) or ieee (2)");
  if (p.output_norm && *p.output_norm > Activation::sigmoid)
    bad("output_norm", static_cast<int>(*p.output_norm), "silu (0) or sigmoid (1)");
  if (p.conv_activation && *p.conv_activation != Activation::silu &&
      *p.conv_activation != Activation::none)
    bad("conv_activation", static_cast<int>(*p.conv_activation), "silu (0) or none (2)");
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

void check_householder(const Problem& p) {
  check_range("num_householder", p.num_householder, 1, kMaxSteps);
  if (p.B * p.T * p.num_householder > kMaxTokens)
    bad("B*T*num_householder", p.B * p.T * p.num_householder,
        fmt::format("at most {}", kMaxTokens));
}

void check_dtypes(const Problem& p, const OperatorFacts& op) {
  const GateKind gate = p.has_g ? op.gate : GateKind::none;
  check_dtype("dtype", p.dtype, {DType::bf16, DType::fp16, DType::fp32});
  // Listing fp32 twice would repeat it in the message.
  if (p.dtype == DType::fp32)
    check_dtype("beta_dtype", p.beta_dtype, {DType::fp32});
  else
    check_dtype("beta_dtype", p.beta_dtype, {p.dtype, DType::fp32});
  if (gate == GateKind::vector)
    check_dtype("g_dtype", p.g_dtype, {DType::fp32, DType::bf16, DType::fp16});
  else if (gate == GateKind::scalar && p.dtype == DType::fp32)
    check_dtype("g_dtype", p.g_dtype, {DType::fp32});
  else if (gate == GateKind::scalar)
    check_dtype("g_dtype", p.g_dtype, {p.dtype, DType::fp32});
  check_dtype("state_dtype", p.state_dtype,
              {DType::fp32, DType::bf16, DType::fp16, DType::float8_e4m3, DType::float8_e5m2});
  check_dtype("seqlens_dtype", p.seqlens_dtype, {DType::int32, DType::int64});
  check_dtype("index_dtype", p.index_dtype, {DType::int32, DType::int64});
}

void check_gate(const Problem& p, const OperatorFacts& op) {
  if (!p.has_g && op.gated() && !op.optional_gate)
    bad("has_g", "false", fmt::format("true for {}; g is missing", op.name));
  if (p.use_gate_in_kernel && !p.has_g) bad("use_gate_in_kernel", "true", "false without g");
  if (p.has_dt_bias && !p.use_gate_in_kernel)
    bad("has_dt_bias", "true", "false unless use_gate_in_kernel is true");
  if (p.lower_bound && !(*p.lower_bound >= -5.0F && *p.lower_bound < 0.0F))
    bad("lower_bound", *p.lower_bound, "in [-5, 0)");
  if (p.lower_bound && !p.use_gate_in_kernel && !p.safe_gate)
    bad("lower_bound", *p.lower_bound,
        "absent unless use_gate_in_kernel is true (it shapes the gate) or safe_gate is (it is "
        "promised)");
  if (p.safe_gate && !p.lower_bound) bad("safe_gate", "true", "false unless lower_bound is set");
  if (!p.has_A_log && p.use_gate_in_kernel && !p.lower_bound)
    bad("has_A_log", "false", "true unless lower_bound is given; A_log is missing");
}

void check_pool(const Problem& p) {
  if (p.inplace_state && p.output_final_state)
    bad("output_final_state", "true", "false with inplace_state, which returns the state in place");
  if (p.inplace_state && p.disable_recompute)
    bad("disable_recompute", "true", "false with inplace_state, which has no backward pass");
  if (p.inplace_state && p.return_intermediate_states)
    bad("return_intermediate_states", "true", "false with inplace_state");
  if (p.state_index && !p.inplace_state && p.pass != Pass::recurrent)
    bad("state_index", "true", "false unless inplace_state is true");
  if (p.state_index && !p.initial_state && !p.inplace_state)
    bad("state_index", "true", "false unless initial_state or inplace_state is true");
  if (p.output_state_index && !(p.state_index && p.inplace_state))
    bad("output_state_index", "true", "false unless state_index and inplace_state are true");
  if (p.null_slot_zero && !p.state_index)
    bad("null_slot_zero", "true", "false unless state_index is true");
  if (p.has_initial_state && !p.inplace_state)
    bad("has_initial_state", "true", "false unless inplace_state is true");
  if (p.state_index) check_range("state_slots", p.state_slots, 0, kMaxTokens);
}

constexpr std::int64_t kMostDrafts = 16;  // tokens of a sequence

void check_draft_shapes(const Problem& p) {
  check_range("index_columns", p.index_columns, 0, kMaxTokens);
  if (p.index_columns != 0) {
    if (!p.packed) check_range("T", p.T, 0, kMostDrafts);
    if (!p.packed && p.index_columns < p.T)
      bad("index_columns", p.index_columns, fmt::format("at least T, which is {}", p.T));
    if (!p.state_index || !p.inplace_state)
      bad("index_columns", p.index_columns, "0 unless inplace_state and state_index are true");
    if (p.output_state_index)
      bad("output_state_index", "true", "false with index_columns, which say where states go");
  }
  if (p.draft_tokens) {
    check_range("draft_tokens", *p.draft_tokens, 0, kMostDrafts);
    if (!p.intermediate_rows)
      bad("draft_tokens", *p.draft_tokens, "absent unless intermediate_rows is set");
    if (!p.packed && *p.draft_tokens != p.T)
      bad("draft_tokens", *p.draft_tokens, fmt::format("T, which is {}, unless packed", p.T));
  }
  if (!p.intermediate_rows) return;
  check_range("intermediate_rows", *p.intermediate_rows, 0, kMaxTokens);
  if (p.packed && !p.draft_tokens)
    bad("draft_tokens", "absent",
        "the most tokens of a sequence of a packed batch with intermediate_states");
  if (!p.packed) check_range("T", p.T, 0, kMostDrafts);
}

void check_drafts(const Problem& p) {
  check_draft_shapes(p);
  if (p.disable_state_update && !p.inplace_state)
    bad("disable_state_update", "true", "false unless inplace_state is true");
  if (p.disable_state_update && p.output_state_index)
    bad("output_state_index", "true", "false with disable_state_update");
  if (!p.parent) return;
  if (!p.intermediate_rows)
    bad("parent", "true", "false without intermediate_states, which tokens go on from");
  if (p.inplace_state && !p.disable_state_update)
    bad("parent", "true",
        "false unless disable_state_update is true: a tree of drafts has no one state to end with");
  if (p.output_final_state)
    bad("output_final_state", "true", "false with parent: a tree has no one state to end with");
}

void check_output_dtype(const Problem& p) {
  if (!p.output_dtype) {
    if (p.output_scale_tokens_last)
      bad("output_scale_tokens_last", "true", "false unless output_dtype is float8_e4m3");
    return;
  }
  check_dtype("output_dtype", *p.output_dtype, {DType::float8_e4m3});
  const auto refuse = [&](bool given, std::string_view why) {
    if (given) bad("output_dtype", to_string(*p.output_dtype), fmt::format("absent {}", why));
  };
  refuse(!p.output_norm, "unless output_norm is set");
  refuse(p.keep_output, "with keep_output: its o has no gradient");
  refuse(p.V % kScaledColumns != 0,
         fmt::format("where V is {}, no multiple of {}", p.V, kScaledColumns));
}

void check_output_norm(const Problem& p) {
  if (p.norm_eps && !(std::isfinite(*p.norm_eps) && *p.norm_eps > 0))
    bad("norm_eps", *p.norm_eps, "finite and above 0");
  if (p.norm_eps && !p.output_norm)
    bad("norm_eps", *p.norm_eps, "absent unless output_norm is set");
  check_output_dtype(p);
  if (!p.keep_output) return;
  if (!p.output_norm) bad("keep_output", "true", "false unless output_norm is set");
  if (p.inplace_state)
    bad("keep_output", "true", "false with inplace_state, which has no backward pass");
  if (has_checkpoints(p))
    bad("keep_output", "true", "false with checkpoints, which have no backward pass");
}

/// Rows that are in a pool go with states that are: a sequence goes on from both.
void check_conv_pool(const Problem& p) {
  if (!p.inplace_conv_state) {
    if (p.short_conv && p.inplace_state)
      bad("inplace_conv_state", "false", "true with short_conv and inplace_state");
    if (p.conv_columns)
      bad("conv_columns", *p.conv_columns, "absent unless inplace_conv_state is true");
    if (p.conv_tokens_first)
      bad("conv_tokens_first", "true", "false unless inplace_conv_state is true");
    return;
  }
  if (!p.inplace_state)
    bad("inplace_conv_state", "true", "false unless inplace_state is true, whose slots it has");
  for (const auto& [name, set] : {std::pair("initial_conv_state", p.initial_conv_state),
                                  std::pair("output_conv_state", p.output_conv_state)})
    if (set) bad(name, "true", "false with inplace_conv_state, which has these rows in conv_state");
  check_range("conv_columns", conv_columns_of(p), used_conv_columns(p), kMaxRow / conv_channels(p));
}

void check_short_conv(const Problem& p) {
  if (!p.short_conv) {
    if (p.conv_activation)
      bad("conv_activation", to_string(*p.conv_activation), "absent unless short_conv is set");
    for (const auto& [name, set] : {std::pair("has_conv_bias", p.has_conv_bias),
                                    std::pair("initial_conv_state", p.initial_conv_state),
                                    std::pair("output_conv_state", p.output_conv_state),
                                    std::pair("inplace_conv_state", p.inplace_conv_state)})
      if (set) bad(name, "true", "false unless short_conv is set");
    check_conv_pool(p);
    return;
  }
  check_range("short_conv", *p.short_conv, 2, 4);
  if (p.dtype == DType::fp32)
    check_dtype("conv_dtype", p.conv_dtype, {DType::fp32});
  else
    check_dtype("conv_dtype", p.conv_dtype, {p.dtype, DType::fp32});
  check_range("the number of channels of short_conv", conv_channels(p), 1, kMaxRow);
  check_conv_pool(p);
  if (p.parent && p.output_conv_state)
    bad("output_conv_state", "true", "false with parent: a tree has no one window to end with");
}

void check_checkpoints(const Problem& p) {
  constexpr std::int64_t kUnit = 64;
  if (p.checkpoint_every < 0 || p.checkpoint_every % kUnit != 0)
    bad("checkpoint_every", p.checkpoint_every, fmt::format("0 or a multiple of {}", kUnit));
  check_range("checkpoint_every", p.checkpoint_every, 0, kMaxTokens);
  if (p.checkpoint_offsets && p.checkpoint_every != 0)
    bad("checkpoint_every", p.checkpoint_every, "0 with checkpoint_offsets");
  if (p.checkpoint_rows) {
    check_range("checkpoint_rows", *p.checkpoint_rows, 0, kMaxTokens);
    if (p.checkpoint_every == 0)
      bad("checkpoint_rows", *p.checkpoint_rows, "absent unless checkpoint_every is set");
  }
  if (p.fp32_checkpoints && !has_checkpoints(p))
    bad("fp32_checkpoints", "true", "false without checkpoint_every and checkpoint_offsets");
  if (!has_checkpoints(p)) return;
  if (p.disable_recompute)
    bad("disable_recompute", "true", "false with checkpoints, which have no backward pass");
  if (p.chunk_size && p.checkpoint_every % *p.chunk_size != 0)
    bad("chunk_size", *p.chunk_size,
        fmt::format("a divisor of checkpoint_every, which is {}", p.checkpoint_every));
}

void check_state_scale(const Problem& p, const OperatorFacts& op) {
  if (!is_float8(p.state_dtype)) return;
  const auto refuse = [&](std::string_view why) {
    bad("state_dtype", to_string(p.state_dtype), fmt::format("fp32 or bf16 or fp16 {}", why));
  };
  if (!p.inplace_state) refuse("unless inplace_state is true: a scale belongs to a slot of a pool");
  if (op.householder || !op.beta)
    refuse(fmt::format(
        "for {}; only {} take float8", op.name,
        operators_with([](const OperatorFacts& f) { return f.beta && !f.householder; })));
  if (has_checkpoints(p) && !p.fp32_checkpoints)
    refuse("with checkpoints, which have no scale, unless fp32_checkpoints is true");
  if (p.intermediate_rows) refuse("with intermediate_states, which have no scale");
}

void check_batch_invariant(const Problem& p) {
  if (!p.batch_invariant) return;
  if (p.chunk_size && 64 % *p.chunk_size != 0)
    bad("chunk_size", *p.chunk_size,
        "16, 32 or 64 with batch_invariant, so that a sequence may go on at any multiple of 64 "
        "tokens");
}

void check_summary(const Problem& p) {
  if (p.transition && !p.summary) bad("transition", "true", "false unless summary is true");
  if (!p.summary) return;
  const bool backward = p.pass == Pass::backward;
  const auto refuse = [](bool given, std::string_view why) {
    if (given) bad("summary", "true", fmt::format("false with {}", why));
  };
  refuse(p.inplace_state || p.state_index,
         "inplace_state or state_index: it reads and writes no pool");
  refuse(has_checkpoints(p), "checkpoints: it has states at the ends of sequences alone");
  refuse(p.disable_recompute, "disable_recompute: it keeps nothing for a backward pass");
  refuse(p.return_intermediate_states,
         "return_intermediate_states: it has states at the ends of sequences alone");
  refuse(p.batch_invariant, "batch_invariant: its sums depend on the plan's segments");
  refuse(p.output_norm.has_value(), "output_norm: it has no o");
  refuse(p.short_conv.has_value(), "short_conv: it takes rows as the operator does");
  refuse(p.output_final_state && !backward,
         "output_final_state in the forward pass: R is the final state");
  refuse(p.initial_state && backward, "initial_state in the backward pass, which reads no state");
}

/// Of a pass that takes maps the same options are refused as of the summary that gives them.
void check_segments(const Problem& p) {
  if (!p.segment_chunks) return;
  if (*p.segment_chunks != 8 && *p.segment_chunks != 16 && *p.segment_chunks != 32)
    bad("segment_chunks", *p.segment_chunks, "8, 16 or 32");
  const auto refuse = [&](bool given, std::string_view why) {
    if (given) bad("segment_chunks", *p.segment_chunks, fmt::format("absent {}", why));
  };
  refuse(!p.chunk_size, "unless chunk_size is set, on which maps depend too");
  refuse(p.packed, "for a packed batch, where not every slot of a segment has one");
  refuse(p.inplace_state || p.state_index, "with inplace_state or state_index");
  refuse(has_checkpoints(p), "with checkpoints");
  refuse(p.batch_invariant, "with batch_invariant, whose plans have no segments");
  refuse(p.short_conv.has_value(), "with short_conv: maps are those of convolved rows");
}

void check_options(const Problem& p, const OperatorFacts& op) {
  if (p.scale && !std::isfinite(*p.scale)) bad("scale", *p.scale, "finite");
  if (p.chunk_size && *p.chunk_size != 16 && *p.chunk_size != 32 && *p.chunk_size != 64 &&
      *p.chunk_size != 128)
    bad("chunk_size", *p.chunk_size, "16, 32, 64 or 128");
  if (p.seqlens_hint) {
    if (!p.packed) bad("seqlens_hint", *p.seqlens_hint, "absent unless the batch is packed");
    check_range("seqlens_hint", *p.seqlens_hint, 0, kMaxTokens);
  }
  check_gate(p, op);
  check_pool(p);
  check_drafts(p);
  check_output_norm(p);
  check_short_conv(p);
  check_checkpoints(p);
  check_state_scale(p, op);
  check_batch_invariant(p);
  check_summary(p);
  check_segments(p);
  if (p.disable_recompute && p.return_intermediate_states)
    bad("return_intermediate_states", "true",
        "false with disable_recompute, which returns the states as h");
}

template <class Integer>
void check_seqlens(const Problem& problem, std::span<const Integer> cu_seqlens) {
  check_range("N", problem.N, 0, kMaxTokens);
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
  if (problem.index_columns == 0) return;
  for (std::size_t i = 1; i < expected; ++i)
    if (const auto tokens = cu_seqlens[i] - cu_seqlens[i - 1]; tokens > kMostDrafts)
      bad(fmt::format("the length of sequence {}", i - 1), tokens,
          fmt::format("at most {} with index_columns", kMostDrafts));
}

template <class Integer>
void check_seqlens_at(const Problem& problem, const TensorView& cu_seqlens) {
  const auto count = static_cast<std::size_t>(cu_seqlens.shape[0]);
  check_seqlens(problem, std::span(static_cast<const Integer*>(cu_seqlens.data), count));
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

std::string_view to_string(Activation activation) noexcept {
  switch (activation) {
    case Activation::silu: return "silu";
    case Activation::sigmoid: return "sigmoid";
    case Activation::none: return "none";
  }
  return "?";
}

std::optional<Activation> parse_activation(std::string_view text) noexcept {
  for (const Activation one : {Activation::silu, Activation::sigmoid, Activation::none})
    if (to_string(one) == text) return one;
  return {};
}

std::int64_t kept_chunk_size(const Problem& problem) noexcept {
  if (problem.chunk_size) return *problem.chunk_size;
  if (!problem.disable_recompute) return 64;
  // The backward kernels have a chunk's rows of V in shared memory: 32 KiB of them fit everywhere
  // that 164 KB are.
  const auto row = static_cast<std::int64_t>(size_of(problem.dtype)) * problem.V;
  return row <= 512 ? 64 : row <= 1024 ? 32 : 16;
}

std::int64_t longest_sequence(const Problem& problem) noexcept {
  if (problem.N <= 0) return 0;
  const std::int64_t mean = (problem.B * problem.T + problem.N - 1) / problem.N;
  if (!problem.seqlens_hint || !problem.packed || problem.batch_invariant) return mean;
  return std::clamp(*problem.seqlens_hint, mean, problem.T);
}

bool has_checkpoints(const Problem& problem) noexcept {
  return problem.checkpoint_every != 0 || problem.checkpoint_offsets;
}

std::int64_t checkpoint_rows(const Problem& problem) noexcept {
  if (problem.checkpoint_every <= 0) return problem.checkpoint_offsets ? problem.N : 0;
  return problem.checkpoint_rows.value_or(problem.B * (problem.T / problem.checkpoint_every));
}

DType checkpoint_dtype(const Problem& problem) noexcept {
  const bool as_states = has_checkpoints(problem) && !problem.fp32_checkpoints;
  return as_states ? problem.state_dtype : DType::fp32;
}

bool has_state_scale(const Problem& problem) noexcept {
  return problem.inplace_state && is_float8(problem.state_dtype);
}

std::int64_t draft_tokens_of(const Problem& problem) noexcept {
  return problem.draft_tokens.value_or(problem.T);
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

float norm_eps_of(const Problem& problem) noexcept { return problem.norm_eps.value_or(1e-6F); }

ScaleShape output_scale_shape(const Problem& problem) noexcept {
  if (!problem.output_dtype) return {};
  const std::int64_t tokens = problem.B * problem.T;
  const std::int64_t scales = problem.HV * (problem.V / kScaledColumns);
  if (problem.output_scale_tokens_last) return {scales, (tokens + 3) / 4 * 4};
  return {tokens, scales};
}

std::int64_t conv_channels(const Problem& problem) noexcept {
  const std::int64_t keys = problem.H * problem.K, values = problem.HV * problem.V;
  return keys + problem.num_householder * (keys + values);
}

std::int64_t used_conv_columns(const Problem& problem) noexcept {
  if (!problem.short_conv) return 0;
  return *problem.short_conv - 2 + std::max<std::int64_t>(problem.index_columns, 1);
}

std::int64_t conv_columns_of(const Problem& problem) noexcept {
  return problem.conv_columns.value_or(used_conv_columns(problem));
}

void validate(const Problem& problem) {
  const OperatorDefinition& op = definition_of(problem);
  check_enumerations(problem);
  check_sizes(problem);
  check_scope(problem, op.facts());
  check_householder(problem);
  check_dtypes(problem, op.facts());
  check_options(problem, op.facts());
  op.check(problem);
}

void validate_seqlens(const Problem& problem, std::span<const std::int64_t> cu_seqlens) {
  if (cu_seqlens.data() == nullptr && !cu_seqlens.empty())
    bad("cu_seqlens", "null", "the N + 1 entries that its length promises");
  check_seqlens(problem, cu_seqlens);
}

void validate_seqlens(const Problem& problem, const TensorView& cu_seqlens) {
  check_dtype("the dtype of cu_seqlens", cu_seqlens.dtype, {DType::int32, DType::int64});
  if (cu_seqlens.rank != 1) bad("the rank of cu_seqlens", cu_seqlens.rank, "1");
  if (!cu_seqlens.present()) bad("cu_seqlens", "null", "a tensor of N + 1 entries");
  if (cu_seqlens.shape[0] < 0) bad("the length of cu_seqlens", cu_seqlens.shape[0], "N + 1");
  if (cu_seqlens.dtype == DType::int32)
    check_seqlens_at<std::int32_t>(problem, cu_seqlens);
  else
    check_seqlens_at<std::int64_t>(problem, cu_seqlens);
}

const Preset& find_preset(std::string_view name) {
  const std::span<const Preset> all = presets();
  const auto found = std::find_if(all.begin(), all.end(),
                                  [&](const Preset& preset) { return preset.name == name; });
  if (found != all.end()) return *found;
  std::vector<std::string_view> names;
  for (const Preset& preset : all) names.push_back(preset.name);
  bad("preset", fmt::format("'{}'", name), "one of: " + nearest_names(name, names));
}

}  // namespace wyvern
