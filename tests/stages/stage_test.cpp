// Every template of the build on its own against the float64 reference of the stages it carries
// out. Cases are grouped as {Cpu,Gpu,Emulated}/{Stage,StageSpace,SolveTril,ChunkIndex} and
// Gpu/StageSanitize: Gpu ones skip where there is no GPU, Emulated ones run a GPU's templates on
// the host; StageSanitize is the short subset for compute-sanitizer, without guard bands, so that
// its memcheck sees the first stray byte.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <stdexcept>
#include <tuple>

#include "runtime/devices/device_impl.hpp"
#include "runtime/operators/operator.hpp"
#include "runtime/plan.hpp"
#include "templates/legality.hpp"
#include "tests/support/coverage.hpp"
#include "tests/support/full_suite.hpp"
#include "tests/support/stage_data.hpp"

namespace wyvern::testing {
namespace {

using Lengths = std::vector<std::int64_t>;

/// Chunks a segment in the references' data.
const std::int64_t kSegment = StageContext{}.SEG;

using Guards = DeviceTensor::Guards;

std::vector<std::string> template_ids(DeviceKind kind) {
  std::vector<std::string> ids;
  for (const Template& t : all_templates())
    if (t.device == kind) ids.push_back(t.id());
  return ids;
}

std::string case_name(std::string text) {
  std::replace(text.begin(), text.end(), '.', '_');
  return text;
}

const Template& template_of(const std::string& id) { return *find_template(id); }

std::vector<std::int64_t> chunk_sizes_of(const Template& t) {
  const Tunable* tunable = t.tunable("BT");
  if (tunable == nullptr) return {64};
  std::vector<std::int64_t> sizes;
  for (const Value& value : tunable->values) sizes.push_back(std::get<std::int64_t>(value));
  return sizes;
}

/// Tokens of a segment; 0 where the template does not split scans.
std::int64_t segment_tokens(const Template& t, std::int64_t BT) {
  return t.tunable("SEG") == nullptr ? 0 : BT * kSegment;
}

/// The default config, with the precision asked for where the template has one.
std::optional<Config> config_for(const Template& t, const Problem& problem, const Limits& limits,
                                 std::int64_t BT, Precision precision) {
  const Constants constants = problem_constants(problem);
  const auto config =
      default_config(t, constants, limits, Precision::tf32, {.shape = {BT, kSegment}});
  if (!config || !config->contains("precision")) return config;
  Config wanted = *config;
  wanted.set("precision", precision);
  const bool fits = config_problem(t, wanted, constants, limits, Precision::tf32).empty() &&
                    !(t.redundant && t.redundant(Spec(constants, wanted)));
  return fits ? std::optional(wanted)
              : default_config(t, constants, limits, precision, {.shape = {BT, kSegment}});
}

/// Whether it is one of the kernels of a whole backward pass.
bool is_backward_pass(const Template& t) {
  return t.source.starts_with("backward/") || t.name == "kda_bwd_prepare";
}

Pass pass_of(const Template& t) {
  for (const Cover& cover : t.covers) {
    const std::string_view stage = cover.stage->name;
    if (stage.ends_with("recurrent") || stage == "short_conv_step") return Pass::recurrent;
    if (stage.find("bwd") != std::string_view::npos || stage == "head_sum" ||
        stage == "gate_param_sum" || stage == "layer_sum" ||
        stage == "chunk_local_reverse_cumsum" || is_backward_pass(t))
      return Pass::backward;
  }
  return Pass::forward;
}

/// Options of the operator `op` by the bits of `switches`, as far as the template knows them.
void set_gate(Problem& p, const Template& t, std::string_view op, unsigned switches) {
  const auto bit = [&](unsigned index) { return ((switches >> index) & 1U) != 0; };
  const auto covers_any = [&](auto... stages) { return (t.carries_out(stages) || ...); };
  p.op = op;
  const bool takes_steps =
      std::any_of(t.constants.begin(), t.constants.end(),
                  [](const AnyConstant& c) { return name_of(c) == constant::STEPS.name; });
  p.num_householder = takes_steps && find_operator(op)->facts().householder ? (bit(1) ? 3 : 2) : 1;
  p.use_beta_sigmoid &= definition_of(p).facts().beta;
  p.allow_neg_eigval &= p.use_beta_sigmoid;
  const bool gated = gate_kind(p) != GateKind::none, kda = gate_kind(p) == GateKind::vector;
  const bool optional_gate = std::any_of(t.covers.begin(), t.covers.end(), [](const Cover& c) {
    return c.stage->name.ends_with("gate") && c.only_when;
  });
  const bool has_gate =
      covers_any("gate", "kda_gate", "gate_bwd", "kda_gate_bwd", "gate_param_sum");
  p.use_gate_in_kernel =
      (has_gate && !optional_gate) ||
      (gated && bit(0) &&
       (has_gate ||
        covers_any("chunk_local_reverse_cumsum", "recurrent", "kda_segment", "delta_segment",
                   "delta_scans", "delta_scans_segment", "delta_reverse", "delta_gradient",
                   "delta_gradient_kept", "kda_bwd_prepare", "kda_gradient")));
  p.has_dt_bias = p.use_gate_in_kernel && bit(1);
  p.lower_bound = kda && bit(3) ? std::optional(-5.0F) : std::nullopt;
  p.safe_gate = p.lower_bound && (!p.use_gate_in_kernel || !bit(0));
  p.has_A_log = !p.lower_bound || bit(0) || !bit(1);
  const bool sums = covers_any("layer_sum"), sums_conv = sums && !bit(0);
  if ((p.pass == Pass::recurrent && bit(1)) ||
      covers_any("output_norm", "output_norm_bwd", "output_quantize") ||
      (sums && (bit(0) || bit(1))))
    p.output_norm = bit(2) ? Activation::silu : Activation::sigmoid;
  if (covers_any("output_quantize")) p.output_dtype = DType::float8_e4m3;
  p.output_scale_tokens_last = p.output_dtype && bit(1);
  if (!covers_any("short_conv", "short_conv_step", "short_conv_bwd") && !sums_conv) return;
  p.short_conv = 2 + switches % 3;
  p.conv_activation = bit(0) ? Activation::silu : Activation::none;
  p.has_conv_bias = bit(1) != bit(2);
  p.conv_dtype = bit(2) ? DType::fp32 : p.dtype;
  p.inplace_conv_state = p.inplace_state;
  p.conv_tokens_first = p.inplace_state && bit(2);
  if (p.inplace_state && bit(1) != bit(2)) p.conv_columns = *p.short_conv + (bit(0) ? 4 : 0);
  p.initial_conv_state = !p.inplace_state && bit(1) == bit(3);
  p.output_conv_state = !p.inplace_state && (bit(0) || bit(3));
}

/// The operators of this build that use the template with these options.
std::vector<std::string> operators_of(const Template& t, const Problem& like, unsigned switches) {
  std::vector<std::string> found;
  for (const std::string_view op : operators()) {
    Problem p = like;
    p.T = 1, p.K = p.V = 4;
    set_gate(p, t, op, switches);
    const std::int64_t BT = is_backward_pass(t) ? 64 : 16;
    if (exercises(t, make_stage_data(p, BT, Gate::typical, 1, {1}))) found.emplace_back(op);
  }
  return found;
}

/// A problem for the template with the switches that it knows set by the bits of `switches`; the
/// operators that use it take turns.
Problem problem_for(const Template& t, DType dtype, unsigned switches) {
  Problem p;
  p.pass = pass_of(t);
  p.dtype = dtype;
  const auto bit = [&](unsigned index) { return ((switches >> index) & 1U) != 0; };
  p.packed = bit(0) || t.name == "chunk_index" || t.name == "step_seqlens";
  p.beta_dtype = bit(1) ? DType::fp32 : dtype;
  p.g_dtype = bit(2) ? DType::fp32 : dtype;
  p.use_qk_l2norm = bit(0) != bit(2);
  p.use_beta_sigmoid = bit(1) != bit(3);
  p.allow_neg_eigval = bit(3);
  p.initial_state = bit(2);
  p.state_dtype = !bit(3) ? DType::fp32 : bit(1) ? DType::fp16 : DType::bf16;
  p.output_final_state = bit(0) || bit(3);
  p.state_v_first = bit(1);
  p.seqlens_dtype = bit(2) ? DType::int64 : DType::int32;
  p.return_intermediate_states =
      t.carries_out("transpose_states") || (keeps_states(t) && bit(1) != bit(2));
  p.disable_recompute = bit(1) == bit(2) && !p.return_intermediate_states && !is_backward_pass(t);
  // Where checkpoints may divide a chunk, the sums of gates of all its rows are written.
  p.checkpoint_offsets = t.name == "kda_prepare" && p.packed && bit(1);
  if (p.pass == Pass::recurrent || t.name == "short_conv") {
    p.inplace_state = bit(0) != bit(3);
    p.state_index = bit(1) != bit(2) && (p.inplace_state || p.pass == Pass::recurrent);
    p.output_state_index = p.inplace_state && p.state_index && bit(0);
    p.has_initial_state = p.inplace_state && bit(1);
    p.null_slot_zero = p.state_index && bit(3);
    p.index_dtype = bit(3) ? DType::int64 : DType::int32;
    p.initial_state = !p.inplace_state && (bit(2) || p.state_index);
    p.output_final_state = !p.inplace_state;
    p.disable_recompute = false;
  }
  if (std::ranges::any_of(
          t.constants, [](const AnyConstant& c) { return name_of(c) == constant::SUMMARY.name; })) {
    p.summary = t.name.ends_with("summary") || bit(0) != bit(1);
    p.transition = p.summary && p.pass == Pass::forward && bit(2);
  }
  if (p.summary) {
    p.disable_recompute = false;
    (p.pass == Pass::forward ? p.output_final_state : p.initial_state) = false;
  }
  const std::vector<std::string> ops = operators_of(t, p, switches);
  if (ops.empty()) throw std::logic_error("no operator uses " + t.id());
  set_gate(p, t, ops[(switches / 3) % ops.size()], switches);
  return p;
}

/// Some operator uses each template, whatever the options: what tests on a GPU begin with.
TEST(StageData, EveryTemplateHasAnOperator) {
  for (const DeviceKind kind : {DeviceKind::cpu, DeviceKind::cuda})
    for (const std::string& id : template_ids(kind))
      for (unsigned switches = 0; switches < 16; ++switches)
        EXPECT_NO_THROW(problem_for(template_of(id), DType::bf16, switches)) << id << switches;
}

/// What is left out for one template changes nothing that it reads or is held to.
TEST(StageData, IsTheSameForOneTemplate) {
  for (const std::string& id : template_ids(DeviceKind::cpu)) {
    SCOPED_TRACE(id);
    const Template& t = template_of(id);
    Problem problem = problem_for(t, DType::bf16, 0b0101);
    problem.HV = 2, problem.K = 8, problem.V = 12;
    const Lengths lengths{segment_tokens(t, 16) + 17, 0, 3};
    const StageData all = make_stage_data(problem, 16, Gate::mixed, 1, lengths);
    const StageData some = make_stage_data(problem, 16, Gate::mixed, 1, lengths, &t);
    ASSERT_TRUE(exercises(t, some));
    for (const Argument& argument : t.parameters) {
      if (!is_present(argument, problem_constants(problem))) continue;
      const std::string name(argument.name);
      EXPECT_TRUE(same_bytes(some.tensors.at(name), all.tensors.at(name))) << name;
    }
    EXPECT_LE(some.tensors.size(), all.tensors.size());
  }
}

class DeviceTest : public ::testing::Test {
 protected:
  /// False where the test is to be skipped, for skip_reason_.
  bool open(TestDevice which, const Template& t, DType dtype = DType::bf16) {
    device_ = test_device(which, &skip_reason_);
    if (!device_) return false;
    if (is_for(t, dtype)) return true;
    skip_reason_ = t.id() + " is not for " + std::string(to_string(dtype)) + " on this device";
    return false;
  }
  bool is_for(const Template& t, DType dtype) const {
    Problem usual;
    usual.K = usual.V = 128;
    usual.dtype = dtype;
    usual.pass = pass_of(t);
    usual.disable_recompute = keeps_states(t);
    return takes(t, limits(), usual);
  }
  const Device& device() const { return *device_; }
  const Limits& limits() const { return device_->impl().target().limits; }

