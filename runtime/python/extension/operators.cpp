// The operators of PyTorch's dispatcher, wyvern::forward, ::backward, ::update, ::summary,
// ::backward_summary, ::shared_summary, ::resume and ::fold, and the functions by which the Python
// package (src/wyvern/_extension.py) loads and steers this library.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/devices/cpu/memory.hpp"
#include "runtime/python/extension/prepared.hpp"
#include "runtime/python/extension/torch_abi.hpp"

namespace wyvern::extension {
namespace {

using Kind = Refusal::Kind;

/// An operator's arguments as take() reads them.
const char* name_of(Operation operation) {
  switch (operation) {
    case Operation::forward: return "forward";
    case Operation::backward: return "backward";
    case Operation::summary: return "summary";
    case Operation::backward_summary: return "backward_summary";
    case Operation::shared_summary: return "shared_summary";
    case Operation::resume: return "resume";
    case Operation::update: break;
  }
  return "update";
}

/// Whether it gives a tensor and not a list.
constexpr bool gives_one(Operation operation) {
  return operation == Operation::update || operation == Operation::summary ||
         operation == Operation::backward_summary;
}

std::string schema(Operation operation) {
  std::string text = name_of(operation) + std::string("(str problem");
  for (std::size_t i = 0; i < kInputs.size(); ++i)
    text += std::string(i < kRequired ? ", Tensor " : ", Tensor? ") + kInputs[i];
  text += ", Tensor? cu_seqlens_cpu";
  if (is_backward(operation)) text += ", Tensor do, Tensor? dht";
  if (operation == Operation::backward) text += ", Tensor? dfinal_conv_state, Tensor[] kept";
  if (operation == Operation::resume)
    for (const char* const map : kSegments) text += std::string(", Tensor ") + map;
  char alias = 'a';
  if (operation == Operation::update)
    for (std::size_t i = 0; i < kPool.size(); ++i)
      text += (kWritten[i] ? std::string(", Tensor(") + alias++ + "!)? " : ", Tensor? ") + kPool[i];
  // With a list among the outputs PyTorch does not trace an operator that writes to its inputs, and
  // none may give an input back: where the caller has o, what an update gives is empty.
  return text + (gives_one(operation) ? ") -> Tensor" : ") -> Tensor[]");
}

/// order: the ranges in the order of tokens, by their places in summaries.
constexpr const char* kFoldSchema =
    "fold(Tensor summaries, int[] order, int V, bool reverse) -> Tensor";

constexpr std::uintptr_t kAlignment = 16, kWorkspaceAlignment = 256;
constexpr std::size_t input_place(std::string_view input) {
  return static_cast<std::size_t>(std::ranges::find(kInputs, input) - kInputs.begin());
}
/// Of a call beside its inputs: of a backward pass, or of an update.
constexpr std::size_t kMostBeside = std::max(kOutputGradients.size(), kPool.size());
constexpr std::size_t kOutput = kInputs.size() + (std::ranges::find(kPool, std::string_view("o")) -
                                                  kPool.begin());  ///< o of an update
constexpr std::size_t kMostTensors = kInputs.size() + kMostBeside + kKept.size();

/// A failure of PyTorch itself, which has said more on stderr or in its own exception.
void check_torch(AOTITorchError error, const char* what) {
  if (error != 0) throw Refusal(Kind::runtime, std::string("PyTorch failed: ") + what);
}

/// An owned tensor of PyTorch; empty where it is absent.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}
  Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor() {
    if (handle_ != nullptr) torch().aoti_torch_delete_tensor_object(handle_);
  }

  explicit operator bool() const { return handle_ != nullptr; }
  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

