#include "tests/support/runner.hpp"

#include <wyvern/reference.hpp>

#include <gtest/gtest.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <thread>

#include "cache/cache.hpp"
#include "compiler/compiler.hpp"
#include "runtime/devices/device_impl.hpp"
#include "tests/support/coverage.hpp"
#include "tests/support/strided_rows.hpp"
#if WYVERN_TESTS_EMULATOR
#include "tests/emulator/device.hpp"
#endif

namespace wyvern::testing {
namespace {

using Guards = DeviceTensor::Guards;
using Role = DeviceTensor::Role;
using Against = DeviceTensor::Against;

/// Launches take turns, so that both ends of every tensor are tried.
Against against_of(int launch) { return launch % 2 == 0 ? Against::end : Against::start; }

/// $WYVERN_TEST_CACHE, else a directory that lives as long as this object.
class CacheDirectory {
 public:
  CacheDirectory() {
    if (const char* given = std::getenv("WYVERN_TEST_CACHE")) {
      path_ = given;
      return;
    }
    std::string name = (std::filesystem::temp_directory_path() / "wyvern-test-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary directory");
    path_ = name;
    owned_ = true;
  }
  ~CacheDirectory() {
    std::error_code ignored;
    if (owned_) std::filesystem::remove_all(path_, ignored);
  }
  CacheDirectory(const CacheDirectory&) = delete;
  CacheDirectory& operator=(const CacheDirectory&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  bool owned_ = false;
};

/// Calls `launch`; on the CPU from a new thread, so that the scratch memory of its blocks is new
/// too and full of huge numbers (open_device sees to that), not zeros or an earlier test's values.
void launch_apart(const Device& device, const std::function<void()>& launch) {
  if (!device.impl().host_memory()) return launch();
  std::exception_ptr error;
  std::thread([&] {
    try {
      launch();
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
}

bool is_emulated([[maybe_unused]] const Device& device) {
#if WYVERN_TESTS_EMULATOR
  return emulator::is_emulated(device);
#else
  return false;
#endif
}

std::optional<Device> open_device(TestDevice which, std::string& why) {
  mallopt(M_PERTURB, 0x80);  // new memory is filled with 0x7F bytes, 3e38 as floats
  if (which == TestDevice::emulated) {
#if WYVERN_TESTS_EMULATOR
    return emulator::open_emulated_device(/*multiprocessors=*/3);
#else
    why = "this build has no emulator";
    return {};
#endif
  }
  const DeviceKind kind = which == TestDevice::cpu ? DeviceKind::cpu : DeviceKind::cuda;
  if (kind == DeviceKind::cpu && WYVERN_TESTS_CPU) return Device::open("cpu");
  why = compiler_problem(kind);
  if (!why.empty()) return {};
  try {
    return Device::open(kind == DeviceKind::cpu ? "cpu" : "cuda:0");
  } catch (const Error& error) {
    why = error.what();
    return {};
  }
}

struct OpenedDevice {
  explicit OpenedDevice(TestDevice which) : device(open_device(which, why)) {}
  std::string why;
  std::optional<Device> device;
};

HostTensor poisoned(const HostTensor& like, unsigned char byte) {
  HostTensor tensor(like.dtype(), like.shape());
  tensor.poison(byte);
  return tensor;
}

bool holds_poison(const HostTensor& tensor, std::int64_t element, unsigned char byte) {
  const std::size_t size = size_of(tensor.dtype());
  const unsigned char* at = tensor.data() + static_cast<std::size_t>(element) * size;
  return std::all_of(at, at + size, [byte](unsigned char x) { return x == byte; });
}

bool same_element(const HostTensor& a, const HostTensor& b, std::int64_t element) {
  const std::size_t size = size_of(a.dtype()), at = static_cast<std::size_t>(element) * size;
  return std::equal(a.data() + at, a.data() + at + size, b.data() + at);
}

/// Compares an output of two launches that started from different poison.
void expect_written(const std::string& name, const HostTensor& first, const HostTensor& second,
                    const Written& written) {
  for (std::int64_t i = 0; i < first.elements(); ++i) {
    const bool untouched =
        holds_poison(first, i, kNanPoison) && holds_poison(second, i, kFinitePoison);
    if (written && !written(name, i)) {
      if (untouched) continue;
      ADD_FAILURE() << name << " element " << i << " was written, it must not be";
      return;
    }
    if (untouched) {
      ADD_FAILURE() << name << " element " << i << " was not written";
      return;
    }
    if (!same_element(first, second, i)) {
      ADD_FAILURE() << name << " element " << i << " differs between two launches: " << first.at(i)
                    << " and " << second.at(i);
      return;
    }
  }
}

void expect_intact(const std::string& name, const DeviceTensor& tensor) {
  const std::string damage = tensor.guard_damage();
  EXPECT_TRUE(damage.empty()) << name << " was written " << damage;
}

void expect_unchanged(const std::string& name, const DeviceTensor& tensor,
                      const HostTensor& before) {
  expect_intact(name, tensor);
  EXPECT_TRUE(same_bytes(tensor.download(), before)) << "the input " << name << " was changed";
}

}  // namespace

std::optional<Device> test_device(TestDevice which, std::string* why) {
  static const std::array<OpenedDevice, 3> devices{OpenedDevice(TestDevice::cpu),
                                                   OpenedDevice(TestDevice::gpu),
                                                   OpenedDevice(TestDevice::emulated)};
  const OpenedDevice& opened = devices.at(static_cast<std::size_t>(which));
  if (why != nullptr) *why = opened.why;
  return opened.device;
}

std::shared_ptr<Cache> test_cache() {
  static const CacheDirectory directory;
  return std::make_shared<Cache>(directory.path());
}

Runtime& test_runtime() {
  static Runtime runtime([] {
    RuntimeOptions options;
    options.cache = test_cache();
    return options;
  }());
  return runtime;
}

Operator prepare_operator(const Device& device, const Problem& problem) {
#if WYVERN_TESTS_EMULATOR
  if (is_emulated(device)) return emulator::prepare(device, problem);
#endif
  return test_runtime().prepare(device, problem);
}

Operator prepare_operator(const Device& device, const Problem& problem, const Plan& plan) {
#if WYVERN_TESTS_EMULATOR
  if (is_emulated(device)) return emulator::prepare(device, problem, plan);
#endif
  return test_runtime().prepare(device, problem, plan);
}

Stage prepare_stage(const Device& device, const PlanStep& step, const Problem& problem) {
#if WYVERN_TESTS_EMULATOR
  if (is_emulated(device)) return emulator::prepare_stage(device, step, problem);
#endif
  return test_runtime().prepare_stage(device, step, problem);
}

DeviceTensor::DeviceTensor(const Device& device, const HostTensor& content, Guards guards,
                           Role role, const std::string& name, Against against)
    : device_(device), like_(content), guard_byte_(role == Role::input ? kNanPoison : kGuardByte) {
  const std::size_t bytes = content.bytes(), band = guards == Guards::bands ? kGuardBytes : 0;
  std::shared_ptr<GuardedMemory> pages;
  if (band != 0 && (device.impl().host_memory() || is_emulated(device))) {
    // Exactly the alignment that the runtime asks for: code that needs more fails.
    const std::size_t alignment = role == Role::workspace ? 256 : 16;
    pages = std::make_shared<GuardedMemory>(name, bytes, alignment, band, against);
    content_ = reinterpret_cast<unsigned char*>(pages->data());
    before_ = static_cast<std::size_t>(pages->data() - pages->first());
    after_ = pages->accessible() - before_ - bytes;
    memory_ = pages;
  } else {
    memory_ = device.allocate(std::max<std::size_t>(bytes + 2 * band, 1));
    content_ = static_cast<unsigned char*>(memory_.get()) + band;
    before_ = after_ = band;
  }
  device_.fill(content_ - before_, guard_byte_, before_);
  device_.fill(content_ + bytes, guard_byte_, after_);
  device_.copy_in(content_, content.data(), bytes);
  if (pages && role == Role::input) pages->make_read_only();
}

TensorView DeviceTensor::view() const { return like_.view_at(content_); }

HostTensor DeviceTensor::download() const {
  HostTensor content(like_.dtype(), like_.shape());
  device_.copy_out(content.data(), view().data, content.bytes());
  return content;
}

std::string DeviceTensor::guard_damage() const {
  std::vector<unsigned char> before(before_), after(after_);
  device_.copy_out(before.data(), content_ - before_, before_);
  device_.copy_out(after.data(), content_ + like_.bytes(), after_);
  for (std::size_t i = 0; i < before_; ++i)
    if (before[before_ - 1 - i] != guard_byte_)
      return std::to_string(i + 1) + " bytes before its start";
  for (std::size_t i = 0; i < after_; ++i)
    if (after[i] != guard_byte_) return std::to_string(i) + " bytes past its end";
  return {};
}

namespace {

/// The same memory with its last dimensions merged, if the contract counts them so.
TensorView with_rank(TensorView view, int rank) {
  for (; view.rank < rank; ++view.rank) {
    const auto last = static_cast<std::size_t>(view.rank);
    view.shape[last] = view.strides[last] = 1;
  }
  for (; view.rank > rank; --view.rank) {
    const auto last = static_cast<std::size_t>(view.rank) - 1;
    view.shape[last - 1] *= view.shape[last];
    view.strides[last - 1] = view.strides[last];
    view.shape[last] = view.strides[last] = 0;
  }
  return view;
}

}  // namespace

HostTensors run_stage(const Device& device, const Stage& stage, const Constants& constants,
                      const HostTensors& tensors, Guards guards, const Written& written) {
  const Template& t = *find_template(stage.step().template_id);
  const std::size_t launches = t.strided.empty() || is_emulated(device) ? 2 : 3;
  std::array<HostTensors, 3> outputs;
  for (std::size_t launch = 0; launch < launches; ++launch) {
    const unsigned char poison = launch == 1 ? kFinitePoison : kNanPoison;
    std::map<std::string, DeviceTensor> memory;
    std::vector<StridedRows> apart;
    std::vector<TensorView> views;
    for (const Parameter& argument : t.parameters) {
      views.emplace_back();
      if (!is_present(argument, constants)) continue;
      const std::string name(argument.name);
      const HostTensor& given = tensors.at(name);
      // Tensors both read and written start every launch as given.
      const bool out = argument.access == Access::out;
      const Role role = argument.access == Access::in ? Role::input : Role::output;
      const auto [at, added] =
          memory.try_emplace(name, device, out ? poisoned(given, poison) : given, guards, role,
                             name, against_of(static_cast<int>(launch)));
      views.back() = with_rank(at->second.view(), static_cast<int>(argument.shape.size()));
      if (launch + 1 == launches && argument.strided && role == Role::input)
        views.back() = apart.emplace_back(device, views.back(), outer_dims(argument)).view();
    }
    device.synchronize();
    launch_apart(device, [&] { stage.launch(views); });
    device.synchronize();
    for (const Argument& argument : t.parameters) {
      const std::string name(argument.name);
      const auto at = memory.find(name);
      if (at == memory.end()) continue;
      if (argument.access == Access::in) {
        expect_unchanged(name, at->second, tensors.at(name));
      } else {
        expect_intact(name, at->second);
        outputs[launch][name] = at->second.download();
      }
    }
  }
  for (const auto& [name, first] : outputs[0]) {
    expect_written(name, first, outputs[1].at(name), written);
    if (launches == 2) continue;
    EXPECT_TRUE(same_bytes(outputs[2].at(name), first)) << name << ", of strided rows";
  }
  return std::move(outputs[0]);
}

namespace {

/// Whether element i of a tensor of states that is in and out belongs to a state that some sequence
/// writes.
std::function<bool(std::int64_t)> touched_states(const OperatorData& data,
                                                 const std::string& name) {
  const Problem& p = data.problem;
  if (name == "conv_state")
    return [&p, touched = window_columns(data).written](std::int64_t i) {
      return touched[static_cast<std::size_t>(column_of(p, i))];
    };
  const bool windows = name == "intermediate_conv_states";
  const std::int64_t one = windows ? conv_channels(p) * (*p.short_conv - 1) : p.HV * p.K * p.V;
  return [one, touched = written_states(data, name)](std::int64_t i) {
    return touched[static_cast<std::size_t>(i / one)];
  };
}

void expect_other_states_kept(const OperatorData& data, const std::string& name,
                              const HostTensor& after) {
  const auto touched = touched_states(data, name);
  const HostTensor& before = data.tensors.at(name);
  for (std::int64_t i = 0; i < after.elements(); ++i) {
    if (touched(i) || same_element(before, after, i)) continue;
    ADD_FAILURE() << name << " element " << i
                  << ", of a state that no sequence writes, was changed";
    return;
  }
}

/// The tensors of an operator on a device.
class OperatorMemory {
 public:
  OperatorMemory(const Device& device, const OperatorData& data, Guards guards)
      : device_(device), data_(data), guards_(guards) {
    for (const TensorSpec& spec : tensor_specs(data.problem)) {
      if (!spec.present) continue;
      const std::string name(spec.name);
      if (spec.access == TensorAccess::in)
        input_names_.push_back(name);
      else
        outputs_like_.emplace_back(
            name, spec.access == TensorAccess::inout ? data.tensors.at(name) : host_tensor(spec));
    }
  }

  bool in_and_out(const std::string& name) const { return data_.tensors.contains(name); }

  /// New tensors: outputs poisoned, tensors both read and written with their content.
  Arguments prepare(unsigned char poison, Against against) {
    inputs_.clear();
    outputs_.clear();
    for (const std::string& name : input_names_)
      add(inputs_, name, data_.tensors.at(name), Role::input, against);
    for (const auto& [name, like] : outputs_like_)
      add(outputs_, name, in_and_out(name) ? like : poisoned(like, poison), Role::output, against);
    return arguments_;
  }

  HostTensors take_outputs() const {
    HostTensors result;
    for (const auto& [name, tensor] : outputs_) {
      expect_intact(name, tensor);
      result[name] = tensor.download();
    }
    return result;
  }

  void expect_inputs_unchanged() const {
    for (const auto& [name, tensor] : inputs_)
      expect_unchanged(name, tensor, data_.tensors.at(name));
  }

 private:
  using Memory = std::map<std::string, DeviceTensor>;

  void add(Memory& memory, const std::string& name, const HostTensor& content, Role role,
           Against against) {
    const auto [at, added] =
        memory.try_emplace(name, device_, content, guards_, role, name, against);
    arguments_.tensor(name) = at->second.view();
  }

  const Device& device_;
  const OperatorData& data_;
  Guards guards_;
  std::vector<std::string> input_names_;
  std::vector<std::pair<std::string, HostTensor>> outputs_like_;
  Memory inputs_, outputs_;
  Arguments arguments_;
};

}  // namespace

HostTensors run_operator(const Device& device, const Operator& op, const OperatorData& data,
                         Guards guards, const Launcher& launcher, int launches) {
  EXPECT_EQ(op.workspace_bytes() % sizeof(float), 0U);
  for (const PlanStep& step : op.plan()) is_only_listed(data.problem, step.template_id);
  if (is_listing()) return {};
  const HostTensor workspace_like(
      DType::fp32, {static_cast<std::int64_t>(op.workspace_bytes() / sizeof(float))});
  OperatorMemory memory(device, data, guards);
  HostTensors first;
  for (int launch = 0; launch < launches; ++launch) {
    const unsigned char poison = launch == 0 ? kNanPoison : kFinitePoison;
    const Arguments arguments = memory.prepare(poison, against_of(launch));
    const DeviceTensor workspace(device, poisoned(workspace_like, poison), guards, Role::workspace,
                                 "the workspace", against_of(launch));
    device.synchronize();
    launch_apart(device, [&] {
      if (launcher)
        launcher(arguments, workspace.view().data);
      else
        op.launch(arguments, workspace.view().data);
    });
    device.synchronize();
    expect_intact("the workspace", workspace);
    memory.expect_inputs_unchanged();
    HostTensors outputs = memory.take_outputs();
    if (launch == 0) {
      first = std::move(outputs);
      continue;
    }
    for (const auto& [name, tensor] : first) {
      if (launch == 1 && !memory.in_and_out(name))
        expect_written(name, tensor, outputs.at(name), {});
      else
        EXPECT_TRUE(same_bytes(tensor, outputs.at(name)))
            << name << " differs in launch " << launch;
    }
  }
  for (const auto& [name, tensor] : first)
    if (memory.in_and_out(name)) expect_other_states_kept(data, name, tensor);
  return first;
}

void expect_matches_oracle(const OperatorData& data, const HostTensors& outputs) {
  if (is_listing()) return;
  for (const auto& [name, wanted] : reference(data.problem, data.arguments())) {
    const HostTensor& actual = outputs.at(name);
    // States that must not change would only hide the others' error.
    const bool updated = data.tensors.contains(name);
    const double error = updated ? rms_error(actual, wanted, touched_states(data, name))
                                 : relative_error(actual.view(), wanted);
    EXPECT_LE(error, error_bound(data.problem, name)) << name;
  }
}

OperatorData with_kept(const Device& device, const Operator& forward, const OperatorData& data,
                       Guards guards) {
  OperatorData inputs = data;
  inputs.problem = forward.problem();
  for (const TensorSpec& spec : tensor_specs(inputs.problem))
    if (!spec.present || spec.access == TensorAccess::out)
      inputs.tensors.erase(std::string(spec.name));
  HostTensors outputs = run_operator(device, forward, inputs, guards);
  expect_matches_oracle(inputs, outputs);
  OperatorData result = data;
  for (auto& [name, tensor] : outputs)
    if (is_kept(data.problem, name)) result.tensors[name] = std::move(tensor);
  return result;
}

}  // namespace wyvern::testing
