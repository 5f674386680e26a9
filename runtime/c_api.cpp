// The C API: versions, errors, devices, the runtime and its operators. c_api_problem.cpp has the
// rest.
#include "runtime/c_api.hpp"

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "cache/cache.hpp"
#include "runtime/arguments.hpp"
#include "runtime/base/printable.hpp"
#include "runtime/operator_impl.hpp"
#include "runtime/plan.hpp"
#include "runtime/thread_owned.hpp"
#include "runtime/tuner_command.hpp"
#include "runtime/tuning_policy.hpp"

struct wyvern_device_list {
  std::vector<wyvern::DeviceInfo> infos;
};

struct wyvern_memory {
  std::shared_ptr<void> memory;
};

wyvern_runtime::wyvern_runtime(wyvern::RuntimeOptions options, const std::string& command,
                               std::function<void(const std::string&)> failed)
    : runtime(std::move(options)),
      policies(runtime, wyvern::TunerCommand(command, runtime.cache().file().parent_path()),
               std::move(failed)) {}

struct wyvern_operator {
  wyvern::Operator op;
  std::int32_t origin;
  /// Null if it never becomes outdated.
  std::shared_ptr<const std::atomic<bool>> outdated;
  std::string plan;
};

namespace wyvern {
namespace {

/// A literal instead of this thread's last message, if that could not be stored.
thread_local const char* unstored_message = nullptr;
/// The stored message. A type of its own, since a thread owns one object of each type.
struct StoredMessage {
  std::string text;
};

std::int32_t origin_of(Origin origin) {
  switch (origin) {
    case Origin::exact: return WYVERN_ORIGIN_EXACT;
    case Origin::nearest: return WYVERN_ORIGIN_NEAREST;
    case Origin::fallback: return WYVERN_ORIGIN_DEFAULT;
    case Origin::given: return WYVERN_ORIGIN_GIVEN;
  }
  return 0;
}

wyvern_device_info info_of(const DeviceInfo& from) {
  wyvern_device_info info = WYVERN_DEVICE_INFO_INIT;
  info.name = from.name.c_str();
  info.kind = from.kind.c_str();
  info.model = from.model.c_str();
  info.arch = from.arch.c_str();
  info.key = from.key.c_str();
  info.driver = from.driver.c_str();
  info.problem = from.problem.c_str();
  info.units = from.units;
  info.memory_bytes = from.memory_bytes;
  info.clock_ghz = from.clock_ghz;
  info.peak_bytes_per_s = from.peak_bytes_per_s;
  return info;
}

std::function<void(const std::string&)> reporter_of(const wyvern_runtime_options& from) {
  if (from.on_degraded == nullptr) return warn;
  return [say = from.on_degraded, user = from.user](const std::string& sentence) {
    say(sentence.c_str(), user);
  };
}

RuntimeOptions options_of(const wyvern_runtime_options& from) {
  RuntimeOptions options;
  options.cache = from.cache_directory == nullptr ? std::make_shared<Cache>()
                                                  : std::make_shared<Cache>(from.cache_directory);
  if (from.compile_jobs > std::numeric_limits<unsigned>::max())
    bad_input(fmt::format("options.compile_jobs is {}; it must be at most {}", from.compile_jobs,
                          std::numeric_limits<unsigned>::max()));
  options.compile_jobs = static_cast<unsigned>(from.compile_jobs);
  if (from.on_degraded != nullptr) {
    options.on_degraded = reporter_of(from);
    options.cache->on_degraded(options.on_degraded);
  }
  return options;
}

Plan plan_of(const char* json) {
  if (std::optional<Plan> plan = plan_from_json(json)) return *std::move(plan);
  // Enough of it to recognize it.
  constexpr std::size_t kShown = 60;
  std::string shown(json, ::strnlen(json, kShown + 1));
  if (shown.size() > kShown) shown.replace(kShown - 3, std::string::npos, "...");
  for (char& c : shown)
    if (static_cast<unsigned char>(c) < ' ' || static_cast<unsigned char>(c) > '~') c = '?';
  bad_input(
      fmt::format("options.plan is {}; it must be a JSON list of templates of this library, "
                  "as wyvern_operator_plan() writes it",
                  shown));
}

TuningPolicy policy_of(std::int64_t policy) {
  switch (policy) {
    case WYVERN_POLICY_CACHED: return TuningPolicy::cached;
    case WYVERN_POLICY_OFF: return TuningPolicy::off;
    case WYVERN_POLICY_ON_MISS: return TuningPolicy::on_miss;
    case WYVERN_POLICY_BACKGROUND: return TuningPolicy::background;
    case WYVERN_POLICY_FIXED: return TuningPolicy::fixed;
    default:
      bad_input(
          fmt::format("options.policy is {}; it must be WYVERN_POLICY_CACHED (0), _OFF (1), "
                      "_ON_MISS (2), _BACKGROUND (3) or _FIXED (4)",
                      policy));
  }
}

double budget_of(double seconds) {
  constexpr double kUsual = 60, kMost = 1e6;
  if (seconds == 0) return kUsual;
  if (!(seconds >= 1e-3 && seconds <= kMost))
    bad_input(fmt::format("options.tuning_budget_s is {}; it must be 0 or from 0.001 to {} seconds",
                          seconds, kMost));
  return seconds;
}

PolicyRuntime::Prepared prepare(wyvern_runtime& runtime, const Device& device,
                                const Problem& problem, const wyvern_prepare_options& options) {
  const TuningPolicy policy = policy_of(options.policy);
  const double budget_s = budget_of(options.tuning_budget_s);
  if (options.plan == nullptr) return runtime.policies.prepare(device, problem, policy, budget_s);
  if (policy != TuningPolicy::cached)
    bad_input(
        fmt::format("options.policy is {}; it must be 0 with options.plan, which leaves "
                    "nothing to choose",
                    options.policy));
  return {runtime.runtime.prepare(device, problem, plan_of(options.plan)), nullptr};
}

/// Reads the tensors of a launch into Arguments.
class TensorReader {
 public:
  explicit TensorReader(Arguments& arguments) : arguments_(arguments) {}

