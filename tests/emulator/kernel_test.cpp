// Every CUDA template against the float64 reference of its stages, on the emulator. Each launch
// runs twice, with other warps first, outputs poisoned differently and rows of tokens apart where
// the template takes them so: the results must agree bit for bit, and what a contract leaves alone
// must keep its poison.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "compiler/compiler.hpp"
#include "runtime/operators/operator.hpp"
#include "runtime/plan.hpp"
#include "tests/emulator/block.hpp"
#include "tests/emulator/emulator.hpp"
#include "tests/support/coverage.hpp"
#include "tests/support/full_suite.hpp"
#include "tests/support/stage_data.hpp"

namespace wyvern {
namespace {

using emulator::GuardedMemory;
using emulator::Schedule;
using testing::Gate;
using testing::HostTensor;
using testing::StageData;

const Limits kHopper = cuda_target("sm_90a").limits;

Extents extents_of(const StageData& data) {
  const Problem& p = data.problem;
  return Extents{
      .B = p.B,
      .T = p.T,
      .N = p.N,
      .NT = static_cast<std::int64_t>(data.context.layout.slots.size()),
      .NS = static_cast<std::int64_t>(data.context.layout.segments(data.context.SEG).size()),
      .S = data.context.state_slots,
      .first_slot = data.context.first_slot,
      .scale = static_cast<float>(data.context.scale),
      .gate_floor = static_cast<float>(data.context.gate_floor),
      .lower_bound = p.lower_bound.value_or(0.0F),
      .norm_eps = static_cast<float>(data.context.norm_eps),
      .M = std::max<std::int64_t>(p.index_columns, 1),
      .R = p.intermediate_rows.value_or(0),
      .D = draft_tokens_of(p),
      .H = static_cast<int>(p.H),
      .HV = static_cast<int>(p.HV)};
}

/// Elements from row to row of a tensor with strided rows of `dense` elements.
std::int64_t stride_apart(std::int64_t dense, DType dtype) {
  const std::int64_t unit = 16 / static_cast<std::int64_t>(size_of(dtype));
  return ((dense + unit - 1) / unit + 3) * unit;
}

/// Rows of `dense` elements at their places where they lie `stride` elements apart, NaNs between.
std::vector<unsigned char> rows_apart(const HostTensor& tensor, std::int64_t dense,
                                      std::int64_t stride) {
  const std::int64_t rows = dense == 0 ? 0 : tensor.elements() / dense;
  const std::size_t size = size_of(tensor.dtype());
  const auto row_bytes = static_cast<std::size_t>(dense) * size;
  const auto step = static_cast<std::size_t>(stride) * size;
  const auto count = static_cast<std::size_t>(rows);
  // The last row ends the memory.
  std::vector<unsigned char> bytes(count == 0 ? 0 : (count - 1) * step + row_bytes,
                                   testing::kNanPoison);
  for (std::size_t r = 0; r < count; ++r)
    std::memcpy(bytes.data() + r * step, tensor.data() + r * row_bytes, row_bytes);
  return bytes;
}

/// The outputs of one emulated launch; every argument at the end of its own mapping. Inputs that
/// the template takes strided lie `apart` or not.
std::map<std::string, HostTensor, std::less<>> launch(const Template& t, const Config& config,
                                                      const StageData& data, Schedule schedule,
                                                      unsigned char poison, bool apart,
                                                      const Limits& device = {}) {
  const Constants constants = problem_constants(data.problem);
  const Spec spec(constants, config);
  const Extents extents = extents_of(data);
  std::vector<std::unique_ptr<GuardedMemory>> memory;
  std::vector<void*> pointers;
  std::vector<std::int64_t> strides;
  for (const Parameter& argument : t.parameters) {
    const std::int64_t dense = argument.strided ? dense_stride(argument, spec, extents) : 0;
    if (argument.strided) strides.push_back(dense);
    if (!is_present(argument, constants)) {
      pointers.push_back(nullptr);
      continue;
    }
    const HostTensor& tensor = data.tensors.at(std::string(argument.name));
    if (apart && argument.strided && argument.access == Access::in) {
      strides.back() = stride_apart(dense, tensor.dtype());
      const std::vector<unsigned char> bytes = rows_apart(tensor, dense, strides.back());
      memory.push_back(std::make_unique<GuardedMemory>(bytes.size()));
      pointers.push_back(memory.back()->data());
      std::copy(bytes.begin(), bytes.end(), static_cast<unsigned char*>(pointers.back()));
      continue;
    }
    memory.push_back(std::make_unique<GuardedMemory>(tensor.bytes()));
    pointers.push_back(memory.back()->data());
    if (argument.access == Access::out)
      std::memset(pointers.back(), poison, tensor.bytes());
    else
      std::memcpy(pointers.back(), tensor.data(), tensor.bytes());
  }
  emulator::emulate(t, constants, config, t.geometry(spec, extents, device), extents, pointers,
                    strides, schedule);

  std::map<std::string, HostTensor, std::less<>> outputs;
  for (std::size_t i = 0; i < pointers.size(); ++i) {
    const Argument& argument = t.parameters[i];
    if (argument.access == Access::in || pointers[i] == nullptr) continue;
    HostTensor tensor = data.tensors.at(std::string(argument.name));
    std::memcpy(tensor.data(), pointers[i], tensor.bytes());
    outputs.emplace(argument.name, std::move(tensor));
  }
  return outputs;
}

/// Whether element i of both holds nothing but its poison.
bool untouched(const HostTensor& tensor, std::int64_t i, unsigned char poison) {
  const std::size_t size = size_of(tensor.dtype());
  for (std::size_t byte = 0; byte < size; ++byte)
    if (tensor.data()[static_cast<std::size_t>(i) * size + byte] != poison) return false;
  return true;
}

bool same_element(const HostTensor& a, const HostTensor& b, std::int64_t i) {
  const std::size_t size = size_of(a.dtype());
  const std::size_t offset = static_cast<std::size_t>(i) * size;
  return std::memcmp(a.data() + offset, b.data() + offset, size) == 0;
}

void expect_correct(const Template& t, const Config& config, const StageData& data,
                    const Limits& device = {}) {
  SCOPED_TRACE(t.id() + " {" + config.to_string() + "} " + testing::describe(data.problem));
  if (testing::is_only_listed(data.problem, t.id())) return;
  const auto outputs =
      launch(t, config, data, Schedule::first_warp, testing::kNanPoison, /*apart=*/false, device);
  const auto again =
      launch(t, config, data, Schedule::last_warp, testing::kFinitePoison, /*apart=*/true, device);
  const testing::TensorMap expected = testing::reference_outputs(t, data);
  const testing::Written written = testing::written_elements(data, &t);
  for (const auto& [name, actual] : outputs) {
    const HostTensor& second = again.at(name);
    std::int64_t unstable = 0;
    std::int64_t stray = 0;
    for (std::int64_t i = 0; i < actual.elements(); ++i) {
      if (written(name, i))
        unstable += same_element(actual, second, i) ? 0 : 1;
      else
        stray += untouched(actual, i, testing::kNanPoison) ? 0 : 1;
    }
    EXPECT_EQ(unstable, 0) << name << ": elements not written, or that depend on timing";
    EXPECT_EQ(stray, 0) << name << ": elements written that are not the template's";
    const testing::Vector& reference = expected.at(name);
    const auto in_contract = [&, &tensor = name](std::int64_t i) { return written(tensor, i); };
    if (!is_floating(actual.dtype()))
      EXPECT_EQ(actual.values(), reference) << name;
    else
      EXPECT_LE(testing::rms_error(actual, reference, in_contract),
                testing::stage_bound(data, config, name))
          << name;
  }
}

/// Whether the template is for a GPU, has this chunk size, and the problem uses it.
bool applies(const Template& t, const StageData& data) {
  if (t.device != DeviceKind::cuda || !testing::exercises(t, data)) return false;
  if (!testing::takes(t, kHopper, data.problem)) return false;
  const Tunable* sizes = t.tunable("BT");
  return sizes == nullptr || std::find(sizes->values.begin(), sizes->values.end(),
                                       Value{data.context.layout.BT}) != sizes->values.end();
}

/// Everything that decides what a template is compiled to.
std::string specialization(const Template& t, const Constants& constants, const Config& config) {
  Values known;
  for (const AnyConstant& constant : t.constants)
    known.set(std::string(name_of(constant)), value_of(constant, constants));
  return t.id() + " " + known.merged(config).to_string();
}

/// Every template's default config for the problem, and for its backward pass where it is a forward
/// one; what both compile alike runs once. `only` those of a stage, where one is named. Of those
/// one in `step` is tried (0: none), others with another seed, and what is new to this process.
void expect_some_correct(const Problem& problem, std::int64_t BT, Gate gate, std::uint64_t seed,
                         const std::vector<std::int64_t>& lengths,
                         const std::vector<std::string_view>& only, std::uint64_t step) {
  std::set<std::string> done;
  std::uint64_t turn = seed, tried = 0;
  std::vector<Pass> passes{problem.pass};
  if (problem.pass == Pass::forward) passes.push_back(Pass::backward);
  for (const Pass pass : passes) {
    Problem p = problem;
    p.pass = pass;
    const StageData data = testing::make_stage_data(p, BT, gate, seed, lengths);
    const Constants constants = problem_constants(data.problem);
    for (const Template& t : all_templates()) {
      if (!applies(t, data)) continue;
      if (!only.empty() &&
          std::find(only.begin(), only.end(), t.covers.front().stage->name) == only.end())
        continue;
      const auto config = default_config(t, constants, kHopper, precision_floor(data.problem),
                                         {.shape = {BT, data.context.SEG}});
      ASSERT_TRUE(config.has_value()) << t.id() << " has no legal config";
      if (!done.insert(specialization(t, constants, *config)).second) continue;
      const bool sampled = step != 0 && ++turn % step == 0;
      if (!sampled && !testing::is_new(p, t.id())) continue;
      ++tried;
      expect_correct(t, *config, data);
    }
  }
  ASSERT_FALSE(done.empty()) << testing::describe(problem);
  if (tried == 0 && step != 0) expect_some_correct(problem, BT, gate, seed, lengths, only, 1);
}

/// What is left out of the short suite where a problem meets every template: two of three.
std::uint64_t short_step() { return testing::full_suite() ? 1 : 3; }

/// The same with a gate per head and without one.
void expect_scalar_correct(Problem problem, std::int64_t BT, Gate gate, std::uint64_t seed,
                           const std::vector<std::int64_t>& lengths = {},
                           std::uint64_t step = short_step()) {
  expect_some_correct(problem, BT, gate, seed, lengths, {}, step);
  problem.op = "delta_rule";
  problem.use_gate_in_kernel = problem.has_dt_bias = false;
  expect_some_correct(problem, BT, gate, seed + 1, lengths, {}, short_step());
}

bool has_beta(const Problem& p) { return definition_of(p).facts().beta; }

Problem problem(std::int64_t B, std::int64_t T, std::int64_t H, std::int64_t HV, std::int64_t K,
                std::int64_t V) {
  Problem p;
  p.B = p.N = B;
  p.T = T;
  p.H = H;
  p.HV = HV;
  p.K = K;
  p.V = V;
  p.output_final_state = true;
  return p;
}

TEST(Kernel, Bf16) {
  Problem p = problem(2, 150, 2, 2, 128, 128);
  expect_scalar_correct(p, 64, Gate::typical, 1, {}, 1);
}

TEST(Kernel, Fp16WithGroupedHeadsAndStates) {
  Problem p = problem(1, 130, 1, 3, 64, 96);
  p.dtype = p.beta_dtype = p.g_dtype = DType::fp16;
  p.state_dtype = DType::bf16;
  p.initial_state = p.state_v_first = true;
  p.use_beta_sigmoid = p.allow_neg_eigval = p.use_qk_l2norm = true;
  expect_scalar_correct(p, 64, Gate::mixed, 2);
}

TEST(Kernel, Fp32) {
  Problem p = problem(2, 77, 1, 2, 64, 32);
  p.dtype = p.beta_dtype = DType::fp32;
  p.initial_state = true;
  p.use_gate_in_kernel = p.has_dt_bias = true;
  expect_scalar_correct(p, 64, Gate::typical, 3);
}

TEST(Kernel, PackedWithEmptySequences) {
  Problem p = problem(1, 0, 2, 4, 64, 64);
  p.initial_state = true;
  p.seqlens_dtype = DType::int64;
  p.use_qk_l2norm = true;
  p = testing::packed(p, {0, 5, 70, 0, 0, 64, 33, 0});
  expect_scalar_correct(p, 32, Gate::typical, 4, {0, 5, 70, 0, 0, 64, 33, 0});
}

TEST(Kernel, OddDimensions) {
  for (const auto& [K, V, dtype] : {std::tuple{60, 100, DType::bf16},
                                    {100, 60, DType::fp16},
                                    {33, 50, DType::bf16},
                                    {33, 7, DType::fp32}}) {
    Problem p = problem(1, 70, 1, 2, K, V);
    p.dtype = dtype;
    p.beta_dtype = DType::fp32;
    p.initial_state = p.use_qk_l2norm = true;
    expect_scalar_correct(p, 64, Gate::mixed, 5);
  }
}

TEST(Kernel, SmallChunks) {
  Problem p = problem(1, 45, 1, 1, 32, 32);
  expect_scalar_correct(p, 16, Gate::zero, 6);
}

TEST(Kernel, LargeChunks) {
  Problem p = problem(1, 140, 1, 1, 64, 64);
  expect_scalar_correct(p, 128, Gate::typical, 7);
}

TEST(Kernel, GatesThatEraseEverything) {
  Problem p = problem(1, 100, 1, 1, 32, 32);
  p.initial_state = true;
  expect_scalar_correct(p, 64, Gate::very_negative, 8);
}

/// Scans in segments, forwards and backwards: several of them, an exact number, an empty sequence.
TEST(Kernel, Segments) {
  const std::vector<std::int64_t> lengths{300, 0, 128, 5, 129};
  std::map<std::string, int> checked;  // by template
  std::uint64_t seed = 12;
  for (const char* op : {"gated_delta_rule", "kda", "delta_rule"})
    for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
      for (const Pass pass : {Pass::forward, Pass::backward}) {
        Problem p = problem(1, 0, 1, 2, 40, 48);
        p.op = op;
        p.pass = pass;
        p.dtype = dtype;
        p.initial_state = p.disable_recompute = true;
        p.use_qk_l2norm = p.state_v_first = seed % 2 == 0;
        p.output_final_state = seed++ % 4 != 0;
        const StageData data =
            testing::make_stage_data(testing::packed(p, lengths), 16, Gate::typical, seed, lengths);
        for (const Template& t : all_templates()) {
          const bool backward = t.covers.front().stage->name.starts_with("bwd");
          if (t.tunable("SEG") == nullptr || !applies(t, data)) continue;
          if (backward != (pass == Pass::backward)) continue;
          const auto config =
              default_config(t, problem_constants(data.problem), kHopper,
                             precision_floor(data.problem), {.shape = {16, data.context.SEG}});
          ASSERT_TRUE(config.has_value()) << t.id();
          ++checked[t.id()];
          expect_correct(t, *config, data);
        }
      }
  EXPECT_EQ(checked.size(), 6U);
  for (const auto& [id, count] : checked) EXPECT_EQ(count, 9) << id;
}

/// States past segments of keys that some warps have no rows of, that all have, and that take
/// turns.
TEST(Kernel, StatesPastSegmentsOfAnyWidth) {
  const std::vector<std::int64_t> lengths{300, 0, 128, 5, 129};
  std::uint64_t seed = 40;
  for (const std::int64_t K : {48, 128, 160, 256})
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      Problem p = problem(1, 0, 1, 2, K, 40);
      p.pass = pass;
      p.dtype = p.beta_dtype = DType::bf16;
      p.initial_state = p.output_final_state = p.disable_recompute = true;
      const StageData data =
          testing::make_stage_data(testing::packed(p, lengths), 16, Gate::typical, ++seed, lengths);
      const Template& t = *find_template(pass == Pass::forward ? "fwd_h_combine.portable"
                                                               : "bwd_dhu_combine.portable");
      ASSERT_TRUE(applies(t, data));
      const auto config =
          default_config(t, problem_constants(data.problem), kHopper, precision_floor(data.problem),
                         {.shape = {16, data.context.SEG}});
      ASSERT_TRUE(config.has_value());
      expect_correct(t, *config, data);
    }
}

/// States past segments of which some forget all, some not, over more of them than are looked at at
/// once: a head each for every other one, for runs of both kinds, for all but the first and the
/// last, and for all.
TEST(Kernel, SegmentsThatForgetAllAndSegmentsThatDoNot) {
  constexpr std::int64_t kHeads = 4, kSegment = 16 * 8, kTokens = 70 * kSegment + 5;
  for (const std::int64_t V : {32, 20}) {
    Problem p = problem(1, kTokens, 1, kHeads, 16, V);
    p.initial_state = true;
    const Template& t = *find_template("fwd_h_combine.portable");
    StageData data = testing::make_stage_data(p, 16, Gate::typical, 9);
    HostTensor& M = data.tensors.at("segment_M");
    ASSERT_EQ(data.context.SEG, 8);
    const std::int64_t size = p.K * p.K;
    for (std::int64_t i = 0; i < M.elements(); i += size) {
      const std::int64_t segment = i / size / kHeads;
      const bool forgets[] = {segment % 2 == 0, segment % 40 > 7, segment != 0 && segment != 69,
                              true};
      if (!forgets[i / size % kHeads]) continue;
      M.set(i, std::numeric_limits<float>::denorm_min());
      for (std::int64_t j = 1; j < size; ++j) M.set(i + j, 0);
    }
    const auto config = default_config(t, problem_constants(p), kHopper, precision_floor(p),
                                       {.shape = {16, data.context.SEG}});
    ASSERT_TRUE(config.has_value());
    expect_correct(t, *config, data);
  }
}

/// What a segment does to a state, where a few channels of keys outlast the others: chunks take
/// most of what these hold away again, but not what rounding has added to it.
TEST(Kernel, SegmentsWhereFewChannelsLast) {
  for (const std::int64_t BT : {16, 32})
    for (const Pass pass : {Pass::forward, Pass::backward})
      for (std::uint64_t seed = 1; seed < (testing::full_suite() ? 9 : 3); ++seed) {
        Problem p = problem(1, BT * testing::StageContext{}.SEG + 70, 1, 2, 60, 33);
        p.op = "kda";
        p.pass = pass;
        p.dtype = DType::bf16;
        p.use_qk_l2norm = p.initial_state = p.safe_gate = true;
        p.lower_bound = -5.0F;
        const StageData data = testing::make_stage_data(p, BT, Gate::mixed, seed, {});
        const Template& t = *find_template(pass == Pass::forward ? "fwd_h_segment.portable"
                                                                 : "bwd_dhu_segment.portable");
        const auto config = default_config(t, problem_constants(p), kHopper, precision_floor(p),
                                           {.shape = {BT, data.context.SEG}});
        ASSERT_TRUE(config.has_value());
        expect_correct(t, *config, data);
      }
}

constexpr std::string_view kRowStages[] = {
    "l2norm_bwd",   "head_sum",      "chunk_local_reverse_cumsum", "gate_bwd", "kda_gate",
    "kda_gate_bwd", "gate_param_sum"};

/// Work on rows and gates, the backward passes above all, for every kind of gate.
TEST(Kernel, RowsAndGates) {
  const std::vector<std::string_view> only(std::begin(kRowStages), std::end(kRowStages));
  const std::vector<std::int64_t> lengths{0, 5, 70, 0, 64, 33};
  std::uint64_t seed = 20;
  for (const auto& [H, HV, K] :
       {std::tuple{2, 4, 64}, {1, 3, 33}, {1, 6, 50}, {2, 2, 100}, {1, 1, 256}})
    for (const char* op : {"delta_rule", "gated_delta_rule", "kda"})
      for (const bool bounded : {false, true}) {
        Problem p = problem(1, 90, H, HV, K, 8);
        p.op = op;
        p.pass = Pass::backward;
        p.dtype = p.g_dtype = seed % 3 == 0   ? DType::fp32
                              : seed % 3 == 1 ? DType::bf16
                                              : DType::fp16;
        p.beta_dtype = DType::fp32;
        const GateKind kind = gate_kind(p);
        if (bounded && kind == GateKind::none) continue;
        p.use_gate_in_kernel = kind == GateKind::vector || bounded;
        p.has_dt_bias = p.use_gate_in_kernel && seed % 2 == 0;
        if (bounded && kind == GateKind::vector) {
          p.lower_bound = -5.0F;
          p.has_A_log = seed % 4 < 2;
        }
        p.use_qk_l2norm = true;
        p = testing::packed(p, lengths);
        expect_some_correct(p, seed % 2 == 0 ? 64 : 16, Gate::mixed, seed, lengths, only,
                            testing::is_tried(seed, 3) ? 1 : 0);
        ++seed;
      }
}

/// Rows of o that fill a lane's vectors, miss them, are held by a whole warp, and are too long to
/// be held.
TEST(Kernel, OutputNorm) {
  std::uint64_t seed = 60;
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
    for (const std::int64_t V : {1, 60, 128, 300, 512, 1300}) {
      Problem p = problem(2, 19, 1, 3, 16, V);
      p.dtype = p.beta_dtype = dtype;
      p.output_norm = seed % 2 == 0 ? Activation::silu : Activation::sigmoid;
      const StageData data = testing::make_stage_data(p, 64, Gate::typical, seed, {},
                                                      find_template("output_norm.portable"));
      const Template& t = *find_template("output_norm.portable");
      const std::vector<Config> configs =
          space(t, problem_constants(p), kHopper, Precision::tf32, {});
      ASSERT_FALSE(configs.empty());
      expect_correct(t, configs[seed++ % configs.size()], data);
    }
}

TEST(Kernel, OutputNormSpillsNothing) {
  if (const std::string missing = compiler_problem(DeviceKind::cuda); !missing.empty())
    GTEST_SKIP() << missing;
  const Template& t = *find_template("output_norm.portable");
  for (const DType dtype : {DType::bf16, DType::fp32})
    for (const std::int64_t V : {60, 128, 512, 1300}) {
      Problem p = problem(1, 90, 1, 3, 64, V);
      p.dtype = p.beta_dtype = dtype;
      p.output_norm = Activation::silu;
      for (const Config& config : space(t, problem_constants(p), kHopper))
        for (const char* arch : {"sm_80", "sm_90a"}) {
          const Artifact artifact = compile({&t, problem_constants(p), config, cuda_target(arch)});
          EXPECT_EQ(artifact.resources.spill_bytes, 0) << V << ' ' << config.to_string();
          EXPECT_EQ(artifact.resources.stack_bytes, 0) << V << ' ' << config.to_string();
        }
    }
}

/// Gradients inside chunks, with a scalar gate and without one.
TEST(Kernel, ChunkGradients) {
  const std::vector<std::string_view> only{"bwd_dqkwg", "wy_bwd", "wy_dqkg"};
  const std::vector<std::int64_t> lengths{0, 5, 70, 0, 64, 33};
  std::uint64_t seed = 60;
  for (const auto& [H, HV, K, V, BT] : {std::tuple{1, 2, 128, 128, 64},
                                        {1, 2, 60, 100, 64},
                                        {1, 3, 33, 50, 32},
                                        {1, 1, 100, 16, 16},
                                        {1, 1, 33, 7, 64},
                                        {1, 1, 256, 512, 16}})
    for (const char* op : {"delta_rule", "gated_delta_rule"})
      for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32}) {
        Problem p = problem(1, BT + 6, H, HV, K, V);
        p.op = op;
        p.pass = Pass::backward;
        p.dtype = dtype;
        p.beta_dtype = seed % 2 == 0 ? DType::fp32 : dtype;
        p.use_qk_l2norm = seed % 2 == 0;
        p.use_beta_sigmoid = seed % 3 != 0;
        p.allow_neg_eigval = seed % 3 == 1;
        p.precision = seed % 4 == 0 ? Precision::ieee : Precision::tf32x3;
        const Gate gates[] = {Gate::typical, Gate::mixed, Gate::zero, Gate::very_negative};
        const bool packed = seed % 2 != 0 && V < 200;
        if (packed) p = testing::packed(p, lengths);
        expect_some_correct(p, BT, gates[seed % 4], seed,
                            packed ? lengths : std::vector<std::int64_t>{}, only,
                            testing::is_tried(seed, 2) ? 1 : 0);
        ++seed;
      }
}

