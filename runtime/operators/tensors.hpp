// The tensors of an operator as data: names, shapes, dtypes and contents.
#pragma once

#include <wyvern/runtime.hpp>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace wyvern {

/// A dimension of a tensor, by its symbol in runtime/SPECIFICATION.md.
enum class TensorDim : std::uint8_t {
  B,
  T,
  nT,  ///< num_householder T: a row for each step of each token
  H,
  HV,
  K,
  V,
  N,
  N_plus_1,
  NT,             ///< chunk slots of kept_chunk_size() rows of k
  C,              ///< kept_chunk_size()
  slots,          ///< state_slots with state_index, else N
  index_columns,  ///< index_columns; where it is 0 the tensor does not have the dimension
  drafts,         ///< draft_tokens_of() in the recurrent pass; elsewhere as index_columns
  states_inside,  ///< NT, or intermediate_rows in the recurrent pass
  checkpoints,    ///< checkpoint_rows()
  state_rows,     ///< K, or V with state_v_first
  state_columns,  ///< V, or K with state_v_first
  conv_channels,  ///< conv_channels()
  conv_width,     ///< short_conv
  conv_before,    ///< short_conv - 1
  conv_rows,  ///< of a slot of conv_state: conv_channels(), or conv_columns_of() where tokens are
              ///< first
  conv_columns,        ///< of a slot of conv_state: the other
  conv_draft_rows,     ///< of a window of intermediate_conv_states: as conv_rows, of short_conv - 1
                       ///< columns
  conv_draft_columns,  ///< of such a window: the other
  summary_columns,     ///< V, or V + K with transition
  scale_rows,          ///< of o_scale: output_scale_shape()
  scale_columns,       ///< of o_scale
  NS,                  ///< segments of segment_chunks chunks of kept_chunk_size() rows of k
};
inline constexpr std::size_t kDims = 29;

/// A shape in symbols.
struct Dims {
  std::array<TensorDim, kMaxRank> at{};
  int rank = 0;

  Dims(std::initializer_list<TensorDim> dims) {
    for (const TensorDim dim : dims) at[static_cast<std::size_t>(rank++)] = dim;
  }
  bool has(TensorDim dim) const noexcept;
};

enum class TensorRole : std::uint8_t {
  input,
  kept,     ///< the forward pass may write it, the backward pass reads it
  shared,   ///< a summary may write it, the forward pass reads it
  output,   ///< gradients too
  updated,  ///< read and written
  inside,   ///< an output of the forward pass; the recurrent pass writes some of its rows
};

/// A tensor's contents, which decide how random inputs are drawn: every maker of inputs (the
/// tuner's, the command's, the tests') has its own distribution for each.
enum class Quantity : std::uint8_t {
  directions,      ///< rows of q or k: of length 1 unless use_qk_l2norm makes them so
  values,          ///< about normal: v, do, o_raw, windows of rows
  taps,            ///< small: conv_weight, conv_bias, which leave convolved keys shorter than 1
  rates,           ///< in (0, 1), or logits with use_beta_sigmoid: beta, erase, write
  gates,           ///< natural-log decay, or the raw gate input with use_gate_in_kernel
  gate_rates,      ///< A_log
  gate_biases,     ///< dt_bias
  states,          ///< initial_state, state, checkpoints
  state_gradient,  ///< dht
  seqlens,         ///< cu_seqlens
  state_slots,     ///< state_index, output_state_index
  choices,         ///< has_initial_state
  state_scales,    ///< state_scale: positive
  offsets,         ///< checkpoint_offsets
  accepted,        ///< num_accepted: in 1 to index_columns
  rows,            ///< intermediate_index
  parents,         ///< parent
  computed,        ///< written by a pass; an input only with disable_recompute or segment_chunks
};

/// One tensor of an operator. A gradient's name is "d" and its input's name.
struct TensorRule {
  std::string_view name;  ///< of Arguments
  TensorRole role = TensorRole::input;
  Quantity holds = Quantity::computed;
  Dims dims;
  DType (*dtype)(const Problem&) = nullptr;
  bool (*present)(const Problem&) = nullptr;  ///< for a problem of the operator
  /// Its rows of tokens, or slots, may be strided: default plans accept that, but for o where fwd_o
  /// or kda_fwd_o writes it.
  bool strided = false;
};
inline constexpr bool kStrided = true;
using TensorRules = std::vector<TensorRule>;

// Dtypes and presences that rules share.
DType dtype_of_rows(const Problem& problem);    ///< Problem::dtype
DType dtype_of_output(const Problem& problem);  ///< Problem::output_dtype, or Problem::dtype
DType dtype_of_rates(const Problem& problem);   ///< Problem::beta_dtype
DType always_fp32(const Problem& problem);
bool always(const Problem& problem);
bool in_backward(const Problem& problem);
bool with_kept(const Problem& problem);       ///< disable_recompute
bool with_gradients(const Problem& problem);  ///< of inputs: in_backward, without `summary`

// Groups of rules that operators put together. Each is a whole subject: a new operator that differs
// in one replaces the group.

/// q, k, v, o, do and the gradients of q, k and v. `rows` is the dimension of tokens in k and v: T,
/// or nT for an operator of several steps a token.
TensorRules row_tensors(TensorDim rows = TensorDim::T);
/// beta and its gradient.
TensorRules beta_tensors(TensorDim rows = TensorDim::T);
/// g, A_log, dt_bias and their gradients; the shape of a token's gate is [HV, dims...].
TensorRules gate_tensors(std::initializer_list<TensorDim> channels = {});
/// States, their index and gradients, cu_seqlens.
TensorRules state_tensors();
/// Of disable_recompute: h, v_new.
TensorRules kept_tensors(TensorDim rows = TensorDim::T);
/// Of disable_recompute, with a gate per key channel: Tinv, w, decayed queries and keys, and the
/// products of queries with keys.
TensorRules kept_decayed_tensors();

TensorRules join(std::initializer_list<TensorRules> groups);

/// A tensor's shape in symbols for a message: "[B,T,HV,K]".
std::string symbols_of(const TensorRule& rule, const Problem& problem);

}  // namespace wyvern
