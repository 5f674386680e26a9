// How many registers Hopper's kernels spill, by NVRTC's own count: none or few, whatever the
// options.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "compiler/compiler.hpp"
#include "runtime/operators/operator.hpp"
#include "runtime/plan.hpp"
#include "tests/support/full_suite.hpp"
#include "tests/support/operator_data.hpp"

namespace wyvern {
namespace {

const Limits kHopper = cuda_target("sm_90a").limits;

class Spills : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string missing = compiler_problem(DeviceKind::cuda); !missing.empty())
      GTEST_SKIP() << missing;
  }
};

Problem problem(std::int64_t T, std::int64_t H, std::int64_t HV, std::int64_t K, std::int64_t V) {
  Problem p;
  p.B = p.N = 1;
  p.T = T, p.H = H, p.HV = HV, p.K = K, p.V = V;
  p.output_final_state = true;
  return p;
}

/// A forward pass in bf16 with all options that `op` has, or with none.
Problem forward(const char* op, std::int64_t K, std::int64_t V, bool all) {
  Problem p = problem(90, 1, 3, K, V);
  p.op = op;
  p.dtype = p.beta_dtype = DType::bf16;
  if (p.op == "kda") p.g_dtype = DType::bf16;
  p.packed = p.use_qk_l2norm = p.use_beta_sigmoid = p.use_gate_in_kernel = all;
  p.initial_state = p.output_final_state = p.has_A_log = p.has_dt_bias = all;
  if (all && p.op == "kda") p.lower_bound = -5.0F;
  return p;
}

/// gdn2's problem of the same options.
Problem with_gates_of_elements(Problem p) {
  p.op = "gdn2";
  p.beta_dtype = p.dtype;
  p.use_beta_sigmoid = false;
  return p;
}

/// Of the template's kernel with 64 rows a chunk, 8 chunks a segment, and these tunables in place
/// of the default ones.
Resources resources(std::string_view id, const Problem& p, const Config& tunables = {}) {
  const Template& t = *find_template(id);
  const Constants constants = problem_constants(p);
  const std::int64_t segment = t.tunable("SEG") == nullptr ? 0 : 8;
  const auto config =
      default_config(t, constants, kHopper, precision_floor(p), {.shape = {64, segment}});
  return compile({&t, constants, config.value().merged(tunables), cuda_target("sm_90a")}).resources;
}

std::int64_t spilled(std::string_view id, const Problem& p, const Config& tunables = {}) {
  return resources(id, p, tunables).spill_bytes;
}

constexpr const char* kForwardPasses[] = {"delta_forward.hopper", "delta_resume.hopper",
                                          "kda_forward.hopper",   "kda_resume.hopper",
                                          "kda_fwd_h_o.hopper",   "kda_fwd_h_o_resume.hopper"};

/// Serialized products are compilation errors already.
TEST_F(Spills, ProductsOfKeysHaveNone) {
  for (const std::int64_t K : {64, 128, 256})
    for (const bool all : {false, true}) {
      Problem p = problem(90, 1, 3, K, 16);
      p.dtype = all ? DType::fp16 : DType::bf16;
      p.packed = p.use_qk_l2norm = p.use_beta_sigmoid = p.allow_neg_eigval = all;
      const Resources used = resources("scaled_dot_kkt.hopper", p);
      EXPECT_EQ(used.spill_bytes, 0);
      EXPECT_EQ(used.stack_bytes, 0);
    }
}

TEST_F(Spills, WholeForwardPassOfAGateAHeadHasFew) {
  struct Size {
    std::int64_t K, BV, stages;
  };
  std::uint64_t turn = 0;
  for (const Size size : {Size{64, 64, 3}, {64, 128, 3}, {128, 64, 3}, {128, 128, 2}, {256, 64, 2}})
    for (const bool all : {false, true}) {
      if (!testing::is_tried(turn++, 3)) continue;
      Problem p = forward("gated_delta_rule", size.K, 128, all);
      // fp16 rows with norms have blocks of 64 columns alone.
      if (all && size.BV == 64) p.dtype = p.beta_dtype = DType::fp16;
      // Stored and loaded bytes. With all options a helper, which makes norms too, keeps up to six
      // numbers in memory from one chunk to the next; with K = 256 the state does so with ten.
      const std::int64_t least = all ? (size.BV > 64 ? 48 : 8) : 0;
      const std::int64_t limit = size.K == 256 ? (all ? 84 : 48) : least;
      EXPECT_LE(spilled("delta_forward.hopper", p, {{"BV", size.BV}, {"num_stages", size.stages}}),
                limit)
          << size.K << ' ' << size.BV << ' ' << all;
    }
}