  std::optional<Device> device_;
  std::string skip_reason_;
};

#define WYVERN_OPEN_OR_SKIP(...) \
  if (!open(__VA_ARGS__)) GTEST_SKIP() << skip_reason_

// --- The spec's shapes, dtypes, precisions and switches -----------------------------------------

struct Dimensions {
  std::int64_t H, HV, K, V;
};

// GVA or not, dimensions that fill tiles, that miss them by little and by much, and the largest.
constexpr Dimensions kDimensions[] = {
    {2, 4, 64, 64},  {1, 2, 33, 60},  {2, 2, 60, 100}, {1, 3, 16, 16},  {2, 4, 128, 128},
    {1, 1, 100, 16}, {1, 2, 256, 64}, {1, 1, 64, 512}, {2, 2, 128, 60}, {1, 1, 256, 512},
};

constexpr std::int64_t kTokens[] = {1, 15, 16, 17, 63, 64, 65, 130, 200};

const Lengths kPackedLengths[] = {
    {65, 0, 1, 17, 64, 0, 15, 38}, {0}, {130}, {0, 0, 3}, {1, 1, 1, 200, 1}, {16, 32, 64, 63}};

constexpr Gate kGates[] = {Gate::typical, Gate::mixed, Gate::zero, Gate::very_negative};

class Stage : public DeviceTest,
              public ::testing::WithParamInterface<std::tuple<TestDevice, std::string, DType>> {
 protected:
  /// A point of the sweep; `dtype` names the case that tries it.
  struct Point {
    DType dtype;
    unsigned index;
    Problem problem;
    std::int64_t BT;
    Config config;
    std::vector<std::string> pairs;
  };

  /// The template's points of all element types, which share the shapes out, as most of the time
  /// goes into compiling: on a GPU each leaves out another third of two rounds; on the CPU, which
  /// computes all in fp32, each takes that third alone, of one round, and on the emulator of eight.
  std::vector<Point> all_points() const {
    const auto& [which, id, any] = GetParam();
    const Template& t = template_of(id);
    const bool on_gpu = which == TestDevice::gpu, emulated = which == TestDevice::emulated;
    const std::vector<std::int64_t> sizes = chunk_sizes_of(t);
    constexpr Precision kPrecisions[] = {Precision::ieee, Precision::tf32x3, Precision::tf32};
    const auto place = static_cast<unsigned>(&t - all_templates().data());
    std::vector<Point> found;
    for (unsigned i = 0; i < std::size(kDimensions) * (on_gpu ? 2 : emulated ? 8 : 1); ++i)
      for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32}) {
        const bool third = (i + static_cast<unsigned>(dtype)) % 3 == 0;
        if (third == on_gpu || !is_for(t, dtype)) continue;
        // In the emulator's short suite templates take turns with the shapes, and what is tried
        // for its options is small.
        const bool small = emulated && !full_suite() && i >= 3;
        const unsigned turn = emulated && !full_suite() ? i + 3 * place : i;
        const Dimensions& d = kDimensions[small ? i % 4 : turn % std::size(kDimensions)];
        // Multiples of an odd number have all 16 switch settings.
        Problem problem = problem_for(t, dtype, i * 7 + i / 10);
        problem.H = d.H, problem.HV = d.HV, problem.K = d.K, problem.V = d.V;
        problem = within_reach(t, limits(), problem);
        if (which != TestDevice::cpu && i % 4 != 0) problem.precision = kPrecisions[i % 3];
        // On the emulator segments, of several chunks each, are short.
        const bool shortest = emulated && segment_tokens(t, 1) > 0;
        const std::int64_t BT = sizes[shortest ? 0 : (i + i / 10) % sizes.size()];
        const auto config = config_for(t, problem, limits(), BT, kPrecisions[i % 3]);
        if (!config) continue;  // too large for this target's shared memory at this BT
        found.push_back({dtype, i, problem, BT, *config, template_pairs(problem, id)});
      }
    return found;
  }

