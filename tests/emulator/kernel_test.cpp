// CUDA templates on the emulator, on inputs made for what a kernel does with them: gates that
// forget a segment's states, channels that outlast the others, norms near zero, warps that take
// turns. tests/stages holds every template to its reference over shapes, dtypes and options.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "runtime/devices/device_impl.hpp"
#include "runtime/operators/operator.hpp"
#include "runtime/plan.hpp"
#include "tests/support/full_suite.hpp"
#include "tests/support/stage_data.hpp"

namespace wyvern::testing {
namespace {

class Kernel : public ::testing::Test {
 protected:
  const Limits& limits() const { return device_.impl().target().limits; }

  void expect_correct(const Template& t, const Config& config, const StageData& data) {
    expect_stage_matches(device_, {t.id(), config}, data);
  }
  /// By the default config with `change`.
  void expect_correct(std::string_view id, const StageData& data, const Config& change = {}) {
    const Template& t = *find_template(id);
    ASSERT_TRUE(exercises(t, data) && takes(t, limits(), data.problem)) << id;
    const auto config =
        default_config(t, problem_constants(data.problem), limits(), precision_floor(data.problem),
                       {.shape = {data.context.layout.BT, data.context.SEG}});
    ASSERT_TRUE(config.has_value()) << id;
    expect_correct(t, config->merged(change), data);
  }