/// Keeping states and V' takes no register more.
TEST_F(Spills, WholeForwardPassThatKeepsStatesHasFew) {
  for (const std::int64_t K : {64, 128})
    for (const std::int64_t BV : {64, 128})
      for (const bool all : {false, true}) {
        Problem p = forward("gated_delta_rule", K, 128, all);
        p.disable_recompute = true;
        EXPECT_LE(spilled("delta_forward_keep.hopper", p, {{"BV", BV}}),
                  all ? (BV > 64 ? 48 : 8) : 0)
            << K << ' ' << BV << ' ' << all;
      }
}

/// With the norm of o and all options two numbers more are kept in memory than without the norm.
TEST_F(Spills, WholeForwardPassWithTheNormOfOHasFew) {
  for (const std::int64_t K : {64, 128})
    for (const bool all : {false, true}) {
      Problem p = forward("gated_delta_rule", K, 128, all);
      p.output_norm = Activation::silu;
      EXPECT_LE(spilled("delta_forward_norm.hopper", p,
                        {{"BV", std::int64_t{128}}, {"num_stages", std::int64_t{3}}}),
                all ? 56 : 8)
          << K << all;
    }
}

/// With all options a helper is two registers short, once in 32 channels of a slice.
TEST_F(Spills, WholeForwardPassOfAGateAChannelHasAtMostTwo) {
  std::uint64_t turn = 0;
  for (const std::int64_t K : {64, 128})
    for (const std::int64_t V : {64, 128})
      for (const bool all : {false, true}) {
        if (!testing::is_tried(turn++, 3)) continue;
        EXPECT_LE(spilled("kda_forward.hopper", forward("kda", K, V, all),
                          {{"BV", V}, {"num_stages", std::int64_t{9}}}),
                  all ? 8 : 0)
            << K << V << all;
      }
}

/// With the norm of o a thread is at most four registers more short than without, with states of
/// its own, in a pool, and with checkpoints.
TEST_F(Spills, WholeForwardPassOfAGateAChannelHasFewMoreWithTheNormOfO) {
  const Config blocks{{"BV", std::int64_t{128}}, {"num_stages", std::int64_t{9}}};
  std::uint64_t turn = 0;
  for (const std::int64_t K : {64, 128})
    for (const bool all : {false, true})
      for (const bool bounded : {false, true})
        for (const int states : {0, 1, 2}) {
          if ((bounded && !all) || !testing::is_tried(turn++, 3)) continue;
          Problem p = forward("kda", K, 128, all);
          if (!bounded) p.lower_bound.reset();
          if (states == 1) {
            p.initial_state = p.output_final_state = false;
            p.inplace_state = p.state_index = p.has_initial_state = true;
          }
          if (states == 2) p.checkpoint_every = 64;
          const std::int64_t plain = spilled("kda_forward.hopper", p, blocks);
          p.output_norm = all ? Activation::sigmoid : Activation::silu;
          EXPECT_LE(spilled("kda_forward_norm.hopper", p, blocks), plain + 16)
              << K << all << bounded << states;
        }
}

/// With K = 256 states are twenty numbers short, as in the pass without segments; else a thread is
/// at most three.
TEST_F(Spills, PassesOverSegmentsOfAGateAHeadHaveFew) {
  struct Size {
    std::int64_t K, BV, stages;
  };
  std::uint64_t turn = 0;
  for (const Size size : {Size{64, 64, 3}, {128, 64, 3}, {128, 128, 3}, {256, 64, 2}})
    for (const bool all : {false, true})
      for (const char* const id : {"delta_segment.hopper", "delta_resume.hopper"}) {
        if (!testing::is_tried(turn++, 3)) continue;
        Problem p = forward("gated_delta_rule", size.K, 128, all);
        if (all && size.BV == 64) p.dtype = p.beta_dtype = DType::fp16;
        const std::int64_t limit = size.K == 256 ? (all ? 84 : 48) : all && size.BV > 64 ? 48 : 24;
        EXPECT_LE(spilled(id, p, {{"BV", size.BV}, {"num_stages", size.stages}}), limit)
            << id << ' ' << size.K << ' ' << size.BV << ' ' << all;
      }
}