 private:
  AtenTensorHandle handle_ = nullptr;
};

struct Place {
  std::int32_t type = 0, index = -1;
  bool operator==(const Place&) const = default;
};

Place place_of(const Tensor& tensor) {
  Place place;
  check_torch(torch().aoti_torch_get_device_type(tensor.get(), &place.type), "get_device_type");
  check_torch(torch().aoti_torch_get_device_index(tensor.get(), &place.index), "get_device_index");
  return place;
}

/// PyTorch's numbers of dtypes and devices.
struct Numbers {
  std::int32_t cpu, cuda, bytes;
  std::array<std::pair<std::int32_t, std::int32_t>, 8> dtypes;  ///< PyTorch's, wyvern_dtype
};

const Numbers& numbers() {
  static const Numbers all{torch().aoti_torch_device_type_cpu(),
                           torch().aoti_torch_device_type_cuda(),
                           torch().aoti_torch_dtype_uint8(),
                           {{{torch().aoti_torch_dtype_float32(), WYVERN_FP32},
                             {torch().aoti_torch_dtype_float16(), WYVERN_FP16},
                             {torch().aoti_torch_dtype_bfloat16(), WYVERN_BF16},
                             {torch().aoti_torch_dtype_int32(), WYVERN_INT32},
                             {torch().aoti_torch_dtype_int64(), WYVERN_INT64},
                             {torch().aoti_torch_dtype_bool(), WYVERN_BOOLEAN},
                             {torch().aoti_torch_dtype_float8_e4m3fn(), WYVERN_FLOAT8_E4M3},
                             {torch().aoti_torch_dtype_float8_e5m2(), WYVERN_FLOAT8_E5M2}}}};
  return all;
}

/// Below 0: one that Wyvern does not know.
std::int32_t wyvern_dtype_of(std::int32_t dtype) {
  for (const auto& [theirs, ours] : numbers().dtypes)
    if (theirs == dtype) return ours;
  return -1 - dtype;
}

std::int32_t torch_dtype_of(std::int32_t dtype) {
  for (const auto& [theirs, ours] : numbers().dtypes)
    if (ours == dtype) return theirs;
  throw Refusal(Kind::runtime, "an output has a dtype that PyTorch has not");
}

/// What PyTorch calls a dtype of wyvern_dtype_of().
const char* dtype_text(std::int32_t dtype) {
  constexpr std::array<const char*, 8> names{
      "torch.float32", "torch.float16", "torch.bfloat16",      "torch.int32",
      "torch.int64",   "torch.bool",    "torch.float8_e4m3fn", "torch.float8_e5m2"};
  if (dtype >= 0) return names[static_cast<std::size_t>(dtype - WYVERN_FP32)];
  for (const auto& [theirs, text] : {
           std::pair{torch().aoti_torch_dtype_float64(), "torch.float64"},
           std::pair{torch().aoti_torch_dtype_uint8(), "torch.uint8"},
           std::pair{torch().aoti_torch_dtype_int8(), "torch.int8"},
           std::pair{torch().aoti_torch_dtype_int16(), "torch.int16"},
           std::pair{torch().aoti_torch_dtype_complex64(), "torch.complex64"},
           std::pair{torch().aoti_torch_dtype_complex128(), "torch.complex128"},
       })
    if (-1 - theirs == dtype) return text;
  return "of another dtype";
}

std::string place_text(const Place& place) {
  if (place.type == numbers().cpu) return "the CPU";
  if (place.type == numbers().cuda) return "cuda:" + std::to_string(place.index);
  return "another device";
}

/// Memory for a tensor, contiguous and not initialized.
Tensor empty(std::span<const std::int64_t> shape, std::int32_t dtype, const Place& place) {
  std::array<std::int64_t, WYVERN_MAX_RANK> strides{};
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<std::int64_t>(shape[i], 1);
  }
  AtenTensorHandle handle = nullptr;
  check_torch(
      torch().aoti_torch_empty_strided(static_cast<std::int64_t>(shape.size()), shape.data(),
                                       strides.data(), dtype, place.type, place.index, &handle),
      "no memory for an output or the workspace");
  return Tensor(handle);
}