  /// Those that are tried: all on a GPU and in the full suite, ten of each type on the emulator;
  /// else the first of each type (two on the CPU), and then whichever has most new options, until
  /// none has any. They are the same whichever cases run, so that shards do not repeat each other.
  std::vector<Point> points() const {
    const auto which = std::get<TestDevice>(GetParam());
    const bool emulated = which == TestDevice::emulated;
    const bool all = which == TestDevice::gpu || full_suite();
    std::vector<Point> left = all_points(), chosen;
    std::set<std::string> met;
    const auto choose = [&](std::vector<Point>::iterator point) {
      met.insert(point->pairs.begin(), point->pairs.end());
      chosen.push_back(std::move(*point));
      return left.erase(point);
    };
    const std::ptrdiff_t first = all ? (emulated ? 10 : 20) : emulated ? 1 : 2;
    for (auto point = left.begin(); point != left.end();) {
      const DType dtype = point->dtype;
      const auto same = std::ranges::count(chosen, dtype, &Point::dtype);
      point = same < first ? choose(point) : point + 1;
    }
    const auto news = [&](const Point& point) {
      return std::ranges::count_if(point.pairs, [&](const auto& p) { return !met.contains(p); });
    };
    while (!left.empty()) {
      const auto best = std::ranges::max_element(left, {}, news);
      if (news(*best) == 0) break;
      choose(best);
    }
    return chosen;
  }

