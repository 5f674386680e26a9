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

/// What an output norm's gate goes through: silu(x) = x sigmoid(x), or sigmoid(x).
enum class Activation : std::uint8_t { silu, sigmoid };
std::string_view to_string(Activation activation) noexcept;
[[nodiscard]] std::optional<Activation> parse_activation(std::string_view text) noexcept;

/// One operator at one shape. A plain value; validate() says whether it is legal.
///
/// A state S (K x V, one per sequence and value head; value head h reads key head h / (HV / H))
/// goes through the tokens, with the decay a_t = exp(g_t), g the natural logarithm, at most 0:
///   S~ = a_t S;  u = beta_t (v_t - S~^T k_t);  S = S~ + k_t u^T;  o_t = scale S^T q_t
/// `delta_rule` has a_t = 1 (DeltaNet; its parallel form is arXiv 2406.06484), `gated_delta_rule` a
/// scalar per value head (Gated DeltaNet, arXiv 2412.06464), `kda` a value per key channel (Kimi
/// Linear, arXiv 2510.26692). `gdn2` has kda's decay and two gates in the place of beta:
///   u = write_t v_t - S~^T (erase_t k_t)
///
/// Shapes: q, k [B,T,H,K]; v, o [B,T,HV,V]; beta [B,T,HV]; g [B,T,HV] (gated_delta_rule) or
/// [B,T,HV,K] (kda, gdn2), absent for delta_rule; erase [B,T,HV,K], write [B,T,HV,V]; states
/// [N,HV,K,V]. An operator of several steps a token (gated_delta_product) has n = num_householder
/// rows of k, v and beta for each: k [B,nT,H,K], v [B,nT,HV,V], beta
/// [B,nT,HV], of token t rows n t to n t + n - 1. S~ is decayed before the first step of a token
/// alone, o follows the last one. Its chunks are runs of steps, so that the states at their
/// boundaries may lie inside a token; T and cu_seqlens count tokens everywhere. A packed batch has
/// B = 1, T the sum of all lengths, and cu_seqlens [N+1]; else N = B. K is at most 256, HV a
/// multiple of H, B T below 2^31 (n B T too); B, T and N may be 0. The backward pass of a forward
/// problem is the same problem with `pass` changed: it takes do, dht where output_final_state is
/// set, and gives the gradient of every input that the options name.
struct Problem {
  std::string op = "gated_delta_rule";
  Pass pass = Pass::forward;

  std::int64_t B = 1, T = 0, H = 1, HV = 1, K = 128, V = 128;
  std::int64_t N = 1;
  bool packed = false;
  std::int64_t num_householder = 1;  ///< steps of a token; above 1 where the operator has them

  DType dtype = DType::bf16;       ///< of q, k, v and o: bf16, fp16 or fp32
  DType beta_dtype = DType::bf16;  ///< of beta, or of erase and write: as dtype, or fp32
  DType g_dtype = DType::fp32;     ///< as dtype, or fp32; of kda any of the three
  /// Of states but the final one, and of checkpoints unless fp32_checkpoints: fp32, bf16, fp16; of
  /// states in place, of operators of one step a token that have a beta, also float8_e4m3 and
  /// float8_e5m2.
  DType state_dtype = DType::fp32;
  DType seqlens_dtype = DType::int32;  ///< int32 or int64

  std::optional<float> scale;          ///< factor on o; default K^-0.5
  std::optional<Precision> precision;  ///< floor for fp32 products; default_precision() if unset
  std::optional<float> lower_bound;    ///< of the gate, in [-5, 0); kda only
  bool safe_gate = false;              ///< promises g >= lower_bound, which must be given
  bool use_qk_l2norm = false;          ///< q, k <- x / sqrt(sum x^2 + 1e-6)
  /// g <- -exp(A_log) softplus(g + dt_bias), or lower_bound sigmoid(exp(A_log) (g + dt_bias))
  bool use_gate_in_kernel = false;
  bool has_g = true;                ///< g is given; may be false where the decay is optional
  bool has_A_log = true;            ///< A_log is given; may be false with lower_bound: 0 then
  bool has_dt_bias = false;         ///< dt_bias is given
  bool use_beta_sigmoid = false;    ///< beta <- sigmoid(beta)
  bool allow_neg_eigval = false;    ///< with use_beta_sigmoid: beta <- 2 sigmoid(beta)
  bool initial_state = false;       ///< an initial state is given, else zero
  bool output_final_state = false;  ///< the final state is wanted; backward: dht is given
  bool state_v_first = false;       ///< states are [N,HV,V,K]
  /// A sequence's bits follow from its own tokens, heads and options, not from the sequences beside
  /// it or from tuning (SPECIFICATION.md, section 10). The forward and recurrent pass only.
  bool batch_invariant = false;

  // The forward and backward pass only.
  /// 16, 32, 64 or 128; unset: tuned, or kept_chunk_size() where a tensor's shape depends on it. A
  /// device may have no template of that size for the operator, K, V and dtype: prepare() throws
  /// then.
  std::optional<std::int64_t> chunk_size;
  bool disable_recompute =
      false;  ///< the forward pass returns intermediates that the backward pass would recompute
  bool return_intermediate_states = false;  ///< forward: the state entering every chunk
  /// Tokens of the longest sequence of a packed batch, as far as they are known: plans are chosen
  /// by it, longest_sequence() says how. What is computed is the same whatever it says.
  std::optional<std::int64_t> seqlens_hint;