/// Linux overcommits memory; touching the pages may run out of it, and kills the process.
void check_memory(const Prepared& op) {
  constexpr std::uint64_t kMuch = std::uint64_t{1} << 30;  // finding out takes a while
  constexpr std::uint64_t kMega = 1'000'000;
  std::uint64_t needed = op.workspace_bytes;
  for (const wyvern_tensor_spec& output : op.outputs) {
    std::uint64_t bytes = output.dtype == WYVERN_FP32          ? 4  // no output is of integers
                          : output.dtype == WYVERN_FLOAT8_E4M3 ? 1
                                                               : 2;
    for (std::int32_t i = 0; i < output.rank; ++i)
      bytes *= static_cast<std::uint64_t>(output.shape[i]);
    needed += bytes;
  }
  if (needed < kMuch) return;
  const std::uint64_t free = available_memory();
  if (needed > free)
    throw Refusal(Kind::runtime, "the outputs and the workspace need " +
                                     std::to_string(needed / kMega) + " MB of memory, and " +
                                     std::to_string(free / kMega) +
                                     " MB are free; give fewer sequences, tokens or heads");
}

void* data_of(const Tensor& tensor) {
  void* data = nullptr;
  check_torch(torch().aoti_torch_get_data_ptr(tensor.get(), &data), "get_data_ptr");
  return data;
}

using ShownName = decltype(wyvern_launch::shown_name);

/// The names that tensors have in wyvern.ops; with_out() is for calls that are given o.
const char* with_out(const char* name) {
  const std::size_t at = argument_index(name);
  return at < kOperatorTensors ? kArguments[at].python.data() : name;
}
const char* in_python(const char* name) {
  return std::string_view(name) == "o" ? name : with_out(name);
}

/// The tensor's description for the C API, which lives as long as the tensor; strides are left out
/// where it is contiguous.
wyvern_tensor describe(const char* name, const Tensor& tensor, const Place& place,
                       ShownName shown_name) {
  const auto shown = [&] { return std::string(shown_name(name)); };
  const Place own = place_of(tensor);
  if (own != place)
    throw Refusal(Kind::value, shown() + " is on " + place_text(own) + "; it must be on " +
                                   place_text(place) + ", where q is");
  wyvern_tensor described{name, nullptr, nullptr, nullptr, 0, 0};
  std::int64_t rank = 0, *sizes = nullptr, *strides = nullptr;
  std::int32_t dtype = 0;
  bool contiguous = false;
  check_torch(torch().aoti_torch_get_dim(tensor.get(), &rank), "get_dim");
  check_torch(torch().aoti_torch_get_sizes(tensor.get(), &sizes), "get_sizes");
  check_torch(torch().aoti_torch_get_dtype(tensor.get(), &dtype), "get_dtype");
  check_torch(torch().aoti_torch_is_contiguous(tensor.get(), &contiguous), "is_contiguous");
  if (rank > WYVERN_MAX_RANK)
    throw Refusal(Kind::value, shown() + " has " + std::to_string(rank) + " dimensions");
  if (!contiguous)
    check_torch(torch().aoti_torch_get_strides(tensor.get(), &strides), "get_strides");
  described.data = data_of(tensor);
  described.shape = sizes;
  described.strides = strides;
  described.dtype = wyvern_dtype_of(dtype);
  described.rank = static_cast<std::int32_t>(rank);
  return described;
}

bool is_dense(const wyvern_tensor& tensor) {
  return tensor.strides == nullptr &&
         reinterpret_cast<std::uintptr_t>(tensor.data) % kAlignment == 0;
}

/// Replaces a tensor that is not contiguous or not aligned by a copy.
void make_dense(Tensor& tensor, wyvern_tensor& described, const Place& place) {
  if (is_dense(described)) return;
  std::int32_t dtype = 0;
  check_torch(torch().aoti_torch_get_dtype(tensor.get(), &dtype), "get_dtype");
  Tensor copy = empty({described.shape, static_cast<std::size_t>(described.rank)}, dtype, place);
  check_torch(torch().aoti_torch_copy_(copy.get(), tensor.get(), 0), "copy_");
  tensor = std::move(copy);
  described = describe(described.name, tensor, place, in_python);
}

