// Tensors of more elements than 32 bits count. Cases are {Cpu,Gpu}/LargePool.

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "runtime/devices/device_impl.hpp"
#include "tests/operators/fixture.hpp"

namespace wyvern::testing {
namespace {

/// Memory of the device that costs nothing where nothing is touched, as a host can give it; null
/// where there is not as much.
std::shared_ptr<void> much_memory(const Device& device, std::size_t bytes) {
  if (device.impl().host_memory()) {
    void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    return {memory, [bytes](void* all) { munmap(all, bytes); }};
  }
  try {
    return device.allocate(bytes);
  } catch (const Error&) {
    return nullptr;
  }
}

class LargePool : public OperatorTest,
                  public ::testing::WithParamInterface<std::tuple<DeviceKind, std::string_view>> {
 protected:
  /// One token for each of two sequences, whose states are in a pool.
  static Problem problem() {
    Problem p = base({std::string(std::get<1>(GetParam())), Pass::recurrent});
    p.inplace_state = p.state_index = true;
    p.output_final_state = false;
    p.state_slots = 2;
    return p;
  }
};

/// The last slot of a pool begins past 2^31 elements; what is done there is what a small pool gets.
TEST_P(LargePool, SlotsBeyond32BitsOfElementsAreReached) {
  WYVERN_OPEN_OR_SKIP(std::get<0>(GetParam()));
  const Problem p = problem();
  OperatorData data = make_data(p, Gate::typical, 4);
  data.tensors["state_index"] = HostTensor(p.index_dtype, {2}, {1, 0});
  const HostTensors expected = run_operator(device(), prepare(p), data);

  Problem large = p;
  const std::size_t slot_bytes = data.tensors.at("state").bytes() / 2;
  large.state_slots = (std::int64_t{1} << 32) / (p.HV * p.K * p.V) + 3;
  const auto last = static_cast<std::size_t>(large.state_slots - 1);
  const Operator op = prepare(large);
  const auto pool = much_memory(device(), (last + 1) * slot_bytes);
  if (!pool) GTEST_SKIP() << "not enough memory";
  auto* const first_slot = static_cast<std::byte*>(pool.get());
  std::byte* const last_slot = first_slot + last * slot_bytes;
  const unsigned char* const states = data.tensors.at("state").data();
  device().copy_in(first_slot, states, slot_bytes);
  device().copy_in(last_slot, states + slot_bytes, slot_bytes);

  OperatorData inputs = data;
  inputs.tensors["state_index"] = HostTensor(p.index_dtype, {2}, {static_cast<double>(last), 0});
  std::map<std::string, DeviceTensor> memory;
  Arguments arguments;
  for (const TensorSpec& spec : tensor_specs(large)) {
    const std::string name(spec.name);
    if (!spec.present || name == "state") continue;
    const bool in = spec.access == TensorAccess::in;
    const auto [at, added] = memory.try_emplace(
        name, device(), in ? inputs.tensors.at(name) : host_tensor(spec), Guards::bands,
        in ? DeviceTensor::Role::input : DeviceTensor::Role::output, name);
    arguments.tensor(name) = at->second.view();
  }
  arguments.tensor("state") =
      TensorView(pool.get(), p.state_dtype, {large.state_slots, p.HV, p.K, p.V});
  const auto workspace = device().allocate(std::max<std::size_t>(op.workspace_bytes(), 1));
  op.launch(arguments, workspace.get());
  device().synchronize();

  EXPECT_TRUE(same_bytes(memory.at("o").download(), expected.at("o")));
  HostTensor after(p.state_dtype, {2, p.HV, p.K, p.V});
  device().copy_out(after.data(), first_slot, slot_bytes);
  device().copy_out(after.data() + slot_bytes, last_slot, slot_bytes);
  EXPECT_TRUE(same_bytes(after, expected.at("state")));
}

using ::testing::Combine;
using ::testing::Values;
using ::testing::ValuesIn;

const auto kOperator = [](const auto& each) { return std::string(std::get<1>(each.param)); };
const auto kOperators = ValuesIn(operators());

INSTANTIATE_TEST_SUITE_P(Cpu, LargePool, Combine(Values(DeviceKind::cpu), kOperators), kOperator);
INSTANTIATE_TEST_SUITE_P(Gpu, LargePool, Combine(Values(DeviceKind::cuda), kOperators), kOperator);

}  // namespace
}  // namespace wyvern::testing