  /// All lengths for one specialization; few for wide ones, where the reference takes longest, and
  /// on the emulator, and long ones for scans in segments.
  void check(const PlanStep& step, Problem problem, std::int64_t BT, std::uint64_t seed) {
    if (is_only_listed(problem, step.template_id)) return;
    const Template& t = *find_template(step.template_id);
    const bool emulated = std::get<TestDevice>(GetParam()) == TestDevice::emulated;
    const bool one = emulated && !full_suite();
    const std::int64_t segment = segment_tokens(t, BT);
    const bool wide = problem.K * problem.V > 128 * 128;
    const bool few = wide || problem.pass == Pass::backward || segment > 0 || emulated;
    std::size_t index = seed;
    if (problem.packed) {
      for (Lengths lengths : kPackedLengths) {
        if (few && lengths.size() <= 5) continue;
        // A row of o that is a small sum of large terms has a large error of its own (5e-2 met),
        // which the norm scales up to other rows' size: an error of three rows says nothing.
        if (t.carries_out("output_norm") && lengths == Lengths{0, 0, 3}) lengths = {0, 0, 65};
        if (one) lengths = {65, 0, 1, 17};
        if (segment > 0) lengths.insert(lengths.begin() + 1, segment + 17);
        if (segment > 0 && !one) lengths.insert(lengths.begin() + 2, {0, segment});
        expect_stage_matches(device(), step,
                             make_stage_data(problem, BT, kGates[index++ % 4], seed, lengths, &t));
      }
      return;
    }
    Lengths tokens(std::begin(kTokens), std::end(kTokens));
    if (few) tokens = wide ? Lengths{17, 65} : Lengths{1, 17, 64, 130};
    if (segment > 0) tokens = {17, segment, wide ? segment + 1 : 2 * segment + 5};
    if (one) tokens = {tokens[seed % tokens.size()]};
    for (const std::int64_t T : tokens) {
      problem.T = T;
      problem.B = problem.N = T < 64 ? 2 : 1;
      expect_stage_matches(device(), step,
                           make_stage_data(problem, BT, kGates[index++ % 4], seed, {}, &t));
    }
  }
};