  Device device_ = test_device(TestDevice::emulated).value();
};

Problem problem(std::int64_t B, std::int64_t T, std::int64_t H, std::int64_t HV, std::int64_t K,
                std::int64_t V) {
  Problem p;
  p.B = p.N = B;
  p.T = T, p.H = H, p.HV = HV, p.K = K, p.V = V;
  p.output_final_state = true;
  return p;
}

/// States past segments of which some forget all, some not, over more of them than are looked at at
/// once: a head each for every other one, for runs of both kinds, for all but the first and the
/// last, and for all.
TEST_F(Kernel, SegmentsThatForgetAllAndSegmentsThatDoNot) {
  constexpr std::int64_t kHeads = 4, kSegment = 16 * 8, kTokens = 70 * kSegment + 5;
  for (const std::int64_t V : {32, 20}) {
    Problem p = problem(1, kTokens, 1, kHeads, 16, V);
    p.initial_state = true;
    StageData data = make_stage_data(p, 16, Gate::typical, 9);
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
    expect_correct("fwd_h_combine.portable", data);
  }
}

/// What a segment does to a state, where a few channels of keys outlast the others: chunks take
/// most of what these hold away again, but not what rounding has added to it.
TEST_F(Kernel, SegmentsWhereFewChannelsLast) {
  for (const std::int64_t BT : {16, 32})
    for (const Pass pass : {Pass::forward, Pass::backward})
      for (std::uint64_t seed = 1; seed < (full_suite() ? 9 : 3); ++seed) {
        Problem p = problem(1, BT * StageContext{}.SEG + 70, 1, 2, 60, 33);
        p.op = "kda";
        p.pass = pass;
        p.dtype = DType::bf16;
        p.use_qk_l2norm = p.initial_state = p.safe_gate = true;
        p.lower_bound = -5.0F;
        const StageData data = make_stage_data(p, BT, Gate::mixed, seed, {});
        expect_correct(
            pass == Pass::forward ? "fwd_h_segment.portable" : "bwd_dhu_segment.portable", data);
      }
}

/// Rows of o, and of their gradients, that fill a lane's vectors, miss them, are held by a whole
/// warp, and are too long to be held; parts of a gradient's rows that are whole, and the last ones.
TEST_F(Kernel, OutputNorm) {
  std::uint64_t seed = 60;
  for (const char* const id :
       {"output_norm.portable", "output_norm_bwd.portable", "layer_sum.portable"})
    for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
      for (const std::int64_t V : {1, 60, 128, 256, 300, 512, 1300}) {
        const Template& t = *find_template(id);
        const bool forward = t.name == "output_norm", whole = seed % 2 == 0;
        Problem p = problem(2, forward || !whole ? 19 : 64, 1, whole && !forward ? 4 : 3, 16, V);
        p.pass = forward ? Pass::forward : Pass::backward;
        p.dtype = p.beta_dtype = dtype;
        p.output_norm = seed % 3 == 0 ? Activation::silu : Activation::sigmoid;
        const StageData data = make_stage_data(p, 64, Gate::typical, seed, {}, &t);
        const std::vector<Config> configs =
            space(t, problem_constants(p), limits(), Precision::tf32, {});
        ASSERT_FALSE(configs.empty());
        expect_correct(t, configs[seed++ % configs.size()], data);
      }
}

/// Rows of o to e4m3, where blocks end inside a token and inside a group of lanes.
TEST_F(Kernel, OutputQuantize) {
  std::uint64_t seed = 80;
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
    for (const std::int64_t V : {128, 384, 1152})
      for (const auto& [id, T] : {std::pair{"output_quantize.portable", 1},
                                  {"output_quantize.portable", 37},
                                  {"output_norm_quantize.portable", 5}}) {
        const Template& t = *find_template(id);
        Problem p = problem(2, T, 1, 3, 16, V);
        p.dtype = p.beta_dtype = dtype;
        p.output_norm = Activation::silu;
        p.output_dtype = DType::float8_e4m3;
        p.output_scale_tokens_last = seed % 2 == 0;
        const StageData data = make_stage_data(p, 64, Gate::typical, seed, {}, &t);
        const std::vector<Config> configs =
            space(t, problem_constants(p), limits(), Precision::tf32, {});
        ASSERT_FALSE(configs.empty());
        expect_correct(t, configs[seed++ % configs.size()], data);
      }
}

/// Gradients of convolved rows where sequences end in each row around a warp's tokens and a part's,
/// of every width, with channels that fill a lane's vector and a warp's lanes, and miss them.
TEST_F(Kernel, ShortConvGradients) {
  const Template& t = *find_template("short_conv_bwd.portable");
  std::uint64_t seed = 70;
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
    for (const std::int64_t W : {2, 3, 4})
      for (const std::vector<std::int64_t>& lengths :
           {std::vector<std::int64_t>{61, 1, 1, 1, 1, 0, 62, 1, 2, 126, 257, 2, 70},
            {64, 0, 192, 130, 3, 190},
            {253, 3, 1, 0, 1, 1, 250}}) {
        Problem p = problem(1, 0, 1, 2, seed % 2 == 0 ? 16 : 33, seed % 5 == 0 ? 8 : 20);
        p.pass = Pass::backward;
        p.dtype = p.beta_dtype = dtype;
        p.short_conv = W;
        p.conv_activation = seed % 3 == 0 ? Activation::none : Activation::silu;
        p.conv_dtype = seed % 2 == 0 ? dtype : DType::fp32;
        p.has_conv_bias = seed % 4 < 2;
        p.initial_conv_state = seed % 3 != 1;
        p.output_conv_state = seed % 2 == 1;
        const StageData data =
            make_stage_data(packed(p, lengths), 64, Gate::typical, seed, lengths, &t);
        const std::vector<Config> configs =
            space(t, problem_constants(data.problem), limits(), Precision::tf32, {});
        ASSERT_FALSE(configs.empty());
        expect_correct(t, configs[seed++ % configs.size()], data);
      }
}

/// Two warps a strip of columns, each with half of the keys and of a chunk's rows: chunks that end
/// in either half, few columns and many, gates and none.
TEST_F(Kernel, WarpsThatShareColumnsOfAScan) {
  std::uint64_t seed = 90;
  for (const std::int64_t BT : {32, 64})
    for (const char* const op : {"gated_delta_rule", "delta_rule"})
      for (const bool few : {false, true}) {
        ++seed;
        Problem p = problem(1, 0, 1, 2, few ? 96 : 128, few ? 33 : 64);
        p.op = op;
        p.dtype = p.beta_dtype = seed % 3 == 0 ? DType::fp16 : DType::bf16;
        p.use_qk_l2norm = seed % 4 < 2;
        p.initial_state = p.state_v_first = seed % 3 < 2;
        const std::vector<std::int64_t> lengths{3 * BT + 1, 0, BT - 5, BT / 2 - 1};
        const StageData data = make_stage_data(packed(p, lengths), BT, Gate::mixed, seed, lengths);
        const std::int64_t BV = few ? 32 : 64;
        expect_correct("fwd_h_o.portable", data,
                       {{"BV", BV}, {"num_stages", std::int64_t{1}}, {"num_warps", BV / 8}});
      }
}

constexpr std::string_view kWalks[] = {"kda_fwd_h_o.hopper", "fwd_h_segment.hopper",
                                       "kda_fwd_h_o_resume.hopper"};

/// 128 columns in two warpgroups, grouped heads, a chunk that is not full; so many chunks that
/// warps which take turns come to a buffer before the last but one that used it is done. In the
/// short suite each template meets both numbers of columns and both types.
TEST_F(Kernel, WarpsTakeTurnsWithPreparedChunks) {
  for (const DType dtype : {DType::bf16, DType::fp16}) {
    Problem p = problem(2, 400, 1, 2, 128, 128);
    p.op = "kda";
    p.dtype = p.beta_dtype = dtype;
    p.initial_state = p.output_final_state = p.state_v_first = true;
    const StageData data = make_stage_data(p, 64, Gate::typical, 60);
    for (const std::string_view id : kWalks)
      for (const std::int64_t BV : {64, 128}) {
        if (!full_suite() && (BV == 128) != (dtype == DType::bf16)) continue;
        expect_correct(id, data, {{"BV", BV}, {"num_stages", std::int64_t{2}}});
      }
  }
}

/// Wide keys, whose state lies in shared memory too; one segment that another follows.
TEST_F(Kernel, PreparedChunksOfWideKeys) {
  for (const bool all : {false, true}) {
    const std::vector<std::int64_t> lengths{570, 0, 64, 17};
    Problem p = problem(1, 0, 1, 1, 256, all ? 64 : 128);
    p.op = "kda";
    p.dtype = p.beta_dtype = all ? DType::fp16 : DType::bf16;
    p.initial_state = p.output_final_state = p.state_v_first = p.use_qk_l2norm = all;
    const StageData data =
        make_stage_data(packed(p, lengths), 64, all ? Gate::mixed : Gate::zero, 61, lengths);
    for (const std::string_view id : kWalks) expect_correct(id, data);
  }
}

/// More columns of values than a block has at once: two to four bands a value head, of 128 and 256
/// columns, for one value head a key head and for several.
TEST_F(Kernel, BackwardPassOfManyColumns) {
  struct Size {
    std::int64_t HV, K, V;
    bool all;
  };
  std::uint64_t seed = 62;
  for (const Size& size : {Size{1, 256, 512, false},
                           {2, 128, 384, true},
                           {2, 256, 512, true},
                           {3, 64, 512, true},
                           {2, 256, 384, false}}) {
    if (!full_suite() && seed > 63) break;
    const std::vector<std::int64_t> lengths{130, 0, 64, 17};
    Problem p = problem(1, 0, 1, size.HV, size.K, size.V);
    p.pass = Pass::backward;
    p.dtype = p.beta_dtype = DType::bf16;
    p.initial_state = p.use_qk_l2norm = p.use_beta_sigmoid = p.use_gate_in_kernel = size.all;
    p.has_A_log = p.has_dt_bias = size.all;
    const StageData data = make_stage_data(packed(p, lengths), 64,
                                           size.all ? Gate::typical : Gate::mixed, ++seed, lengths);
    for (const char* const id :
         {"delta_scans.hopper", "delta_gradient.hopper", "delta_gradient_kept.hopper"})
      expect_correct(id, data);
  }
}

/// Rows of values that a warp loads in several parts, which they fill and which they miss, in
/// chunks that are full and that are not.
TEST_F(Kernel, OneWarpLoadsWideRows) {
  std::uint64_t seed = 90;
  for (const auto& [dtype, V] :
       {std::pair<DType, std::int64_t>{DType::bf16, 512}, {DType::fp16, 500}, {DType::fp32, 256}}) {
    const std::vector<std::int64_t> lengths{16, 0, 37};
    Problem p = problem(1, 0, 1, 2, 32, V);
    p.pass = Pass::backward;
    p.dtype = p.beta_dtype = dtype;
    p.use_qk_l2norm = dtype == DType::fp16;
    const StageData data = make_stage_data(packed(p, lengths), 16, Gate::typical, ++seed, lengths);
    expect_correct("wy_dqkg.portable", data,
                   {{"BK", std::int64_t{16}},
                    {"num_warps", std::int64_t{1}},
                    {"num_stages", std::int64_t{1}}});
  }
}

/// Rows of keys that are 0, near it and of the usual length, and large values: in fp16 nothing
/// overflows, of keys that count times a thousand, and nothing is lost of others in their chunk.
TEST_F(Kernel, NormsOfKeysNearZeroInFp16) {
  std::uint64_t seed = 46;
  for (const std::int64_t K : {64, 256})
    for (const char* const op : {"gated_delta_rule", "delta_rule"}) {
      Problem p = problem(1, 600, 1, 1, K, 128);
      p.op = op;
      p.dtype = p.beta_dtype = DType::fp16;
      p.initial_state = p.use_qk_l2norm = true;
      StageData data = make_stage_data(p, 64, Gate::typical, ++seed);
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
          if (t.illegal(Spec(problem_constants(p), config), limits()).empty())
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
TEST_F(Kernel, SegmentsForgetOnlyWhatIsProved) {
  const Template& t = *find_template("kda_segment.hopper");
  constexpr std::int64_t kSize = 64, kHeads = 6, kTokens = 512;
  Problem p = problem(1, kTokens + 20, 1, kHeads, kSize, kSize);
  p.op = "kda";
  p.dtype = p.beta_dtype = DType::bf16;
  p.g_dtype = DType::fp32;
  p.use_qk_l2norm = true;
  StageData data = make_stage_data(p, 64, Gate::typical, 50);
  Engine engine(51);
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
  const HostTensors outputs =
      run_stage(device_, prepare_stage(device_, {t.id(), config}, data.problem),
                problem_constants(data.problem), data.tensors, DeviceTensor::Guards::bands,
                written_elements(data, &t));
  const std::vector<double> M = outputs.at("share_M").values();
  const TensorMap expected = reference_outputs(t, data);
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

}  // namespace
}  // namespace wyvern::testing