/// What the dispatcher hands over, owned: reading it takes it from the stack, all of it, so that
/// nothing is lost where a later step throws.
struct Call {
  std::string problem;
  bool gradients = false;
  std::array<Tensor, kInputs.size() + kMostBeside> tensors;
  Tensor cu_seqlens_cpu;
  std::vector<Tensor> kept;
};

Tensor take_tensor(StableIValue value) {
  return Tensor(reinterpret_cast<AtenTensorHandle>(value));  // NOLINT(performance-no-int-to-ptr)
}

Tensor take_optional(StableIValue value) {
  auto* const inner = reinterpret_cast<StableIValue*>(value);  // NOLINT(performance-no-int-to-ptr)
  if (inner == nullptr) return {};
  Tensor tensor = take_tensor(*inner);
  delete inner;
  return tensor;
}

std::string take_string(StableIValue value) {
  auto* const handle = reinterpret_cast<StringHandle>(value);  // NOLINT(performance-no-int-to-ptr)
  std::size_t length = 0;
  const char* text = nullptr;
  check_torch(torch().torch_string_length(handle, &length), "string_length");
  check_torch(torch().torch_string_c_str(handle, &text), "string_c_str");
  std::string own(text, length);
  torch().torch_delete_string(handle);
  return own;
}

template <class Element>
std::vector<Element> take_list(StableIValue value, Element (*take)(StableIValue)) {
  auto* const list =
      reinterpret_cast<StableListHandle>(value);  // NOLINT(performance-no-int-to-ptr)
  std::size_t count = 0;
  check_torch(torch().torch_list_size(list, &count), "list_size");
  std::vector<Element> elements(count);
  for (std::size_t i = 0; i < count; ++i) {
    StableIValue item = 0;
    check_torch(torch().torch_list_get_item(list, i, &item), "list_get_item");
    elements[i] = take(item);
  }
  torch().torch_delete_list(list);
  return elements;
}

std::int64_t take_integer(StableIValue value) { return static_cast<std::int64_t>(value); }

/// Whether the text had that ending, which it has no longer.
bool drop_last(std::string& text, std::string_view ending) {
  if (!text.ends_with(ending)) return false;
  text.resize(text.size() - ending.size());
  return true;
}

Call take(const StableIValue* stack, Operation operation) {
  Call call;
  std::size_t at = 0;
  call.problem = take_string(stack[at++]);
  call.gradients = operation == Operation::forward && drop_last(call.problem, " gradients=1");
  for (std::size_t i = 0; i < kInputs.size(); ++i, ++at)
    call.tensors[i] = i < kRequired ? take_tensor(stack[at]) : take_optional(stack[at]);
  call.cu_seqlens_cpu = take_optional(stack[at++]);
  if (operation == Operation::update)
    for (std::size_t i = 0; i < kPool.size(); ++i)
      call.tensors[kInputs.size() + i] = take_optional(stack[at++]);
  if (operation == Operation::resume)
    for (std::size_t i = 0; i < kSegments.size(); ++i)
      call.tensors[kInputs.size() + i] = take_tensor(stack[at++]);
  if (!is_backward(operation)) return call;
  call.tensors[kInputs.size()] = take_tensor(stack[at++]);
  call.tensors[kInputs.size() + 1] = take_optional(stack[at++]);
  if (operation != Operation::backward) return call;
  for (std::size_t i = 2; i < kOutputGradients.size(); ++i)
    call.tensors[kInputs.size() + i] = take_optional(stack[at++]);
  call.kept = take_list(stack[at++], take_tensor);
  return call;
}

