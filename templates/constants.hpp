// The compile-time values of kernels, each described once: the constants that a problem sets and
// the tunables that a config sets. Kernel sources see them under these names; stage signatures,
// legality and launches use the same names here, as members of a struct, so that a misspelled one
// does not compile.
#pragma once

#include <wyvern/config.hpp>

#include <compare>
#include <cstdint>
#include <span>
#include <string_view>
#include <variant>

// clang-format off
#define WYVERN_INTEGER_CONSTANTS(X)                                                         \
  X(H, "query and key heads")                                                               \
  X(HV, "value heads, a multiple of H")                                                     \
  X(GROUP, "value heads a query and key head: HV / H")                                       \
  X(K, "key dimension")                                                                     \
  X(V, "value dimension")                                                                   \
  X(GATE_K, "gates a value head: K with a gate per key channel, else 1")                    \
  X(GATE_HEADS, "gates a token: HV GATE_K")                                                 \
  X(STATE_ROWS, "rows of a state as the caller has it: K, or V with STATE_V_FIRST")         \
  X(STATE_COLS, "columns of a state as the caller has it: V, or K with STATE_V_FIRST")      \
  X(STEPS, "Householder steps a token; rows of k, v and beta are tokens times steps")         \
  X(CHECKPOINT_EVERY, "tokens between a sequence's checkpoints; 0: none at fixed intervals") \
  X(SUMMARY_COLUMNS, "columns of a summary: V of R, and with TRANSITION K of M")    \
  X(CONV_WIDTH, "rows of q, k and v that a convolved row is made of")                        \
  X(CONV_CHANNELS, "channels that are convolved: of q, of each step of k, of each step of v") \
  X(CONV_COLUMNS, "rows before a sequence's first: CONV_WIDTH - 1")                          \
  X(CONV_LENGTH, "columns of a slot of conv_state, CONV_COLUMNS or more")                    \
  X(CONV_SLOT_ROWS, "rows of a slot of conv_state: channels, or columns with CONV_TOKENS_FIRST")  \
  X(CONV_SLOT_COLS, "columns of a slot of conv_state as the caller has it: the other")        \
  X(CONV_DRAFT_ROWS, "rows of a window of intermediate_conv_states: as CONV_SLOT_ROWS")      \
  X(CONV_DRAFT_COLS, "its columns: the other of channels and CONV_COLUMNS")
#define WYVERN_TYPE_CONSTANTS(X)                                                            \
  X(DTYPE, "element type of q, k, v, o and of 16-bit intermediates")                        \
  X(U_DTYPE, "element type of u between kernels: DTYPE, or fp32 where K is small")            \
  X(BETA_DTYPE, "element type of beta, erase and write")                                    \
  X(G_DTYPE, "element type of the gate's input")                                            \
  X(DG_DTYPE, "element type of the gate's gradient where it is summed")                     \
  X(STATE_DTYPE, "element type of the initial state and of a pool of states")               \
  X(CHECKPOINT_DTYPE, "element type of checkpoints: STATE_DTYPE, or fp32")                  \
  X(CONV_DTYPE, "element type of conv_weight and conv_bias")                                \
  X(SEQLENS_DTYPE, "element type of cu_seqlens")                                            \
  X(INDEX_DTYPE, "element type of state_index and other indices and counts")
