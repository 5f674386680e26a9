// Launches beside each other, on several streams and devices in one process, and very many in a
// row. Cases are Gpu/OperatorDevices and Gpu/HopperRepeats.
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "runtime/devices/device_impl.hpp"
#include "tests/operators/fixture.hpp"

namespace wyvern::testing {
namespace {

/// One launch that can be enqueued again and again: an operator with tensors and workspace of its
/// own on a device.
class Enqueued {
 public:
  Enqueued(const Device& device, Operator op, const OperatorData& data)
      : op_(std::move(op)),
        workspace_(device.allocate(std::max<std::size_t>(op_.workspace_bytes(), 1))) {
    for (const TensorSpec& spec : tensor_specs(data.problem)) {
      if (!spec.present) continue;
      const std::string name(spec.name);
      const bool out = spec.access == TensorAccess::out;
      HostTensor content = out ? host_tensor(spec) : data.tensors.at(name);
      if (out) std::memset(content.data(), 0xFF, content.bytes());
      const auto [at, added] =
          tensors_.try_emplace(name, device, content, Guards::bands,
                               out ? DeviceTensor::Role::output : DeviceTensor::Role::input, name);
      arguments_.tensor(name) = at->second.view();
      if (out) outputs_.push_back(name);
    }
  }

  void enqueue(Stream stream) { op_.launch(arguments_, workspace_.get(), stream); }

  void expect_outputs(const HostTensors& expected) const {
    ASSERT_FALSE(outputs_.empty());
    for (const std::string& name : outputs_)
      EXPECT_TRUE(same_bytes(tensors_.at(name).download(), expected.at(name))) << name;
  }

 private:
  Operator op_;
  std::shared_ptr<void> workspace_;
  std::map<std::string, DeviceTensor> tensors_;
  Arguments arguments_;
  std::vector<std::string> outputs_;
};

/// Every operator and pass.
struct PassCase {
  OperatorPass which;
};

void PrintTo(const PassCase& c, std::ostream* out) { *out << name_of(c.which); }

class OperatorDevices : public OperatorTest, public ::testing::WithParamInterface<PassCase> {
 protected:
  static OperatorData data_of(std::uint64_t seed) {
    Problem p = base(GetParam().which);
    p.initial_state = p.use_qk_l2norm = true;
    if (p.pass != Pass::recurrent) p.T = 500;
    return make_data(p, Gate::typical, seed);
  }
};

/// Launches of one operator follow each other on either stream and wait for nothing on the other.
TEST_P(OperatorDevices, TwoStreamsAtOnce) {
  WYVERN_OPEN_OR_SKIP(DeviceKind::cuda);
  constexpr int kLaunches = 20;
  const OperatorData data[] = {data_of(50), data_of(51)};
  const Operator op = prepare(data[0].problem);
  const HostTensors alone[] = {run_operator(device(), op, data[0]),
                               run_operator(device(), op, data[1])};
  Enqueued launches[] = {{device(), op, data[0]}, {device(), op, data[1]}};
  const std::shared_ptr<void> streams[] = {device().impl().make_stream(),
                                           device().impl().make_stream()};
  for (int i = 0; i < kLaunches; ++i)
    for (const int j : {0, 1}) launches[j].enqueue(streams[j].get());
  for (const int j : {0, 1}) {
    device().synchronize(streams[j].get());
    launches[j].expect_outputs(alone[j]);
  }
}

/// One runtime serves both GPUs of a machine, from a thread each, and both compute the same bits.
TEST_P(OperatorDevices, TwoGpusAtOnce) {
  WYVERN_OPEN_OR_SKIP(DeviceKind::cuda);
  std::vector<Device> gpus;
  for (const DeviceInfo& each : list_devices())
    if (each.cuda && each.problem.empty()) gpus.push_back(Device::open(each.name));
  if (gpus.size() < 2) GTEST_SKIP() << "this machine has one GPU";
  gpus.resize(2, gpus[0]);
  const OperatorData data = data_of(52);
  std::vector<HostTensors> outputs(gpus.size());
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < gpus.size(); ++i)
      threads.emplace_back([&, i] {
        outputs[i] = run_operator(gpus[i], test_runtime().prepare(gpus[i], data.problem), data,
                                  Guards::bands, {}, 10);
      });
  }
  expect_matches_oracle(data, outputs[0]);
  for (const auto& [name, tensor] : outputs[0])
    EXPECT_TRUE(same_bytes(tensor, outputs[1].at(name))) << name;
}

