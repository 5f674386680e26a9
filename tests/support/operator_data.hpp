// Random inputs of any operator and pass.
#pragma once

#include <wyvern/problem.hpp>
#include <wyvern/runtime.hpp>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/host_tensor.hpp"

namespace wyvern::testing {

using HostTensors = std::map<std::string, HostTensor, std::less<>>;

/// The inputs of one problem on the host.
struct OperatorData {
  Problem problem;
  std::vector<std::int64_t> cu_seqlens;  ///< empty unless packed
  /// By their names in runtime/SPECIFICATION.md. A tensor that is in and out holds its first
  /// content.
  HostTensors tensors;

  /// Views of the tensors; all others are left absent. The views live as long as this object.
  Arguments arguments() const;
};

/// Turns `problem` into a packed batch of these lengths.
Problem packed(Problem problem, const std::vector<std::int64_t>& lengths);

/// Whether the tensor is one that disable_recompute hands from the forward to the backward pass, or
/// a summary to the forward pass.
bool is_kept(const Problem& problem, std::string_view name);

/// A tensor of zeros with the spec's shape and dtype.
HostTensor host_tensor(const TensorSpec& spec);

/// Every input but intermediates of a forward pass, in the range of trained models: k rows of
/// length 1 (unless use_qk_l2norm makes them so), beta in (0, 1), gates as `gate` says (through the
/// raw gate input with use_gate_in_kernel, at the bound and not below it where one is promised),
/// gradients and states normal, state indices distinct with some sequences skipped. For a packed
/// problem `lengths` are its sequences; their sum is T and their count N.
OperatorData make_data(const Problem& problem, Gate gate, std::uint64_t seed,
                       const std::vector<std::int64_t>& lengths = {});

/// The slots of a sequence's states (with index_columns `to` has no meaning), and whether it starts
/// from the first one's state.
struct Slots {
  std::int64_t from = 0, to = 0;
  bool reads = true;
};
/// The same for every sequence; nothing for a null one.
std::vector<std::optional<Slots>> slots_of(const OperatorData& data);

/// Which states of a tensor that is in and out, `state`, `checkpoints` or `intermediate_states`, or
/// windows of `intermediate_conv_states`, are written.
std::vector<bool> written_states(const OperatorData& data, std::string_view name);
/// Which columns of all slots of conv_state, slot by slot, are read and which are written.
struct WindowColumns {
  std::vector<bool> read, written;
};
WindowColumns window_columns(const OperatorData& data);
/// The column of an element of conv_state, as they count there.
std::int64_t column_of(const Problem& p, std::int64_t element);

/// Makes all NaN that a problem must not read: with states in place slots that no sequence starts
/// from, columns of windows that none does, and the tokens of null sequences; null tokens of trees
/// of drafts; states of `checkpoints` and `intermediate_states` that are written.
void poison_unread(OperatorData& data);

/// Tokens [first, first + count) of every tensor of one sequence of T tokens; a token may have
/// several rows.
OperatorData tokens_of(const OperatorData& whole, std::int64_t first, std::int64_t count);

/// One line that describes a failing problem.
std::string describe(const Problem& problem);

}  // namespace wyvern::testing