#define WYVERN_FLAG_CONSTANTS(X)                                                            \
  X(VARLEN, "a packed batch: sequences by cu_seqlens")                                      \
  X(SCALAR_GATE, "a decay per value head")                                                  \
  X(VECTOR_GATE, "a decay per key channel")                                                 \
  X(GATED, "any decay")                                                                     \
  X(GATE_IN_KERNEL, "g is the gate's raw input")                                            \
  X(HAS_A_LOG, "A_log is given")                                                            \
  X(HAS_DT_BIAS, "dt_bias is given")                                                        \
  X(LOWER_BOUND, "the gate's form is the bounded one")                                      \
  X(SAFE_GATE, "g >= -5, promised or by the gate's form")                                   \
  X(QK_L2NORM, "rows of q and k are multiplied by q_rstd and k_rstd")                       \
  X(BETA_SIGMOID, "beta is given as logits")                                                \
  X(NEG_EIGVAL, "with BETA_SIGMOID: twice the sigmoid")                                     \
  X(ERASE_WRITE, "elementwise gates, erase and write, replace beta")                        \
  X(INITIAL_STATE, "an initial state is given")                                             \
  X(FINAL_STATE, "the final state is written; backward: its gradient is given")             \
  X(STATE_V_FIRST, "the caller's states are V by K")                                        \
  X(KEEP_INVERSE, "fused templates that cover solve_tril also write Tinv")                  \
  X(KEEP_STATES, "slots of h that no chunk uses are written, as 0")                         \
  X(STATE_UNIT, "fp16: u, states and gradients of states are in units (device/state_unit.hpp)") \
  X(INPLACE_STATE, "states are read from and written to one pool")                          \
  X(STATE_INDEX, "state_index says which slot of the pool a sequence has")                  \
  X(OUTPUT_STATE_INDEX, "output_state_index says which slot its final state goes to")       \
  X(HAS_INITIAL_STATE, "has_initial_state says which sequences start from zeros")           \
  X(BATCH_INVARIANT, "a sequence's bits do not depend on the rest of the batch")            \
  X(CHECKPOINTS, "states inside sequences are written")                                     \
  X(CHECKPOINT_OFFSETS, "checkpoint_offsets says after how many tokens")                    \
  X(INDEX_COLUMNS, "state_index has a slot for each token of a sequence")                     \
  X(INTERMEDIATE_STATES, "recurrent: the state after each token is written")                  \
  X(PARENT, "parent says from which token's state each token starts")                       \
  X(STATE_SCALE, "elements of the pool are multiplied by state_scale")                      \
  X(KEEP_POOL, "the pool is read only")                                                       \
  X(OUTPUT_NORM, "rows of o are normalized and gated")                                        \
  X(NORM_SILU, "with OUTPUT_NORM: the gate is silu(norm_gate), else sigmoid(norm_gate)")      \
  X(SHORT_CONV, "q, k and v are convolved")                                                  \
  X(CONV_SILU, "convolved rows go through silu")                                              \
  X(HAS_CONV_BIAS, "conv_bias is given")                                                     \
  X(CONV_INITIAL, "rows before each sequence's first are given")                             \
  X(CONV_FINAL, "each sequence's last rows are written; backward: their gradient is given")   \
  X(CONV_INPLACE, "both are in slots of the pool conv_state")                                \
  X(CONV_TOKENS_FIRST, "slots of conv_state have channels side by side")                     \
  X(KEEP_OUTPUT, "with OUTPUT_NORM: o before the norm is written too")                        \
  X(SCALE_TOKENS_LAST, "o_scale has tokens side by side, not the scales of one")              \
  X(TRANSITION, "summaries hold M beside R")                                        \
  X(BACKWARDS, "gradients of states go through ranges from last to first")                  \
  X(SUMMARY, "maps of all segments are found, for a summary of their sequence")               \
  X(SEGMENTS_GIVEN, "maps of segments are given: no stage finds them")               \
  X(FIRST_STEP, "a per-token row belongs to its first step; else to its last")
#define WYVERN_INTEGER_TUNABLES(X)                                                          \
  X(BT, "tokens a chunk")                                                                   \
  X(BK, "columns of K a tile")                                                              \
  X(BV, "columns of V a tile or block")                                                     \
  X(BC, "columns a block, in templates without chunks")                                     \
  X(ROWS, "rows a block, in templates without chunks")                                      \
  X(SEG, "chunks a segment of a split scan")                                                \
  X(num_warps, "warps a block")                                                             \
  X(num_stages, "pipeline stages: buffers that tiles pass through")                         \
  X(min_blocks, "minimum of blocks a multiprocessor, which caps registers; 0: none")
