// The CPU and a GPU in one process, by one runtime and from several threads. The GPU runs nothing,
// so that what reaches it is seen and what the CPU computes is the only result.
#include <gtest/gtest.h>
#include <wyvern/runtime.hpp>

#include <algorithm>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "cache/cache.hpp"
#include "compiler/compiler.hpp"
#include "runtime/plan.hpp"
#include "tests/fake_cuda/fake_cuda.hpp"
#include "tests/support/runner.hpp"

namespace wyvern::testing {
namespace {

constexpr int kLaunches = 20;

Problem problem() {
  Problem p;
  p.op = "delta_rule";
  p.pass = Pass::recurrent;
  p.T = 2, p.K = p.V = 16;
  p.output_final_state = true;
  return p;
}

/// All tensors of a launch in the memory of a device.
class Tensors {
 public:
  Tensors(const Device& device, const OperatorData& data) {
    for (const TensorSpec& spec : tensor_specs(data.problem)) {
      if (!spec.present) continue;
      const std::string name(spec.name);
      const bool in = spec.access == TensorAccess::in;
      const auto [at, added] = memory_.try_emplace(
          name, device, in ? data.tensors.at(name) : host_tensor(spec), DeviceTensor::Guards::none,
          in ? DeviceTensor::Role::input : DeviceTensor::Role::output, name);
      arguments_.tensor(name) = at->second.view();
    }
  }
  const Arguments& arguments() const { return arguments_; }

 private:
  std::map<std::string, DeviceTensor> memory_;
  Arguments arguments_;
};

DeviceKind kind_of(const PlanStep& step) { return find_template(step.template_id)->device; }

void launch_on_gpu(Runtime& runtime, const Device& gpu, const OperatorData& data) {
  const Tensors tensors(gpu, data);
  for (int i = 0; i < kLaunches; ++i) {
    const Operator op = runtime.prepare(gpu, data.problem);
    for (const PlanStep& step : op.plan()) ASSERT_EQ(kind_of(step), DeviceKind::cuda);
    const auto workspace = gpu.allocate(std::max<std::size_t>(op.workspace_bytes(), 1));
    op.launch(tensors.arguments(), workspace.get());
    gpu.synchronize();
  }
}

TEST(BothDevices, ShareARuntimeAndNothingElse) {
  for (const DeviceKind kind : {DeviceKind::cpu, DeviceKind::cuda})
    if (const std::string why = compiler_problem(kind); !why.empty()) GTEST_SKIP() << why;
  fake_cuda::reset();
  const Device cpu = *test_device(DeviceKind::cpu);
  const OperatorData data = make_data(problem(), Gate::typical, 3);
  RuntimeOptions options;
  options.cache = test_cache();
  Runtime runtime(options);
  const int objects = fake_cuda::open_objects();
  {
    const Device gpu = Device::open("cuda:0");
    std::vector<std::jthread> threads;
    for (int t = 0; t < 2; ++t) {
      threads.emplace_back([&] { launch_on_gpu(runtime, gpu, data); });
      threads.emplace_back([&] {
        for (int i = 0; i < kLaunches / 2; ++i) {
          const Operator op = runtime.prepare(cpu, data.problem);
          for (const PlanStep& step : op.plan()) ASSERT_EQ(kind_of(step), DeviceKind::cpu);
          expect_matches_oracle(data, run_operator(cpu, op, data));
        }
      });
    }
  }
  const Operator on_gpu = runtime.prepare(Device::open("cuda:0"), data.problem);
  EXPECT_EQ(fake_cuda::launches().size(), 2 * kLaunches * on_gpu.plan().size())
      << "each GPU launch reaches the driver, and none of the CPU's";
  EXPECT_NE(plan_to_json(on_gpu.plan()), plan_to_json(runtime.prepare(cpu, data.problem).plan()));
  EXPECT_LE(runtime.compiled(), 2) << "a kernel for each, whoever asked first";
  EXPECT_GT(fake_cuda::open_objects(), objects) << "the runtime holds kernels of the GPU";
  // What is left of the GPU disturbs the CPU no more than its use did.
  expect_matches_oracle(data, run_operator(cpu, runtime.prepare(cpu, data.problem), data));
}

}  // namespace
}  // namespace wyvern::testing