/// Rows of tokens and rows of steps, of every alignment.
TEST(Kernel, Steps) {
  const std::vector<std::int64_t> lengths{2, 0, 30, 1};
  std::uint64_t seed = 90;
  for (const auto& [H, K, steps] :
       {std::tuple{2, 128, 2}, {1, 33, 3}, {3, 5, 2}, {1, 1, 4}, {1, 60, 3}, {1, 8, 100}})
    for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
      for (const bool packed : {false, true}) {
        Problem p = problem(packed ? 1 : 2, 9, H, H, K, 8);
        p.op = "gated_delta_product";
        p.num_householder = steps;
        p.dtype = p.beta_dtype = dtype;
        p.seqlens_dtype = seed % 2 == 0 ? DType::int64 : DType::int32;
        if (packed) p = testing::packed(p, lengths);
        expect_some_correct(p, 64, Gate::zero, seed++,
                            packed ? lengths : std::vector<std::int64_t>{}, {}, short_step());
      }
}

/// Every switch of the decode stage, over dimensions of all alignments.
TEST(Kernel, Recurrent) {
  std::uint64_t seed = 40;
  for (const auto& [K, V] :
       {std::tuple{128, 128}, {33, 60}, {60, 33}, {256, 40}, {100, 7}, {16, 512}})
    for (const char* op : {"delta_rule", "gated_delta_rule", "gated_delta_product", "kda", "gdn2"})
      for (const unsigned switches : {0U, 1U, 2U, 3U}) {
        Problem p = problem(2, 3, 1, 2, K, V);
        p.op = op;
        p.pass = Pass::recurrent;
        if (p.op == "gated_delta_product") p.num_householder = 2 + switches % 3;
        p.dtype = p.g_dtype = seed % 3 == 0   ? DType::fp32
                              : seed % 3 == 1 ? DType::bf16
                                              : DType::fp16;
        p.beta_dtype = DType::fp32;
        p.state_v_first = switches % 2 != 0;
        p.state_dtype = seed % 5 == 0 ? DType::bf16 : seed % 5 == 1 ? DType::fp16 : DType::fp32;
        p.inplace_state = switches / 2 != 0;
        p.initial_state = !p.inplace_state && seed % 5 != 0;
        p.output_final_state = !p.inplace_state;
        p.state_index = p.inplace_state || p.initial_state;
        p.index_dtype = seed % 2 == 0 ? DType::int32 : DType::int64;
        p.output_state_index = p.inplace_state && seed % 3 != 1;
        p.has_initial_state = p.inplace_state && seed % 4 < 2;
        p.null_slot_zero = p.state_index && seed % 5 < 2;
        p.use_qk_l2norm = seed % 2 == 0;
        p.use_beta_sigmoid = p.allow_neg_eigval = seed % 3 == 0 && has_beta(p);
        p.use_gate_in_kernel = gate_kind(p) != GateKind::none && seed % 4 != 0;
        p.has_dt_bias = p.use_gate_in_kernel && seed % 3 != 0;
        if (p.use_gate_in_kernel && gate_kind(p) == GateKind::vector && seed % 2 == 0) {
          p.lower_bound = -4.0F;
          p.has_A_log = seed % 4 == 2;
        }
        if (has_beta(p) && p.num_householder == 1 && seed % 2 == 0)
          p.output_norm = seed % 4 == 0 ? Activation::silu : Activation::sigmoid;
        const std::vector<std::int64_t> lengths{2, 0, 8, 1};
        const bool packed = seed % 3 != 1;
        if (packed) p = testing::packed(p, lengths);
        expect_some_correct(p, 64, Gate::mixed, seed,
                            packed ? lengths : std::vector<std::int64_t>{}, {},
                            testing::is_tried(seed, 2) ? 1 : 0);
        ++seed;
      }
}