/// Slots of a pool are found before and after a walk: it spills no more than with states of its
/// own.
TEST_F(Spills, StatesInPlaceHaveNoMore) {
  std::uint64_t turn = 0;
  for (const std::string_view id : kForwardPasses)
    for (const std::int64_t width : {64, 128}) {
      if (!testing::is_tried(turn++, 3)) continue;
      Problem p =
          forward(id.starts_with("kda") ? "kda" : "gated_delta_rule", 128, width, /*all=*/true);
      p.g_dtype = DType::bf16;
      Problem pool = p;
      pool.initial_state = pool.output_final_state = false;
      pool.inplace_state = pool.state_index = pool.output_state_index = pool.has_initial_state =
          true;
      EXPECT_LE(spilled(id, pool, {{"BV", width}}), spilled(id, p, {{"BV", width}}))
          << id << ' ' << width;
    }
}

/// Checkpoints are found by other warps than those with states, and are written between products:
/// a thread is at most three registers short for them, with K = 256, where states have all there
/// are, fourteen.
TEST_F(Spills, CheckpointsHaveFewMore) {
  std::uint64_t turn = 0;
  // Templates go round first, so that one point of seven meets each.
  for (const std::int64_t K : {64, 128, 256})
    for (const std::int64_t width : {64, 128})
      for (const bool all : {false, true})
        for (const std::string_view id : kForwardPasses) {
          const bool channels = id.starts_with("kda");
          if (K == 256 && (width != 64 || channels)) continue;
          if (!testing::is_tried(turn++, 1)) continue;
          Problem p = forward(channels ? "kda" : "gated_delta_rule", K, width, all);
          p.g_dtype = DType::bf16;
          const Config columns{{"BV", width}};
          Problem every = p, offsets = p;
          every.checkpoint_every = 64, offsets.checkpoint_offsets = true;
          const std::int64_t most = spilled(id, p, columns) + (K == 256 ? 56 : 12);
          EXPECT_LE(spilled(id, every, columns), most)
              << id << ' ' << K << ' ' << width << ' ' << all;
          EXPECT_LE(spilled(id, offsets, columns), most)
              << id << ' ' << K << ' ' << width << ' ' << all;
        }
}

/// The kernels that walk from segment to segment spill none.
TEST_F(Spills, PassesOverSegmentsOfAGateAChannelHaveNone) {
  std::uint64_t turn = 0;
  for (const std::int64_t width : {64, 128})
    for (const bool all : {false, true})
      for (const char* const id : {"kda_segment.hopper", "kda_resume.hopper"}) {
        if (!testing::is_tried(turn++, 3)) continue;
        EXPECT_EQ(spilled(id, forward("kda", width, width, all),
                          {{"BV", width}, {"num_stages", std::int64_t{9}}}),
                  0)
            << id << ' ' << width << ' ' << all;
      }
}

/// Segments whose last chunk may be short, for a summary, keep no more in memory than others.
TEST_F(Spills, SegmentsOfSummariesHaveNoMore) {
  struct Kernel {
    const char* id;
    const char* op;
    Pass pass;
  };
  std::uint64_t turn = 0;
  for (const Kernel kernel : {Kernel{"delta_segment.hopper", "gated_delta_rule", Pass::forward},
                              {"kda_segment.hopper", "kda", Pass::forward},
                              {"fwd_h_segment.hopper", "kda", Pass::forward},
                              {"delta_scans_segment.hopper", "gated_delta_rule", Pass::backward}})
    for (const std::int64_t width : {64, 128})
      for (const bool all : {false, true}) {
        if (!testing::is_tried(turn++, 3)) continue;
        Problem p = forward(kernel.op, width, width, all);
        p.pass = kernel.pass;
        p.initial_state = p.output_final_state = false;
        Problem summary = p;
        summary.summary = true;
        summary.transition = p.pass == Pass::forward;
        EXPECT_LE(spilled(kernel.id, summary, {{"BV", width}}),
                  spilled(kernel.id, p, {{"BV", width}}))
            << kernel.id << ' ' << width << ' ' << all;
      }
}

