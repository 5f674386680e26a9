// Running stages and operators under suspicion: outputs and workspace poisoned, everything between
// guard bands, on the CPU against guard pages too, each launch done twice.
#pragma once

#include <wyvern/runtime.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "templates/template.hpp"
#include "tests/support/guarded_memory.hpp"
#include "tests/support/host_tensor.hpp"
#include "tests/support/operator_data.hpp"

namespace wyvern::testing {

/// Where a case runs: on the CPU, on cuda:0, or on the emulator by a GPU's templates.
enum class TestDevice { cpu, gpu, emulated };

/// The device to test on, opened once per process. Nothing where it cannot be used: `why`, if
/// given, then says why in one sentence, for GTEST_SKIP. A CPU whose kernels this build promises to
/// compile is never skipped. The emulated GPU has three multiprocessors, so that blocks which share
/// work out take several pieces each.
std::optional<Device> test_device(TestDevice which, std::string* why = nullptr);
inline std::optional<Device> test_device(DeviceKind kind, std::string* why = nullptr) {
  return test_device(kind == DeviceKind::cpu ? TestDevice::cpu : TestDevice::gpu, why);
}

/// The one Runtime of this process. Its cache is $WYVERN_TEST_CACHE (CTest gives all tests of a
/// build tree the same), else a directory removed at exit; never the user's.
Runtime& test_runtime();
/// A new cache over the same directory.
std::shared_ptr<Cache> test_cache();
/// By test_runtime(), or on the emulated device by the emulator.
Operator prepare_operator(const Device& device, const Problem& problem);
Operator prepare_operator(const Device& device, const Problem& problem, const Plan& plan);
Stage prepare_stage(const Device& device, const PlanStep& step, const Problem& problem);

/// A tensor's memory on a device, between guard bands; or exactly its bytes without, so that a
/// memory checker sees the first stray access. A band of the CPU, and of the emulated device, is
/// GuardedMemory: the tensor lies against a page that may not be touched, and an input may not be
/// written at all.
class DeviceTensor {
 public:
  enum class Guards { bands, none };
  /// Memory around an input is NaN, so that a value read past its end shows in the result.
  enum class Role { input, output, workspace };
  using Against = GuardedMemory::Against;

  /// `name`: for messages about an access that guard pages stopped.
  DeviceTensor(const Device& device, const HostTensor& content, Guards guards, Role role,
               const std::string& name, Against against = Against::end);

  TensorView view() const;
  /// The bytes there now.
  HostTensor download() const;
  /// Empty when both guard bands are intact, else where not.
  std::string guard_damage() const;

 private:
  Device device_;
  HostTensor like_;
  unsigned char guard_byte_;
  std::shared_ptr<void> memory_;
  unsigned char* content_;  ///< within the memory, between bands of so many bytes:
  std::size_t before_, after_;
};

/// Which elements of an output a template must write; null: all.
using Written = std::function<bool(const std::string& name, std::int64_t element)>;

/// Launches `stage` twice, its outputs poisoned differently, and returns the outputs of the first
/// launch. A test failure is recorded for a changed input, a damaged guard band, an element not
/// written, an element written that must not be, and bytes that differ between the launches. A
/// third launch (the second on the emulated device, which is slow) gives strided rows to the inputs
/// that may have them, and must write the first one's bytes. `tensors` holds every tensor of the
/// template's contract by name, outputs for their shape.
HostTensors run_stage(const Device& device, const Stage& stage, const Constants& constants,
                      const HostTensors& tensors,
                      DeviceTensor::Guards guards = DeviceTensor::Guards::bands,
                      const Written& written = {});

/// How run_operator carries out one launch and waits for it; null: Operator::launch on the default
/// stream.
using Launcher = std::function<void(const Arguments& arguments, void* workspace)>;

/// The same for an operator, by tensor_specs() of its problem; the workspace is exactly
/// workspace_bytes(), poisoned and guarded. A tensor both read and written starts every launch from
/// its content in `data` and must keep the slots that no sequence writes. `launches` (at least 2)
/// must agree bit by bit.
HostTensors run_operator(const Device& device, const Operator& op, const OperatorData& data,
                         DeviceTensor::Guards guards = DeviceTensor::Guards::bands,
                         const Launcher& launcher = {}, int launches = 2);

/// Holds every output that the oracle knows to it and to SPECIFICATION.md's bounds; records test
/// failures.
void expect_matches_oracle(const OperatorData& data, const HostTensors& outputs);

/// `data` of a backward pass with the intermediates that disable_recompute keeps, or of a pass that
/// takes segments with these, from one launch of `forward` (an operator of the same problem with
/// that pass, or of its summary), whose outputs are held to the oracle too.
OperatorData with_kept(const Device& device, const Operator& forward, const OperatorData& data,
                       DeviceTensor::Guards guards = DeviceTensor::Guards::bands);

}  // namespace wyvern::testing