/// States that go through shared memory, several to each of two or three blocks.
TEST(KernelHopper, RecurrentWithManyStates) {
  const Template& t = *find_template("recurrent.hopper");
  std::uint64_t seed = 70;
  for (const auto& [K, V] : {std::tuple{128, 128}, {64, 128}, {128, 64}, {64, 64}})
    for (const char* op : {"delta_rule", "gated_delta_rule", "gated_delta_product", "kda", "gdn2"})
      for (const unsigned switches : {0U, 1U, 2U, 3U}) {
        if (!testing::is_tried(++seed, 2)) continue;
        Problem p = problem(5, 1 + seed % 3, 1, 2, K, V);
        p.op = op;
        p.pass = Pass::recurrent;
        if (p.op == "gated_delta_product") p.num_householder = 2;
        p.dtype = p.g_dtype = seed % 3 == 0 ? DType::fp32 : DType::bf16;
        p.beta_dtype = seed % 2 == 0 ? DType::fp32 : p.dtype;
        p.state_v_first = switches % 2 != 0;
        p.inplace_state = switches / 2 != 0;
        p.state_dtype = !p.inplace_state || seed % 4 > 1 ? DType::fp32
                        : seed % 4 == 0                  ? DType::bf16
                                                         : DType::fp16;
        p.initial_state = !p.inplace_state && seed % 5 != 0;
        p.output_final_state = !p.inplace_state;
        p.state_index = p.inplace_state || p.initial_state;
        p.output_state_index = p.inplace_state && seed % 3 != 1;
        p.has_initial_state = p.inplace_state && seed % 4 < 2;
        p.null_slot_zero = p.state_index && seed % 5 < 2;
        p.use_qk_l2norm = seed % 2 == 0;
        p.use_beta_sigmoid = p.allow_neg_eigval = seed % 3 == 0 && has_beta(p);
        p.use_gate_in_kernel = gate_kind(p) != GateKind::none && seed % 4 != 0;
        p.has_dt_bias = p.use_gate_in_kernel && seed % 3 != 0;
        if (has_beta(p) && p.num_householder == 1 && seed % 3 != 2)
          p.output_norm = seed % 3 == 0 ? Activation::silu : Activation::sigmoid;
        const std::vector<std::int64_t> lengths{2, 0, 8, 1, 40};
        const bool packed = seed % 3 != 1;
        const StageData data =
            testing::make_stage_data(packed ? testing::packed(p, lengths) : p, 64, Gate::mixed,
                                     seed, packed ? lengths : std::vector<std::int64_t>{}, &t);
        ASSERT_TRUE(applies(t, data));
        Limits device = kHopper;
        device.multiprocessors = 2 + static_cast<int>(seed % 2);
        const auto config = default_config(t, problem_constants(data.problem), device,
                                           precision_floor(data.problem), {});
        ASSERT_TRUE(config.has_value());
        expect_correct(t, *config, data, device);
      }
}

