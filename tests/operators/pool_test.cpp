// States in a pool, in place: strided slots, every plan, and what is refused.
#include <gtest/gtest.h>
#include <wyvern/reference.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "tests/operators/fixture.hpp"

namespace wyvern::testing {
namespace {

std::vector<OperatorPass> serving_passes() {
  std::vector<OperatorPass> all = all_passes();
  std::erase_if(all, [](const OperatorPass& which) { return which.pass == Pass::backward; });
  return all;
}

class PoolOperator : public OperatorTest,
                     public ::testing::WithParamInterface<std::tuple<TestDevice, OperatorPass>> {
 protected:
  void SetUp() override { WYVERN_OPEN_OR_SKIP(std::get<TestDevice>(GetParam())); }
  const OperatorPass& which() const { return std::get<OperatorPass>(GetParam()); }
};

TEST_P(PoolOperator, SlotsMayLieApartInEveryPlan) {
  Problem p = base(which());
  p.K = 36, p.V = 40;
  const bool recurrent = p.pass == Pass::recurrent;
  const OperatorData pool = pool_data(
      p, Gate::mixed, 21,
      recurrent ? Lengths{1, 3, 2, 2, 5, 1, 0, 4} : Lengths{65, 3, 130, 16, 64, 1, 0, 17});
  for (const Plan& plan : plans_with_all(device(), pool.problem, 16))
    check_strided_rows(prepare(pool.problem, plan), pool);
}

/// Pieces of a sequence, each from where the one before left its state.
TEST_P(PoolOperator, ASequenceGoesOnFromItsSlot) {
  Problem p = base(which(), DType::fp32);
  p.B = p.N = 1;
  p.T = p.pass == Pass::recurrent ? 7 : 150;
  p.output_final_state = true;
  OperatorData whole = make_data(p, Gate::typical, 22);
  const HostTensors wanted = run_operator(device(), prepare(p), whole);
  p.inplace_state = p.state_index = p.has_initial_state = true;
  p.output_final_state = false;
  p.state_slots = 3;
  HostTensor state(DType::fp32, {3, p.HV, p.K, p.V});
  state.poison(kNanPoison);
  const std::int64_t first = p.T / 3;
  for (const auto& [at, count] : {std::pair{std::int64_t{0}, first}, {first, p.T - first}}) {
    OperatorData piece = tokens_of(whole, at, count);
    const std::int64_t T = piece.problem.T;
    piece.problem = p, piece.problem.T = T;
    piece.tensors["state"] = state;
    piece.tensors["state_index"] = HostTensor(p.index_dtype, {1}, {1});
    piece.tensors["has_initial_state"] = HostTensor(DType::boolean, {1}, {at == 0 ? 0.0 : 1.0});
    const HostTensors outputs = run_operator(device(), prepare(piece.problem), piece);
    if (!is_listing()) state = outputs.at("state");
  }
  if (is_listing()) return;
  std::vector<double> slot = state.values();
  const std::vector<double> last = wanted.at("final_state").values();
  slot = {slot.begin() + std::ssize(last), slot.begin() + 2 * std::ssize(last)};
  const HostTensor after(DType::fp32, {p.HV, p.K, p.V}, slot);
  EXPECT_LE(rms_error(after, last), 2 * error_bound(p, "state"));
}

/// Windows [N, C, W - 1] in slots of conv_state, the columns behind them poisoned.
HostTensor in_slots(const Problem& p, const HostTensor& windows) {
  const std::int64_t C = conv_channels(p), L = conv_columns_of(p), before = *p.short_conv - 1;
  HostTensor slots(windows.dtype(), p.conv_tokens_first ? Shape{p.N, L, C} : Shape{p.N, C, L});
  slots.poison(kNanPoison);
  for (std::int64_t i = 0; i < windows.elements(); ++i) {
    const std::int64_t n = i / before / C, c = i / before % C, j = i % before;
    slots.set(p.conv_tokens_first ? (n * L + j) * C + c : (n * C + c) * L + j, windows.at(i));
  }
  return slots;
}

/// In slots rows and states have the bits that they have outside, and the columns of a slot that
/// are not in use keep theirs. Decoding has them in one launch and token by token.
TEST_P(PoolOperator, ConvolvedRowsHaveTheSameBitsInPlace) {
  Problem p = base(which());
  p.B = p.N = 1;
  p.T = p.pass == Pass::recurrent ? 6 : 70;
  p.batch_invariant = p.pass == Pass::recurrent;  // one plan, whatever the number of tokens
  p.initial_state = p.output_final_state = true;
  p.short_conv = 4, p.has_conv_bias = true;
  p.initial_conv_state = p.output_conv_state = true;
  const OperatorData outside = make_data(p, Gate::typical, 25);
  const HostTensors wanted = run_operator(device(), prepare(p), outside);
  for (const bool tokens_first : {false, true}) {
    OperatorData data = outside;
    Problem& q = data.problem;
    q.initial_state = q.output_final_state = q.initial_conv_state = q.output_conv_state = false;
    q.inplace_state = q.inplace_conv_state = true;
    q.conv_tokens_first = tokens_first;
    if (tokens_first) q.conv_columns = 5;
    data.tensors["state"] = outside.tensors.at("initial_state");
    data.tensors["conv_state"] = in_slots(q, outside.tensors.at("initial_conv_state"));
    data.tensors.erase("initial_state");
    data.tensors.erase("initial_conv_state");
    const Operator whole = prepare(q);
    const HostTensors outputs = run_operator(device(), whole, data);
    if (is_listing()) continue;
    const auto expect_same = [&](const HostTensors& got) {
      EXPECT_TRUE(same_bytes(got.at("state"), wanted.at("final_state")));
      EXPECT_TRUE(same_bytes(got.at("conv_state"), in_slots(q, wanted.at("final_conv_state"))));
    };
    EXPECT_TRUE(same_bytes(outputs.at("o"), wanted.at("o")));
    expect_same(outputs);
    if (p.pass != Pass::recurrent) continue;
    HostTensors last{{"state", data.tensors.at("state")},
                     {"conv_state", data.tensors.at("conv_state")}};
    const std::int64_t row = wanted.at("o").elements() / p.T;
    for (std::int64_t t = 0; t < p.T; ++t) {
      OperatorData one = tokens_of(data, t, 1);
      for (auto& [name, tensor] : last)
        if (name != "o") one.tensors[name] = tensor;
      last = run_operator(device(), prepare(one.problem), one);
      for (std::int64_t i = 0; i < row; ++i)
        ASSERT_EQ(last.at("o").at(i), wanted.at("o").at(t * row + i)) << "token " << t;
    }
    expect_same(last);
  }
}

const auto kPassName = [](const auto& each) { return name_of(std::get<OperatorPass>(each.param)); };

INSTANTIATE_TEST_SUITE_P(Cpu, PoolOperator,
                         ::testing::Combine(::testing::Values(TestDevice::cpu),
                                            ::testing::ValuesIn(serving_passes())),
                         kPassName);
INSTANTIATE_TEST_SUITE_P(Emulated, PoolOperator,
                         ::testing::Combine(::testing::Values(TestDevice::emulated),
                                            ::testing::ValuesIn(serving_passes())),
                         kPassName);

class Float8Pool
    : public OperatorTest,
      public ::testing::WithParamInterface<std::tuple<TestDevice, OperatorPass, DType>> {
 protected:
  void SetUp() override { WYVERN_OPEN_OR_SKIP(std::get<TestDevice>(GetParam())); }
};

TEST_P(Float8Pool, SlotsMayLieApartInEveryPlan) {
  const auto& [where, which, type] = GetParam();
  Problem p = base(which);
  p.K = 36, p.V = 40, p.state_dtype = type;
  const bool recurrent = p.pass == Pass::recurrent;
  const OperatorData pool = pool_data(
      p, Gate::mixed, 24,
      recurrent ? Lengths{1, 3, 2, 2, 5, 1, 0, 4} : Lengths{65, 3, 130, 16, 64, 1, 0, 17});
  for (const Plan& plan : plans_with_all(device(), pool.problem, 16))
    check_strided_rows(prepare(pool.problem, plan), pool);
}

TEST_P(Float8Pool, EveryNumberIsReadAndRounded) {
  const auto& [where, which, type] = GetParam();
  for (const bool v_first : {false, true}) {
    const OperatorData data = float8_data(which, type, v_first);
    const HostTensors outputs = run_operator(device(), prepare(data.problem), data);
    if (!is_listing()) expect_float8_rounded(data, outputs.at("state"));
  }
}

std::vector<OperatorPass> float8_passes() {
  std::vector<OperatorPass> all = serving_passes();
  std::erase_if(all, [](const OperatorPass& which) {
    return which.op == "gdn2" || which.op == "gated_delta_product";
  });
  return all;
}

auto float8_cases(TestDevice where) {
  return ::testing::Combine(::testing::Values(where), ::testing::ValuesIn(float8_passes()),
                            ::testing::Values(DType::float8_e4m3, DType::float8_e5m2));
}
const auto kFloat8Name = [](const auto& each) {
  return fmt::format("{}_{}", name_of(std::get<OperatorPass>(each.param)),
                     to_string(std::get<DType>(each.param)));
};

INSTANTIATE_TEST_SUITE_P(Cpu, Float8Pool, float8_cases(TestDevice::cpu), kFloat8Name);
INSTANTIATE_TEST_SUITE_P(Emulated, Float8Pool, float8_cases(TestDevice::emulated), kFloat8Name);

class PoolInput : public OperatorTest {
 protected:
  void SetUp() override { WYVERN_OPEN_OR_SKIP(DeviceKind::cpu); }
};

/// A launch of a pool whose slots lie `distance` elements apart; what it refuses, or "".
std::string refusal(const Operator& op, const OperatorData& data, std::int64_t distance,
                    std::int64_t offset = 0) {
  constexpr std::size_t kRoom = 1 << 20;
  alignas(256) static unsigned char room[kRoom], output[kRoom], workspace[kRoom];
  Arguments arguments = data.arguments();
  arguments.state.data = room + offset;
  arguments.state.strides[0] = distance;
  arguments.o = TensorView(offset < 0 ? room + 64 : output, data.problem.dtype,
                           {data.problem.B, data.problem.T, data.problem.HV, data.problem.V});
  if (offset < 0) arguments.state.data = room;
  try {
    op.launch(arguments, workspace);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

TEST_F(PoolInput, DistancesOfSlotsAreChecked) {
  if (is_listing()) return;
  for (const Pass pass : {Pass::forward, Pass::recurrent}) {
    Problem p = base({"gated_delta_rule", pass});
    p.B = p.N = 2, p.T = 4, p.H = p.HV = 1, p.K = p.V = 16;
    p.inplace_state = true, p.output_final_state = false;
    const OperatorData data = make_data(p, Gate::typical, 23);
    const Operator op = prepare(p);
    ASSERT_LE(op.workspace_bytes(), std::size_t{1} << 20);
    const std::int64_t slot = 256;
    EXPECT_EQ(refusal(op, data, slot), "");
    EXPECT_EQ(refusal(op, data, slot + 4), "");
    EXPECT_EQ(refusal(op, data, 10 * slot), "");
    for (const std::int64_t bad : {std::int64_t{0}, slot - 4, slot + 1, slot + 2, -slot}) {
      const std::string why = refusal(op, data, bad);
      EXPECT_NE(why.find(fmt::format("state has strides [{}, ", bad)), std::string::npos) << why;
      EXPECT_NE(why.find("contiguous slots at equal distances"), std::string::npos) << why;
    }
    // Of a pool all memory from its first to its last byte is its own.
    const std::string overlap = refusal(op, data, 10 * slot, -1);
    EXPECT_NE(overlap.find("state overlaps o"), std::string::npos) << overlap;
  }
}

/// As engines keep them: a page has a sequence's state and the rows before it.
TEST_F(PoolInput, SlotsOfTwoPoolsMayShareAPage) {
  if (is_listing()) return;
  Problem p = base({"gated_delta_rule", Pass::recurrent});
  p.B = p.N = 3, p.T = 1, p.H = p.HV = 1, p.K = p.V = 16;
  p.inplace_state = p.inplace_conv_state = true, p.output_final_state = false;
  p.short_conv = 4;
  const OperatorData data = make_data(p, Gate::typical, 29);
  const Operator op = prepare(p);
  const HostTensor &states = data.tensors.at("state"), &rows = data.tensors.at("conv_state");
  const std::size_t slots = 3, state = states.bytes() / slots, row = rows.bytes() / slots;
  const std::size_t page = state + row + 64;
  constexpr std::size_t kRoom = 1 << 16;
  alignas(256) static unsigned char pages[kRoom], output[2][kRoom], workspace[kRoom];
  ASSERT_LE(std::max(slots * page, op.workspace_bytes()), kRoom);

  Arguments apart = data.arguments();
  apart.o = TensorView(output[0], p.dtype, {3, 1, 1, 16});
  Arguments shared = apart;
  shared.o.data = output[1];
  const auto place = [&](TensorView& pool, std::size_t offset) {
    pool.data = pages + offset;
    pool.strides[0] = static_cast<std::int64_t>(page / size_of(pool.dtype));
  };
  for (std::size_t i = 0; i < slots; ++i) {
    std::memcpy(pages + i * page, states.data() + i * state, state);
    std::memcpy(pages + i * page + state, rows.data() + i * row, row);
  }
  const auto refused = [&] {
    try {
      op.launch(shared, workspace);
      return std::string();
    } catch (const Error& error) {
      return std::string(error.what());
    }
  };
  place(shared.state, 0);
  place(shared.conv_state, state - 16);
  EXPECT_NE(refused().find("overlaps"), std::string::npos);
  place(shared.state, row - 16);
  place(shared.conv_state, 0);
  EXPECT_NE(refused().find("overlaps"), std::string::npos);
  place(shared.state, 0);
  place(shared.conv_state, state);
  EXPECT_EQ(refused(), "");
  op.launch(apart, workspace);
  EXPECT_EQ(std::memcmp(output[0], output[1], 3 * 16 * size_of(p.dtype)), 0);
  for (std::size_t i = 0; i < slots; ++i) {
    EXPECT_EQ(std::memcmp(pages + i * page, states.data() + i * state, state), 0);
    EXPECT_EQ(std::memcmp(pages + i * page + state, rows.data() + i * row, row), 0);
  }
}

}  // namespace
}  // namespace wyvern::testing