StableIValue give_list(std::vector<Tensor>& tensors) {
  StableListHandle list = nullptr;
  check_torch(torch().torch_new_list_reserve_size(tensors.size(), &list), "new_list");
  for (Tensor& tensor : tensors)
    check_torch(
        torch().torch_list_push_back(list, reinterpret_cast<StableIValue>(tensor.release())),
        "list_push_back");
  return reinterpret_cast<StableIValue>(list);
}

void* stream_of(const Place& place) {
  if (place.type != numbers().cuda) return nullptr;
  if (torch().aoti_torch_get_current_cuda_stream == nullptr)
    throw Refusal(Kind::runtime, "this build of PyTorch is not for CUDA");
  void* stream = nullptr;
  check_torch(torch().aoti_torch_get_current_cuda_stream(place.index, &stream),
              "get_current_cuda_stream");
  return stream;
}

/// cu_seqlens of the host as the C API takes them.
class HostSeqlens {
 public:
  explicit HostSeqlens(Tensor& tensor) {
    if (!tensor) return;
    const Place host{numbers().cpu, -1};
    wyvern_tensor given = describe("cu_seqlens_cpu", tensor, host, in_python);
    make_dense(tensor, given, host);
    if (given.rank != 1)
      throw Refusal(Kind::value, "cu_seqlens_cpu has " + std::to_string(given.rank) +
                                     " dimensions; it must have 1");
    const auto count = static_cast<std::size_t>(given.shape[0]);
    if (given.dtype == WYVERN_INT64) {
      entries_ = {static_cast<const std::int64_t*>(given.data), count};
    } else if (given.dtype == WYVERN_INT32) {
      const auto* const narrow = static_cast<const std::int32_t*>(given.data);
      wide_.assign(narrow, narrow + count);
      entries_ = wide_;
    } else {
      throw Refusal(Kind::type, "cu_seqlens_cpu must be torch.int32 or torch.int64");
    }
  }
  std::span<const std::int64_t> entries() const { return entries_; }

 private:
  std::vector<std::int64_t> wide_;
  std::span<const std::int64_t> entries_;
};

/// The tensors of a launch, gathered in the order in which the operator names them.
class Launch {
 public:
  Launch(const Prepared& prepared, const Request& request, std::span<const wyvern_tensor> kept,
         std::span<const Tensor> outputs)
      : prepared_(prepared), shown_name_(request.shown_name) {
    for (const LaunchTensor& tensor : prepared.tensors) switch (tensor.from) {
        case LaunchTensor::From::input: add(tensor.spec, request.tensors[tensor.at]); break;
        case LaunchTensor::From::kept: add(tensor.spec, kept[tensor.at]); break;
        case LaunchTensor::From::output:
          tensors_[count_++] = {tensor.spec.name, data_of(outputs[tensor.at]), tensor.spec.shape,
                                nullptr,          tensor.spec.dtype,           tensor.spec.rank};
          break;
      }
  }

