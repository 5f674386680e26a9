#include "runtime/python/extension/prepared.hpp"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <tuple>
#include <unordered_map>

#include "runtime/base/mutex.hpp"

namespace wyvern::extension {
namespace {

using Kind = Refusal::Kind;

std::string_view name_of(Kind kind) {
  switch (kind) {
    case Kind::type: return "TypeError";
    case Kind::value: return "ValueError";
    case Kind::runtime: break;
  }
  return "RuntimeError";
}

std::atomic<int> current_policy{WYVERN_POLICY_CACHED};
std::atomic<double> tuning_budget_s{0};
/// Raised by forget(): tables filled under another number are empty.
std::atomic<std::uint64_t> generation{0};

// Shapes that come and go must not fill the memory: a table that is full begins anew.
constexpr std::size_t kMostOfThread = 1024;
constexpr std::size_t kMostOfProcess = 8192;

using Table = std::unordered_map<std::string, std::shared_ptr<const Prepared>>;

/// Device, ranges, heads, K, V, whether there are maps, and the order.
using FoldKey = std::tuple<std::int32_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                           std::int64_t, std::vector<std::int64_t>>;

/// What the whole process shares. Never destroyed: threads may outlive main().
struct Shared {
  Mutex mutex;
  Table table;
  std::map<std::int32_t, wyvern_device*> devices;  ///< by number, -1 the CPU
  std::map<std::string, std::string> plans;        ///< of use_plan(), by key
  std::map<FoldKey, PreparedFold> folds;
  wyvern_runtime* runtime = nullptr;
};

Shared& shared() {
  static Shared* const all = [] {
    auto* made = new Shared;
    // A child of fork() must find the lock free; it is held for moments only.
    // One of these functions acquires it, the others release it.
    pthread_atfork([]() WYVERN_UNCHECKED_LOCKING { shared().mutex.lock(); },
                   []() WYVERN_UNCHECKED_LOCKING { shared().mutex.unlock(); },
                   []() WYVERN_UNCHECKED_LOCKING { shared().mutex.unlock(); });
    return made;
  }();
  return *all;
}

wyvern_device* device_of(std::int32_t number) {
  const Lock lock(shared().mutex);
  wyvern_device*& device = shared().devices[number];
  if (device == nullptr)
    check(wyvern_device_open(number < 0 ? "cpu" : ("cuda:" + std::to_string(number)).c_str(),
                             &device));
  return device;
}

/// Whether the stream of the request is captured into a graph, so that nothing may be prepared.
bool is_captured(const auto& request) {
  if (request.cuda_device < 0) return false;
  using Query = int (*)(void*, int*);
  static const Query query = [] {
    void* const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    return driver == nullptr ? nullptr
                             : reinterpret_cast<Query>(dlsym(driver, "cuStreamIsCapturing"));
  }();
  int status = 0;
  return query != nullptr && query(request.stream, &status) == 0 && status != 0;
}

/// Throws where nothing may be prepared.
void refuse_captured(const auto& request) {
  if (is_captured(request))
    throw Refusal(Kind::runtime,
                  "a CUDA graph is captured and this problem was not prepared before: call the "
                  "operator once with these shapes and options before the capture");
}

/// Whether a better plan is known and may be prepared now. One read where it is not.
bool gives_way(const Prepared& one, const Request& request) {
  return wyvern_operator_is_outdated(one.op) != 0 && !is_captured(request);
}

/// A problem of the C API while it is filled.
class Problem {
 public:
  explicit Problem(const std::string& op) { check(wyvern_problem_create(op.c_str(), &problem_)); }
  ~Problem() { wyvern_problem_destroy(problem_); }
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  void set(const char* field, std::int64_t value) {
    check(wyvern_problem_set_int(problem_, field, value));
  }
  void set(const char* field, const char* value) {
    check(wyvern_problem_set_text(problem_, field, value));
  }
  /// A field given as text, whatever its type.
  void set_text(const std::string& field, const std::string& value) {
    switch (type_of(field)) {
      case WYVERN_FIELD_REAL:
        check(wyvern_problem_set_real(problem_, field.c_str(), number<double>(field, value)));
        break;
      case WYVERN_FIELD_INT:
      case WYVERN_FIELD_BOOL: set(field.c_str(), number<std::int64_t>(field, value)); break;
      default: set(field.c_str(), value.c_str()); break;
    }
  }
  const wyvern_problem* get() const { return problem_; }