TEST_P(Stage, MatchesFloat64) {
  const auto& [which, id, dtype] = GetParam();
  WYVERN_OPEN_OR_SKIP(which, template_of(id), dtype);
  std::size_t checked = 0;
  for (const Point& point : points()) {
    if (point.dtype != dtype) continue;
    ++checked;
    check({id, point.config}, point.problem, point.BT, point.index);
    if (HasFatalFailure()) return;
  }
  const bool all = which == TestDevice::gpu || full_suite();
  const std::size_t least = which == TestDevice::gpu   ? 7
                            : all                      ? 3
                            : which == TestDevice::cpu ? 2
                                                       : 1;
  EXPECT_GE(checked, least) << "most shapes have no legal config";
}

// --- Every config of the space
// --------------------------------------------------------------------

class StageSpace : public Stage {};

TEST_P(StageSpace, EveryConfigMatches) {
  const auto& [which, id, dtype] = GetParam();
  const Template& t = template_of(id);
  WYVERN_OPEN_OR_SKIP(which, t, dtype);
  Problem problem = problem_for(t, dtype, 0b0101);
  problem.H = 1, problem.HV = 2, problem.K = 100, problem.V = 60;
  problem = within_reach(t, limits(), problem);
  std::vector<Config> configs =
      space(t, problem_constants(problem), limits(), Precision::tf32, {0, kSegment});
  ASSERT_FALSE(configs.empty());
  // A fixed sample keeps the time bounded. On a GPU another dtype draws another one; on the CPU,
  // which computes all in fp32, and on the emulator the dtypes share one sample out.
  const bool on_gpu = which == TestDevice::gpu;
  Engine engine(on_gpu ? static_cast<std::uint64_t>(dtype) + 1 : 1);
  std::shuffle(configs.begin(), configs.end(), engine);
  const std::size_t most = on_gpu ? 64 : full_suite() ? 3 : 1;
  if (!on_gpu)
    std::rotate(configs.begin(),
                configs.begin() + std::ssize(configs) * static_cast<int>(dtype) / 3, configs.end());
  configs.resize(std::min(configs.size(), most));
  std::map<std::int64_t, StageData> by_chunk_size;
  for (const Config& config : configs) {
    if (is_only_listed(problem, id)) continue;
    const std::int64_t BT = config.contains("BT") ? config.integer("BT") : 64;
    if (!by_chunk_size.contains(BT))
      by_chunk_size[BT] =
          make_stage_data(problem, BT, Gate::mixed, 1, {segment_tokens(t, BT) + 65, 0, 17}, &t);
    expect_stage_matches(device(), {id, config}, by_chunk_size[BT]);
    if (HasFatalFailure()) return;
  }
}

