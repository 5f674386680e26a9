// Folds of what ranges of tokens do to a state, against the float64 reference and in the place
// where they are used: between passes over ranges of one sequence.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "tests/operators/fixture.hpp"
#include "tests/support/stage_reference.hpp"

namespace wyvern::testing {
namespace {

using Role = DeviceTensor::Role;

class FoldTest : public OperatorTest, public ::testing::WithParamInterface<DeviceKind> {
 protected:
  void SetUp() override {
    WYVERN_OPEN_OR_SKIP(GetParam());
    if (is_listing()) GTEST_SKIP() << "folds are none of what is listed";
  }

  Fold fold_of(const FoldOptions& options) {
    return test_runtime().prepare_fold(device(), options);
  }

  /// The states of a launch that must write each of their elements, nothing besides, and the same
  /// again.
  HostTensor run(const Fold& fold, const HostTensor& summaries, const HostTensor& order,
                 bool backwards) {
    const auto& [ranges, HV, K, V, transition] = fold.options();
    std::vector<HostTensor> launches;
    for (const unsigned char poison : {kNanPoison, kFinitePoison}) {
      HostTensor states(DType::fp32, {ranges, HV, K, V});
      states.poison(poison);
      const DeviceTensor in(device(), summaries, Guards::bands, Role::input, "summaries");
      const DeviceTensor places(device(), order, Guards::bands, Role::input, "order");
      const DeviceTensor out(device(), states, Guards::bands, Role::output, "states");
      fold.launch({in.view(), places.view(), out.view(), backwards});
      device().synchronize(nullptr);
      for (const DeviceTensor* tensor : {&in, &places, &out}) EXPECT_EQ(tensor->guard_damage(), "");
      EXPECT_TRUE(same_bytes(in.download(), summaries));
      launches.push_back(out.download());
    }
    EXPECT_TRUE(same_bytes(launches[0], launches[1]));
    return launches[0];
  }
};

/// Random R, and M that keeps about as much as it is given; of each fourth range M is 0.
HostTensor random_summaries(Engine& engine, const FoldOptions& o) {
  const std::int64_t columns = o.V + (o.transition ? o.K : 0);
  HostTensor summaries = normal(engine, DType::fp32, {o.ranges, o.HV, o.K, columns});
  const double length = 1 / std::sqrt(static_cast<double>(o.K));
  for (std::int64_t i = 0; i < summaries.elements(); ++i)
    if (i % columns >= o.V) {
      const bool through = i / (o.HV * o.K * columns) % 4 != 3;
      summaries.set(i, through ? length * summaries.at(i) : 0);
    }
  return summaries;
}

HostTensor random_order(Engine& engine, std::int64_t ranges) {
  std::vector<double> order(static_cast<std::size_t>(ranges));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), engine);
  return {DType::int32, {ranges}, order};
}

Vector reference(const FoldOptions& o, const HostTensor& summaries, const HostTensor& order,
                 bool backwards) {
  StageContext context;
  context.dims = {.H = o.HV, .HV = o.HV, .K = o.K, .V = o.V};
  context.backwards = backwards;
  TensorMap tensors{{"order", order.values()}};
  const Vector given = summaries.values();
  const std::int64_t columns = summaries.shape()[3];
  Vector& whole = tensors["summaries"];
  for (auto row = given.begin(); row != given.end(); row += columns) {
    whole.insert(whole.end(), row, row + columns);
    whole.resize(whole.size() + static_cast<std::size_t>(o.V + o.K - columns));
  }
  run_reference("fold", context, tensors);
  return tensors.at("range_states");
}

TEST_P(FoldTest, MatchesFloat64) {
  Engine engine(1);
  for (FoldOptions o : {FoldOptions{.ranges = 1, .HV = 2, .K = 16, .V = 16},
                        {.ranges = 2, .HV = 3, .K = 128, .V = 128},
                        {.ranges = 5, .HV = 2, .K = 33, .V = 60},
                        {.ranges = 16, .HV = 1, .K = 100, .V = 17},
                        {.ranges = 7, .HV = 1, .K = 256, .V = 130},
                        {.ranges = 64, .HV = 1, .K = 64, .V = 64}})
    for (const bool transition : {false, true}) {
      o.transition = transition;
      const Fold fold = fold_of(o);
      EXPECT_EQ(fold.options(), o);
      const HostTensor summaries = random_summaries(engine, o);
      const HostTensor order = random_order(engine, o.ranges);
      for (const bool backwards : {false, true})
        EXPECT_LE(rms_error(run(fold, summaries, order, backwards),
                            reference(o, summaries, order, backwards)),
                  transition ? 1e-6 : 0)
            << o.ranges << " ranges, K = " << o.K << ", V = " << o.V << ", backwards " << backwards;
    }
}

