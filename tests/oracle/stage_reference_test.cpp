// The stage references: each against its definition, and all of them chained against the oracle,
// which shares nothing with them. The two agreeing in float64 validates both.
#include <wyvern/reference.hpp>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <tuple>

#include "runtime/operators/operator.hpp"
#include "tests/support/full_suite.hpp"
#include "tests/support/operator_data.hpp"
#include "tests/support/stage_reference.hpp"

namespace wyvern::testing {
namespace {

double distance(const Vector& a, const Vector& b) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return a.size() == b.size() ? std::sqrt(difference / std::max(norm, 1e-300))
                              : std::numeric_limits<double>::infinity();
}

TEST(StageReference, EqualLayout) {
  const ChunkLayout layout = equal_layout(2, 35, 16);
  ASSERT_EQ(layout.slots.size(), 6U);
  EXPECT_EQ(layout.tokens(), 70);
  EXPECT_EQ(layout.slots[2].begin, 32);
  EXPECT_EQ(layout.slots[2].rows, 3);
  EXPECT_EQ(layout.slots[3].sequence, 1);
  EXPECT_EQ(layout.slots[3].begin, 35);
  EXPECT_EQ(layout.chunk_offsets, (std::vector<std::int64_t>{0, 3, 6}));
}

TEST(StageReference, PackedLayout) {
  const std::vector<std::int64_t> seqlens{0, 0, 17, 18, 18};
  const ChunkLayout layout = packed_layout(seqlens, 16, 18 / 16 + 4);
  ASSERT_EQ(layout.slots.size(), 5U);
  EXPECT_EQ(layout.chunk_offsets, (std::vector<std::int64_t>{0, 0, 2, 3, 3}));
  EXPECT_EQ(layout.slots[1].sequence, 1);
  EXPECT_EQ(layout.slots[1].chunk, 1);
  EXPECT_EQ(layout.slots[1].begin, 16);
  EXPECT_EQ(layout.slots[1].rows, 1);
  EXPECT_EQ(layout.slots[2].sequence, 2);
  EXPECT_EQ(layout.slots[2].chunk, 0);
  EXPECT_EQ(layout.slots[3].sequence, -1);
  EXPECT_EQ(layout.slots[4].sequence, -1);
}

TEST(StageReference, SolveTrilInverts) {
  Engine engine(7);
  const std::int64_t BT = 16, HV = 2;
  const ChunkLayout layout = equal_layout(1, 21, BT);
  const Vector A = uniform(engine, DType::fp32, {1, 21, HV, BT}, -1, 1).values();
  const Vector X = solve_tril(layout, HV, A);
  const auto at = [&](const Vector& m, std::int64_t token, std::int64_t head, std::int64_t s) {
    return m[static_cast<std::size_t>((token * HV + head) * BT + s)];
  };
  for (const ChunkLayout::Slot& slot : layout.slots)
    for (std::int64_t head = 0; head < HV; ++head)
      for (std::int64_t r = 0; r < slot.rows; ++r)
        for (std::int64_t s = 0; s < BT; ++s) {
          double sum = s < slot.rows ? at(X, slot.begin + r, head, s) : 0;
          for (std::int64_t m = 0; m < r && s < slot.rows; ++m)
            sum += at(A, slot.begin + r, head, m) * at(X, slot.begin + m, head, s);
          EXPECT_NEAR(sum, r == s ? 1 : 0, 1e-9);
          if (s > r) {
            EXPECT_EQ(at(X, slot.begin + r, head, s), 0);
          }
        }
}

TEST(StageReference, CumsumRestartsAtChunksAndHonoursTheFloor) {
  const ChunkLayout layout = equal_layout(1, 5, 2);
  const Vector g{-1, -2, -1000, -4, -5};
  EXPECT_EQ(chunk_local_cumsum(layout, g, -std::numeric_limits<double>::infinity()),
            (Vector{-1, -3, -1000, -1004, -5}));
  EXPECT_EQ(chunk_local_cumsum(layout, g, -32), (Vector{-1, -3, -32, -36, -5}));
}

/// The chunked form (runtime/SPECIFICATION.md, section 3): every stage in order, on the inputs the
/// oracle gets; those of segments of SEG chunks too where that is not 0.
class StageChain {
 public:
  StageChain(const OperatorData& data, std::int64_t BT, double gate_floor, std::int64_t SEG = 0)
      : p_(data.problem) {
    c_.SEG = SEG;
    c_.layout = p_.packed ? packed_layout(data.cu_seqlens, BT, p_.T / BT + p_.N)
                          : equal_layout(p_.B, p_.T, BT);
    c_.dims = {p_.H, p_.HV, p_.K, p_.V};
    c_.scale = scale_of(p_);
    c_.gate_floor = gate_floor;
    if (p_.lower_bound) c_.lower_bound = *p_.lower_bound;
    c_.gate_in_kernel = p_.use_gate_in_kernel;
    c_.qk_l2norm = p_.use_qk_l2norm;
    c_.beta_sigmoid = p_.use_beta_sigmoid;
    c_.neg_eigval = p_.allow_neg_eigval;
    c_.state_v_first = p_.state_v_first;
    c_.state_slots = p_.state_index ? p_.state_slots : p_.N;
    for (const auto& [name, tensor] : data.tensors) t_[name] = tensor.values();
  }