// --- The subset for compute-sanitizer
// -------------------------------------------------------------

class StageSanitize : public Stage {};

TEST_P(StageSanitize, SmallShapes) {
  const auto& [which, id, dtype] = GetParam();
  const Template& t = template_of(id);
  WYVERN_OPEN_OR_SKIP(which, t, dtype);
  unsigned checked = 0;
  for (const std::int64_t BT : chunk_sizes_of(t))
    for (const unsigned switches : {0b1110U, 0b0101U}) {
      Problem problem = problem_for(t, dtype, switches);
      problem.H = 1, problem.HV = 2, problem.K = 60, problem.V = 33;
      problem = within_reach(t, limits(), problem);
      problem.T = segment_tokens(t, BT) + 70;
      const auto config = config_for(t, problem, limits(), BT, Precision::tf32x3);
      if (!config) continue;
      ++checked;
      // Mixed gates of channels leave all but nothing of a map of states, and of that no digits.
      const bool channels = gate_kind(problem) == GateKind::vector;
      const Gate gate = problem.summary && channels ? Gate::typical : Gate::mixed;
      expect_stage_matches(
          device(), {id, *config},
          make_stage_data(problem, BT, gate, 2, {segment_tokens(t, BT) + 33, 0, 1, 36}, &t),
          Guards::none);
    }
  EXPECT_GE(checked, 2U);
}

// --- The inverse on its own row of SPECIFICATION.md
// ----------------------------------------------

class SolveTril : public Stage {};