 private:
  static std::int32_t type_of(const std::string& field) {
    wyvern_field_info info = WYVERN_FIELD_INFO_INIT;
    for (std::size_t i = 0; i < wyvern_field_count(); ++i) {
      check(wyvern_field_get(i, &info));
      if (field == info.name) return info.type;
    }
    throw Refusal(Kind::value, "problem names the field '" + field + "', which there is not");
  }
  template <class T>
  static T number(const std::string& field, const std::string& text) {
    T value{};
    const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
    if (parsed.ec != std::errc{} || parsed.ptr != text.data() + text.size())
      throw Refusal(Kind::value, field + " is '" + text + "'; it must be a number");
    return value;
  }

  wyvern_problem* problem_ = nullptr;
};

/// "a=1 b=2" as pairs.
std::vector<std::pair<std::string, std::string>> fields_of(std::string_view text) {
  std::vector<std::pair<std::string, std::string>> fields;
  while (!text.empty()) {
    const std::string_view field = text.substr(0, text.find(' '));
    text.remove_prefix(std::min(field.size() + 1, text.size()));
    const std::size_t equals = field.find('=');
    if (equals == std::string_view::npos)
      throw Refusal(Kind::value, "problem has '" + std::string(field) + "'; it must be name=value");
    fields.emplace_back(field.substr(0, equals), field.substr(equals + 1));
  }
  return fields;
}

const char* dtype_name(std::int32_t dtype) {
  switch (dtype) {
    case WYVERN_FP32: return "fp32";
    case WYVERN_FP16: return "fp16";
    case WYVERN_BF16: return "bf16";
    case WYVERN_INT32: return "int32";
    case WYVERN_INT64: return "int64";
    case WYVERN_BOOLEAN: return "boolean";
    case WYVERN_FLOAT8_E4M3: return "float8_e4m3";
    case WYVERN_FLOAT8_E5M2: return "float8_e5m2";
    default: return "?";
  }
}

/// The place of a tensor of a call: an input, or behind all of them a gradient of an output or what
/// is updated in place.
consteval std::size_t place_of(std::string_view name) {
  const auto place = [name](const auto& names) {
    return static_cast<std::size_t>(std::find(names.begin(), names.end(), name) - names.begin());
  };
  const std::size_t input = place(kInputs);
  if (input < kInputs.size()) return input;
  const std::size_t gradient = place(kOutputGradients), pool = place(kPool);
  if (gradient < kOutputGradients.size()) return input + gradient;
  if (pool == kPool.size()) throw "no tensor of a call has this name";
  return input + pool;
}

/// The tensors of a request by place, with checks that the problem's dimensions need.
class Tensors {
 public:
  explicit Tensors(const Request& request) : request_(request) {}

  const wyvern_tensor* find(std::size_t at) const {
    return request_.tensors[at].name == nullptr ? nullptr : &request_.tensors[at];
  }
  const wyvern_tensor& ranked(const char* name, std::size_t at, std::int32_t rank) const {
    const wyvern_tensor* const tensor = find(at);
    if (tensor == nullptr) throw Refusal(Kind::type, shown(name) + " is missing");
    if (tensor->rank != rank)
      throw Refusal(Kind::value, shown(name) + " has " + std::to_string(tensor->rank) +
                                     " dimensions; it must have " + std::to_string(rank));
    return *tensor;
  }

 private:
  std::string shown(const char* name) const { return request_.shown_name(name); }

