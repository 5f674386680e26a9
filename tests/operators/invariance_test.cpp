// What batch_invariant promises: a sequence has the same bits alone, anywhere in any batch, in
// pieces of multiples of 64 tokens, with any number of threads, and whatever has been tuned.
#include <sched.h>
#include <wyvern/error.hpp>

#include <cstddef>
#include <memory>
#include <thread>

#include "cache/cache.hpp"
#include "cache/cache_testing.hpp"
#include "runtime/devices/device_impl.hpp"
#include "runtime/plan_source.hpp"
#include "tests/operators/invariance.hpp"

namespace wyvern::testing {
namespace {

struct Setting {
  DeviceKind device;
  OperatorPass which;
  Options options;
};

void PrintTo(const Setting& s, std::ostream* out) { *out << name_of(s.which); }

class BatchInvarianceOf : public BatchInvariance<OperatorTest>,
                          public ::testing::WithParamInterface<Setting> {
 protected:
  void SetUp() override { WYVERN_OPEN_OR_SKIP(GetParam().device); }
  bool recurrent() const { return GetParam().which.pass == Pass::recurrent; }
  Problem problem() const { return BatchInvariance::problem(GetParam().which, GetParam().options); }
};

TEST_P(BatchInvarianceOf, AloneAndAnywhereInABatch) {
  expect_the_same_anywhere(
      problem(), recurrent() ? Lengths{3, 0, 1, 8, 2, 4, 1} : Lengths{37, 0, 64, 1, 130, 2, 65},
      {0, 2, 4}, /*many=*/true);
}

TEST_P(BatchInvarianceOf, PiecesOf64TokensGiveTheBitsOfOne) {
  expect_the_same_in_pieces(problem());
}

/// A block of the CPU is one thread's, and no block adds to another's sums.
TEST_P(BatchInvarianceOf, OneThreadGivesTheBitsOfAll) {
  if (GetParam().device != DeviceKind::cpu) return;
  const OperatorData data = pack(sequences(problem(), {5, 0, 130, 7}), in_turn(4));
  const HostTensors wanted = run(data);
  HostTensors got;
  std::thread([&] {
    cpu_set_t allowed, first;
    ASSERT_EQ(sched_getaffinity(0, sizeof allowed, &allowed), 0);
    CPU_ZERO(&first);
    for (int cpu = 0; CPU_COUNT(&first) == 0; ++cpu)
      if (CPU_ISSET(cpu, &allowed)) CPU_SET(cpu, &first);
    ASSERT_EQ(sched_setaffinity(0, sizeof first, &first), 0);
    const Device single(cpu_devices().open(0));
    ASSERT_EQ(single.info().units, 1);
    RuntimeOptions options;  // kernels know the threads that they were loaded for
    options.cache = test_cache();
    Runtime runtime(options);
    got = run_operator(single, runtime.prepare(single, data.problem), data);
  }).join();
  expect_same(got, wanted);
}

std::vector<Setting> settings(DeviceKind device) {
  std::vector<Setting> all;
  for (const OperatorPass& which : all_passes())
    for (const Options options : {Options::few, Options::many, Options::wide})
      if (which.pass != Pass::backward && (options != Options::wide || device == DeviceKind::cuda))
        all.push_back({device, which, options});
  return all;
}

std::string name_of_setting(const ::testing::TestParamInfo<Setting>& each) {
  constexpr const char* kOptions[] = {"_Few", "_Many", "_Wide"};
  return name_of(each.param.which) + kOptions[static_cast<int>(each.param.options)];
}

INSTANTIATE_TEST_SUITE_P(Cpu, BatchInvarianceOf, ::testing::ValuesIn(settings(DeviceKind::cpu)),
                         name_of_setting);
INSTANTIATE_TEST_SUITE_P(Gpu, BatchInvarianceOf, ::testing::ValuesIn(settings(DeviceKind::cuda)),
                         name_of_setting);

/// Winners as a tuning stores them, in a cache of its own.
class BatchInvarianceTuned : public BatchInvariance<OperatorTest> {
 protected:
  Operator prepare(const Problem& problem) override { return runtime_->prepare(device(), problem); }

  void SetUp() override {
    WYVERN_OPEN_OR_SKIP(DeviceKind::cpu);
    RuntimeOptions options;
    options.cache = test_cache();  // of kernels
    options.plans = std::make_shared<CachePlanSource>(winners_);
    runtime_ = std::make_unique<Runtime>(options);
  }

  void store_winner(const Problem& problem, std::int64_t chunk_size) {
    const ProblemKey key = problem_key(problem);
    WinnerRow row;
    row.device = device().info().key;
    row.driver = device().info().driver;
    row.family = key.family;
    row.tokens = key.tokens, row.sequences = key.sequences;
    row.plan = plan_to_json(with_chunks(problem, chunk_size));
    row.median_us = 50, row.default_us = 100;
    ASSERT_TRUE(winners_->store_winner(row));
  }

  Plan with_chunks(Problem problem, std::int64_t chunk_size) const {
    problem.batch_invariant = false;
    return plans(device(), problem, chunk_size).front();
  }

 private:
  TempDirectory directory_;
  std::shared_ptr<Cache> winners_ = std::make_shared<Cache>(directory_.path());
  std::unique_ptr<Runtime> runtime_;
};

TEST_F(BatchInvarianceTuned, WinnersChangeNothing) {
  const OperatorPass which{"gated_delta_rule", Pass::forward};
  Sequences all = sequences(problem(which, Options::few), {70, 33});
  const auto run_all = [&] {
    std::vector<HostTensors> outputs = run_each(all);
    outputs.push_back(run(pack(all, {0, 1})));
    return outputs;
  };
  const auto joined_alone = [&](const std::vector<HostTensors>& outputs) {
    return joined(all[0].problem, chosen(outputs, {0, 1}));
  };
  const std::vector<HostTensors> before = run_all();
  expect_same(before[2], joined_alone(before));

  const auto plain = [](Problem p) {
    p.batch_invariant = false;
    return p;
  };
  const Problem alone = all[0].problem, together = pack(all, {0, 1}).problem;
  // Of the option's own problem too, as no tuning would.
  store_winner(alone, 16);
  store_winner(plain(alone), 16);
  store_winner(plain(together), 32);
  const std::vector<HostTensors> after = run_all();
  for (std::size_t i = 0; i < before.size(); ++i) expect_same(after[i], before[i]);
  EXPECT_EQ(prepare(alone).origin(), Origin::fallback);
  EXPECT_EQ(shape_of(prepare(alone).plan()).BT, 64);
  EXPECT_THROW(test_runtime().prepare(device(), alone, with_chunks(alone, 16)), Error);

  // Without the option each batch has its winner, and the sequence other bits in it.
  for (OperatorData& one : all) one.problem = plain(one.problem);
  EXPECT_EQ(shape_of(prepare(all[0].problem).plan()).BT, 16);
  EXPECT_EQ(shape_of(prepare(plain(together)).plan()).BT, 32);
  const std::vector<HostTensors> tuned = run_all();
  EXPECT_FALSE(same_bytes(tuned[2].at("o"), joined_alone(tuned).at("o")));
}

}  // namespace
}  // namespace wyvern::testing