// clang-format on

namespace wyvern {

/// What a problem sets. A plain value.
struct Constants {
#define WYVERN_MEMBER(name, meaning) std::int64_t name = 0;
  WYVERN_INTEGER_CONSTANTS(WYVERN_MEMBER)
#undef WYVERN_MEMBER
#define WYVERN_MEMBER(name, meaning) DType name = DType::fp32;
  WYVERN_TYPE_CONSTANTS(WYVERN_MEMBER)
#undef WYVERN_MEMBER
#define WYVERN_MEMBER(name, meaning) bool name = false;
  WYVERN_FLAG_CONSTANTS(WYVERN_MEMBER)
#undef WYVERN_MEMBER

  /// A copy with the named values replaced; throws Error(kBadInput) for an unknown name or a value
  /// of another kind.
  Constants with(const Values& values) const;
  /// All of them by name, for messages, JSON and artifacts.
  Values values() const;

  auto operator<=>(const Constants&) const = default;
};

/// The constants and the tunables of one specialized kernel. Tunables that its template does not
/// have are 0. Layouts of shared memory are functions of this on the host, and of a type with the
/// same members in the kernel.
struct Spec : Constants {
#define WYVERN_MEMBER(name, meaning) std::int64_t name = 0;
  WYVERN_INTEGER_TUNABLES(WYVERN_MEMBER)
#undef WYVERN_MEMBER
  Precision precision = Precision::ieee;

  Spec() = default;
  explicit Spec(const Constants& constants) : Constants(constants) {}
  Spec(const Constants& constants, const Config& config) : Constants(constants) { set(config); }

  /// Sets the config's values; names that are not tunables are ignored.
  void set(const Config& config);
};

/// One constant of type T by name.
template <class T>
struct Constant {
  std::string_view name;
  T Constants::* member;
  std::string_view meaning;
};
using AnyConstant = std::variant<Constant<std::int64_t>, Constant<DType>, Constant<bool>>;

namespace constant {
#define WYVERN_CONSTANT(name, meaning) \
  inline constexpr Constant<std::int64_t> name{#name, &Constants::name, meaning};
WYVERN_INTEGER_CONSTANTS(WYVERN_CONSTANT)
#undef WYVERN_CONSTANT
#define WYVERN_CONSTANT(name, meaning) \
  inline constexpr Constant<DType> name{#name, &Constants::name, meaning};
WYVERN_TYPE_CONSTANTS(WYVERN_CONSTANT)
#undef WYVERN_CONSTANT
#define WYVERN_CONSTANT(name, meaning) \
  inline constexpr Constant<bool> name{#name, &Constants::name, meaning};
WYVERN_FLAG_CONSTANTS(WYVERN_CONSTANT)
#undef WYVERN_CONSTANT
}  // namespace constant

/// Every constant, in the order of the table.
std::span<const AnyConstant> all_constants();
std::string_view name_of(const AnyConstant& constant);
Value value_of(const AnyConstant& constant, const Constants& constants);

/// One integer tunable by name; `precision` is the only other.
struct TunableName {
  std::string_view name;
  std::int64_t Spec::* member = nullptr;  ///< null for `precision`
  std::string_view meaning;
};

namespace tunable {
#define WYVERN_TUNABLE(name, meaning) \
  inline constexpr TunableName name{#name, &Spec::name, meaning};
WYVERN_INTEGER_TUNABLES(WYVERN_TUNABLE)
#undef WYVERN_TUNABLE
inline constexpr TunableName precision{"precision", nullptr,
                                       "of fp32 products and the triangular inverse"};
}  // namespace tunable

/// Every tunable that a template may have.
std::span<const TunableName> all_tunables();

/// The value of a tunable in a spec.
Value value_of(const TunableName& tunable, const Spec& spec);

}  // namespace wyvern