/// The inverse with every A_rs in [-1, 1], where it is largest.
TEST(Kernel, SolveTrilOfLargeEntries) {
  const Template& t = *find_template("solve_tril.portable");
  for (const DType dtype : {DType::fp32, DType::bf16})
    for (const std::int64_t BT : {16, 32, 64, 128}) {
      Problem p = problem(1, 2 * BT + 7, 1, 2, 16, 16);
      p.dtype = dtype;
      StageData data = testing::make_stage_data(p, BT, Gate::typical, 9);
      testing::Engine engine(10);
      HostTensor& A = data.tensors.at("A");
      A = testing::uniform(engine, DType::fp32, A.shape(), -1, 1);
      for (const Precision precision : {Precision::tf32, Precision::tf32x3, Precision::ieee}) {
        const Config config{{"BT", BT},
                            {"num_warps", std::max<std::int64_t>(BT / 32, 1)},
                            {"precision", precision}};
        if (t.illegal(Spec(problem_constants(p), config), kHopper).empty())
          expect_correct(t, config, data);
      }
    }
}

/// Expects a sample of each template's space to be correct: at a stride that meets all values of
/// all tunables; in the short suite one config of every fourth template, in other turns others, and
/// of those that are new to this process.
void expect_samples_correct(const StageData& data, Precision precision, std::size_t turn) {
  const Constants constants = problem_constants(data.problem);
  std::size_t index = 0;
  for (const Template& t : all_templates()) {
    if (!applies(t, data)) continue;
    const std::vector<Config> configs =
        space(t, constants, kHopper, precision, {data.context.layout.BT, data.context.SEG});
    ASSERT_FALSE(configs.empty()) << t.id();
    std::vector<Config> sample;
    for (std::size_t i = configs.size() / 8; i < configs.size(); i += configs.size() / 4 + 1)
      sample.push_back(configs[i]);
    if (!testing::full_suite()) {
      if ((index++ + turn) % 4 != 0 && !testing::is_new(data.problem, t.id())) continue;
      sample = {sample[(index / 4 + turn) % sample.size()]};
    }
    for (const Config& config : sample) expect_correct(t, config, data);
  }
}

/// A sample of every template's space. A backward problem has the forward stages too.
TEST(Kernel, SampledSpace) {
  std::size_t turn = 0;
  for (const DType dtype : {DType::bf16, DType::fp32}) {
    Problem p = problem(1, 90, 1, 2, 96, 80);
    p.pass = Pass::backward;
    p.dtype = dtype;
    p.precision = Precision::tf32;
    p.use_qk_l2norm = true;
    for (const std::int64_t BT : {32, 64})
      expect_samples_correct(testing::make_stage_data(p, BT, Gate::typical, 11), Precision::tf32,
                             turn++);
  }
}

// ---- one stage by tensor copies and wgmma -------------------------------------------------------

void expect_hopper_correct(Problem p, Gate gate, std::uint64_t seed,
                           const std::vector<std::int64_t>& lengths = {}) {
  constexpr std::int64_t kChunk = 64;
  expect_correct(*find_template("scaled_dot_kkt.hopper"), Config{{"BT", kChunk}},
                 testing::make_stage_data(p, kChunk, gate, seed, lengths));
}

TEST(KernelHopper, EveryKeyDimension) {
  for (const std::int64_t K : {64, 128, 256})
    for (const DType dtype : {DType::bf16, DType::fp16}) {
      Problem p = problem(2, 100, 2, 2, K, 16);
      p.dtype = p.beta_dtype = dtype;
      expect_hopper_correct(p, Gate::typical, 1);
    }
}

TEST(KernelHopper, GroupedHeadsAndTails) {
  for (const std::int64_t T : {1, 63, 64, 65, 200})
    expect_hopper_correct(problem(1, T, 2, 6, 128, 16), Gate::typical, 2);
}

TEST(KernelHopper, EveryGate) {
  Problem p = problem(1, 130, 1, 2, 64, 16);
  for (const Gate gate : {Gate::zero, Gate::typical, Gate::mixed, Gate::very_negative})
    expect_hopper_correct(p, gate, 3);
  p.op = "delta_rule";
  expect_hopper_correct(p, Gate::zero, 3);
}

TEST(KernelHopper, PackedSequences) {
  const std::vector<std::int64_t> lengths{0, 5, 70, 0, 64, 33, 0};
  for (const char* op : {"gated_delta_rule", "delta_rule"}) {
    Problem p = problem(1, 0, 2, 4, 128, 16);
    p.op = op;
    p.dtype = p.beta_dtype = DType::fp16;
    expect_hopper_correct(testing::packed(p, lengths), Gate::mixed, 4, lengths);
  }
}

TEST(KernelHopper, NormsAndBetaLogits) {
  Problem p = problem(1, 90, 1, 3, 128, 16);
  p.use_qk_l2norm = p.use_beta_sigmoid = p.allow_neg_eigval = true;
  p.beta_dtype = DType::fp32;
  expect_hopper_correct(p, Gate::typical, 5);
}

/// Serialized products are compilation errors already.
TEST(KernelHopper, CompilesWithoutSpills) {
  if (const std::string missing = compiler_problem(DeviceKind::cuda); !missing.empty())
    GTEST_SKIP() << missing;
  for (const std::int64_t K : {64, 128, 256})
    for (const bool all : {false, true}) {
      Problem p = problem(1, 90, 1, 3, K, 16);
      p.dtype = all ? DType::fp16 : DType::bf16;
      p.packed = p.use_qk_l2norm = p.use_beta_sigmoid = p.allow_neg_eigval = all;
      const Artifact artifact =
          compile({find_template("scaled_dot_kkt.hopper"), problem_constants(p),
                   Config{{"BT", std::int64_t{64}}}, cuda_target("sm_90a")});
      EXPECT_EQ(artifact.resources.spill_bytes, 0);
      EXPECT_EQ(artifact.resources.stack_bytes, 0);
    }
}

TEST(KernelHopper, WholeForwardPassOfAGateAHeadSpillsFewRegisters) {
  if (const std::string missing = compiler_problem(DeviceKind::cuda); !missing.empty())
    GTEST_SKIP() << missing;
  struct Size {
    std::int64_t K, BV, stages;
  };
  std::uint64_t turn = 0;
  for (const Size size : {Size{64, 64, 3}, {64, 128, 3}, {128, 64, 3}, {128, 128, 2}, {256, 64, 2}})
    for (const bool all : {false, true}) {
      if (!testing::is_tried(turn++, 3)) continue;
      Problem p = problem(1, 90, 1, 3, size.K, 128);
      // fp16 rows with norms have blocks of 64 columns alone.
      p.dtype = p.beta_dtype = all && size.BV == 64 ? DType::fp16 : DType::bf16;
      p.packed = p.use_qk_l2norm = p.use_beta_sigmoid = p.use_gate_in_kernel = all;
      p.initial_state = p.output_final_state = p.has_A_log = p.has_dt_bias = all;
      const Artifact artifact =
          compile({find_template("delta_forward.hopper"), problem_constants(p),
                   Config{{"BT", std::int64_t{64}}, {"BV", size.BV}, {"num_stages", size.stages}},
                   cuda_target("sm_90a")});
      // Stored and loaded bytes. With all options a helper, which makes norms too, keeps up to six
      // numbers in memory from one chunk to the next; with K = 256 the state does so with ten.
      const std::int64_t least = all ? (size.BV > 64 ? 48 : 8) : 0;
      const std::int64_t limit = size.K == 256 ? (all ? 84 : 48) : least;
      EXPECT_LE(artifact.resources.spill_bytes, limit) << size.K << ' ' << size.BV << ' ' << all;
    }
}

/// With all options a helper is two registers short, once in 32 channels of a slice.
TEST(KernelHopper, WholeForwardPassOfAGateAChannelSpillsAtMostTwoRegisters) {
  if (const std::string missing = compiler_problem(DeviceKind::cuda); !missing.empty())
    GTEST_SKIP() << missing;
  std::uint64_t turn = 0;
  for (const std::int64_t K : {64, 128})
    for (const std::int64_t V : {64, 128})
      for (const bool all : {false, true}) {
        if (!testing::is_tried(turn++, 3)) continue;
        Problem p = problem(1, 90, 1, 3, K, V);
        p.op = "kda";
        p.dtype = p.beta_dtype = p.g_dtype = DType::bf16;
        p.packed = p.use_qk_l2norm = p.use_beta_sigmoid = p.use_gate_in_kernel = all;
        p.initial_state = p.output_final_state = p.has_A_log = p.has_dt_bias = all;
        if (all) p.lower_bound = -5.0F;
        const Artifact artifact =
            compile({find_template("kda_forward.hopper"), problem_constants(p),
                     Config{{"BT", std::int64_t{64}}, {"BV", V}, {"num_stages", std::int64_t{9}}},
                     cuda_target("sm_90a")});
        EXPECT_LE(artifact.resources.spill_bytes, all ? 8 : 0) << K << V << all;
      }
}

