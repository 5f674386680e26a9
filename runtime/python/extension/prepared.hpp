// Prepared operators by problem, behind the C API: prepared once, then found in a table.
#pragma once

#include <wyvern/wyvern.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

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

// The tensors of a call, in this order; the names are those of <wyvern/runtime.hpp>. The operators'
// schemas are made of these lists, and src/wyvern/_call.py has its names from there.
inline constexpr auto kInputs =
    std::to_array<const char*>({"q", "k", "v", "g", "beta", "erase", "write", "initial_state",
                                "cu_seqlens", "A_log", "dt_bias"});
inline constexpr std::size_t kRequired = 3;  ///< of kInputs, which are not optional: q, k and v
/// What a backward pass takes beside the inputs.
inline constexpr auto kOutputGradients = std::to_array<const char*>({"do", "dht"});
/// What an update in place takes beside the inputs; all of it is optional.
inline constexpr auto kPool = std::to_array<const char*>(
    {"state", "state_scale", "state_index", "output_state_index", "has_initial_state",
     "num_accepted", "intermediate_index", "parent", "norm_weight", "norm_gate",
     "checkpoint_offsets", "checkpoints", "intermediate_states", "o", "final_state"});
/// Those of kPool that are written.
constexpr bool is_written(std::string_view name) {
  return name == "state" || name == "checkpoints" || name == "intermediate_states" || name == "o" ||
         name == "final_state";
}
/// What disable_recompute keeps for the backward pass.
inline constexpr auto kKept =
    std::to_array<const char*>({"Tinv", "Aqk", "w", "qg", "kg", "h", "v_new"});
/// What a forward or recurrent pass gives before what it keeps.
inline constexpr auto kOutputs =
    std::to_array<const char*>({"o", "final_state", "intermediate_states"});
/// What a backward pass gives.
inline constexpr auto kGradients = std::to_array<const char*>(
    {"dq", "dk", "dv", "dg", "dbeta", "derase", "dwrite", "dinitial_state", "dA_log", "ddt_bias"});

/// The operators of PyTorch's dispatcher. `update` is a forward or recurrent pass without
/// gradients: one that writes to tensors of the caller (a pool of states, states inside sequences,
/// o and final states), or that normalizes o.
enum class Operation : std::uint8_t { forward, backward, update };

/// A call as the table sees it.
struct Request {
  /// "op=kda use_qk_l2norm=1 scale=0.5": fields of a problem (wyvern_field_get() lists them) by
  /// name. Those that the tensors say (dimensions, dtypes, what is given) are left out.
  std::string_view problem;
  Operation operation = Operation::forward;
  std::int32_t cuda_device = -1;  ///< -1: the CPU
  void* stream = nullptr;         ///< of the GPU: asked whether it is captured
  /// kInputs, and of a backward pass kOutputGradients, of an update kPool; a tensor that is absent
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

/// From where plans come from now on, a wyvern_policy, and how many seconds a tuning that the
/// policy begins may take (0: the usual). Each gives what was set before. For the whole process;
/// thread-safe.
int set_policy(int policy);
double set_tuning_budget(double seconds);
/// Waits until nothing is left to tune in the background, but no longer than is said; how many
/// problems are left. Throws Refusal.
std::size_t wait_for_tuning(double seconds);
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