  void read(const wyvern_tensor& from) {
    const std::size_t at = place_of(from);
    if ((seen_ >> at & 1) != 0)
      bad_input(fmt::format("{} is given twice; it must be given once", from.name));
    seen_ |= std::uint64_t{1} << at;
    next_ = at + 1;
    read_tensor(from, arguments_.*kArguments[at].member);
  }

 private:
  static_assert(kOperatorTensors <= 64);

  /// Callers mostly use the table's order: the search starts where the last one ended.
  std::size_t place_of(const wyvern_tensor& from) const {
    if (from.name == nullptr) bad_input("the name of a tensor is null; it must not be");
    const std::string_view name = from.name;
    for (std::size_t i = 0; i < kOperatorTensors; ++i) {
      const std::size_t at = (next_ + i) % kOperatorTensors;
      if (kArguments[at].name == name) return at;
    }
    bad_input(fmt::format("'{}' is not the name of an operator's tensor", name));
  }

  Arguments& arguments_;
  std::size_t next_ = 0;
  std::uint64_t seen_ = 0;  ///< bit i: kArguments[i]
};

Arguments arguments_of(const wyvern_launch& launch) {
  Arguments arguments;
  TensorReader reader(arguments);
  each_tensor(launch, [&](const wyvern_tensor& tensor) { reader.read(tensor); });
  if (launch.cu_seqlens_host == nullptr && launch.cu_seqlens_host_count != 0)
    bad_input(fmt::format("launch.cu_seqlens_host is null; it must point to {} entries",
                          launch.cu_seqlens_host_count));
  arguments.cu_seqlens_host = {launch.cu_seqlens_host, launch.cu_seqlens_host_count};
  arguments.shown_name = launch.shown_name;
  return arguments;
}

wyvern_tensor_spec spec_of(const TensorSpec& from) {
  wyvern_tensor_spec spec{};
  spec.name = from.name.data();  // a literal of kArguments, with its NUL
  if (!from.present) return spec;
  spec.present = 1;
  switch (from.access) {
    case TensorAccess::in: spec.access = WYVERN_READ; break;
    case TensorAccess::out: spec.access = WYVERN_WRITE; break;
    case TensorAccess::inout: spec.access = WYVERN_READ_WRITE; break;
  }
  spec.dtype = static_cast<std::int32_t>(from.dtype) + WYVERN_FP32;
  spec.rank = from.rank;
  std::copy_n(from.shape.begin(), from.rank, spec.shape);
  spec.bytes = bytes_of(from);
  spec.strided = from.strided ? 1 : 0;
  return spec;
}

}  // namespace

wyvern_status failed(wyvern_status status, const char* message) noexcept {
  try {
    ThreadOwned<StoredMessage>::get().text = message;
    unstored_message = nullptr;
  } catch (...) {
    unstored_message = "the host's memory is full, so that the message is lost";
  }
  return status;
}

wyvern_status status_of(ErrorKind kind) noexcept {
  switch (kind) {
    case ErrorKind::kBadInput: return WYVERN_BAD_INPUT;
    case ErrorKind::kUnavailable: return WYVERN_UNAVAILABLE;
    case ErrorKind::kCompile: return WYVERN_COMPILE_ERROR;
    case ErrorKind::kIo: return WYVERN_IO_ERROR;
  }
  return WYVERN_INTERNAL_ERROR;
}

static_assert(static_cast<int>(DType::fp32) == 0 && WYVERN_FP16 - WYVERN_FP32 == int(DType::fp16) &&
              WYVERN_BF16 - WYVERN_FP32 == int(DType::bf16) &&
              WYVERN_INT32 - WYVERN_FP32 == int(DType::int32) &&
              WYVERN_INT64 - WYVERN_FP32 == int(DType::int64) &&
              WYVERN_BOOLEAN - WYVERN_FP32 == int(DType::boolean) &&
              WYVERN_FLOAT8_E4M3 - WYVERN_FP32 == int(DType::float8_e4m3) &&
              WYVERN_FLOAT8_E5M2 - WYVERN_FP32 == int(DType::float8_e5m2));
static_assert(kMaxRank <= WYVERN_MAX_RANK);

void read_tensor(const wyvern_tensor& from, TensorView& to) {
  // Only its name is set: it is absent.
  if (from.data == nullptr && from.rank == 0 && from.dtype == 0) return;
  if (from.dtype < WYVERN_FP32 || from.dtype > WYVERN_FLOAT8_E5M2)
    bad_input(fmt::format("{} has dtype {}; it must be a wyvern_dtype, {} to {}", from.name,
                          from.dtype, static_cast<int>(WYVERN_FP32),
                          static_cast<int>(WYVERN_FLOAT8_E5M2)));
  if (from.rank < 0 || from.rank > kMaxRank)
    bad_input(fmt::format("{} has rank {}; it must be 0 to {}", from.name, from.rank, kMaxRank));
  if (from.rank > 0 && from.shape == nullptr)
    bad_input(fmt::format("{} has a shape that is null; it must point to {} extents", from.name,
                          from.rank));
  to.data = from.data;
  to.dtype = static_cast<DType>(from.dtype - WYVERN_FP32);
  to.rank = from.rank;
  const auto rank = static_cast<std::size_t>(from.rank);
  std::copy_n(from.shape, rank, to.shape.begin());
  if (from.strides != nullptr) {
    std::copy_n(from.strides, rank, to.strides.begin());
    return;
  }
  // Unsigned: a shape that is wrong may be of any size.
  std::uint64_t stride = 1;
  for (std::size_t i = rank; i-- > 0;) {
    to.strides[i] = static_cast<std::int64_t>(stride);
    stride *= static_cast<std::uint64_t>(to.shape[i]);
  }
}

void write_text(std::string_view text, char* to, std::size_t capacity, std::size_t* length) {
  if (to == nullptr && capacity != 0)
    bad_input(fmt::format("text is null; it must point to {} bytes", capacity));
  if (capacity != 0) {
    const std::size_t count = std::min(text.size(), capacity - 1);
    text.copy(to, count);
    to[count] = '\0';
  }
  if (length != nullptr) *length = text.size();
}

void write_specs(std::span<const TensorSpec> from, wyvern_tensor_spec* specs, std::size_t spec_size,
                 std::size_t capacity, std::size_t* count) {
  check_size<wyvern_tensor_spec>("spec_size", spec_size);
  if (specs == nullptr && capacity != 0)
    bad_input(fmt::format("specs is null; it must point to {} structs", capacity));
  auto* at = reinterpret_cast<unsigned char*>(specs);
  for (const TensorSpec& spec : from.first(std::min(capacity, from.size()))) {
    write_struct(spec_of(spec), at, spec_size);
    at += spec_size;
  }
  if (count != nullptr) *count = from.size();
}

}  // namespace wyvern

