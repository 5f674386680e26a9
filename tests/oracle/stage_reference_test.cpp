// The stage references: each against its definition, and all of them chained against the oracle,
// which shares nothing with them. The two agreeing in float64 validates both.
#include <wyvern/reference.hpp>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <tuple>

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

/// The chunked form of section 3: every stage in order, on the inputs the oracle gets.
TensorMap chunked_form(const OperatorData& data, std::int64_t BT, double gate_floor) {
  const Problem& p = data.problem;
  StageContext context;
  context.layout = p.packed ? packed_layout(data.cu_seqlens, BT, p.T / BT + p.N)
                            : equal_layout(p.B, p.T, BT);
  context.dims = {p.H, p.HV, p.K, p.V};
  context.scale = scale_of(p);
  context.gate_floor = gate_floor;
  context.beta_sigmoid = p.use_beta_sigmoid;
  context.neg_eigval = p.allow_neg_eigval;
  context.state_v_first = p.state_v_first;
  TensorMap t;
  for (const auto& [name, tensor] : data.tensors) t[name] = tensor.values();
  for (const char* name : {"q", "k"}) {
    if (!p.use_qk_l2norm) break;
    t["x"] = t[name];
    run_reference("l2norm_rstd", context, t);
    t[std::string(name) + "_rstd"] = t["rstd"];
  }
  if (p.use_gate_in_kernel) run_reference("gate", context, t);
  for (const char* stage : {"chunk_local_cumsum", "scaled_dot_kkt", "solve_tril",
                            "recompute_w_u", "fwd_h", "fwd_o"})
    run_reference(stage, context, t);
  return t;
}

/// T, gate, options (bits: l2norm, gate in kernel with bias, beta logits, doubled, initial state, v
/// first).
class ChunkedForm : public ::testing::TestWithParam<std::tuple<std::int64_t, Gate, int>> {};

TEST_P(ChunkedForm, EqualsTheRecurrence) {
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
  const OperatorData data = make_data(p, gate, static_cast<std::uint64_t>(T * 64 + options));
  const Reference oracle = reference(p, data.arguments(), 2);
  for (const std::int64_t BT : {16, 32, 64, 128}) {
    const TensorMap t = chunked_form(data, BT, -std::numeric_limits<double>::infinity());
    EXPECT_LT(distance(t.at("o"), oracle.at("o")), 1e-11) << "BT=" << BT;
    EXPECT_LT(distance(t.at("final_state"), oracle.at("final_state")), 1e-11) << "BT=" << BT;
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, ChunkedForm,
    ::testing::Combine(::testing::Values(1, 15, 16, 17, 63, 65, 130),
                       ::testing::Values(Gate::zero, Gate::typical, Gate::very_negative,
                                         Gate::mixed),
                       ::testing::Values(0, 1, 2, 4 + 8, 16, 1 + 2 + 4 + 16 + 32)),
    [](const auto& each) {
      return fmt::format("T{}_{}_{}", std::get<0>(each.param), to_string(std::get<1>(each.param)),
                         std::get<2>(each.param));
    });

TEST(ChunkedFormCases, HoldsForAPackedBatch) {
  Problem p;
  p.HV = 2, p.K = 9, p.V = 7, p.packed = p.initial_state = p.output_final_state = true;
  p.dtype = p.beta_dtype = DType::fp32;
  const OperatorData data = make_data(p, Gate::mixed, 4, {0, 33, 1, 0, 64, 130, 0});
  const Reference oracle = reference(data.problem, data.arguments(), 2);
  for (const std::int64_t BT : {16, 64}) {
    const TensorMap t = chunked_form(data, BT, -std::numeric_limits<double>::infinity());
    EXPECT_LT(distance(t.at("o"), oracle.at("o")), 1e-11);
    EXPECT_LT(distance(t.at("final_state"), oracle.at("final_state")), 1e-11);
  }
}

TEST(ChunkedFormCases, TheOperatorsGateFloorIsBelowFp32Resolution) {
  Problem p;
  p.T = 200, p.HV = 2, p.K = p.V = 16, p.output_final_state = true;
  p.dtype = p.beta_dtype = DType::fp32;
  const OperatorData data = make_data(p, Gate::mixed, 9);
  const Reference oracle = reference(p, data.arguments(), 2);
  const TensorMap t = chunked_form(data, 64, -24);
  constexpr double kResolution = 6e-8;  // of fp32
  EXPECT_LT(distance(t.at("o"), oracle.at("o")), kResolution / 100);
  EXPECT_LT(distance(t.at("final_state"), oracle.at("final_state")), kResolution / 100);
}

}  // namespace
}  // namespace wyvern::testing