/// So it makes no difference which rank folds which heads.
TEST_P(FoldTest, PartsOfTheHeadsHaveTheBitsOfAll) {
  Engine engine(2);
  FoldOptions o{.ranges = 6, .HV = 6, .K = 64, .V = 48, .transition = true};
  const HostTensor summaries = random_summaries(engine, o);
  const HostTensor order = random_order(engine, o.ranges);
  const auto heads = [](const HostTensor& all, std::int64_t first, std::int64_t count) {
    Shape shape = all.shape();
    const std::int64_t head = shape[2] * shape[3], HV = shape[1];
    shape[1] = count;
    HostTensor part(DType::fp32, shape);
    for (std::int64_t i = 0; i < part.elements(); ++i)
      part.set(i, all.at((i / (count * head) * HV + first) * head + i % (count * head)));
    return part;
  };
  const Fold all = fold_of(o);
  o.HV = 2;
  const Fold some = fold_of(o);
  for (const bool backwards : {false, true}) {
    const HostTensor states = run(all, summaries, order, backwards);
    for (const std::int64_t first : {0, 2, 4})
      EXPECT_TRUE(same_bytes(run(some, heads(summaries, first, 2), order, backwards),
                             heads(states, first, 2)));
  }
}

/// A sequence of a pack that has grown beyond all bounds is not in the way of those behind it.
TEST_P(FoldTest, WhatIsNotFiniteStaysBeforeAnMOfZeros) {
  Engine engine(3);
  const FoldOptions o{.ranges = 5, .HV = 1, .K = 40, .V = 24, .transition = true};
  const HostTensor order(DType::int32, {5}, {4, 0, 3, 1, 2});  // of range 3 M is 0
  HostTensor summaries = random_summaries(engine, o);
  const Fold fold = fold_of(o);
  const HostTensor finite = run(fold, summaries, order, false);
  summaries.set(4 * 40 * 64 + 5, std::numeric_limits<double>::quiet_NaN());
  summaries.set(4 * 40 * 64 + 64 + 7, std::numeric_limits<double>::infinity());
  const HostTensor states = run(fold, summaries, order, false);
  const auto state = [](const HostTensor& of, std::int64_t range) {
    const Vector values = of.values();
    return Vector(values.begin() + range * 40 * 24, values.begin() + (range + 1) * 40 * 24);
  };
  const auto is_finite = [](double x) { return std::isfinite(x); };
  for (const std::int64_t behind : {1, 2}) EXPECT_EQ(state(states, behind), state(finite, behind));
  EXPECT_FALSE(std::ranges::all_of(state(states, 0), is_finite));
  EXPECT_FALSE(std::ranges::all_of(state(states, 3), is_finite));
}

/// A sequence in ranges whose states pass by a fold of their summaries.
TEST_P(FoldTest, RangesOfASequenceMatchTheOracle) {
  Problem p = base({"gated_delta_rule", Pass::forward}, DType::fp32);
  p.B = p.N = 1, p.T = 210, p.H = 1, p.HV = 2, p.K = 36, p.V = 40;
  p.initial_state = p.state_v_first = false;
  p.output_final_state = true;
  const OperatorData whole = make_data(p, Gate::typical, 4);
  const std::vector<std::int64_t> cuts{0, 50, 130, 145, 210};
  const std::vector<double> order{2, 0, 3, 1};  // the first range is the third summary
  const auto ranges = std::ssize(order);

  const auto range_of = [&](std::int64_t i) {
    const auto at = static_cast<std::size_t>(i);
    OperatorData piece = tokens_of(whole, cuts[at], cuts[at + 1] - cuts[at]);
    piece.problem = p;
    piece.problem.T = cuts[at + 1] - cuts[at];
    return piece;
  };
  HostTensor summaries(DType::fp32, {ranges, p.HV, p.K, p.V + p.K});
  for (std::int64_t i = 0; i < ranges; ++i) {
    OperatorData piece = range_of(i);
    piece.problem.summary = piece.problem.transition = true;
    piece.problem.output_final_state = false;
    const HostTensor own = run_operator(device(), prepare(piece.problem), piece).at("summary");
    const auto place = static_cast<std::int64_t>(order[static_cast<std::size_t>(i)]);
    for (std::int64_t j = 0; j < own.elements(); ++j)
      summaries.set(place * own.elements() + j, own.at(j));
  }
  const Fold fold = fold_of({.ranges = ranges, .HV = p.HV, .K = p.K, .V = p.V, .transition = true});
  const Vector entering =
      run(fold, summaries, HostTensor(DType::int32, {ranges}, order), false).values();

  HostTensors outputs;
  Vector o;
  for (std::int64_t i = 0; i < ranges; ++i) {
    OperatorData piece = range_of(i);
    piece.problem.initial_state = true;
    const auto place = static_cast<std::int64_t>(order[static_cast<std::size_t>(i)]);
    const auto from = entering.begin() + place * p.HV * p.K * p.V;
    piece.tensors["initial_state"] =
        HostTensor(DType::fp32, {1, p.HV, p.K, p.V}, Vector(from, from + p.HV * p.K * p.V));
    outputs = run_operator(device(), prepare(piece.problem), piece);
    const Vector rows = outputs.at("o").values();
    o.insert(o.end(), rows.begin(), rows.end());
  }
  outputs["o"] = HostTensor(p.dtype, {1, p.T, p.HV, p.V}, o);
  expect_matches_oracle(whole, outputs);
}

