// What to compute: operator, pass, shapes, dtypes and options.
#pragma once

#include <wyvern/dtype.hpp>
#include <wyvern/export.hpp>
#include <wyvern/tensor.hpp>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace wyvern WYVERN_API {

/// `recurrent` is the forward pass of a few tokens per sequence (decode), token by token.
enum class Pass : std::uint8_t { forward, backward, recurrent };
std::string_view to_string(Pass pass) noexcept;

/// A function of elements: silu(x) = x sigmoid(x), sigmoid(x), or x itself. An output norm's gate
/// goes through one of the first two, convolved rows through silu or none.
enum class Activation : std::uint8_t { silu, sigmoid, none };
std::string_view to_string(Activation activation) noexcept;
[[nodiscard]] std::optional<Activation> parse_activation(std::string_view text) noexcept;

/// One operator at one shape. A plain value; validate() says whether it is legal.
///
/// Each sequence and value head has a state S (K x V; value head h reads key head h / (HV / H)).
/// Token t updates it, with the decay a_t = exp(g_t), where g is a natural logarithm, at most 0:
///   S~ = a_t S;  u = beta_t (v_t - S~^T k_t);  S = S~ + k_t u^T;  o_t = scale S^T q_t
/// `delta_rule` has a_t = 1 (DeltaNet; its parallel form is arXiv 2406.06484), `gated_delta_rule` a
/// scalar per value head (Gated DeltaNet, arXiv 2412.06464), `kda` a value per key channel (Kimi
/// Linear, arXiv 2510.26692). `gdn2` has kda's decay and replaces beta by two gates:
///   u = write_t v_t - S~^T (erase_t k_t)
///
/// Shapes: q, k [B,T,H,K]; v, o [B,T,HV,V]; beta [B,T,HV]; g [B,T,HV] (gated_delta_rule) or
/// [B,T,HV,K] (kda, gdn2), absent for delta_rule; erase [B,T,HV,K], write [B,T,HV,V]; states
/// [N,HV,K,V].
///
/// An operator with several steps per token (gated_delta_product) has n = num_householder rows of
/// k, v and beta for each token: k [B,nT,H,K], v [B,nT,HV,V], beta [B,nT,HV]; token t has rows n t
/// to n t + n - 1. The state decays before a token's first step only, and o is read after its last
/// step. Chunks count steps, so a chunk may end inside a token; T and cu_seqlens count tokens.
///
/// A packed batch has B = 1, T the sum of all lengths, and cu_seqlens [N+1]; else N = B. K is at
/// most 256, HV a multiple of H, B T below 2^31 (n B T too); B, T and N may be 0. The backward pass
/// of a forward problem is the same problem with `pass` changed: it takes do, and dht where
/// output_final_state is set, and returns the gradient of every input that the options name.
struct Problem {
  std::string op = "gated_delta_rule";
  Pass pass = Pass::forward;

  std::int64_t B = 1, T = 0, H = 1, HV = 1, K = 128, V = 128;
  std::int64_t N = 1;
  bool packed = false;
  std::int64_t num_householder = 1;  ///< steps per token; above 1 only for operators that have them

  DType dtype = DType::bf16;       ///< of q, k, v and o: bf16, fp16 or fp32
  DType beta_dtype = DType::bf16;  ///< of beta, or of erase and write: as dtype, or fp32
  DType g_dtype = DType::fp32;     ///< as dtype, or fp32; for kda any of the three
  /// Of all states but the final one, and of checkpoints unless fp32_checkpoints: fp32, bf16 or
  /// fp16. States in place may also be float8_e4m3 or float8_e5m2 where the operator has a beta and
  /// one step per token.
  DType state_dtype = DType::fp32;
  DType seqlens_dtype = DType::int32;  ///< int32 or int64