TEST_P(OperatorDevices, CpuAndGpuInOneProcess) {
  WYVERN_OPEN_OR_SKIP(DeviceKind::cuda);
  std::string no_cpu;
  const auto cpu = test_device(DeviceKind::cpu, &no_cpu);
  if (!cpu) GTEST_SKIP() << no_cpu;
  const OperatorData data = data_of(53);
  const Operator on_cpu = test_runtime().prepare(*cpu, data.problem);
  HostTensors by_cpu;
  std::jthread beside([&] { by_cpu = run_operator(*cpu, on_cpu, data); });
  const HostTensors by_gpu = run_operator(device(), prepare(data.problem), data);
  beside.join();
  expect_matches_oracle(data, by_gpu);
  expect_matches_oracle(data, by_cpu);
}

/// Every template for Hopper in each pass that some plan carries out with it.
struct HopperCase {
  std::string id;
  OperatorPass which;
};

void PrintTo(const HopperCase& c, std::ostream* out) { *out << c.id; }

class HopperRepeats : public OperatorTest, public ::testing::WithParamInterface<HopperCase> {};

/// A race between warps that meets once in many thousand launches. It takes seconds a case:
/// --gtest_also_run_disabled_tests.
TEST_P(HopperRepeats, DISABLED_HundredThousandLaunchesGiveTheSameBits) {
  WYVERN_OPEN_OR_SKIP(DeviceKind::cuda);
  constexpr int kRounds = 2000, kLaunches = 50;
  Problem p = base(GetParam().which);
  p.K = p.V = 128;
  p.packed = p.initial_state = p.use_qk_l2norm = true;
  const OperatorData data = make_data(p, Gate::typical, 60, {150, 0, 33, 200, 900});
  const auto plan = plan_with(device(), data.problem, GetParam().id);
  if (!plan) GTEST_SKIP() << "no plan of this GPU has " << GetParam().id;
  const Operator op = test_runtime().prepare(device(), data.problem, *plan);
  const HostTensors expected = run_operator(device(), op, data);
  expect_matches_oracle(data, expected);
  Enqueued launches(device(), op, data);
  const std::shared_ptr<void> stream = device().impl().make_stream();
  const auto graph = device().impl().capture([&](Stream recording) {
    for (int i = 0; i < kLaunches; ++i) launches.enqueue(recording);
  });
  for (int round = 0; round < kRounds && !HasFailure(); ++round) {
    graph->launch(stream.get());
    device().synchronize(stream.get());
    SCOPED_TRACE(round);
    launches.expect_outputs(expected);
  }
}

std::vector<HopperCase> hopper_cases() {
  std::vector<HopperCase> all;
  for (const Template& t : all_templates())
    if (t.needs.wgmma)
      for (const OperatorPass& which : chunked_passes()) all.push_back({t.id(), which});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Gpu, HopperRepeats, ::testing::ValuesIn(hopper_cases()),
                         [](const auto& each) {
                           std::string name = each.param.id + "_" + name_of(each.param.which);
                           std::replace(name.begin(), name.end(), '.', '_');
                           return name;
                         });
std::vector<PassCase> pass_cases() {
  std::vector<PassCase> all;
  for (const OperatorPass& which : all_passes()) all.push_back({which});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Gpu, OperatorDevices, ::testing::ValuesIn(pass_cases()),
                         [](const auto& each) { return name_of(each.param.which); });

}  // namespace
}  // namespace wyvern::testing