/// As fwd_h_combine, whose walk they share.
TEST_F(Spills, SummariesHaveNone) {
  for (const std::int64_t K : {64, 128, 256})
    for (const bool backward : {false, true}) {
      Problem p = forward("gated_delta_rule", K, 128, false);
      p.pass = backward ? Pass::backward : Pass::forward;
      p.summary = true, p.transition = !backward;
      const char* const id = backward ? "bwd_dhu_summary.portable" : "fwd_h_summary.portable";
      EXPECT_EQ(spilled(id, p), 0) << id << ' ' << K;
      EXPECT_EQ(spilled("fwd_h_combine.portable", p), 0) << K;
    }
}

/// With a thread's sums of gates beside its decayed rows; most of all where two blocks share a
/// multiprocessor.
TEST_F(Spills, PreparingChunksHasFew) {
  struct Size {
    std::int64_t width, warps, most, most_gated;  ///< bytes; of gdn2
  };
  std::uint64_t turn = 0;
  for (const Size& size :
       {Size{64, 8, 0, 0}, {128, 16, 0, 0}, {128, 8, 144, 148}, {256, 16, 164, 164}})
    for (const bool all : {false, true})
      for (const DType type : {DType::bf16, DType::fp32}) {
        Problem p = problem(90, 1, 3, size.width, size.width);
        p.op = "kda";
        p.dtype = DType::bf16;
        p.g_dtype = type;
        p.packed = p.use_qk_l2norm = p.use_beta_sigmoid = p.use_gate_in_kernel = all;
        p.has_A_log = p.has_dt_bias = all;
        if (all) p.lower_bound = -5.0F;
        for (const Problem& one : {p, with_gates_of_elements(p)}) {
          if (!testing::is_tried(turn++, 2)) continue;
          EXPECT_LE(spilled("kda_prepare.hopper", one, {{"num_warps", size.warps}}),
                    one.op == "gdn2" ? size.most_gated : size.most)
              << size.width << ' ' << size.warps << ' ' << testing::describe(one);
        }
      }
}

/// With 128 columns a thread of the whole pass is short of some registers before and after its
/// walk, not in it.
TEST_F(Spills, WalksThroughPreparedChunksHaveNoneByDefault) {
  std::uint64_t turn = 0;
  for (const std::int64_t width : {64, 128, 256})
    for (const bool all : {false, true})
      for (const char* const id :
           {"kda_fwd_h_o.hopper", "fwd_h_segment.hopper", "kda_fwd_h_o_resume.hopper"}) {
        if (!testing::is_tried(turn++, 3)) continue;
        Problem p = problem(90, 1, 3, width, width);
        p.op = "kda";
        p.dtype = all ? DType::fp16 : DType::bf16;
        p.packed = p.initial_state = p.output_final_state = p.state_v_first = all;
        EXPECT_EQ(spilled(id, p), 0) << id << ' ' << width << ' ' << all;
      }
}

TEST_F(Spills, GradientsOfAGateAHeadHaveNoneUpToOneBand) {
  std::uint64_t turn = 0;
  for (const char* const op : {"delta_rule", "gated_delta_rule"})
    for (const std::int64_t group : {1, 2, 4})
      for (const auto& [K, V] : {std::pair<std::int64_t, std::int64_t>{64, 64},
                                 {128, 128},
                                 {256, 256},
                                 {128, 384},
                                 {256, 384},
                                 {256, 512}})
        for (const bool all : {false, true}) {
          if (!testing::is_tried(turn++, 1)) continue;
          Problem p = problem(90, 2, 2 * group, K, V);
          p.op = op;
          p.pass = Pass::backward;
          p.dtype = DType::bf16;
          p.packed = p.use_qk_l2norm = p.use_beta_sigmoid = all;
          if (all && p.op == "gated_delta_rule")
            p.use_gate_in_kernel = p.has_A_log = p.has_dt_bias = true;
          // With all options and several bands two numbers are kept in memory.
          const std::int64_t most = all && K == 256 && V > 256 ? 16 : 0;
          for (const char* const id : {"delta_gradient.hopper", "delta_gradient_kept.hopper"})
            EXPECT_LE(spilled(id, p), most)
                << id << ' ' << op << ' ' << group << ' ' << K << ' ' << V << ' ' << all;
        }
}