  std::optional<float> scale;          ///< factor on o; default K^-0.5
  std::optional<Precision> precision;  ///< minimum for fp32 products; default_precision() if unset
  std::optional<float> lower_bound;    ///< of the gate, in [-5, 0); kda only
  bool safe_gate = false;              ///< the caller promises g >= lower_bound, which must be set
  bool use_qk_l2norm = false;          ///< q, k <- x / sqrt(sum x^2 + 1e-6)
  /// g <- -exp(A_log) softplus(g + dt_bias), or lower_bound sigmoid(exp(A_log) (g + dt_bias))
  bool use_gate_in_kernel = false;
  bool has_g = true;                ///< g is given; may be false where the decay is optional
  bool has_A_log = true;            ///< A_log is given; may be false with lower_bound: 0 then
  bool has_dt_bias = false;         ///< dt_bias is given
  bool use_beta_sigmoid = false;    ///< beta <- sigmoid(beta)
  bool allow_neg_eigval = false;    ///< with use_beta_sigmoid: beta <- 2 sigmoid(beta)
  bool initial_state = false;       ///< an initial state is given; else states start from zero
  bool output_final_state = false;  ///< the final state is an output; backward: dht is given
  bool state_v_first = false;       ///< states are [N,HV,V,K]
  /// A sequence's output bits depend only on its own tokens, heads and options, not on the rest of
  /// the batch or on tuning (SPECIFICATION.md, section 10). Forward and recurrent pass only.
  bool batch_invariant = false;

  // The forward and backward pass only.
  /// 16, 32, 64 or 128; unset: tuned, or kept_chunk_size() where a tensor's shape depends on it.
  /// prepare() throws where the device has no template of that size for the operator, K, V and
  /// dtype.
  std::optional<std::int64_t> chunk_size;
  bool disable_recompute =
      false;  ///< the forward pass returns intermediates that the backward pass would recompute
  bool return_intermediate_states = false;  ///< forward: output the state entering every chunk
  /// An estimate of the tokens of a packed batch's longest sequence. It selects the plan
  /// (longest_sequence() says how) and does not change what is computed.
  std::optional<std::int64_t> seqlens_hint;

  // The forward and the recurrent pass only: states in a pool (SPECIFICATION.md, section 9).
  bool inplace_state = false;  ///< the state is read from and written to `state`
  /// Sequence n's state is slot state_index[n] of the pool. A sequence whose index names no slot
  /// computes nothing. In the recurrent pass state_index also indexes `initial_state`.
  bool state_index = false;
  bool output_state_index = false;   ///< the final state goes to slot output_state_index[n]
  bool null_slot_zero = false;       ///< index 0 names no slot either; else only negative ones
  bool has_initial_state = false;    ///< starts from zero where has_initial_state[n] is false
  std::int64_t state_slots = 0;      ///< slots of the pool with state_index; else it has N
  DType index_dtype = DType::int32;  ///< of the index tensors: int32 or int64

  // The recurrent pass only: verification of drafts of at most 16 tokens per sequence
  // (SPECIFICATION.md, section 9), for operators with a beta and one step per token.
  /// Columns of state_index, at least T; 0: state_index is [N]. With columns num_accepted is given:
  /// a sequence starts from the slot in column num_accepted[n] - 1, and the state after token t
  /// goes to the slot in column t.
  std::int64_t index_columns = 0;
  /// The state after each token goes to intermediate_states, which has this many rows of
  /// draft_tokens states; with short_conv also the window behind it to intermediate_conv_states.
  std::optional<std::int64_t> intermediate_rows;
  /// Tokens per row of intermediate_states and of `parent`, at most 16; unset: T.
  std::optional<std::int64_t> draft_tokens;
  bool parent = false;                ///< `parent` is given: drafts are a tree
  bool disable_state_update = false;  ///< `state` is read only