  const Request& request_;
};

constexpr std::size_t kSeqlens = place_of("cu_seqlens");
constexpr std::size_t kState = place_of("state"), kCheckpoints = place_of("checkpoints");
constexpr std::size_t kIntermediateStates = place_of("intermediate_states");
constexpr std::size_t kConvState = place_of("conv_state");

void set_dtype(Problem& problem, const char* field, const wyvern_tensor* tensor) {
  if (tensor != nullptr) problem.set(field, dtype_name(tensor->dtype));
}

/// Where states inside sequences go. The number of rows decides where the call names no offsets.
void fill_checkpoints(Problem& problem, const Tensors& tensors) {
  if (tensors.find(kCheckpoints) == nullptr) return;
  const wyvern_tensor& rows = tensors.ranked("checkpoints", kCheckpoints, 4);
  const wyvern_tensor* const offsets = tensors.find(place_of("checkpoint_offsets"));
  set_dtype(problem, "index_dtype", offsets);
  const wyvern_tensor* const pool = tensors.find(kState);
  const wyvern_tensor* const states =
      pool != nullptr ? pool : tensors.find(place_of("initial_state"));
  if (states == nullptr)
    set_dtype(problem, "state_dtype", &rows);
  else if (rows.dtype == WYVERN_FP32 && states->dtype != WYVERN_FP32)
    problem.set("fp32_checkpoints", 1);
  if (offsets != nullptr)
    problem.set("checkpoint_offsets", 1);
  else
    problem.set("checkpoint_rows", rows.shape[0]);
}

/// The states after each token, and the tree that drafts are.
void fill_drafts(Problem& problem, const Tensors& tensors, bool packed) {
  const wyvern_tensor* const rows = tensors.find(place_of("intermediate_index"));
  const wyvern_tensor* const parent = tensors.find(place_of("parent"));
  set_dtype(problem, "index_dtype", rows != nullptr ? rows : parent);
  problem.set("parent", parent != nullptr ? 1 : 0);
  if (tensors.find(kIntermediateStates) == nullptr) return;
  const wyvern_tensor& states = tensors.ranked("intermediate_states", kIntermediateStates, 5);
  set_dtype(problem, "state_dtype",
            tensors.find(place_of("initial_state")) == nullptr ? &states : nullptr);
  problem.set("intermediate_rows", states.shape[0]);
  if (packed) problem.set("draft_tokens", states.shape[1]);
}

/// The convolution of q, k and v.
void fill_conv(Problem& problem, const Tensors& tensors) {
  constexpr std::size_t kWeight = place_of("conv_weight");
  if (tensors.find(kWeight) == nullptr) return;
  const wyvern_tensor& weight = tensors.ranked("conv_weight", kWeight, 2);
  problem.set("short_conv", weight.shape[1]);
  set_dtype(problem, "conv_dtype", &weight);
  problem.set("has_conv_bias", tensors.find(place_of("conv_bias")) != nullptr ? 1 : 0);
  problem.set("initial_conv_state",
              tensors.find(place_of("initial_conv_state")) != nullptr ? 1 : 0);
}

/// The rows before sequences in a pool, whose shape the text says how to read.
void fill_conv_pool(Problem& problem, const Tensors& tensors, std::string_view text) {
  if (tensors.find(kConvState) == nullptr) return;
  const wyvern_tensor& pool = tensors.ranked("conv_state", kConvState, 3);
  const bool tokens_first = text.find("conv_tokens_first=1") != std::string_view::npos;
  problem.set("inplace_conv_state", 1);
  problem.set("conv_columns", pool.shape[tokens_first ? 1 : 2]);
}

void fill(Problem& problem, const Request& request) {
  const Tensors tensors(request);
  const wyvern_tensor& query = tensors.ranked("q", place_of("q"), 4);
  const wyvern_tensor& value = tensors.ranked("v", place_of("v"), 4);
  problem.set("B", query.shape[0]), problem.set("T", query.shape[1]);
  problem.set("H", query.shape[2]), problem.set("K", query.shape[3]);
  problem.set("HV", value.shape[2]), problem.set("V", value.shape[3]);
  const bool packed = tensors.find(kSeqlens) != nullptr;
  problem.set("packed", packed ? 1 : 0);
  problem.set("N",
              packed ? tensors.ranked("cu_seqlens", kSeqlens, 1).shape[0] - 1 : query.shape[0]);
  set_dtype(problem, "dtype", &query);
  const wyvern_tensor* rate = &query;
  for (const std::size_t at : {place_of("beta"), place_of("erase")})
    if (tensors.find(at) != nullptr) rate = tensors.find(at);
  set_dtype(problem, "beta_dtype", rate);
  set_dtype(problem, "g_dtype", tensors.find(place_of("g")));
  const wyvern_tensor* const state = tensors.find(place_of("initial_state"));
  set_dtype(problem, "state_dtype", state);
  set_dtype(problem, "seqlens_dtype", tensors.find(kSeqlens));
  problem.set("initial_state", state != nullptr ? 1 : 0);
  fill_conv(problem, tensors);
  if (request.operation == Operation::update) {
    fill_checkpoints(problem, tensors);
    fill_drafts(problem, tensors, packed);
  }
  if (request.operation == Operation::update && tensors.find(kState) != nullptr) {
    const wyvern_tensor& pool = tensors.ranked("state", kState, 4);
    const wyvern_tensor* const index = tensors.find(place_of("state_index"));
    problem.set("inplace_state", 1);
    set_dtype(problem, "state_dtype", &pool);
    problem.set("state_index", index != nullptr ? 1 : 0);
    set_dtype(problem, "index_dtype", index);
    if (index != nullptr) problem.set("state_slots", pool.shape[0]);
    if (index != nullptr && index->rank == 2) problem.set("index_columns", index->shape[1]);
    problem.set("output_state_index",
                tensors.find(place_of("output_state_index")) != nullptr ? 1 : 0);
    problem.set("has_initial_state",
                tensors.find(place_of("has_initial_state")) != nullptr ? 1 : 0);
    fill_conv_pool(problem, tensors, request.problem);
  }
  if (is_summary(request.operation)) problem.set("summary", 1);
  if (!is_backward(request.operation)) return;
  problem.set("pass", "backward");
  problem.set("output_final_state", tensors.find(place_of("dht")) != nullptr ? 1 : 0);
  problem.set("output_conv_state", tensors.find(place_of("dfinal_conv_state")) != nullptr ? 1 : 0);
}

bool is_float8(std::int32_t dtype) {
  return dtype == WYVERN_FLOAT8_E4M3 || dtype == WYVERN_FLOAT8_E5M2;
}

bool is_one_of(std::int32_t dtype, Elements elements) {
  switch (elements) {
    case Elements::numbers:
      return dtype == WYVERN_FP32 || dtype == WYVERN_FP16 || dtype == WYVERN_BF16;
    case Elements::integers: return dtype == WYVERN_INT32 || dtype == WYVERN_INT64;
    case Elements::booleans: return dtype == WYVERN_BOOLEAN;
  }
  return false;
}

const char* legal_dtypes(Elements elements) {
  switch (elements) {
    case Elements::integers: return "torch.int32 or torch.int64";
    case Elements::booleans: return "torch.bool";
    default: return "torch.float32, torch.float16 or torch.bfloat16";
  }
}

/// Refuses dtypes that no problem has, by the names of tensors: a problem's fields have others.
void check_dtypes(const Request& request) {
  for (const wyvern_tensor& tensor : request.tensors) {
    if (tensor.name == nullptr) continue;
    const Elements legal = kArguments[argument_index(tensor.name)].elements;
    const std::string_view name = tensor.name;
    const bool narrow = (name == "state" || name == "o") && is_float8(tensor.dtype);
    if (!is_one_of(tensor.dtype, legal) && !narrow)
      throw Refusal(Kind::type, std::string(request.shown_name(tensor.name)) + " is " +
                                    request.dtype_name(tensor.dtype) + "; it must be " +
                                    legal_dtypes(legal));
  }
}

std::vector<wyvern_tensor_spec> specs_of(const wyvern_operator* op) {
  std::size_t count = 0;
  check(wyvern_operator_tensors(op, nullptr, sizeof(wyvern_tensor_spec), 0, &count));
  std::vector<wyvern_tensor_spec> specs(count);
  check(wyvern_operator_tensors(op, specs.data(), sizeof(wyvern_tensor_spec), count, nullptr));
  std::erase_if(specs, [](const wyvern_tensor_spec& spec) { return spec.present == 0; });
  return specs;
}

const wyvern_tensor_spec* find(std::span<const wyvern_tensor_spec> specs, std::string_view name) {
  const auto found = std::find_if(specs.begin(), specs.end(), [&](const wyvern_tensor_spec& spec) {
    return name == spec.name;
  });
  return found == specs.end() ? nullptr : &*found;
}

/// The place of a name; the list's size where it is not in it.
template <class Names>
std::size_t place_in(const Names& names, std::string_view name) {
  const auto found = std::find(std::begin(names), std::end(names), name);
  return static_cast<std::size_t>(found - std::begin(names));
}

/// Says of each tensor of the launch where a call has it.
void connect(Prepared& made, std::span<const wyvern_tensor_spec> specs, const Request& request) {
  const auto add_outputs = [&](std::span<const char* const> names) {
    for (const char* const name : names)
      if (const wyvern_tensor_spec* const spec = find(specs, name);
          spec != nullptr && spec->access == WYVERN_WRITE)
        made.outputs.push_back(*spec);
  };
  switch (request.operation) {
    case Operation::forward:
    case Operation::resume:
      add_outputs(kOutputs);
      add_outputs(kKept);
      break;
    case Operation::backward: add_outputs(kGradients); break;
    case Operation::summary:
    case Operation::backward_summary: add_outputs(kSummaries); break;
    case Operation::shared_summary:
      add_outputs(kSummaries);
      add_outputs(kSegments);
      break;
    case Operation::update:
      if (Tensors(request).find(place_of("o")) == nullptr)
        add_outputs(std::span(kOutputs).first(1));
      break;
  }
  for (const char* const name : kKept)
    if (const wyvern_tensor_spec* const spec = find(specs, name);
        spec != nullptr && spec->access == WYVERN_READ)
      made.kept.push_back(name);

  using From = LaunchTensor::From;
  std::vector<std::string_view> outputs;
  for (const wyvern_tensor_spec& output : made.outputs) outputs.emplace_back(output.name);
  for (const wyvern_tensor_spec& spec : specs) {
    const std::string_view name = spec.name;
    if (const std::size_t output = place_in(outputs, name); output < outputs.size())
      made.tensors.push_back({spec, From::output, output});
    else if (const std::size_t kept = place_in(made.kept, name); kept < made.kept.size())
      made.tensors.push_back({spec, From::kept, kept});
    else if (const std::size_t input = place_in(kInputs, name); input < kInputs.size())
      made.tensors.push_back({spec, From::input, input});
    else if (const std::size_t gradient = place_in(kOutputGradients, name);
             gradient < kOutputGradients.size())
      made.tensors.push_back({spec, From::input, kInputs.size() + gradient});
    else if (const std::size_t map = place_in(kSegments, name); map < kSegments.size())
      made.tensors.push_back({spec, From::input, kInputs.size() + map});
    else if (const std::size_t pool = place_in(kPool, name); pool < kPool.size())
      made.tensors.push_back({spec, From::input, kInputs.size() + pool});
    else
      throw Refusal(Kind::value,
                    "the problem needs " + std::string(name) + ", which no call gives");
  }
}

/// What is given without use is refused once, here; what is missing or wrong each launch refuses.
/// Of q, k and v a summary does not read all.
void check_given(std::span<const wyvern_tensor_spec> specs, const Request& request) {
  const std::size_t first = is_summary(request.operation) ? kRequired : 0;
  for (const wyvern_tensor& tensor : request.tensors.subspan(first))
    if (tensor.name != nullptr && find(specs, tensor.name) == nullptr)
      throw Refusal(Kind::value, std::string(request.shown_name(tensor.name)) +
                                     " is given; this problem has no use for it");
}

const char* origin_name(std::int32_t origin) {
  switch (origin) {
    case WYVERN_ORIGIN_EXACT: return "exact";
    case WYVERN_ORIGIN_NEAREST: return "nearest";
    case WYVERN_ORIGIN_DEFAULT: return "default";
    default: return "given";
  }
}

std::string key_of(const Problem& problem) {
  std::size_t length = 0;
  check(wyvern_problem_key(problem.get(), nullptr, 0, &length));
  std::string key(length + 1, '\0');
  check(wyvern_problem_key(problem.get(), key.data(), key.size(), nullptr));
  key.pop_back();
  return key;
}

/// The plan of use_plan(); empty: the policy says.
std::string plan_in_use(const std::string& key) {
  const Lock lock(shared().mutex);
  const auto found = shared().plans.find(key);
  return found == shared().plans.end() ? "" : found->second;
}

/// The keys of problems and the names of devices have no character that JSON escapes.
std::string describe(const std::string& key, const wyvern_operator* op, std::int32_t device) {
  std::int32_t origin = 0;
  const char* plan = nullptr;
  check(wyvern_operator_origin(op, &origin));
  check(wyvern_operator_plan(op, &plan));
  return R"({"problem": ")" + key + R"(", "device": ")" +
         (device < 0 ? "cpu" : "cuda:" + std::to_string(device)) + R"(", "origin": ")" +
         origin_name(origin) + R"(", "plan": )" + plan + "}";
}