  void run(const Tensor& workspace, const HostSeqlens& seqlens, void* stream) {
    wyvern_launch launch = WYVERN_LAUNCH_INIT;
    launch.tensors = tensors_.data();
    launch.tensor_count = count_;
    if (workspace) {
      auto at = reinterpret_cast<std::uintptr_t>(data_of(workspace));
      at = (at + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
      launch.workspace = reinterpret_cast<void*>(at);  // NOLINT(performance-no-int-to-ptr)
    }
    launch.workspace_bytes = prepared_.workspace_bytes;
    launch.stream = stream;
    launch.cu_seqlens_host = seqlens.entries().data();
    launch.cu_seqlens_host_count = seqlens.entries().size();
    launch.shown_name = shown_name_;
    check(wyvern_operator_launch(prepared_.op, &launch));
  }

 private:
  /// One that is absent is left out, and the launch says what is missing.
  void add(const wyvern_tensor_spec& spec, const wyvern_tensor& given) {
    if (given.name == nullptr) return;
    if (given.dtype != spec.dtype)
      throw Refusal(Kind::type, std::string(shown_name_(given.name)) + " is " +
                                    dtype_text(given.dtype) + "; it must be " +
                                    dtype_text(spec.dtype));
    tensors_[count_++] = given;
  }

  const Prepared& prepared_;
  ShownName shown_name_;
  std::array<wyvern_tensor, kMostTensors + kGradients.size()> tensors_{};
  std::size_t count_ = 0;
};

/// Whether the operator takes the tensor without a copy: contiguous, or with strided rows where its
/// plan allows them.
bool takes(const Prepared& op, const wyvern_tensor& tensor) {
  if (is_dense(tensor)) return true;
  std::int32_t taken = 0;
  check(wyvern_operator_takes(op.op, &tensor, sizeof tensor, &taken));
  return taken != 0;
}

/// The tensors of a call beside its inputs.
std::span<const char* const> beside(Operation operation) {
  switch (operation) {
    case Operation::forward:
    case Operation::summary:
    case Operation::shared_summary: break;
    case Operation::resume: return kSegments;
    case Operation::backward:
    case Operation::backward_summary: return kOutputGradients;
    case Operation::update: return kPool;
  }
  return {};
}

std::vector<Tensor> run(Call& call, Operation operation) {
  const Place place = place_of(call.tensors[0]);
  if (place.type != numbers().cpu && place.type != numbers().cuda)
    throw Refusal(Kind::value, "q is on another device; it must be on the CPU or a CUDA device");
  const std::span<const char* const> others = beside(operation);
  const std::size_t count = kInputs.size() + others.size();
  std::array<wyvern_tensor, kInputs.size() + kMostBeside> inputs{};
  const ShownName shown_name =
      operation == Operation::update && call.tensors[kOutput] ? with_out : in_python;
  for (std::size_t i = 0; i < count; ++i)
    if (call.tensors[i])
      inputs[i] = describe(i < kInputs.size() ? kInputs[i] : others[i - kInputs.size()],
                           call.tensors[i], place, shown_name);

  Request request;
  request.problem = call.problem;
  request.gradients = call.gradients;
  request.operation = operation;
  request.cuda_device = place.type == numbers().cuda ? place.index : -1;
  request.stream = stream_of(place);
  request.tensors = std::span(inputs).first(count);
  request.shown_name = shown_name;
  request.dtype_name = dtype_text;
  const Prepared& op = prepared(request);
  if (is_summary(operation))
    call.tensors[input_place(is_backward(operation) ? "v" : "q")] = Tensor();
  for (std::size_t i = 0; i < count; ++i) {
    // A copy of what is written would be nobody's.
    if (operation == Operation::update && i >= kInputs.size() && kWritten[i - kInputs.size()])
      continue;
    if (call.tensors[i] && !takes(op, inputs[i])) make_dense(call.tensors[i], inputs[i], place);
  }

  if (place.type == numbers().cpu) check_memory(op);
  std::vector<Tensor> outputs(op.outputs.size());
  for (std::size_t i = 0; i < outputs.size(); ++i)
    outputs[i] = empty({op.outputs[i].shape, static_cast<std::size_t>(op.outputs[i].rank)},
                       torch_dtype_of(op.outputs[i].dtype), place);
  if (call.kept.size() != op.kept.size())
    throw Refusal(Kind::value, "kept has " + std::to_string(call.kept.size()) +
                                   " tensors; it must have " + std::to_string(op.kept.size()));
  std::array<wyvern_tensor, kKept.size()> kept{};
  for (std::size_t i = 0; i < op.kept.size(); ++i) {
    kept[i] = describe(op.kept[i], call.kept[i], place, shown_name);
    make_dense(call.kept[i], kept[i], place);
  }
  Tensor workspace;
  if (op.workspace_bytes != 0) {
    const std::int64_t bytes = static_cast<std::int64_t>(op.workspace_bytes + kWorkspaceAlignment);
    workspace = empty({&bytes, 1}, numbers().bytes, place);
  }
  const HostSeqlens seqlens(call.cu_seqlens_cpu);
  Launch(op, request, kept, outputs).run(workspace, seqlens, request.stream);
  return outputs;
}

template <Operation operation>
void kernel(StableIValue* stack, std::uint64_t /*inputs*/, std::uint64_t /*outputs*/) {
  Call call = take(stack, operation);
  std::vector<Tensor> outputs = run(call, operation);
  if constexpr (gives_one(operation)) {
    if (outputs.empty()) {
      const std::int64_t none = 0;
      outputs.push_back(empty({&none, 1}, numbers().bytes, place_of(call.tensors[0])));
    }
    stack[0] = reinterpret_cast<StableIValue>(outputs.front().release());
  } else {
    stack[0] = give_list(outputs);
  }
}

Tensor run_fold(Tensor summaries, std::vector<std::int64_t> order, std::int64_t V, bool reverse) {
  const Place place = place_of(summaries);
  if (place.type != numbers().cpu && place.type != numbers().cuda)
    throw Refusal(Kind::value,
                  "summaries is on another device; it must be on the CPU or a CUDA device");
  const auto own_name = [](const char* name) { return name; };
  wyvern_tensor given = describe("summaries", summaries, place, own_name);
  make_dense(summaries, given, place);
  constexpr std::int32_t kLeastRank = 4;
  if (given.rank < kLeastRank)
    throw Refusal(Kind::value, "summaries has " + std::to_string(given.rank) +
                                   " dimensions; it must have 4 or more");
  if (given.dtype != WYVERN_FP32)
    throw Refusal(Kind::type, std::string("summaries is ") + dtype_text(given.dtype) +
                                  "; it must be torch.float32");
  std::vector<std::int64_t> shape(given.shape, given.shape + given.rank);
  FoldRequest request;
  request.cuda_device = place.type == numbers().cuda ? place.index : -1;
  request.stream = stream_of(place);
  request.options.ranges = shape.front();
  request.options.HV =
      std::accumulate(shape.begin() + 1, shape.end() - 2, std::int64_t{1}, std::multiplies<>());
  request.options.K = shape[shape.size() - 2];
  request.options.V = V;
  request.options.transition = shape.back() != V ? 1 : 0;
  request.order = std::move(order);
  const PreparedFold fold = prepared_fold(request, [&](std::span<const std::int32_t> from) {
    const auto count = static_cast<std::int64_t>(from.size());
    const std::int32_t dtype = torch_dtype_of(WYVERN_INT32);
    Tensor on_cpu = empty({&count, 1}, dtype, {numbers().cpu, -1});
    std::ranges::copy(from, static_cast<std::int32_t*>(data_of(on_cpu)));
    Tensor on_device = empty({&count, 1}, dtype, place);
    check_torch(torch().aoti_torch_copy_(on_device.get(), on_cpu.get(), 0), "copy_");
    void* const data = data_of(on_device);
    on_device.release();
    return data;
  });
  shape.back() = V;
  Tensor states = empty(shape, torch_dtype_of(WYVERN_FP32), place);
  const wyvern_fold_options& sizes = request.options;
  const std::array<std::int64_t, 4> columns{sizes.ranges, sizes.HV, sizes.K,
                                            given.shape[given.rank - 1]},
      rows{sizes.ranges, sizes.HV, sizes.K, V};
  const std::array<wyvern_tensor, 3> tensors{
      {{"summaries", given.data, columns.data(), nullptr, WYVERN_FP32, 4},
       {"order", fold.order, rows.data(), nullptr, WYVERN_INT32, 1},
       {"states", data_of(states), rows.data(), nullptr, WYVERN_FP32, 4}}};
  wyvern_launch launch = WYVERN_LAUNCH_INIT;
  launch.tensors = tensors.data();
  launch.tensor_count = tensors.size();
  launch.stream = request.stream;
  check(wyvern_fold_launch(fold.fold, &launch, reverse ? 1 : 0));
  return states;
}

void fold_kernel(StableIValue* stack, std::uint64_t /*inputs*/, std::uint64_t /*outputs*/) {
  Tensor summaries = take_tensor(stack[0]);
  std::vector<std::int64_t> order = take_list(stack[1], take_integer);
  Tensor states =
      run_fold(std::move(summaries), std::move(order), take_integer(stack[2]), stack[3] != 0);
  stack[0] = reinterpret_cast<StableIValue>(states.release());
}

constexpr std::array kAll{
    Operation::forward,          Operation::backward,       Operation::update, Operation::summary,
    Operation::backward_summary, Operation::shared_summary, Operation::resume};
static_assert(kAll.size() == kOperations);

void register_operators() {
  TorchLibraryHandle library = nullptr;
  check_torch(torch().aoti_torch_library_init_def("wyvern", __FILE__, __LINE__, &library),
              "the namespace wyvern is taken");
  for (const Operation operation : kAll) {
    const std::string text = schema(operation);
    check_torch(torch().aoti_torch_library_def(library, text.c_str()), text.c_str());
  }
  check_torch(torch().aoti_torch_library_def(library, kFoldSchema), kFoldSchema);
  for (const char* const key : {"CPU", "CUDA"}) {
    TorchLibraryHandle kernels = nullptr;
    check_torch(torch().aoti_torch_library_init_impl("wyvern", key, __FILE__, __LINE__, &kernels),
                key);
    const auto implement = [&](const char* name, auto function) {
      check_torch(torch().torch_library_impl(kernels, name, function, kTorchVersion), key);
    };
    implement("forward", &kernel<Operation::forward>);
    implement("backward", &kernel<Operation::backward>);
    implement("update", &kernel<Operation::update>);
    implement("summary", &kernel<Operation::summary>);
    implement("backward_summary", &kernel<Operation::backward_summary>);
    implement("shared_summary", &kernel<Operation::shared_summary>);
    implement("resume", &kernel<Operation::resume>);
    implement("fold", &fold_kernel);
  }
}

}  // namespace
}  // namespace wyvern::extension

