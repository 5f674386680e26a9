// Prepared operators by problem, behind the C API: prepared once, then found in a table.
#pragma once

#include <wyvern/wyvern.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/arguments.hpp"

namespace wyvern::extension {

/// What is wrong, in the words of a Python exception: its message begins with "wyvern.TypeError: ",
/// "wyvern.ValueError: " or "wyvern.RuntimeError: ".
class Refusal : public std::runtime_error {
 public:
  enum class Kind : std::uint8_t { type, value, runtime };
  Refusal(Kind kind, const std::string& what);
};

/// Throws the refusal that belongs to a status of the C API, with its message.
void check(wyvern_status status);

// The tensors of a call follow from the table of <runtime/arguments.hpp>, and the operators'
// schemas and the names of src/wyvern/_call.py from these lists.

/// The tensors that are passed in one of these ways, in the table's order.
template <Passing... ways>
consteval auto passed() {
  constexpr auto is_one = [](const ArgumentTensor& tensor) {
    return ((tensor.passing == ways) || ...);
  };
  std::array<ArgumentTensor, std::ranges::count_if(kArguments, is_one)> tensors{};
  std::ranges::copy_if(kArguments, tensors.begin(), is_one);
  return tensors;
}

/// The same in the order of their places in the schemas, which have no gaps.
template <Passing... ways>
consteval auto placed() {
  auto tensors = passed<ways...>();
  std::ranges::sort(tensors, {}, &ArgumentTensor::place);
  for (std::size_t i = 0; i < tensors.size(); ++i)
    if (tensors[i].place != static_cast<int>(i)) throw "places are not 0, 1, 2, ...";
  return tensors;
}

template <std::size_t count>
consteval std::array<const char*, count> names_of(
    const std::array<ArgumentTensor, count>& tensors) {
  std::array<const char*, count> names{};
  std::ranges::transform(tensors, names.begin(), [](const auto& one) { return one.name.data(); });
  return names;
}

inline constexpr auto kInputs = names_of(placed<Passing::required, Passing::input>());
/// How many of kInputs, the first, are not optional: q, k and v.
inline constexpr std::size_t kRequired = placed<Passing::required>().size();
/// What a backward pass takes beside the inputs: do, and the optional dht and dfinal_conv_state.
inline constexpr auto kOutputGradients = names_of(passed<Passing::output_gradient>());
static_assert(kOutputGradients.size() == 3);
/// What an update in place takes beside the inputs; all of it is optional.
inline constexpr auto kPool =
    names_of(placed<Passing::beside, Passing::updated, Passing::output>());
/// Which of kPool are written.
inline constexpr auto kWritten = [] {
  std::array<bool, kPool.size()> written{};
  std::ranges::transform(placed<Passing::beside, Passing::updated, Passing::output>(),
                         written.begin(),
                         [](const auto& one) { return one.passing != Passing::beside; });
  return written;
}();
/// What is kept for the backward pass.
inline constexpr auto kKept = names_of(passed<Passing::kept>());
/// What a forward or recurrent pass gives before what it keeps.
inline constexpr auto kOutputs = names_of(passed<Passing::output>());
/// What a backward pass gives: the gradients of the inputs that have one, in the inputs' order.
inline constexpr auto kGradients = [] {
  std::array<const char*, passed<Passing::gradient>().size()> names{};
  auto* end = names.begin();
  for (const std::string_view input : kInputs)
    for (const ArgumentTensor& one : passed<Passing::gradient>())
      if (one.name.substr(1) == input) *end++ = one.name.data();
  if (end != names.end()) throw "a gradient is that of no input";
  return names;
}();

/// What a problem with `summary` gives, one of them.
inline constexpr auto kSummaries = names_of(passed<Passing::summary>());

/// The maps of segments that a summary may give and a forward pass may take.
inline constexpr auto kSegments = names_of(passed<Passing::segments>());

/// The operators of PyTorch's dispatcher that prepare problems. `update` is a forward or recurrent
/// pass without gradients that writes to tensors of the caller: a pool of states, states inside
/// sequences, o and final states. Those of summaries take what the pass takes; of q forwards, and
/// of v backwards, the sizes alone.
/// shared_summary gives the maps of segments too, and resume is a forward pass that takes them.
enum class Operation : std::uint8_t {
  forward,
  backward,
  update,
  summary,
  backward_summary,
  shared_summary,
  resume
};
inline constexpr int kOperations = 7;

constexpr bool is_summary(Operation operation) {
  return operation == Operation::summary || operation == Operation::backward_summary ||
         operation == Operation::shared_summary;
}
constexpr bool is_backward(Operation operation) {
  return operation == Operation::backward || operation == Operation::backward_summary;
}

/// A call as the table sees it.
struct Request {
  /// "op=kda use_qk_l2norm=1 scale=0.5": fields of a problem (wyvern_field_get() lists them) by
  /// name. Those that the tensors say (dimensions, dtypes, what is given) are left out.
  std::string_view problem;
  bool gradients = false;  ///< a backward pass is to follow: its kernels are compiled meanwhile
  Operation operation = Operation::forward;
  std::int32_t cuda_device = -1;  ///< -1: the CPU
  void* stream = nullptr;         ///< of the GPU: asked whether it is captured
  /// kInputs, and backwards kOutputGradients, of an update kPool; a tensor that is absent
  /// has no name, one of a dtype that Wyvern does not know has a number below 0.
  std::span<const wyvern_tensor> tensors;
  /// As wyvern_launch has it; not null.
  const char* (*shown_name)(const char* name) = [](const char* name) { return name; };
  /// What PyTorch calls a dtype of `tensors`; not null.
  const char* (*dtype_name)(std::int32_t dtype) = [](std::int32_t) { return "?"; };
};

/// A tensor of a launch, and where a call has it.
struct LaunchTensor {
  enum class From : std::uint8_t { input, kept, output };
  wyvern_tensor_spec spec;
  From from = From::input;
  std::size_t at = 0;  ///< among the request's tensors, what is kept, or the outputs
};

/// An operator and what its launch takes and gives.
struct Prepared {
  wyvern_operator* op = nullptr;
  std::size_t workspace_bytes = 0;
  std::vector<LaunchTensor> tensors;        ///< all that are present, in binding order
  std::vector<wyvern_tensor_spec> outputs;  ///< what is written, in the order of the tables above
  std::vector<const char*> kept;            ///< what a backward pass reads of it, in that order
  std::string description;                  ///< of described()
  ~Prepared() { wyvern_operator_destroy(op); }
};

/// The operator for the request: from this thread's table, else from the process's, else prepared.
/// One that is outdated, since its problem was tuned in the background, is prepared again, but not
/// while a graph is captured. Takes no lock where the thread's table has it. What it gives stays
/// valid until this thread's next call. Throws Refusal.
const Prepared& prepared(const Request& request);

/// A fold of context parallelism, and its order on the device.
struct FoldRequest {
  wyvern_fold_options options = WYVERN_FOLD_OPTIONS_INIT;
  std::vector<std::int64_t> order;  ///< of `options.ranges`, each once
  std::int32_t cuda_device = -1;    ///< -1: the CPU
  void* stream = nullptr;           ///< as Request has it
};
struct PreparedFold {
  const wyvern_fold* fold = nullptr;
  void* order = nullptr;  ///< int32
};

/// The fold for the request, prepared once by the process and never destroyed. Where it was not,
/// `place` copies the order to memory of the device that nobody frees. Throws Refusal.
PreparedFold prepared_fold(const FoldRequest& request,
                           const std::function<void*(std::span<const std::int32_t>)>& place);

/// From where plans come from now on, a wyvern_policy, and how many seconds a tuning that the
/// policy begins may take (0: the usual). Each gives what was set before. For the whole process;
/// thread-safe.
int set_policy(int policy);
double set_tuning_budget(double seconds);
/// Waits until nothing is left to tune in the background, but no longer than is said; how many
/// problems are left. Throws Refusal.
std::size_t wait_for_tuning(double seconds);
/// Stops the tuning in progress, waits for what is compiled ahead, and begins neither from then on.
void stop();
/// The process's runtime, made at the first call; never destroyed. Throws Refusal.
wyvern_runtime* runtime();
/// What is in the process's table, as JSON: [{"problem": key, "device", "origin", "plan"}].
std::string described();
/// Has problems of this key prepared by this plan (JSON, as described() writes it) from now on,
/// whatever the policy; an empty one: by the policy again. Tables are to be emptied by forget().
void use_plan(const std::string& problem_key, const std::string& plan);
/// Empties the tables: what is asked for next is prepared again, by a plan tuned meanwhile.
void forget();

}  // namespace wyvern::extension