/// The problem of the request, without the field of its text that is named.
std::unique_ptr<const Problem> problem_of(const Request& request, std::string_view without = {}) {
  auto fields = fields_of(request.problem);
  const auto op = std::find_if(fields.begin(), fields.end(),
                               [](const auto& field) { return field.first == "op"; });
  if (op == fields.end()) throw Refusal(Kind::value, "problem names no operator (op=...)");
  auto problem = std::make_unique<Problem>(op->second);
  for (const auto& [field, value] : fields)
    if (field != "op" && field != without) problem->set_text(field, value);
  fill(*problem, request);
  check(wyvern_problem_validate(problem->get()));
  return problem;
}

/// Compiles the backward pass beside the forward pass of the request. That final states have no
/// gradient is a guess. What is wrong the call of the backward pass says.
void compile_backward_ahead(const Request& request) {
  try {
    std::vector<wyvern_tensor> tensors(request.tensors.begin(), request.tensors.end());
    tensors.resize(kInputs.size() + kOutputGradients.size());
    Request backward = request;
    backward.operation = Operation::backward;
    backward.tensors = tensors;
    const auto problem = problem_of(backward, "keep_output");
    if (!plan_in_use(key_of(*problem)).empty()) return;
    wyvern_prepare_options options = WYVERN_PREPARE_OPTIONS_INIT;
    options.policy = current_policy.load(std::memory_order_relaxed);
    check(
        wyvern_compile_ahead(runtime(), device_of(request.cuda_device), problem->get(), &options));
  } catch (const Refusal&) {
  }
}