  // Of the layer around the operator, in every pass (SPECIFICATION.md, section 12).
  /// Normalizes and gates each value head's row of o by the inputs norm_weight and norm_gate:
  /// o <- o rsqrt(mean(o^2) + norm_eps) norm_weight output_norm(norm_gate).
  /// Backward: `do` is the gradient of o behind the norm, and o_raw, what the norm took, is given.
  std::optional<Activation> output_norm;
  std::optional<float> norm_eps;  ///< finite, above 0; default 1e-6
  bool keep_output = false;       ///< forward, with output_norm: o before the norm is written too
  /// Forward and recurrent, with output_norm, V a multiple of 128 and without keep_output:
  /// float8_e4m3, whose scales, one for 128 columns, are o_scale. Unset: o has `dtype`.
  std::optional<DType> output_dtype;
  bool output_scale_tokens_last = false;  ///< o_scale has tokens side by side

  // The same: the short convolution.
  /// Convolves q, k and v, as they are given, with the rows before them, before all else: each
  /// channel by itself, by 2 to 4 weights of conv_weight. Backward: q, k and v are again those
  /// before the convolution, and gradients are of them.
  std::optional<std::int64_t> short_conv;
  std::optional<Activation> conv_activation;  ///< of convolved rows: silu (default) or none
  bool has_conv_bias = false;                 ///< conv_bias is given
  DType conv_dtype = DType::fp32;             ///< of conv_weight and conv_bias: as dtype, or fp32
  bool initial_conv_state = false;  ///< the rows before each sequence's first are given; else 0
  /// Each sequence's last rows are an output; backward: their gradient is given.
  bool output_conv_state = false;
  /// Forward and recurrent, with inplace_state: these rows are read from and written to the pool
  /// `conv_state`, in the slots of `state`.
  bool inplace_conv_state = false;
  /// Columns of a slot of conv_state, at least used_conv_columns(); the first so many are in use.
  /// Unset: used_conv_columns().
  std::optional<std::int64_t> conv_columns;
  bool conv_tokens_first = false;  ///< slots of conv_state are [columns, channels]

  // The forward pass only: states inside sequences (SPECIFICATION.md, section 9).
  /// Writes the state after every checkpoint_every tokens of each sequence, a multiple of 64; 0:
  /// writes none.
  std::int64_t checkpoint_every = 0;
  bool checkpoint_offsets = false;  ///< writes the state after checkpoint_offsets[n] tokens
  /// Rows of `checkpoints` with checkpoint_every; unset: B floor(T / checkpoint_every), which is
  /// enough for any lengths.
  std::optional<std::int64_t> checkpoint_rows;
  bool fp32_checkpoints = false;  ///< `checkpoints` is fp32, whatever state_dtype is

  // The forward and backward pass only: what tokens do to a state (SPECIFICATION.md, section 13).
  /// Computes the tensor `summary` alone, of each sequence's map of states S -> M S + R: R, the
  /// state at its end. Neither q nor o, nor options that have more outputs. Backward: `dsummary`
  /// alone, the gradient of the state at its start, from q, k, do, beta and g.
  bool summary = false;
  bool transition = false;  ///< forward, with summary: M beside R
  /// Forward, not packed, with chunk_size: the maps of segments of so many chunks, segment_M and
  /// segment_R, 8, 16 or 32. A problem with summary returns them, another takes those of its tokens
  /// and has plans alone that begin with them.
  std::optional<std::int64_t> segment_chunks;

  bool operator==(const Problem&) const = default;
};

/// A problem's kind of decay: none (delta_rule, or without has_g), one per head (gated_delta_rule)
/// or one per key channel (kda). `none` also for an operator that this build does not have.
enum class GateKind : std::uint8_t { none, scalar, vector };
[[nodiscard]] GateKind gate_kind(const Problem& problem) noexcept;

/// The chunk size of tensors whose shape depends on it (h, Tinv, Aqk, intermediate_states):
/// chunk_size, or where it is unset 64; with disable_recompute 32 for rows of v above 512 bytes and
/// 16 above 1024 bytes.
[[nodiscard]] std::int64_t kept_chunk_size(const Problem& problem) noexcept;

/// The length of the longest sequence that plans assume: seqlens_hint, clamped to at least the mean
/// length and at most T. Without a hint, and with batch_invariant, the mean, rounded up.
[[nodiscard]] std::int64_t longest_sequence(const Problem& problem) noexcept;