  /// Everything the pass makes, by the stages' names; gradients of inputs by the specification's.
  TensorMap run() {
    if (p_.pass == Pass::recurrent) return run("recurrent"), t_;
    forward();
    if (p_.pass == Pass::backward) backward();
    return t_;
  }

  const StageContext& context() const { return c_; }

 private:
  void run(std::string_view stage) { run_reference(stage, c_, t_); }
  void run_segments(const std::string& scan) {
    if (c_.SEG == 0) return;
    run(scan + "_segment");
    run(scan + "_combine");
  }

  void forward() {
    for (const char* name : {"q", "k"}) {
      if (!p_.use_qk_l2norm) break;
      t_["x"] = t_[name];
      run("l2norm_rstd");
      t_[std::string(name) + "_rstd"] = t_["rstd"];
    }
    const bool kda = gate_kind(p_) == GateKind::vector;
    if (p_.use_gate_in_kernel) run(kda ? "kda_gate" : "gate");
    if (gate_kind(p_) != GateKind::none) run("chunk_local_cumsum");
    if (!kda) t_.erase("Gk");
    run(kda ? "kda_intra" : "scaled_dot_kkt");
    run("solve_tril");
    run(kda ? "kda_recompute_w_u" : "recompute_w_u");
    run_segments("fwd_h");
    run("fwd_h");
    run(kda ? "kda_fwd_o" : "fwd_o");
  }

  void backward() {
    const bool kda = gate_kind(p_) == GateKind::vector;
    run(kda ? "kda_bwd_dv_local" : "bwd_dv_local");
    run_segments("bwd_dhu");
    run("bwd_dhu");
    run(kda ? "kda_bwd_dqkg" : "bwd_dqkwg");
    run(kda ? "kda_intra_bwd" : "wy_bwd");
    if (kda) t_.erase("dG");
    if (gate_kind(p_) != GateKind::none) run("chunk_local_reverse_cumsum");
    if (p_.use_gate_in_kernel) {
      run(kda ? "kda_gate_bwd" : "gate_bwd");
      run("gate_param_sum");
      t_["dg"] = t_["dg_raw"];
    }
    for (const std::string name : {"q", "k"}) {
      t_["dy_heads"] = t_["d" + name];
      run("head_sum");
      t_["d" + name] = t_["dy"];
      if (!p_.use_qk_l2norm) continue;
      t_["x"] = t_[name];
      t_["rstd"] = t_[name + "_rstd"];
      run("l2norm_bwd");
      t_["d" + name] = t_["dx"];
    }
  }

  const Problem& p_;
  StageContext c_;
  TensorMap t_;
};

/// Holds the chained stages to the oracle. A gate's gradient is what is left of larger terms, and
/// that of A_log multiplies it by decays of many thousands.
void expect_equals_oracle(const OperatorData& data) {
  const Reference oracle = reference(data.problem, data.arguments(), 2);
  for (const std::int64_t BT : {16, 64}) {
    SCOPED_TRACE(fmt::format("BT={} {}", BT, describe(data.problem)));
    const TensorMap t = StageChain(data, BT, -std::numeric_limits<double>::infinity()).run();
    for (const auto& [name, expected] : oracle)
      EXPECT_LT(distance(t.at(name), expected), name == "dA_log" ? 1e-9
                                                : name == "dg"   ? 1e-10
                                                                 : 1e-11)
          << name;
  }
}

/// T, gate, options (bits: l2norm, gate in kernel with bias, beta logits, doubled, initial state, v
/// first).
class ChunkedForm : public ::testing::TestWithParam<std::tuple<std::int64_t, Gate, int>> {
 protected:
  Problem problem() const {
    const auto [T, gate, options] = GetParam();
    Problem p;
    p.T = T, p.B = p.N = 2, p.H = 2, p.HV = 4, p.K = 20, p.V = 12;
    p.dtype = p.beta_dtype = DType::fp32;
    p.use_qk_l2norm = (options & 1) != 0;
    p.use_gate_in_kernel = p.has_dt_bias = (options & 2) != 0;
    p.use_beta_sigmoid = (options & 4) != 0;
    p.allow_neg_eigval = (options & 8) != 0;
    p.initial_state = (options & 16) != 0;
    p.state_v_first = (options & 32) != 0;
    p.output_final_state = true;
    return p;
  }