std::shared_ptr<const Prepared> prepare(const Request& request) {
  check_dtypes(request);
  const auto given = problem_of(request);
  const Problem& problem = *given;
  if (request.gradients) compile_backward_ahead(request);

  wyvern_prepare_options options = WYVERN_PREPARE_OPTIONS_INIT;
  options.policy = current_policy.load(std::memory_order_relaxed);
  options.tuning_budget_s = tuning_budget_s.load(std::memory_order_relaxed);
  const std::string key = key_of(problem);
  const std::string plan = plan_in_use(key);
  if (!plan.empty()) {
    options.policy = WYVERN_POLICY_CACHED;
    options.plan = plan.c_str();
  }
  auto made = std::make_shared<Prepared>();
  check(wyvern_prepare(runtime(), device_of(request.cuda_device), problem.get(), &options,
                       &made->op));
  check(wyvern_operator_workspace_bytes(made->op, &made->workspace_bytes));
  const std::vector<wyvern_tensor_spec> specs = specs_of(made->op);
  check_given(specs, request);
  connect(*made, specs, request);
  made->description = describe(key, made->op, request.cuda_device);
  return made;
}

/// Everything that the problem, the device and the plan depend on, as bytes.
void write_key(const Request& request, std::string& key) {
  key.assign(request.problem);
  const auto add = [&key](std::int64_t number) {
    char bytes[sizeof number];
    std::memcpy(bytes, &number, sizeof number);
    key.append(bytes, sizeof number);
  };
  const int policy = current_policy.load(std::memory_order_relaxed);
  add((request.cuda_device * 8 + policy) * kOperations + static_cast<int>(request.operation));
  for (const wyvern_tensor& tensor : request.tensors)
    key += tensor.name == nullptr ? '\0' : static_cast<char>(tensor.dtype);
  const auto add_shape = [&](std::size_t at) {
    const wyvern_tensor& tensor = request.tensors[at];
    if (tensor.name == nullptr) return;
    add(tensor.rank);
    for (std::int32_t d = 0; d < tensor.rank; ++d) add(tensor.shape[d]);
  };
  for (const std::size_t at : {place_of("q"), place_of("v"), kSeqlens, place_of("conv_weight")})
    add_shape(at);
  if (request.operation != Operation::update) return;
  for (const std::size_t at : {kState, kCheckpoints}) {
    const wyvern_tensor& states = request.tensors[at];
    add(states.rank == 0 ? -1 : states.shape[0]);
  }
  for (const std::size_t at : {place_of("state_index"), kIntermediateStates, kConvState})
    add_shape(at);
}