/// With K = 256 states are twenty numbers short, as in the pass without segments; else a thread is
/// at most three.
TEST(KernelHopper, PassesOverSegmentsOfAGateAHeadSpillFewRegisters) {
  if (const std::string missing = compiler_problem(DeviceKind::cuda); !missing.empty())
    GTEST_SKIP() << missing;
  struct Size {
    std::int64_t K, BV, stages;
  };
  std::uint64_t turn = 0;
  for (const Size size : {Size{64, 64, 3}, {128, 64, 3}, {128, 128, 3}, {256, 64, 2}})
    for (const bool all : {false, true})
      for (const char* const id : {"delta_segment.hopper", "delta_resume.hopper"}) {
        if (!testing::is_tried(turn++, 3)) continue;
        Problem p = problem(1, 90, 1, 3, size.K, 128);
        p.dtype = p.beta_dtype = all && size.BV == 64 ? DType::fp16 : DType::bf16;
        p.packed = p.use_qk_l2norm = p.use_beta_sigmoid = p.use_gate_in_kernel = all;
        p.initial_state = p.output_final_state = p.has_A_log = p.has_dt_bias = all;
        const Artifact artifact = compile({find_template(id), problem_constants(p),
                                           Config{{"BT", std::int64_t{64}},
                                                  {"BV", size.BV},
                                                  {"num_stages", size.stages},
                                                  {"SEG", std::int64_t{8}}},
                                           cuda_target("sm_90a")});
        const std::int64_t limit = size.K == 256 ? (all ? 84 : 48) : all && size.BV > 64 ? 48 : 24;
        EXPECT_LE(artifact.resources.spill_bytes, limit)
            << id << ' ' << size.K << ' ' << size.BV << ' ' << all;
      }
}

/// Slots of a pool are found before and after a walk: it spills no more than with states of its
/// own.
TEST(KernelHopper, StatesInPlaceSpillNoMore) {
  if (const std::string missing = compiler_problem(DeviceKind::cuda); !missing.empty())
    GTEST_SKIP() << missing;
  std::uint64_t turn = 0;
  for (const char* const id :
       {"delta_forward.hopper", "delta_resume.hopper", "kda_forward.hopper", "kda_resume.hopper",
        "kda_fwd_h_o.hopper", "kda_fwd_h_o_resume.hopper"})
    for (const std::int64_t width : {64, 128}) {
      if (!testing::is_tried(turn++, 3)) continue;
      Problem p = problem(1, 90, 1, 3, 128, width);
      const bool channels = std::string_view(id).starts_with("kda");
      p.op = channels ? "kda" : "gated_delta_rule";
      p.dtype = p.beta_dtype = p.g_dtype = DType::bf16;
      p.packed = p.use_qk_l2norm = p.use_beta_sigmoid = p.use_gate_in_kernel = true;
      p.initial_state = p.output_final_state = p.has_A_log = p.has_dt_bias = true;
      if (channels) p.lower_bound = -5.0F;
      Problem pool = p;
      pool.initial_state = pool.output_final_state = false;
      pool.inplace_state = pool.state_index = pool.output_state_index = pool.has_initial_state =
          true;
      const Template& t = *find_template(id);
      const auto spilled = [&](const Problem& one) {
        const Constants constants = problem_constants(one);
        auto config =
            default_config(t, constants, kHopper, precision_floor(one), {.shape = {64, 8}});
        config->set("BV", width);
        return compile({&t, constants, *config, cuda_target("sm_90a")}).resources.spill_bytes;
      };
      EXPECT_LE(spilled(pool), spilled(p)) << id << ' ' << width;
    }
}

/// Checkpoints are found by other warps than those with states, and are written between products:
/// a thread is at most three registers short for them, with K = 256, where states have all there
/// are, fourteen.
TEST(KernelHopper, CheckpointsSpillFewMore) {
  if (const std::string missing = compiler_problem(DeviceKind::cuda); !missing.empty())
    GTEST_SKIP() << missing;
  std::uint64_t turn = 0;
  // Templates go round first, so that one point of seven meets each.
  for (const std::int64_t K : {64, 128, 256})
    for (const std::int64_t width : {64, 128})
      for (const bool all : {false, true})
        for (const char* const id :
             {"delta_forward.hopper", "delta_resume.hopper", "kda_forward.hopper",
              "kda_resume.hopper", "kda_fwd_h_o.hopper", "kda_fwd_h_o_resume.hopper"}) {
          const bool channels = std::string_view(id).starts_with("kda");
          if (K == 256 && (width != 64 || channels)) continue;
          if (!testing::is_tried(turn++, 1)) continue;
          Problem p = problem(1, 90, 1, 3, K, width);
          p.op = channels ? "kda" : "gated_delta_rule";
          p.dtype = p.beta_dtype = p.g_dtype = DType::bf16;
          p.packed = p.use_qk_l2norm = p.use_beta_sigmoid = p.use_gate_in_kernel = all;
          p.initial_state = p.output_final_state = p.has_A_log = p.has_dt_bias = all;
          if (channels && all) p.lower_bound = -5.0F;
          const Template& t = *find_template(id);
          const auto spilled = [&](const Problem& one) {
            const Constants constants = problem_constants(one);
            auto config =
                default_config(t, constants, kHopper, precision_floor(one), {.shape = {64, 8}});
            config->set("BV", width);
            return compile({&t, constants, *config, cuda_target("sm_90a")}).resources.spill_bytes;
          };
          Problem every = p, offsets = p;
          every.checkpoint_every = 64, offsets.checkpoint_offsets = true;
          const std::int64_t most = spilled(p) + (K == 256 ? 56 : 12);
          EXPECT_LE(spilled(every), most) << id << ' ' << K << ' ' << width << ' ' << all;
          EXPECT_LE(spilled(offsets), most) << id << ' ' << K << ' ' << width << ' ' << all;
        }
}

/// The kernels that walk from segment to segment spill none.
TEST(KernelHopper, PassesOverSegmentsSpillNothing) {
  if (const std::string missing = compiler_problem(DeviceKind::cuda); !missing.empty())
    GTEST_SKIP() << missing;
  std::uint64_t turn = 0;
  for (const std::int64_t width : {64, 128})
    for (const bool all : {false, true})
      for (const char* const id : {"kda_segment.hopper", "kda_resume.hopper"}) {
        if (!testing::is_tried(turn++, 3)) continue;
        Problem p = problem(1, 90, 1, 3, width, width);
        p.op = "kda";
        p.dtype = p.beta_dtype = p.g_dtype = DType::bf16;
        p.packed = p.use_qk_l2norm = p.use_beta_sigmoid = p.use_gate_in_kernel = all;
        p.initial_state = p.output_final_state = p.has_A_log = p.has_dt_bias = all;
        if (all) p.lower_bound = -5.0F;
        const Artifact artifact = compile({find_template(id), problem_constants(p),
                                           Config{{"BT", std::int64_t{64}},
                                                  {"BV", width},
                                                  {"num_stages", std::int64_t{9}},
                                                  {"SEG", std::int64_t{8}}},
                                           cuda_target("sm_90a")});
        EXPECT_EQ(artifact.resources.spill_bytes, 0) << id << ' ' << width << ' ' << all;
      }
}

void expect_defaults_correct(const std::vector<const char*>& templates, const StageData& data) {
  for (const char* const id : templates) {
    const Template& t = *find_template(id);
    ASSERT_TRUE(applies(t, data));
    const auto config =
        default_config(t, problem_constants(data.problem), kHopper, precision_floor(data.problem),
                       {.shape = {64, data.context.SEG}});
    ASSERT_TRUE(config.has_value()) << id;
    expect_correct(t, *config, data);
  }
}

/// Stages of these passes by themselves: segments whose states fade and segments whose states stay.
void expect_segments_correct(const char* op, const std::vector<const char*>& templates,
                             std::uint64_t seed, Pass pass = Pass::forward) {
  const std::vector<std::int64_t> lengths{17, 1100, 0, 513, 40};
  const auto expect = [&](bool packed, Gate gate) {
    Problem p = problem(2, 600, 1, 1, 64, 64);
    p.op = op;
    p.pass = pass;
    p.dtype = p.beta_dtype = DType::bf16;
    p.initial_state = p.use_qk_l2norm = true;
    p.output_final_state = pass == Pass::backward;
    const StageData data =
        packed ? testing::make_stage_data(testing::packed(p, lengths), 64, gate, ++seed, lengths)
               : testing::make_stage_data(p, 64, gate, ++seed);
    expect_defaults_correct(templates, data);
  };
  for (const Gate gate : {Gate::typical, Gate::mixed, Gate::zero}) expect(true, gate);
  expect(false, Gate::typical);
}

TEST(KernelHopper, PassesOverSegments) {
  expect_segments_correct("kda", {"kda_segment.hopper", "kda_resume.hopper"}, 40);
}
TEST(KernelHopper, WalksThroughPreparedChunks) {
  const std::vector<const char*> walks{"kda_fwd_h_o.hopper", "fwd_h_segment.hopper",
                                       "kda_fwd_h_o_resume.hopper"};
  expect_segments_correct("kda", walks, 50);
  // 128 columns in two warpgroups, grouped heads, a chunk that is not full; so many chunks that
  // warps which take turns come to a buffer before the last but one that used it is done. In the
  // short suite each template meets both numbers of columns and both types.
  for (const DType dtype : {DType::bf16, DType::fp16}) {
    Problem p = problem(2, 400, 1, 2, 128, 128);
    p.op = "kda";
    p.dtype = p.beta_dtype = dtype;
    p.initial_state = p.output_final_state = p.state_v_first = true;
    const StageData data = testing::make_stage_data(p, 64, Gate::typical, 60);
    for (const char* const id : walks)
      for (const std::int64_t BV : {64, 128}) {
        if (!testing::full_suite() && (BV == 128) != (dtype == DType::bf16)) continue;
        const Template& t = *find_template(id);
        ASSERT_TRUE(applies(t, data));
        auto config = default_config(t, problem_constants(p), kHopper, precision_floor(p),
                                     {.shape = {64, data.context.SEG}});
        ASSERT_TRUE(config.has_value()) << id;
        expect_correct(t, config->merged(Config{{"BV", BV}, {"num_stages", std::int64_t{2}}}),
                       data);
      }
  }
  // Wide keys, whose state lies in shared memory too; one segment that another follows.
  for (const bool all : {false, true}) {
    const std::vector<std::int64_t> lengths{570, 0, 64, 17};
    Problem p = problem(1, 0, 1, 1, 256, all ? 64 : 128);
    p.op = "kda";
    p.dtype = p.beta_dtype = all ? DType::fp16 : DType::bf16;
    p.initial_state = p.output_final_state = p.state_v_first = p.use_qk_l2norm = all;
    const StageData data = testing::make_stage_data(testing::packed(p, lengths), 64,
                                                    all ? Gate::mixed : Gate::zero, 61, lengths);
    expect_defaults_correct(walks, data);
  }
}