  void check(Problem p) const {
    const auto [T, gate, options] = GetParam();
    for (p.pass = Pass::forward; p.pass != Pass::recurrent;
         p.pass = p.pass == Pass::forward ? Pass::backward : Pass::recurrent)
      expect_equals_oracle(make_data(p, gate, static_cast<std::uint64_t>(T * 64 + options)));
    p.output_final_state = !(p.inplace_state = p.initial_state);
    p.state_index = p.inplace_state && p.use_qk_l2norm;
    p.state_slots = p.N + 1;
    expect_equals_oracle(make_data(p, gate, static_cast<std::uint64_t>(T * 64 + options)));
  }
};

TEST_P(ChunkedForm, OfScalarGatesEqualsTheRecurrence) {
  Problem p = problem();
  check(p);
  p.op = "delta_rule";
  p.use_gate_in_kernel = p.has_dt_bias = false;
  if (std::get<1>(GetParam()) == Gate::zero) check(p);
}

std::vector<std::int64_t> tokens() {
  if (full_suite()) return {1, 15, 16, 17, 63, 65, 130};
  return {1, 16, 65};
}

TEST_P(ChunkedForm, OfGatesPerChannelEqualsTheRecurrence) {
  for (const char* op : {"kda", "gdn2"}) {
    Problem p = problem();
    p.op = op;
    p.use_beta_sigmoid &= definition_of(p).facts().beta;
    p.allow_neg_eigval &= p.use_beta_sigmoid;
    check(p);
    p.lower_bound = -5.0F;
    p.safe_gate = true;
    p.has_A_log = p.use_qk_l2norm;
    check(p);
  }
}

INSTANTIATE_TEST_SUITE_P(All, ChunkedForm,
                         ::testing::Combine(::testing::ValuesIn(tokens()),
                                            ::testing::Values(Gate::zero, Gate::typical,
                                                              Gate::very_negative, Gate::mixed),
                                            ::testing::Values(0, 1, 2, 4 + 8, 16,
                                                              1 + 2 + 4 + 16 + 32)),
                         [](const auto& each) {
                           return fmt::format("T{}_{}_{}", std::get<0>(each.param),
                                              to_string(std::get<1>(each.param)),
                                              std::get<2>(each.param));
                         });

TEST(ChunkedFormCases, HoldsForAPackedBatch) {
  Problem p;
  p.HV = 2, p.K = 9, p.V = 7, p.packed = p.initial_state = p.output_final_state = true;
  p.dtype = p.beta_dtype = DType::fp32;
  for (const char* op : {"delta_rule", "gated_delta_rule", "kda", "gdn2"})
    for (const Pass pass : {Pass::forward, Pass::backward, Pass::recurrent}) {
      p.op = op, p.pass = pass;
      expect_equals_oracle(make_data(p, Gate::mixed, 4, {0, 33, 1, 0, 64, 130, 0}));
    }
}

/// State or segment `at` of a tensor with `size` elements each.
Vector part(const Vector& tensor, std::int64_t at, std::int64_t size) {
  return {tensor.begin() + at * size, tensor.begin() + (at + 1) * size};
}

TEST(ChunkedFormCases, SegmentsMeetAtTheStatesOfTheWholeScans) {
  Problem p;
  p.HV = 2, p.K = 9, p.V = 7, p.packed = p.initial_state = p.output_final_state = true;
  p.dtype = p.beta_dtype = DType::fp32, p.pass = Pass::backward;
  for (const char* op : {"delta_rule", "gated_delta_rule", "kda", "gdn2"}) {
    p.op = op;
    const OperatorData data = make_data(p, Gate::mixed, 4, {0, 33, 1, 0, 64, 130, 0});
    StageChain chain(data, 16, -std::numeric_limits<double>::infinity(), /*SEG=*/2);
    const TensorMap t = chain.run();
    const std::vector<ChunkLayout::Segment> segments = chain.context().layout.segments(2);
    const std::int64_t size = p.HV * p.K * p.V;
    int compared = 0;
    for (std::int64_t s = 0; s < std::ssize(segments); ++s) {
      const auto& segment = segments[static_cast<std::size_t>(s)];
      if (segment.sequence < 0 || segment.chunks == 0) continue;
      ++compared;
      EXPECT_LT(distance(part(t.at("segment_state"), s, size), part(t.at("h"), segment.slot, size)),
                1e-12);
      EXPECT_LT(distance(part(t.at("segment_dstate"), s, size),
                         part(t.at("dh"), segment.slot + segment.chunks - 1, size)),
                1e-12);
    }
    EXPECT_EQ(compared, 2 + 1 + 2 + 5);
  }
}

TEST(ChunkedFormCases, TheOperatorsGateFloorIsBelowFp32Resolution) {
  Problem p;
  p.T = 200, p.HV = 2, p.K = p.V = 16, p.output_final_state = true;
  p.dtype = p.beta_dtype = DType::fp32;
  constexpr double kResolution = 6e-8;  // of fp32
  for (const char* op : {"gated_delta_rule", "kda", "gdn2"})
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      p.op = op, p.pass = pass;
      const OperatorData data = make_data(p, Gate::mixed, 9);
      const TensorMap t = StageChain(data, 64, -24).run();
      for (const auto& [name, expected] : reference(p, data.arguments(), 2))
        EXPECT_LT(distance(t.at(name), expected), kResolution / 100) << op << " " << name;
    }
}

}  // namespace
}  // namespace wyvern::testing