using namespace wyvern::extension;

#define WYVERN_EXTENSION extern "C" __attribute__((visibility("default")))

/// Registers the operators, once; "" or what is wrong, which lives until the next call.
WYVERN_EXTENSION const char* wyvern_extension_load() {
  static std::string problem;
  static bool done = false;
  if (done) return "";
  try {
    register_operators();
    done = true;
    problem.clear();
  } catch (const std::exception& error) {
    problem = error.what();
  }
  return problem.c_str();
}

/// The same as set_policy().
WYVERN_EXTENSION int wyvern_extension_policy(int policy) { return set_policy(policy); }

/// The same as set_tuning_budget().
WYVERN_EXTENSION double wyvern_extension_tuning_budget(double seconds) {
  return set_tuning_budget(seconds);
}

/// The same as stop(), before the process ends: compilers cannot go on while it does.
WYVERN_EXTENSION void wyvern_extension_stop() { stop(); }
/// The same as wait_for_tuning(); below 0 where no runtime can be made.
WYVERN_EXTENSION std::int64_t wyvern_extension_wait_for_tuning(double seconds) {
  try {
    return static_cast<std::int64_t>(wait_for_tuning(seconds));
  } catch (const std::exception&) {
    return -1;
  }
}

/// The process's wyvern_runtime, for what is not an operator; null where none can be made.
WYVERN_EXTENSION wyvern_runtime* wyvern_extension_runtime() {
  try {
    return runtime();
  } catch (const std::exception&) {
    return nullptr;
  }
}

/// The same as described(); lives until this thread's next call.
WYVERN_EXTENSION const char* wyvern_extension_described() {
  thread_local std::string text;
  text = described();
  return text.c_str();
}

/// The same as use_plan().
WYVERN_EXTENSION void wyvern_extension_use_plan(const char* problem_key, const char* plan) {
  use_plan(problem_key, plan);
}

/// The same as forget().
WYVERN_EXTENSION void wyvern_extension_forget() { forget(); }