using namespace wyvern;

int wyvern_api_version() { return WYVERN_API_VERSION; }
const char* wyvern_version() { return WYVERN_VERSION; }
const char* wyvern_last_error() {
  if (unstored_message != nullptr) return unstored_message;
  const auto* const stored = ThreadOwned<StoredMessage>::find();
  return stored != nullptr ? stored->text.c_str() : "";
}

wyvern_status wyvern_device_open(const char* name, wyvern_device** device) {
  return guarded([&] {
    given(device, "device") = nullptr;
    *device = new wyvern_device{Device::open(&given(name, "name"))};
  });
}

wyvern_status wyvern_device_open_best(wyvern_device** device) {
  return guarded([&] {
    given(device, "device") = nullptr;
    *device = new wyvern_device{Device::best()};
  });
}

void wyvern_device_destroy(wyvern_device* device) { delete device; }

wyvern_status wyvern_device_get_info(const wyvern_device* device, wyvern_device_info* info) {
  return guarded([&] { write_info(info_of(given(device, "device").device.info()), info, "info"); });
}

wyvern_status wyvern_device_list_create(wyvern_device_list** list) {
  return guarded([&] {
    given(list, "list") = nullptr;
    *list = new wyvern_device_list{list_devices()};
  });
}

void wyvern_device_list_destroy(wyvern_device_list* list) { delete list; }