/// What a case of kda's backward pass in three kernels has of options.
struct KdaCase {
  std::int64_t K, V;
  bool norms, in_kernel, bounded, packed;
  DType g_dtype;

  Problem problem_of() const {
    Problem p = problem(200, 2, 2, K, V);
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

constexpr KdaCase kKdaCases[] = {
    {128, 128, true, true, true, true, DType::bf16},
    {128, 128, false, true, false, true, DType::bf16},
    {128, 128, true, false, false, true, DType::fp32},
    {128, 128, true, false, false, false, DType::fp32},
    {128, 128, false, false, false, false, DType::bf16},
    {64, 64, true, true, true, false, DType::bf16},
    {64, 128, false, false, false, true, DType::fp32},
    {128, 64, false, false, false, true, DType::bf16},
};

TEST_F(Spills, BackwardPassOfAGateAChannelHasNoneButChunks) {
  std::uint64_t turn = 0;
  for (const KdaCase& c : kKdaCases)
    for (const auto& [id, op] : {std::pair{"kda_bwd_prepare.hopper", "kda"},
                                 {"kda_scans.hopper", "kda"},
                                 {"kda_scans_summary.hopper", "kda"},
                                 {"kda_gradient.hopper", "kda"},
                                 {"kda_bwd_prepare.hopper", "gdn2"},
                                 {"kda_gradient.hopper", "gdn2"}}) {
      if (!testing::is_tried(turn++, 2)) continue;
      Problem p = c.problem_of();
      if (p.op != op) p = with_gates_of_elements(p);
      // With eight warps, two blocks a multiprocessor. With an erase gate and norms the keys'
      // warpgroup keeps a few numbers of an item beside its slices.
      const std::int64_t most = id == std::string_view("kda_bwd_prepare.hopper") ? 280
                                : p.op == "gdn2"                                 ? 80
                                                                                 : 0;
      EXPECT_LE(spilled(id, p), most) << id << ' ' << testing::describe(p);
    }
}

TEST_F(Spills, OutputNormAndItsGradientsHaveNone) {
  for (const char* const id : {"output_norm.portable", "output_norm_bwd.portable",
                               "output_quantize.portable", "output_norm_quantize.portable"})
    for (const DType dtype : {DType::bf16, DType::fp32})
      for (const std::int64_t V : {60, 128, 512, 1300}) {
        const Template& t = *find_template(id);
        Problem p = problem(90, 1, 3, 64, V);
        p.dtype = p.beta_dtype = dtype;
        p.output_norm = Activation::silu;
        for (const Config& config : space(t, problem_constants(p), kHopper))
          for (const char* arch : {"sm_80", "sm_90a"}) {
            const Resources resources =
                compile({&t, problem_constants(p), config, cuda_target(arch)}).resources;
            EXPECT_EQ(resources.spill_bytes, 0) << id << V << ' ' << config.to_string();
            EXPECT_EQ(resources.stack_bytes, 0) << id << V << ' ' << config.to_string();
          }
      }
}

TEST_F(Spills, DecodingWithConvolutionHasFewMore) {
  const auto spilled = [](const char* id, const Problem& p, const Config& config) {
    const Constants constants = problem_constants(p);
    return compile({find_template(id), constants, config, cuda_target("sm_90a")})
        .resources.spill_bytes;
  };
  const Template& t = *find_template("recurrent_conv.hopper");
  for (const std::string_view op : {"gated_delta_rule", "kda", "gdn2"})
    for (const std::int64_t width : {2, 4})
      for (const bool in_place : {false, true}) {
        Problem p = problem(90, 16, 32, 128, 128);
        p.op = op;
        p.pass = Pass::recurrent;
        p.dtype = p.beta_dtype = p.g_dtype = DType::bf16;
        p.use_qk_l2norm = p.use_gate_in_kernel = p.has_dt_bias = true;
        p.use_beta_sigmoid = op != "gdn2";
        p.output_norm = Activation::silu;
        p.short_conv = width;
        p.has_conv_bias = p.packed = true;
        p.initial_conv_state = p.output_conv_state = !in_place;
        p.initial_state = p.output_final_state = !in_place;
        p.inplace_state = p.inplace_conv_state = p.state_index = in_place;
        p.has_initial_state = p.output_state_index = in_place;
        p.conv_tokens_first = in_place && width == 4;
        p.state_v_first = in_place;
        for (const Config& config : space(t, problem_constants(p), kHopper))
          EXPECT_LE(spilled("recurrent_conv.hopper", p, config),
                    spilled("recurrent.hopper", p, config) + 16)
              << op << width << in_place << ' ' << config.to_string();
      }
}

TEST_F(Spills, ShortConvOfDraftsHasNone) {
  const Template& t = *find_template("short_conv_step.portable");
  for (const bool tree : {false, true})
    for (const bool tokens_first : {false, true})
      for (const DType dtype : {DType::bf16, DType::fp32}) {
        Problem p = problem(90, 1, 3, 128, tokens_first ? 128 : 60);
        p.pass = Pass::recurrent;
        p.dtype = p.beta_dtype = dtype;
        p.short_conv = 4;
        p.has_conv_bias = p.packed = p.has_initial_state = true;
        p.inplace_state = p.inplace_conv_state = p.state_index = true;
        p.conv_tokens_first = tokens_first;
        p.index_columns = 8, p.intermediate_rows = 4, p.draft_tokens = 8;
        p.parent = p.disable_state_update = tree;
        for (const Config& config : space(t, problem_constants(p), kHopper)) {
          const Resources resources =
              compile({&t, problem_constants(p), config, cuda_target("sm_90a")}).resources;
          EXPECT_EQ(resources.spill_bytes, 0) << tree << tokens_first << ' ' << config.to_string();
          EXPECT_EQ(resources.stack_bytes, 0) << tree << tokens_first << ' ' << config.to_string();
        }
      }
}

TEST_F(Spills, ShortConvAndItsGradientsHaveNone) {
  for (const auto& [id, pass, in_place] : {std::tuple("short_conv.portable", Pass::forward, false),
                                           {"short_conv.portable", Pass::forward, true},
                                           {"short_conv_step.portable", Pass::recurrent, false},
                                           {"short_conv_step.portable", Pass::recurrent, true},
                                           {"short_conv_bwd.portable", Pass::backward, false}})
    for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
      for (const std::int64_t width : {2, 4})
        for (const std::int64_t V : {60, 128}) {
          const Template& t = *find_template(id);
          Problem p = problem(90, 1, 3, 128, V);
          p.pass = pass;
          p.dtype = p.beta_dtype = dtype;
          p.short_conv = width;
          p.has_conv_bias = p.packed = true;
          p.initial_conv_state = p.output_conv_state = !in_place;
          p.inplace_state = p.inplace_conv_state = p.state_index = in_place;
          p.has_initial_state = p.output_state_index = in_place;
          p.conv_tokens_first = in_place && V == 60;
          if (in_place && width == 2) p.conv_columns = 5;
          for (const Config& config : space(t, problem_constants(p), kHopper))
            for (const char* arch : {"sm_80", "sm_90a"}) {
              const Resources resources =
                  compile({&t, problem_constants(p), config, cuda_target(arch)}).resources;
              const std::string which =
                  fmt::format("{} {} in place {}, W={} V={} {} {}", id, to_string(dtype), in_place,
                              width, V, config.to_string(), arch);
              EXPECT_EQ(resources.spill_bytes, 0) << which;
              EXPECT_EQ(resources.stack_bytes, 0) << which;
            }
        }
}

}  // namespace
}  // namespace wyvern