/// gdn2's problem of the same options.
Problem with_gates_of_elements(Problem p) {
  p.op = "gdn2";
  p.beta_dtype = p.dtype;
  p.use_beta_sigmoid = false;
  return p;
}

/// Chunks from what is given: gates in all their forms, norms, grouped heads, ragged sequences.
/// Pairs of values meet, not all of them: each case is a kernel to compile.
TEST(KernelHopper, PreparesChunks) {
  struct Case {
    DType dtype;
    Gate gate;
    std::int64_t K, warps;
    bool all;
  };
  const Template& t = *find_template("kda_prepare.hopper");
  std::uint64_t seed = 70;
  for (const Case& c : {Case{DType::bf16, Gate::typical, 128, 16, true},
                        {DType::bf16, Gate::mixed, 64, 8, false},
                        {DType::bf16, Gate::very_negative, 128, 8, true},
                        {DType::bf16, Gate::zero, 128, 16, false},
                        {DType::fp16, Gate::typical, 64, 8, true},
                        {DType::fp16, Gate::mixed, 128, 16, true},
                        {DType::fp16, Gate::very_negative, 64, 8, false},
                        {DType::fp16, Gate::zero, 128, 8, true},
                        {DType::bf16, Gate::typical, 256, 16, true},
                        {DType::fp16, Gate::very_negative, 256, 16, false}}) {
    const std::vector<std::int64_t> lengths{100, 0, 64, 1, 130};
    Problem p = problem(1, 0, 1, 2, c.K, c.K == 128 ? 128 : 192);
    p.op = "kda";
    p.dtype = p.beta_dtype = c.dtype;
    p.g_dtype = c.all ? c.dtype : DType::fp32;
    p.use_qk_l2norm = p.use_beta_sigmoid = c.all;
    if (c.gate == Gate::typical) {
      p.use_gate_in_kernel = p.has_A_log = p.has_dt_bias = true;
      if (c.dtype == DType::bf16) p.lower_bound = -5.0F;
    }
    for (const bool gated : {false, true}) {
      Problem one = gated ? with_gates_of_elements(p) : p;
      // Where checkpoints may divide a chunk, the sums of gates of all its rows are written.
      one.checkpoint_offsets = !gated && (c.gate == Gate::zero || c.gate == Gate::mixed);
      if (!testing::is_tried(++seed, gated ? 2 : 7)) continue;
      const StageData data =
          testing::make_stage_data(testing::packed(one, lengths), 64, c.gate, seed, lengths);
      ASSERT_TRUE(applies(t, data));
      expect_correct(t, Config{{"BT", std::int64_t{64}}, {"num_warps", c.warps}}, data);
    }
  }
}

/// With a thread's sums of gates beside its decayed rows; most of all where two blocks share a
/// multiprocessor.
TEST(KernelHopper, PreparingChunksSpillsFewRegisters) {
  if (const std::string missing = compiler_problem(DeviceKind::cuda); !missing.empty())
    GTEST_SKIP() << missing;
  struct Size {
    std::int64_t width, warps, most, most_gated;  ///< bytes; of gdn2
  };
  std::uint64_t turn = 0;
  for (const Size& size :
       {Size{64, 8, 0, 0}, {128, 16, 0, 0}, {128, 8, 144, 148}, {256, 16, 164, 164}})
    for (const bool all : {false, true})
      for (const DType type : {DType::bf16, DType::fp32}) {
        Problem p = problem(1, 90, 1, 3, size.width, size.width);
        p.op = "kda";
        p.dtype = DType::bf16;
        p.g_dtype = type;
        p.packed = p.use_qk_l2norm = p.use_beta_sigmoid = p.use_gate_in_kernel = all;
        p.has_A_log = p.has_dt_bias = all;
        if (all) p.lower_bound = -5.0F;
        for (const Problem& one : {p, with_gates_of_elements(p)}) {
          if (!testing::is_tried(turn++, 2)) continue;
          const Artifact artifact = compile(
              {find_template("kda_prepare.hopper"), problem_constants(one),
               Config{{"BT", std::int64_t{64}}, {"num_warps", size.warps}}, cuda_target("sm_90a")});
          EXPECT_LE(artifact.resources.spill_bytes, one.op == "gdn2" ? size.most_gated : size.most)
              << size.width << ' ' << size.warps << ' ' << testing::describe(one);
        }
      }
}

/// Both walks of a backward pass: gates in all their forms and none, norms, states, ragged
/// sequences.
TEST(KernelHopper, WalksBothWays) {
  struct Size {
    std::int64_t K, V, BV, stages;
  };
  std::uint64_t seed = 90;
  const Template& t = *find_template("delta_scans.hopper");
  for (const Gate gate : {Gate::typical, Gate::mixed, Gate::very_negative, Gate::zero})
    for (const bool all : {false, true})
      for (const Size& size : {Size{128, 128, 64, 3},
                               {128, 128, 128, 3},
                               {64, 64, 64, 3},
                               {128, 64, 64, 2},
                               {256, 128, 64, 2}}) {
        // Every size meets every gate, with options or without.
        if (size.K != 128 && all == (gate == Gate::mixed)) continue;
        const bool sampled = testing::is_tried(seed++, 3);
        const std::vector<std::int64_t> lengths{100, 0, 64, 1, 200};
        Problem p = problem(2, 192, 1, 2, size.K, size.V);
        p.op = gate == Gate::zero ? "delta_rule" : "gated_delta_rule";
        p.has_g = gate != Gate::zero;
        p.pass = Pass::backward;
        p.dtype = p.beta_dtype = DType::bf16;
        p.g_dtype = all ? DType::bf16 : DType::fp32;
        p.use_qk_l2norm = p.use_beta_sigmoid = p.initial_state = p.output_final_state = all;
        p.state_v_first = all && size.BV == 64;
        if (gate == Gate::typical && all) p.use_gate_in_kernel = p.has_A_log = p.has_dt_bias = true;
        if (all) p = testing::packed(p, lengths);
        if (!sampled && !testing::is_new(p, t.id())) continue;
        const StageData data = testing::make_stage_data(
            p, 64, gate, seed, all ? lengths : std::vector<std::int64_t>(), &t);
        ASSERT_TRUE(applies(t, data));
        expect_correct(
            t, Config{{"BT", std::int64_t{64}}, {"BV", size.BV}, {"num_stages", size.stages}},
            data);
      }
}

TEST(KernelHopper, WalksBothWaysThroughSegments) {
  expect_segments_correct("gated_delta_rule",
                          {"delta_scans_segment.hopper", "delta_scans_resume.hopper"}, 110,
                          Pass::backward);
}

/// With 128 columns a thread of the whole pass is short of some registers before and after its
/// walk, not in it.
TEST(KernelHopper, WalksThroughPreparedChunksSpillNothingByDefault) {
  if (const std::string missing = compiler_problem(DeviceKind::cuda); !missing.empty())
    GTEST_SKIP() << missing;
  std::uint64_t turn = 0;
  for (const std::int64_t width : {64, 128, 256})
    for (const bool all : {false, true})
      for (const char* const id :
           {"kda_fwd_h_o.hopper", "fwd_h_segment.hopper", "kda_fwd_h_o_resume.hopper"}) {
        if (!testing::is_tried(turn++, 3)) continue;
        Problem p = problem(1, 90, 1, 3, width, width);
        p.op = "kda";
        p.dtype = all ? DType::fp16 : DType::bf16;
        p.packed = p.initial_state = p.output_final_state = p.state_v_first = all;
        const Template& t = *find_template(id);
        const auto config = default_config(t, problem_constants(p), kHopper, precision_floor(p),
                                           {.shape = {64, 8}});
        ASSERT_TRUE(config.has_value()) << id;
        const Artifact artifact =
            compile({&t, problem_constants(p), *config, cuda_target("sm_90a")});
        EXPECT_EQ(artifact.resources.spill_bytes, 0) << id << ' ' << width << ' ' << all;
      }
}

TEST(KernelHopper, PassesOverSegmentsOfAGateAHead) {
  expect_segments_correct("gated_delta_rule", {"delta_segment.hopper", "delta_resume.hopper"}, 43);
}