size_t wyvern_device_list_count(const wyvern_device_list* list) {
  return list == nullptr ? 0 : list->infos.size();
}

wyvern_status wyvern_device_list_get(const wyvern_device_list* list, size_t index,
                                     wyvern_device_info* info) {
  return guarded([&] {
    const std::vector<DeviceInfo>& infos = given(list, "list").infos;
    if (index >= infos.size())
      bad_input(fmt::format("index is {}; it must be below {}", index, infos.size()));
    write_info(info_of(infos[index]), info, "info");
  });
}

wyvern_status wyvern_memory_create(const wyvern_device* device, size_t bytes,
                                   wyvern_memory** memory) {
  return guarded([&] {
    given(memory, "memory") = nullptr;
    *memory = new wyvern_memory{given(device, "device").device.allocate(bytes)};
  });
}

void wyvern_memory_destroy(wyvern_memory* memory) { delete memory; }

void* wyvern_memory_data(const wyvern_memory* memory) {
  return memory == nullptr ? nullptr : memory->memory.get();
}

wyvern_status wyvern_device_copy_in(const wyvern_device* device, void* to, const void* from_host,
                                    size_t bytes) {
  return guarded([&] { given(device, "device").device.copy_in(to, from_host, bytes); });
}

wyvern_status wyvern_device_copy_out(const wyvern_device* device, void* to_host, const void* from,
                                     size_t bytes) {
  return guarded([&] { given(device, "device").device.copy_out(to_host, from, bytes); });
}

wyvern_status wyvern_device_fill(const wyvern_device* device, void* to, unsigned char byte,
                                 size_t bytes, void* stream) {
  return guarded([&] { given(device, "device").device.fill(to, byte, bytes, stream); });
}

wyvern_status wyvern_device_synchronize(const wyvern_device* device, void* stream) {
  return guarded([&] { given(device, "device").device.synchronize(stream); });
}

wyvern_status wyvern_runtime_create(const wyvern_runtime_options* options,
                                    wyvern_runtime** runtime) {
  return guarded([&] {
    given(runtime, "runtime") = nullptr;
    const auto own = read_options(options, "options");
    *runtime = new wyvern_runtime(options_of(own), own.command == nullptr ? "" : own.command,
                                  reporter_of(own));
  });
}

void wyvern_runtime_destroy(wyvern_runtime* runtime) { delete runtime; }

int64_t wyvern_runtime_compiled(const wyvern_runtime* runtime) {
  return runtime == nullptr ? 0 : runtime->runtime.compiled();
}