TEST_P(SolveTril, AnyEntriesWithinOne) {
  const auto& [which, id, dtype] = GetParam();
  const Template& t = template_of(id);
  WYVERN_OPEN_OR_SKIP(which, t, dtype);
  for (const std::int64_t BT : chunk_sizes_of(t))
    for (const Precision precision : {Precision::ieee, Precision::tf32x3, Precision::tf32}) {
      Problem problem = problem_for(t, dtype, 0);
      problem.HV = 3, problem.T = 2 * BT + BT / 2 + 1;
      const auto config = config_for(t, problem, limits(), BT, precision);
      if (!config) continue;
      StageData data = make_stage_data(problem, BT, Gate::zero, 3);
      Engine engine(static_cast<std::uint64_t>(BT));
      HostTensor& A = data.tensors.at("A");
      // The inverse of random signs grows with BT; this is as large as fp16's range lets it get.
      const double largest = dtype == DType::fp16 && BT > 32 ? 0.5 : 1.0;
      A = uniform(engine, DType::fp32, A.shape(), -largest, largest);
      expect_stage_matches(device(), {id, *config}, data);
    }
}

std::vector<std::string> solvers(DeviceKind kind) {
  std::vector<std::string> ids = template_ids(kind);
  std::erase_if(ids, [](const std::string& id) { return template_of(id).name != "solve_tril"; });
  return ids;
}

// --- Tables of a bad cu_seqlens
// -------------------------------------------------------------------

class ChunkIndex : public DeviceTest,
                   public ::testing::WithParamInterface<std::tuple<TestDevice, std::string>> {};

TEST_P(ChunkIndex, BadLengthsStayInBounds) {
  const auto& [which, id] = GetParam();
  const Template& t = template_of(id);
  WYVERN_OPEN_OR_SKIP(which, t);
  const std::int64_t T = 100;
  for (const Lengths& seqlens : {Lengths{0, 200, 50, 100}, Lengths{-7, 30, 20, 10},
                                 Lengths{90, 10, 100, 5}, Lengths{0, -1, 1 << 30, 100}}) {
    Problem problem = problem_for(t, DType::bf16, 0);
    problem.T = T;
    StageData data = make_stage_data(problem, 16, Gate::zero, 1, {20, 30, 50});
    data.tensors["cu_seqlens"] = HostTensor(DType::int32, {4}, {seqlens.begin(), seqlens.end()});
    const auto config = config_for(t, data.problem, limits(), 16, Precision::tf32);
    ASSERT_TRUE(config.has_value());
    const auto stage = prepare_stage(device(), {id, *config}, data.problem);
    const HostTensors out =
        run_stage(device(), stage, problem_constants(data.problem), data.tensors);
    const HostTensor& offsets = out.at("seq_offsets");
    const HostTensor& starts = out.at("chunk_offsets");
    const HostTensor& table = out.at("chunk_index");
    const auto NT = table.shape()[0];
    for (std::int64_t n = 0; n <= 3; ++n) {
      EXPECT_GE(offsets.at(n), n == 0 ? 0 : offsets.at(n - 1));
      EXPECT_LE(offsets.at(n), T);
      EXPECT_GE(starts.at(n), n == 0 ? 0 : starts.at(n - 1));
      EXPECT_LE(starts.at(n), NT);
    }
    for (std::int64_t c = 0; c < NT; ++c) {
      const double sequence = table.at(2 * c);
      ASSERT_GE(sequence, -1);
      ASSERT_LT(sequence, 3);
      if (sequence < 0) continue;
      const auto n = static_cast<std::int64_t>(sequence);
      EXPECT_GE(table.at(2 * c + 1), 0);
      EXPECT_LT(offsets.at(n) + table.at(2 * c + 1) * 16, offsets.at(n + 1)) << "slot " << c;
    }
  }
}

// --- Instances
// ------------------------------------------------------------------------------------

class ConvolvedRows : public DeviceTest, public ::testing::WithParamInterface<TestDevice> {};