/// Rows of keys that are 0, near it and of the usual length, and large values: in fp16 nothing
/// overflows, of keys that count times a thousand, and nothing is lost of others in their chunk.
TEST(KernelHopper, NormsOfKeysNearZeroInFp16) {
  std::uint64_t seed = 46;
  for (const std::int64_t K : {64, 256})
    for (const char* const op : {"gated_delta_rule", "delta_rule"}) {
      Problem p = problem(1, 600, 1, 1, K, 128);
      p.op = op;
      p.dtype = p.beta_dtype = DType::fp16;
      p.initial_state = p.use_qk_l2norm = true;
      StageData data = testing::make_stage_data(p, 64, Gate::typical, ++seed);
      HostTensor& k = data.tensors.at("k");
      HostTensor& v = data.tensors.at("v");
      const double lengths[] = {0.0, 1e-5, 1.0, 1e-3, 1.0};
      for (std::int64_t i = 0; i < k.elements(); ++i)
        // All chunks but the second have such rows.
        if (i / K < 64 || i / K >= 128) k.set(i, k.at(i) * lengths[i / K % 5]);
      for (std::int64_t i = 0; i < v.elements(); ++i) v.set(i, 200 * v.at(i));
      for (const char* const id : {"delta_forward.hopper", "delta_segment.hopper"})
        for (const std::int64_t BV : {64, 128}) {
          if (BV > 64 && K > 128) continue;
          const Template& t = *find_template(id);
          Config config{{"BT", std::int64_t{64}}, {"BV", BV}, {"num_stages", std::int64_t{2}}};
          if (t.tunable("SEG") != nullptr) config.set("SEG", data.context.SEG);
          if (t.illegal(Spec(problem_constants(p), config), kHopper).empty())
            expect_correct(t, config, data);
        }
    }
}

/// The spectral norm of a square matrix, by powers of M^T M.
double spectral_norm(const double* M, std::int64_t size) {
  const auto n = static_cast<std::size_t>(size);
  std::vector<double> x(n, 1.0);
  double norm = 0;
  for (int step = 0; step < 100; ++step) {
    std::vector<double> y(n), z(n);
    for (std::size_t r = 0; r < n; ++r)
      for (std::size_t c = 0; c < n; ++c) y[r] += M[r * n + c] * x[c];
    for (std::size_t r = 0; r < n; ++r)
      for (std::size_t c = 0; c < n; ++c) z[c] += M[r * n + c] * y[r];
    double length = 0;
    for (const double value : z) length += value * value;
    length = std::sqrt(length);
    if (length == 0) return 0;
    norm = std::sqrt(length);
    for (std::size_t i = 0; i < n; ++i) x[i] = z[i] / length;
  }
  return norm;
}

/// A segment's M is left out where the bound says so, and then the bound is one: for decays that
/// are all alike, which the spectral norms of tokens show, and for some that change from token to
/// token, where in each some channel hardly decays, which the columns' sums show.
TEST(KernelHopper, SegmentsForgetOnlyWhatIsProved) {
  const Template& t = *find_template("kda_segment.hopper");
  constexpr std::int64_t kSize = 64, kHeads = 6, kTokens = 512;
  Problem p = problem(1, kTokens + 20, 1, kHeads, kSize, kSize);
  p.op = "kda";
  p.dtype = p.beta_dtype = DType::bf16;
  p.g_dtype = DType::fp32;
  p.use_qk_l2norm = true;
  StageData data = testing::make_stage_data(p, 64, Gate::typical, 50);
  testing::Engine engine(51);
  std::normal_distribution<double> normal;
  HostTensor& g = data.tensors.at("g");
  for (std::int64_t i = 0; i < g.elements(); ++i) {
    const std::int64_t head = i / kSize % kHeads;
    const double x = normal(engine);
    const double alike[] = {0.02, 0.035, 0.045, 0.1};
    if (head < 4)
      g.set(i, -alike[head] * (1 + 0.01 * x));
    else
      g.set(i, -5 / (1 + std::exp(4 * x + (head == 4 ? 0 : 12))));
  }
  const Config config{{"BT", std::int64_t{64}},
                      {"BV", std::int64_t{64}},
                      {"num_stages", std::int64_t{9}},
                      {"SEG", std::int64_t{8}}};
  const auto outputs = launch(t, config, data, Schedule::first_warp, testing::kNanPoison,
                              /*apart=*/false);
  const std::vector<double> M = outputs.at("share_M").values();
  const testing::TensorMap expected = testing::reference_outputs(t, data);
  std::vector<bool> left_out;
  for (std::int64_t head = 0; head < kHeads; ++head) {
    const auto first = M.begin() + head * kSize * kSize;
    // The least positive number says so.
    left_out.push_back(
        *first == std::numeric_limits<float>::denorm_min() &&
        std::all_of(first + 1, first + kSize * kSize, [](double x) { return x == 0; }));
    if (left_out.back()) {
      EXPECT_LE(spectral_norm(&expected.at("share_M")[head * kSize * kSize], kSize),
                std::ldexp(1.0, -30))
          << head;
    }
  }
  EXPECT_EQ(left_out, (std::vector<bool>{false, false, true, true, true, false}));
}

// ---- a decay per key channel --------------------------------------------------------------------

/// With a bounded gate and without a bound; `only` and `step` as above.
void expect_vector_gate_correct(Problem p, std::int64_t BT, Gate gate, std::uint64_t seed,
                                const std::vector<std::int64_t>& lengths,
                                const std::vector<std::string_view>& only, std::uint64_t step) {
  expect_some_correct(p, BT, gate, seed, lengths, only, step);
  if (gate == Gate::very_negative) return;
  p.safe_gate = true;
  p.lower_bound = -5.0F;
  expect_some_correct(p, BT, gate, seed + 1, lengths, only, step);
}

void expect_kda_correct(Problem p, std::int64_t BT, Gate gate, std::uint64_t seed,
                        const std::vector<std::int64_t>& lengths = {},
                        std::uint64_t step = short_step()) {
  p.op = "kda";
  expect_vector_gate_correct(p, BT, gate, seed, lengths, {}, step);
}

TEST(KernelKda, Bf16) {
  expect_kda_correct(problem(1, 150, 1, 2, 128, 128), 64, Gate::typical, 21, {}, 1);
}

TEST(KernelKda, Fp16WithNormsAndSmallGates) {
  Problem p = problem(1, 70, 1, 2, 64, 96);
  p.dtype = p.beta_dtype = DType::fp16;
  p.use_qk_l2norm = p.use_beta_sigmoid = p.initial_state = true;
  expect_kda_correct(p, 32, Gate::mixed, 22);
}

TEST(KernelKda, Fp32) {
  Problem p = problem(1, 77, 1, 2, 64, 32);
  p.dtype = p.beta_dtype = DType::fp32;
  p.use_gate_in_kernel = p.has_dt_bias = p.use_qk_l2norm = true;
  expect_kda_correct(p, 64, Gate::typical, 23);
}

TEST(KernelKda, PackedBackward) {
  Problem p = problem(1, 0, 1, 2, 32, 64);
  p.pass = Pass::backward;
  p.use_qk_l2norm = true;
  p = testing::packed(p, {0, 5, 70, 0, 64, 33, 0});
  expect_kda_correct(p, 32, Gate::typical, 24, {0, 5, 70, 0, 64, 33, 0});
}

TEST(KernelKda, OddDimensions) {
  for (const auto& [K, V, dtype] :
       {std::tuple{60, 100, DType::bf16}, {33, 50, DType::fp16}, {33, 7, DType::fp32}}) {
    Problem p = problem(1, 40, 1, 1, K, V);
    p.dtype = dtype;
    expect_kda_correct(p, 16, Gate::mixed, 25);
  }
}

TEST(KernelKda, GatesThatEraseEverything) {
  for (const DType dtype : {DType::bf16, DType::fp32}) {
    Problem p = problem(1, 100, 1, 1, 32, 32);
    p.dtype = dtype;
    expect_kda_correct(p, 64, Gate::very_negative, 26);
  }
}

/// As SampledSpace.
TEST(KernelKda, SampledSpace) {
  std::size_t turn = 0;
  for (const DType dtype : {DType::bf16, DType::fp32})
    for (const bool bounded : {false, true}) {
      Problem p = problem(1, 90, 1, 1, 96, 80);
      p.op = "kda";
      p.dtype = dtype;
      p.precision = Precision::tf32;
      p.use_qk_l2norm = p.safe_gate = bounded;
      if (bounded) p.lower_bound = -5.0F;
      for (const std::int64_t BT : {32, 64})
        expect_samples_correct(testing::make_stage_data(p, BT, Gate::typical, 27), Precision::tf32,
                               turn++);
    }
}

// ---- gates of keys and values -------------------------------------------------------------------

/// Templates of the stages that read erase and write; of the others nothing is gdn2's.
void expect_gdn2_correct(Problem p, std::int64_t BT, Gate gate, std::uint64_t seed,
                         const std::vector<std::int64_t>& lengths = {},
                         std::uint64_t step = short_step()) {
  p.op = "gdn2";
  expect_vector_gate_correct(p, BT, gate, seed, lengths,
                             {"kda_intra", "kda_recompute_w_u", "kda_bwd_dqkg", "kda_intra_bwd"},
                             step);
}

TEST(KernelGdn2, Bf16) {
  expect_gdn2_correct(problem(1, 150, 1, 2, 128, 128), 64, Gate::typical, 31, {}, 1);
}

TEST(KernelGdn2, Fp16WithNormsAndSmallGates) {
  Problem p = problem(1, 70, 1, 2, 64, 96);
  p.dtype = DType::fp16;
  p.beta_dtype = DType::fp32;
  p.use_qk_l2norm = p.initial_state = true;
  expect_gdn2_correct(p, 32, Gate::mixed, 32);
}

TEST(KernelGdn2, Fp32PackedWithEmptySequences) {
  Problem p = problem(1, 0, 1, 2, 32, 64);
  p.dtype = p.beta_dtype = DType::fp32;
  p.use_qk_l2norm = true;
  const std::vector<std::int64_t> lengths{0, 5, 70, 0, 64, 33, 0};
  expect_gdn2_correct(testing::packed(p, lengths), 32, Gate::typical, 33, lengths);
}

TEST(KernelGdn2, OddDimensions) {
  for (const auto& [K, V, dtype] :
       {std::tuple{60, 100, DType::bf16}, {33, 50, DType::fp16}, {33, 7, DType::fp32}}) {
    Problem p = problem(1, 40, 1, 1, K, V);
    p.dtype = p.beta_dtype = dtype;
    expect_gdn2_correct(p, 16, Gate::mixed, 34);
  }
}

TEST(KernelGdn2, FewKeys) {
  expect_gdn2_correct(problem(1, 130, 1, 1, 16, 48), 64, Gate::zero, 35);
}