/// Whether the problem writes checkpoints, and how many rows the tensor `checkpoints` has.
[[nodiscard]] bool has_checkpoints(const Problem& problem) noexcept;
[[nodiscard]] std::int64_t checkpoint_rows(const Problem& problem) noexcept;
/// Of `checkpoints`; fp32 of a problem without.
[[nodiscard]] DType checkpoint_dtype(const Problem& problem) noexcept;

/// Whether states in place are multiplied by state_scale: states of 8 bits are.
[[nodiscard]] bool has_state_scale(const Problem& problem) noexcept;

/// Tokens per row of intermediate_states in the recurrent pass: draft_tokens, or T.
[[nodiscard]] std::int64_t draft_tokens_of(const Problem& problem) noexcept;

/// Whether intra-chunk products may rely on g >= lower_bound, by safe_gate or the gate's formula.
[[nodiscard]] bool gate_is_bounded(const Problem& problem) noexcept;

/// The minimum precision of fp32 products where a problem sets none: tf32x3 for fp32 inputs, tf32
/// for 16-bit inputs.
[[nodiscard]] Precision default_precision(DType dtype) noexcept;
[[nodiscard]] Precision precision_floor(const Problem& problem) noexcept;
[[nodiscard]] float scale_of(const Problem& problem) noexcept;
[[nodiscard]] float norm_eps_of(const Problem& problem) noexcept;

/// The shape of o_scale: {B T, HV V / 128}, or with output_scale_tokens_last {HV V / 128, B T
/// rounded up to a multiple of 4}; {0, 0} without output_dtype.
struct ScaleShape {
  std::int64_t rows = 0, columns = 0;
};
[[nodiscard]] ScaleShape output_scale_shape(const Problem& problem) noexcept;

/// The channels of short_conv: those of q, then of each step of k, then of each step of v.
[[nodiscard]] std::int64_t conv_channels(const Problem& problem) noexcept;
/// Columns of a slot of conv_state that are in use: short_conv - 1, with index_columns one more for
/// each column of state_index behind the first; 0 without short_conv.
[[nodiscard]] std::int64_t used_conv_columns(const Problem& problem) noexcept;
/// Columns of a slot of conv_state: conv_columns, or used_conv_columns().
[[nodiscard]] std::int64_t conv_columns_of(const Problem& problem) noexcept;

/// Throws Error(kBadInput) that names the first wrong field, its value and what is legal.
void validate(const Problem& problem);

/// Throws Error(kBadInput) unless N is legal and `cu_seqlens` has N + 1 entries, starts at 0, never
/// decreases and ends at T; the message names the entry.
void validate_seqlens(const Problem& problem, std::span<const std::int64_t> cu_seqlens);
/// The same for a host tensor [N+1]. Also throws where it is null, of another rank, or neither
/// int32 nor int64.
void validate_seqlens(const Problem& problem, const TensorView& cu_seqlens);

/// The key of a problem's winners. `family` has everything that a plan may depend on but tokens and
/// sequences; `tokens` and `sequences` are B*T and N rounded up to powers of two (0 stays 0). The
/// family of a packed batch whose longest_sequence() is at least 1.5 times the mean also has that
/// length, rounded likewise.
struct ProblemKey {
  std::string family;
  std::int64_t tokens = 0, sequences = 0;
  /// "family/tokens=8192/sequences=1"
  [[nodiscard]] std::string to_string() const;
};
[[nodiscard]] ProblemKey problem_key(const Problem& problem);

/// A model's shape (runtime/SPECIFICATION.md, section 7). B, T and N are left at their defaults.
struct Preset {
  std::string_view name, op;
  std::int64_t H, HV, K, V;
  float lower_bound = 0;  ///< 0: none
};
std::span<const Preset> presets();
/// Throws Error(kBadInput) that lists the known names.
const Preset& find_preset(std::string_view name);

/// The operators of this build, by name.
std::span<const std::string_view> operators();

}  // namespace wyvern WYVERN_API