std::shared_ptr<const Prepared> find_shared(const std::string& key, const Request& request,
                                            std::uint64_t now) {
  const Lock lock(shared().mutex);
  if (generation.load(std::memory_order_acquire) != now) return nullptr;
  const auto found = shared().table.find(key);
  if (found == shared().table.end() || gives_way(*found->second, request)) return nullptr;
  return found->second;
}

void keep_shared(const std::string& key, const std::shared_ptr<const Prepared>& made,
                 std::uint64_t now) {
  const Lock lock(shared().mutex);
  if (generation.load(std::memory_order_acquire) != now) return;
  if (shared().table.size() >= kMostOfProcess) shared().table.clear();
  shared().table.insert_or_assign(key, made);
}

}  // namespace

Refusal::Refusal(Kind kind, const std::string& what)
    : std::runtime_error("wyvern." + std::string(name_of(kind)) + ": " + what) {}

void check(wyvern_status status) {
  if (status == WYVERN_OK) return;
  throw Refusal(status == WYVERN_BAD_INPUT ? Kind::value : Kind::runtime, wyvern_last_error());
}

const Prepared& prepared(const Request& request) {
  thread_local std::string key;
  thread_local Table table;
  thread_local std::uint64_t filled_under = 0;
  const std::uint64_t now = generation.load(std::memory_order_acquire);
  if (filled_under != now || table.size() >= kMostOfThread) {
    table.clear();
    filled_under = now;
  }
  write_key(request, key);
  if (const auto found = table.find(key);
      found != table.end() && !gives_way(*found->second, request))
    return *found->second;
  std::shared_ptr<const Prepared> one = find_shared(key, request, now);
  if (one == nullptr) {
    refuse_captured(request);
    one = prepare(request);
    keep_shared(key, one, now);
  }
  return *table.insert_or_assign(key, std::move(one)).first->second;
}