  // The forward and the recurrent pass only: states in a pool (SPECIFICATION.md, section 9).
  bool inplace_state = false;  ///< the state is read from and written to `state`
  /// Sequence n's state is slot state_index[n] of the pool; an index that is none of a slot: it
  /// computes nothing. In the recurrent pass also of `initial_state`.
  bool state_index = false;
  bool output_state_index = false;   ///< its final state goes to slot output_state_index[n]
  bool null_slot_zero = false;       ///< index 0 too is none of a slot; else those below 0 alone
  bool has_initial_state = false;    ///< starts from zeros where has_initial_state[n] is false
  std::int64_t state_slots = 0;      ///< slots of the pool with state_index; else N slots
  DType index_dtype = DType::int32;  ///< of the index tensors: int32 or int64

  // The recurrent pass only: drafts to verify, at most 16 tokens a sequence (SPECIFICATION.md,
  // section 9); of operators of one step a token that have a beta.
  /// Columns of state_index, at least T; 0: it is [N]. num_accepted is given then: a sequence
  /// starts from the slot in column num_accepted[n] - 1, and each token's state goes to its
  /// column's slot.
  std::int64_t index_columns = 0;
  /// The state after each token goes to intermediate_states, of so many rows of draft_tokens.
  std::optional<std::int64_t> intermediate_rows;
  /// Tokens a row of intermediate_states and of `parent`, at most 16; unset: T.
  std::optional<std::int64_t> draft_tokens;
  bool parent = false;                ///< `parent` is given: drafts are a tree
  bool disable_state_update = false;  ///< `state` is read only

  // The recurrent pass only, of operators of one step a token that have a beta.
  /// Each value head's row of o is normalized and gated, norm_weight and norm_gate are given:
  /// o <- o rsqrt(mean(o^2) + norm_eps) norm_weight output_norm(norm_gate).
  std::optional<Activation> output_norm;
  std::optional<float> norm_eps;  ///< finite, above 0; default 1e-6

  // The forward pass only: states inside sequences (SPECIFICATION.md, section 9).
  /// The state after every so many tokens of each sequence is written, a multiple of 64; 0: none.
  std::int64_t checkpoint_every = 0;
  bool checkpoint_offsets = false;  ///< the state after checkpoint_offsets[n] tokens is written
  /// Rows of `checkpoints` with checkpoint_every; unset: B floor(T / checkpoint_every), which
  /// sequences of any lengths leave room in.
  std::optional<std::int64_t> checkpoint_rows;
  bool fp32_checkpoints = false;  ///< `checkpoints` is fp32, whatever state_dtype is

  bool operator==(const Problem&) const = default;
};

/// How a problem's decay looks: none (delta_rule, or without has_g), one a head (gated_delta_rule),
/// one a key channel (kda). None for an operator that this build has not.
enum class GateKind : std::uint8_t { none, scalar, vector };
[[nodiscard]] GateKind gate_kind(const Problem& problem) noexcept;

/// The chunk size of tensors whose shape depends on it (h, Tinv, Aqk, intermediate_states):
/// chunk_size, or 64; with disable_recompute and rows of v of more than 512 bytes 32, of more than
/// 1024 bytes 16.
[[nodiscard]] std::int64_t kept_chunk_size(const Problem& problem) noexcept;

/// Tokens of the longest sequence, as plans take it to be: seqlens_hint, but at least the mean and
/// at most T; the mean, rounded up, without one, and with batch_invariant, whose plans follow from
/// no length.
[[nodiscard]] std::int64_t longest_sequence(const Problem& problem) noexcept;

/// Whether states inside sequences are written, and how many rows the tensor of them has.
[[nodiscard]] bool has_checkpoints(const Problem& problem) noexcept;
[[nodiscard]] std::int64_t checkpoint_rows(const Problem& problem) noexcept;
/// Of `checkpoints`; fp32 of a problem without.
[[nodiscard]] DType checkpoint_dtype(const Problem& problem) noexcept;

/// Whether elements of the states in place count times state_scale: those of 8 bits do.
[[nodiscard]] bool has_state_scale(const Problem& problem) noexcept;

/// Tokens a row of intermediate_states in the recurrent pass: draft_tokens, or T.
[[nodiscard]] std::int64_t draft_tokens_of(const Problem& problem) noexcept;

/// Whether intra-chunk products may count on g >= lower_bound: promised, or so by the gate's form.
[[nodiscard]] bool gate_is_bounded(const Problem& problem) noexcept;

/// The floor that holds when a problem names none: tf32x3 for fp32 inputs, tf32 for 16-bit ones.
[[nodiscard]] Precision default_precision(DType dtype) noexcept;
[[nodiscard]] Precision precision_floor(const Problem& problem) noexcept;
[[nodiscard]] float scale_of(const Problem& problem) noexcept;
[[nodiscard]] float norm_eps_of(const Problem& problem) noexcept;

/// Throws Error(kBadInput) that names the first wrong field, its value and what is legal.
void validate(const Problem& problem);

/// Throws Error(kBadInput) unless N is legal and `cu_seqlens` has N + 1 entries, starts at 0, never
/// decreases and ends at T; the message names the entry.
void validate_seqlens(const Problem& problem, std::span<const std::int64_t> cu_seqlens);
/// The same for a host tensor [N+1]; throws too where it is null, of another rank, or neither int32
/// nor int64.
void validate_seqlens(const Problem& problem, const TensorView& cu_seqlens);

/// The key under which winners are kept: everything a plan may depend on but the buckets, and the
/// buckets: powers of two at or above B*T and N (0 stays 0). The family of a packed batch whose
/// longest_sequence() has one and a half times the mean or more has a bucket of it too.
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