wyvern_status wyvern_prepare(wyvern_runtime* runtime, const wyvern_device* device,
                             const wyvern_problem* problem, const wyvern_prepare_options* options,
                             wyvern_operator** op) {
  return guarded([&] {
    given(op, "op") = nullptr;
    const auto choice = read_options(options, "options");
    auto [prepared, outdated] = prepare(given(runtime, "runtime"), given(device, "device").device,
                                        given(problem, "problem").problem, choice);
    // The default plan was passed, but not chosen by a user.
    const std::int32_t origin =
        choice.policy == WYVERN_POLICY_OFF ? WYVERN_ORIGIN_DEFAULT : origin_of(prepared.origin());
    std::string plan = plan_to_json(prepared.plan());
    *op = new wyvern_operator{std::move(prepared), origin, std::move(outdated), std::move(plan)};
  });
}

wyvern_status wyvern_compile_ahead(wyvern_runtime* runtime, const wyvern_device* device,
                                   const wyvern_problem* problem,
                                   const wyvern_prepare_options* options) {
  return guarded([&] {
    const auto choice = read_options(options, "options");
    const Problem& copied = given(problem, "problem").problem;
    validate(copied);
    if (choice.plan != nullptr) bad_input("options.plan is given; it must be NULL");
    given(runtime, "runtime")
        .policies.compile_ahead(given(device, "device").device, copied, policy_of(choice.policy));
  });
}

int wyvern_operator_is_outdated(const wyvern_operator* op) {
  return op != nullptr && op->outdated && op->outdated->load(std::memory_order_acquire) ? 1 : 0;
}

wyvern_status wyvern_runtime_wait_for_tuning(wyvern_runtime* runtime, double seconds,
                                             size_t* left) {
  return guarded([&] {
    if (!(seconds >= 0)) bad_input(fmt::format("seconds is {}; it must be 0 or more", seconds));
    const std::size_t still =
        given(runtime, "runtime").policies.wait(std::chrono::duration<double>(seconds));
    if (left != nullptr) *left = still;
  });
}

wyvern_status wyvern_runtime_stop_tuning(wyvern_runtime* runtime) {
  return guarded([&] { given(runtime, "runtime").policies.stop(); });
}

void wyvern_operator_destroy(wyvern_operator* op) { delete op; }

wyvern_status wyvern_operator_workspace_bytes(const wyvern_operator* op, size_t* bytes) {
  return guarded([&] { given(bytes, "bytes") = given(op, "op").op.workspace_bytes(); });
}

wyvern_status wyvern_operator_origin(const wyvern_operator* op, int32_t* origin) {
  return guarded([&] { given(origin, "origin") = given(op, "op").origin; });
}

wyvern_status wyvern_operator_plan(const wyvern_operator* op, const char** json) {
  return guarded([&] { given(json, "json") = given(op, "op").plan.c_str(); });
}

wyvern_status wyvern_operator_tensors(const wyvern_operator* op, wyvern_tensor_spec* specs,
                                      size_t spec_size, size_t capacity, size_t* count) {
  return guarded([&] {
    write_specs(given(op, "op").op.impl().expected(), specs, spec_size, capacity, count);
  });
}

wyvern_status wyvern_operator_takes(const wyvern_operator* op, const wyvern_tensor* tensor,
                                    size_t tensor_size, int32_t* takes) {
  return guarded([&] {
    const OperatorImpl& prepared = given(op, "op").op.impl();
    const wyvern_tensor own = one_tensor(tensor, tensor_size);
    const std::size_t place = argument_index(&given(own.name, "tensor.name"));
    if (place == kOperatorTensors)
      bad_input(fmt::format("'{}' is not the name of an operator's tensor", own.name));
    TensorView view;
    read_tensor(own, view);
    given(takes, "takes") = prepared.takes(place, view) ? 1 : 0;
  });
}

wyvern_status wyvern_operator_launch(const wyvern_operator* op, const wyvern_launch* launch) {
  return guarded([&] {
    const Operator& prepared = given(op, "op").op;
    const wyvern_launch own = read_options(&given(launch, "launch"), "launch");
    prepared.launch(arguments_of(own), own.workspace, own.workspace_bytes, own.stream);
  });
}