TEST_P(FoldTest, RefusesWhatIsWrong) {
  const auto refusal = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kBadInput);
      return error.what();
    }
    return "";
  };
  const FoldOptions good{.ranges = 3, .HV = 2, .K = 16, .V = 8, .transition = true};
  const auto options = [&](auto FoldOptions::* field, std::int64_t value) {
    FoldOptions bad = good;
    bad.*field = value;
    return refusal([&] { fold_of(bad); });
  };
  EXPECT_EQ(options(&FoldOptions::ranges, 0), "ranges is 0; it must be between 1 and 65535");
  EXPECT_EQ(options(&FoldOptions::ranges, 65536),
            "ranges is 65536; it must be between 1 and 65535");
  EXPECT_EQ(options(&FoldOptions::HV, 0), "HV is 0; it must be between 1 and 1073741823");
  EXPECT_EQ(options(&FoldOptions::K, 257), "K is 257; it must be between 1 and 256");
  EXPECT_EQ(options(&FoldOptions::V, -1), "V is -1; it must be between 1 and 536870911");

  const Fold fold = fold_of(good);
  Engine engine(5);
  HostTensor states(DType::fp32, {3, 2, 16, 8});
  states.poison(kNanPoison);
  const DeviceTensor summaries(device(), random_summaries(engine, good), Guards::bands, Role::input,
                               "summaries");
  const DeviceTensor out(device(), states, Guards::bands, Role::output, "states");
  const auto launch = [&](const std::vector<double>& order, const auto& change) {
    const DeviceTensor places(device(), HostTensor(DType::int32, {std::ssize(order)}, order),
                              Guards::bands, Role::input, "order");
    FoldArguments arguments{summaries.view(), places.view(), out.view()};
    change(arguments);
    return refusal([&] { fold.launch(arguments); });
  };
  const auto nothing = [](FoldArguments&) {};
  EXPECT_EQ(launch({0, 1}, nothing), "order has shape [2]; it must be int32 [3]");
  EXPECT_EQ(launch({0, 1, 2}, [](FoldArguments& a) { a.order = {}; }),
            "order is missing; it must be int32 [3]");
  EXPECT_EQ(launch({0, 1, 2}, [](FoldArguments& a) { a.summaries.shape[3] = 8; }),
            "summaries has shape [3, 2, 16, 8]; it must be fp32 [3, 2, 16, 24]");
  EXPECT_EQ(launch({0, 1, 2}, [](FoldArguments& a) { a.states.dtype = DType::bf16; }),
            "states is bf16; it must be fp32 [3, 2, 16, 8]");
  EXPECT_EQ(launch({0, 1, 2}, [](FoldArguments& a) { a.states.data = a.summaries.data; }),
            "states overlaps summaries; a tensor that a launch writes must not overlap the other "
            "tensors");
  if (GetParam() == DeviceKind::cpu) {
    EXPECT_EQ(launch({0, 1, 3}, nothing), "order[2] is 3; it must be between 0 and 2");
    EXPECT_EQ(launch({0, 1, 1}, nothing), "order[2] is 1 again; order has each range once");
  }
  device().synchronize(nullptr);
  EXPECT_TRUE(same_bytes(out.download(), states)) << "written in spite of the error";
}

/// Where a GPU reads an order that is wrong it neither reads nor writes anything else.
TEST_P(FoldTest, AWrongOrderLeadsNowhereElse) {
  if (GetParam() == DeviceKind::cpu) GTEST_SKIP() << "the CPU refuses it";
  Engine engine(6);
  const FoldOptions o{.ranges = 3, .HV = 2, .K = 16, .V = 8, .transition = true};
  const Fold fold = fold_of(o);
  const HostTensor given = random_summaries(engine, o);
  HostTensor states(DType::fp32, {3, 2, 16, 8});
  const DeviceTensor summaries(device(), given, Guards::bands, Role::input, "summaries");
  const DeviceTensor order(device(), HostTensor(DType::int32, {3}, {-1, 1 << 30, 7}), Guards::bands,
                           Role::input, "order");
  const DeviceTensor out(device(), states, Guards::bands, Role::output, "states");
  fold.launch({summaries.view(), order.view(), out.view()});
  device().synchronize(nullptr);
  for (const DeviceTensor* tensor : {&summaries, &order, &out})
    EXPECT_EQ(tensor->guard_damage(), "");
}

INSTANTIATE_TEST_SUITE_P(Cpu, FoldTest, ::testing::Values(DeviceKind::cpu),
                         [](const auto&) { return "cpu"; });
INSTANTIATE_TEST_SUITE_P(Gpu, FoldTest, ::testing::Values(DeviceKind::cuda),
                         [](const auto&) { return "cuda"; });

}  // namespace
}  // namespace wyvern::testing