namespace {

/// Throws unless the order has each range once.
void check_order(const FoldRequest& request) {
  std::vector<std::int64_t> places(request.order);
  std::ranges::sort(places);
  std::int64_t next = 0;
  for (const std::int64_t place : places)
    if (place != next++) next = -1;
  if (next != request.options.ranges)
    throw Refusal(Kind::value, "order must name each of the " +
                                   std::to_string(request.options.ranges) +
                                   " ranges of summaries once");
}

}  // namespace

PreparedFold prepared_fold(const FoldRequest& request,
                           const std::function<void*(std::span<const std::int32_t>)>& place) {
  const wyvern_fold_options& options = request.options;
  const FoldKey key{request.cuda_device, options.ranges,     options.HV,   options.K,
                    options.V,           options.transition, request.order};
  {
    const Lock lock(shared().mutex);
    if (const auto found = shared().folds.find(key); found != shared().folds.end())
      return found->second;
  }
  refuse_captured(request);
  check_order(request);
  wyvern_fold* fold = nullptr;
  check(wyvern_prepare_fold(runtime(), device_of(request.cuda_device), &options, &fold));
  const std::vector<std::int32_t> order(request.order.begin(), request.order.end());
  const PreparedFold made{fold, place(order)};
  const Lock lock(shared().mutex);
  return shared().folds.try_emplace(key, made).first->second;
}

wyvern_runtime* runtime() {
  const Lock lock(shared().mutex);
  if (shared().runtime == nullptr) {
    check(wyvern_runtime_create(nullptr, &shared().runtime));
    // The runtime is never destroyed, and the process must not end under the tuner's feet.
    std::atexit(stop);
  }
  return shared().runtime;
}

int set_policy(int policy) { return current_policy.exchange(policy); }
double set_tuning_budget(double seconds) { return tuning_budget_s.exchange(seconds); }
std::size_t wait_for_tuning(double seconds) {
  std::size_t left = 0;
  check(wyvern_runtime_wait_for_tuning(runtime(), seconds, &left));
  return left;
}
void stop() {
  wyvern_runtime* running = nullptr;
  {
    const Lock lock(shared().mutex);
    running = shared().runtime;
  }
  if (running != nullptr) wyvern_runtime_stop_tuning(running);
}
std::string described() {
  const Lock lock(shared().mutex);
  std::string list;
  for (const auto& [key, one] : shared().table)
    list += (list.empty() ? "" : ",\n ") + one->description;
  return "[" + list + "]";
}
void use_plan(const std::string& problem_key, const std::string& plan) {
  const Lock lock(shared().mutex);
  if (plan.empty())
    shared().plans.erase(problem_key);
  else
    shared().plans.insert_or_assign(problem_key, plan);
}
void forget() {
  const Lock lock(shared().mutex);
  shared().table.clear();
  generation.fetch_add(1, std::memory_order_acq_rel);
}

}  // namespace wyvern::extension