/// Decoding convolves as the forward pass does, and leaves the same rows.
TEST_P(ConvolvedRows, HaveOneSetOfBits) {
  const std::string variant = GetParam() == TestDevice::cpu ? ".cpu" : ".portable";
  std::uint64_t seed = 80;
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
    for (const std::int64_t W : {2, 4}) {
      const Template& by_token = template_of("short_conv_step" + variant);
      WYVERN_OPEN_OR_SKIP(GetParam(), by_token, dtype);
      Problem p;
      p.op = "gated_delta_product", p.num_householder = 2;
      p.pass = Pass::recurrent, p.packed = true;
      p.dtype = p.beta_dtype = dtype, p.H = 1, p.HV = 2, p.K = 36, p.V = 20;
      p.short_conv = W, p.has_conv_bias = dtype != DType::fp16;
      p.initial_conv_state = p.output_conv_state = true;
      StageData data =
          make_stage_data(p, 16, Gate::typical, ++seed, {5, 0, 1, 2, 3, 90}, &by_token);
      const auto run = [&](const Template& t, Pass pass) {
        data.problem.pass = pass;
        const auto config = config_for(t, data.problem, limits(), 16, Precision::ieee);
        return run_stage(device(), prepare_stage(device(), {t.id(), *config}, data.problem),
                         problem_constants(data.problem), data.tensors);
      };
      const HostTensors tokens = run(by_token, Pass::recurrent);
      const HostTensors tiles = run(template_of("short_conv" + variant), Pass::forward);
      for (const char* name : {"q_conv", "k_conv", "v_conv", "final_conv_state"})
        EXPECT_TRUE(same_bytes(tokens.at(name), tiles.at(name))) << name << " " << to_string(dtype);
    }
}

INSTANTIATE_TEST_SUITE_P(, ConvolvedRows,
                         ::testing::Values(TestDevice::cpu, TestDevice::gpu, TestDevice::emulated),
                         [](const auto& each) {
                           return std::string(each.param == TestDevice::cpu   ? "cpu"
                                              : each.param == TestDevice::gpu ? "gpu"
                                                                              : "emulated");
                         });

const auto kName = [](const auto& each) {
  return case_name(std::get<1>(each.param)) + "_" + std::string(to_string(std::get<2>(each.param)));
};

auto cases(TestDevice which, const std::vector<std::string>& ids) {
  return ::testing::Combine(::testing::Values(which), ::testing::ValuesIn(ids),
                            ::testing::Values(DType::bf16, DType::fp16, DType::fp32));
}
auto cpu() { return cases(TestDevice::cpu, template_ids(DeviceKind::cpu)); }
auto gpu() { return cases(TestDevice::gpu, template_ids(DeviceKind::cuda)); }
auto emulated() { return cases(TestDevice::emulated, template_ids(DeviceKind::cuda)); }

INSTANTIATE_TEST_SUITE_P(Cpu, Stage, cpu(), kName);
INSTANTIATE_TEST_SUITE_P(Gpu, Stage, gpu(), kName);
INSTANTIATE_TEST_SUITE_P(Emulated, Stage, emulated(), kName);
INSTANTIATE_TEST_SUITE_P(Cpu, StageSpace, cpu(), kName);
INSTANTIATE_TEST_SUITE_P(Gpu, StageSpace, gpu(), kName);
INSTANTIATE_TEST_SUITE_P(Emulated, StageSpace, emulated(), kName);
INSTANTIATE_TEST_SUITE_P(Gpu, StageSanitize, gpu(), kName);
INSTANTIATE_TEST_SUITE_P(Cpu, SolveTril, cases(TestDevice::cpu, solvers(DeviceKind::cpu)), kName);
INSTANTIATE_TEST_SUITE_P(Gpu, SolveTril, cases(TestDevice::gpu, solvers(DeviceKind::cuda)), kName);
INSTANTIATE_TEST_SUITE_P(Emulated, SolveTril,
                         cases(TestDevice::emulated, solvers(DeviceKind::cuda)), kName);

const auto kTemplate = [](const auto& each) { return case_name(std::get<1>(each.param)); };
INSTANTIATE_TEST_SUITE_P(Cpu, ChunkIndex,
                         ::testing::Values(std::tuple{TestDevice::cpu, "chunk_index.cpu"}),
                         kTemplate);
INSTANTIATE_TEST_SUITE_P(Gpu, ChunkIndex,
                         ::testing::Values(std::tuple{TestDevice::gpu, "chunk_index.portable"}),
                         kTemplate);
INSTANTIATE_TEST_SUITE_P(Emulated, ChunkIndex,
                         ::testing::Values(std::tuple{TestDevice::emulated,
                                                      "chunk_index.portable"}),
                         kTemplate);

}  // namespace
}  // namespace wyvern::testing