TEST(KernelGdn2, GatesThatEraseEverything) {
  for (const DType dtype : {DType::bf16, DType::fp32}) {
    Problem p = problem(1, 100, 1, 1, 32, 32);
    p.dtype = p.beta_dtype = dtype;
    expect_gdn2_correct(p, 64, Gate::very_negative, 36);
  }
}

// ---- the backward pass in two kernels -----------------------------------------------------------

/// Gradients of chunks by two or three blocks, each of which takes several.
void expect_gradients_correct(Problem p, Gate gate, std::uint64_t seed,
                              const std::vector<std::int64_t>& lengths = {}) {
  const Template& t = *find_template("delta_gradient.hopper");
  p.pass = Pass::backward;
  p.dtype = DType::bf16;
  const StageData data = testing::make_stage_data(lengths.empty() ? p : testing::packed(p, lengths),
                                                  64, gate, seed, lengths, &t);
  ASSERT_TRUE(applies(t, data));
  Limits device;
  device.multiprocessors = 2 + static_cast<int>(seed % 2);
  expect_correct(t, Config{{"BT", std::int64_t{64}}}, data, device);
}

TEST(KernelHopper, GradientsOfAGateAHead) {
  for (const Gate gate : {Gate::typical, Gate::mixed, Gate::very_negative, Gate::zero})
    for (const std::int64_t group : {1, 2, 4}) {
      SCOPED_TRACE(fmt::format("gate {} group {}", static_cast<int>(gate), group));
      Problem p = problem(1, group == 1 ? 256 : 150, 1, group, 128, 128);
      p.initial_state = true;
      p.beta_dtype = group == 1 ? DType::bf16 : DType::fp32;
      p.g_dtype = group == 4 ? DType::bf16 : DType::fp32;
      expect_gradients_correct(p, gate, 80 + static_cast<std::uint64_t>(group), {});
    }
}

TEST(KernelHopper, GradientsWithoutAGate) {
  for (const bool norms : {false, true}) {
    Problem p = problem(2, 150, 1, 2, 128, 128);
    p.op = "delta_rule";
    p.use_qk_l2norm = norms;
    expect_gradients_correct(p, Gate::typical, 90);
  }
}

TEST(KernelHopper, GradientsOfRaggedChunks) {
  const std::vector<std::int64_t> lengths{100, 0, 64, 1, 130};
  for (const Gate gate : {Gate::typical, Gate::mixed, Gate::very_negative})
    for (const bool all : {false, true}) {
      SCOPED_TRACE(fmt::format("gate {} all {}", static_cast<int>(gate), all));
      Problem p = problem(1, 0, 2, all ? 4 : 2, 128, 128);
      p.g_dtype = all ? DType::bf16 : DType::fp32;
      p.use_qk_l2norm = p.use_beta_sigmoid = all;
      p.allow_neg_eigval = all && gate == Gate::mixed;
      if (all && gate == Gate::typical) p.use_gate_in_kernel = p.has_A_log = p.has_dt_bias = true;
      expect_gradients_correct(p, gate, 91, lengths);
    }
}

TEST(KernelHopper, GradientsOfOtherWidths) {
  for (const auto& [K, V] : {std::pair{64, 64}, {128, 64}, {64, 256}, {256, 128}, {256, 256}}) {
    Problem p = problem(1, 150, 1, K > V ? 1 : 2, K, V);
    p.use_qk_l2norm = K == V;
    expect_gradients_correct(p, Gate::typical, 92);
  }
}

TEST(KernelHopper, GradientsSpillNothing) {
  if (const std::string missing = compiler_problem(DeviceKind::cuda); !missing.empty())
    GTEST_SKIP() << missing;
  std::uint64_t turn = 0;
  for (const char* const op : {"delta_rule", "gated_delta_rule"})
    for (const std::int64_t group : {1, 2, 4})
      for (const std::int64_t width : {64, 128, 256})
        for (const bool all : {false, true}) {
          if (!testing::is_tried(turn++, 1)) continue;
          Problem p = problem(1, 90, 2, 2 * group, width, width);
          p.op = op;
          p.pass = Pass::backward;
          p.dtype = DType::bf16;
          p.packed = p.use_qk_l2norm = p.use_beta_sigmoid = all;
          if (all && p.op == "gated_delta_rule")
            p.use_gate_in_kernel = p.has_A_log = p.has_dt_bias = true;
          const Artifact artifact =
              compile({find_template("delta_gradient.hopper"), problem_constants(p),
                       Config{{"BT", std::int64_t{64}}}, cuda_target("sm_90a")});
          EXPECT_EQ(artifact.resources.spill_bytes, 0)
              << op << ' ' << group << ' ' << width << ' ' << all;
        }
}

// ---- kda's backward pass in three kernels -------------------------------------------------------

/// What a case of the three kernels has of options.
struct KdaCase {
  Gate gate;
  std::int64_t K, V;
  bool norms, in_kernel, bounded, packed;
  DType g_dtype;

  Problem problem_of() const {
    Problem p = problem(1, 200, 2, 2, K, V);
    p.op = "kda";
    p.pass = Pass::backward;
    p.dtype = DType::bf16;
    p.beta_dtype = norms ? DType::bf16 : DType::fp32;
    p.g_dtype = g_dtype;
    p.use_qk_l2norm = p.use_beta_sigmoid = norms;
    p.initial_state = p.output_final_state = packed || in_kernel;
    p.state_v_first = in_kernel && packed;
    p.use_gate_in_kernel = p.has_A_log = in_kernel;
    p.has_dt_bias = in_kernel && packed;
    if (bounded) p.lower_bound = -5.0F;
    return p;
  }
};

const std::vector<KdaCase>& kda_cases() {
  static const auto& cases = *new std::vector<KdaCase>{
      {Gate::typical, 128, 128, true, true, true, true, DType::bf16},
      {Gate::typical, 128, 128, false, true, false, true, DType::bf16},
      {Gate::mixed, 128, 128, true, false, false, true, DType::fp32},
      {Gate::very_negative, 128, 128, true, false, false, false, DType::fp32},
      {Gate::zero, 128, 128, false, false, false, false, DType::bf16},
      {Gate::typical, 64, 64, true, true, true, false, DType::bf16},
      {Gate::mixed, 64, 128, false, false, false, true, DType::fp32},
      {Gate::very_negative, 128, 64, false, false, false, true, DType::bf16},
  };
  return cases;
}

/// One of the three kernels, with two configs each where it has any; blocks take several chunks.
void expect_kda_correct(const char* id, const std::vector<Config>& configs, std::uint64_t seed) {
  const Template& t = *find_template(id);
  const std::vector<std::int64_t> lengths{100, 0, 64, 1, 130};
  std::vector<std::pair<KdaCase, Problem>> cases;
  for (const KdaCase& c : kda_cases()) cases.emplace_back(c, c.problem_of());
  for (const KdaCase& c : kda_cases())
    cases.emplace_back(c, with_gates_of_elements(c.problem_of()));
  for (auto& [c, p] : cases) {
    const bool sampled = testing::is_tried(++seed, 2);
    if (c.packed) p = testing::packed(p, lengths);
    if (!sampled && !testing::is_new(p, t.id())) continue;
    const StageData data = testing::make_stage_data(
        p, 64, c.gate, seed, c.packed ? lengths : std::vector<std::int64_t>(), &t);
    ASSERT_TRUE(applies(t, data));
    Limits device;
    device.multiprocessors = 2 + static_cast<int>(seed % 2);
    for (const Config& config : configs)
      if (t.illegal(Spec(problem_constants(p), config), kHopper).empty())
        expect_correct(t, config, data, device);
  }
}

TEST(KernelHopper, PreparesChunksForABackwardPass) {
  expect_kda_correct("kda_bwd_prepare.hopper",
                     {Config{{"BT", std::int64_t{64}}, {"num_warps", std::int64_t{8}}},
                      Config{{"BT", std::int64_t{64}}, {"num_warps", std::int64_t{16}}}},
                     120);
}

TEST(KernelHopper, WalksBothWaysThroughPreparedChunks) {
  const auto config = [](std::int64_t BV, std::int64_t stages) {
    return Config{{"BT", std::int64_t{64}}, {"BV", BV}, {"num_stages", stages}};
  };
  expect_kda_correct("kda_scans.hopper", {config(64, 2), config(128, 2)}, 130);
}

TEST(KernelHopper, GradientsOfAGateAChannel) {
  expect_kda_correct("kda_gradient.hopper", {Config{{"BT", std::int64_t{64}}}}, 140);
}

TEST(KernelHopper, BackwardPassOfAGateAChannelSpillsNothingButChunks) {
  if (const std::string missing = compiler_problem(DeviceKind::cuda); !missing.empty())
    GTEST_SKIP() << missing;
  std::uint64_t turn = 0;
  for (const KdaCase& c : kda_cases())
    for (const auto& [id, op] : {std::pair{"kda_bwd_prepare.hopper", "kda"},
                                 {"kda_scans.hopper", "kda"},
                                 {"kda_gradient.hopper", "kda"},
                                 {"kda_bwd_prepare.hopper", "gdn2"},
                                 {"kda_gradient.hopper", "gdn2"}}) {
      if (!testing::is_tried(turn++, 2)) continue;
      Problem p = c.problem_of();
      if (p.op != op) p = with_gates_of_elements(p);
      const Template& t = *find_template(id);
      const auto config =
          default_config(t, problem_constants(p), kHopper, precision_floor(p), {.shape = {64, 0}});
      ASSERT_TRUE(config.has_value()) << id;
      const Artifact artifact = compile({&t, problem_constants(p), *config, cuda_target("sm_90a")});
      // With eight warps, two blocks a multiprocessor. With an erase gate and norms the keys'
      // warpgroup keeps a few numbers of an item beside its slices.
      const std::int64_t most = t.name == "kda_bwd_prepare" ? 280 : p.op == "gdn2" ? 80 : 0;
      EXPECT_LE(artifact.resources.spill_bytes, most) << id << ' ' << testing::describe(p);
    }
}

}  // namespace
}  // namespace wyvern
