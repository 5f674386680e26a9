#include "runtime/problem_fields.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <stdexcept>
#include <type_traits>
#include <vector>

namespace wyvern {
namespace {

using For = FieldOption::For;

constexpr std::int64_t kMostCount = std::int64_t{1} << 40;

constexpr FieldScope kForward{0b001}, kChunked{0b011}, kServing{0b101};
constexpr FieldScope kGated{0b111, [](const OperatorFacts& f) { return f.gated(); }};
constexpr FieldScope kOptionalGate{0b111, [](const OperatorFacts& f) { return f.optional_gate; }};
constexpr FieldScope kBounded{0b111, [](const OperatorFacts& f) { return f.lower_bound; }};
constexpr FieldScope kBeta{0b111, [](const OperatorFacts& f) { return f.beta; }};
constexpr FieldScope kCheckpoints{0b001, [](const OperatorFacts& f) { return !f.householder; }};
constexpr FieldScope kDecoding{0b100,
                               [](const OperatorFacts& f) { return f.beta && !f.householder; }};
/// Of all, but records of earlier versions lack the field, which has its default then.
constexpr FieldScope kLater{0b111, [](const OperatorFacts&) { return true; }};
constexpr FieldScope kHouseholder{0b111, [](const OperatorFacts& f) { return f.householder; }};

/// The least power of two at or above; 0 stays 0.
std::int64_t bucket(std::int64_t count) {
  return count <= 0 ? 0
                    : static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(count)));
}

bool has_states(const Problem& p) {
  return p.initial_state || p.output_final_state || p.inplace_state ||
         p.return_intermediate_states || has_checkpoints(p) || p.intermediate_rows;
}

bool always(const Problem&) { return true; }

bool gate_in_kernel(const Problem& p) {
  return p.use_gate_in_kernel && gate_kind(p) != GateKind::none;
}

std::string text_of_state_dtype(const Problem& p) { return std::string(to_string(p.state_dtype)); }
std::string text_of_index_dtype(const Problem& p) { return std::string(to_string(p.index_dtype)); }

// Distances (nearest_shape.hpp): states (given, output, their layout), what precedes the recurrence
// (norms, the gate and beta in the kernel, their dtypes), packed sequences, narrower plans.
constexpr double kState = 0.25, kInput = 0.5, kPacking = 1, kNarrowing = 0.5;

/// The rows are in the order of Problem. A new field's piece goes behind all others, so that no
/// existing key changes.
constexpr std::array kFields{
    ProblemField{
        .name = "op",
        .member = &Problem::op,
        .help = "the operator",
        .key = {1, "", "", always},
        .illegal = {[](Problem& p) { p.op = "softmax"; },
                    "op is 'softmax' .. delta_rule .. gated_delta_rule .. kda"},
        .shown_name = "operator"},
    ProblemField{.name = "pass",
                 .member = &Problem::pass,
                 .help = "forward, backward or recurrent (default forward)",
                 .option = {"--pass", For::every},
                 .key = {2, "/", "", always},
                 .illegal = {[](Problem& p) { p.pass = static_cast<Pass>(3); },
                             "pass is 3 .. forward (0), backward (1) or recurrent (2)"}},
    ProblemField{.name = "B",
                 .member = &Problem::B,
                 .help = "batch size",
                 .illegal = {[](Problem& p) { p.B = -1; }, "B is -1 .. between 0"}},
    ProblemField{.name = "T",
                 .member = &Problem::T,
                 .help = "tokens of a sequence, or of a packed batch",
                 .illegal = {[](Problem& p) { p.T = -1; }, "T is -1 .. between 0"}},
    ProblemField{.name = "H",
                 .member = &Problem::H,
                 .help = "query and key heads",
                 .key = {3, "/", "H", always},
                 .constant = constant::H,
                 .illegal = {[](Problem& p) { p.H = 0; }, "H is 0 .. between 1"}},
    ProblemField{.name = "HV",
                 .member = &Problem::HV,
                 .help = "value heads",
                 .key = {4, ",", "HV", always},
                 .constant = constant::HV,
                 .illegal = {[](Problem& p) { p.H = 2, p.HV = 3; },
                             "HV is 3 .. a multiple of H, which is 2"}},
    ProblemField{.name = "K",
                 .member = &Problem::K,
                 .help = "key dimension",
                 .key = {5, ",", "K", always},
                 .constant = constant::K,
                 .illegal = {[](Problem& p) { p.K = 257; }, "K is 257 .. between 1 and 256"}},
    ProblemField{.name = "V",
                 .member = &Problem::V,
                 .help = "value dimension",
                 .key = {6, ",", "V", always},
                 .constant = constant::V,
                 .illegal = {[](Problem& p) { p.V = 0; }, "V is 0 .. between 1"}},
    ProblemField{.name = "N",
                 .member = &Problem::N,
                 .help = "sequences",
                 .illegal = {[](Problem& p) { p.N = 3; }, "N is 3 .. equal to B, which is 1"}},
    // With the dtype of cu_seqlens: the dtype of an absent tensor makes no difference to any plan.
    ProblemField{.name = "packed",
                 .member = &Problem::packed,
                 .help = "sequences are packed, cu_seqlens is given",
                 .key = {12, "/", "packed", nullptr,
                         [](const Problem& p) { return std::string(to_string(p.seqlens_dtype)); }},
                 .distance = kPacking,
                 .constant = constant::VARLEN,
                 .illegal = {[](Problem& p) { p.packed = true, p.B = 2; },
                             "B is 2 .. 1 for a packed batch"}},
    ProblemField{.name = "num_householder",
                 .member = &Problem::num_householder,
                 .help = "steps of a token (default 1)",
                 .scope = kHouseholder,
                 .option = {"--num-householder", For::every, 1, 1024},
                 .key = {7, ",", "n"},
                 .constant = constant::STEPS,
                 .illegal = {[](Problem& p) { p.op = "gated_delta_product", p.num_householder = 0; },
                             "num_householder is 0 .. between 1 and 1024"}},
    ProblemField{.name = "dtype",
                 .member = &Problem::dtype,
                 .help = "of q, k, v and o: bf16, fp16 or fp32",
                 .key = {8, "/", "", always},
                 .constant = constant::DTYPE,
                 .illegal = {[](Problem& p) { p.dtype = DType::int32; },
                             "dtype is int32 .. bf16 or fp16 or fp32"}},
    ProblemField{.name = "beta_dtype",
                 .member = &Problem::beta_dtype,
                 .help = "of beta, or of erase and write",
                 .key = {9, ",", "beta", always},
                 .distance = kInput,
                 .constant = constant::BETA_DTYPE,
                 .illegal = {[](Problem& p) { p.beta_dtype = DType::fp16; },
                             "beta_dtype is fp16 .. bf16 or fp32"}},
    ProblemField{.name = "g_dtype",
                 .member = &Problem::g_dtype,
                 .help = "of g: bf16, fp16 or fp32 (default)",
                 .scope = kGated,
                 .option = {"--g-dtype", For::synthetic},
                 .key = {10, ",", "g", [](const Problem& p) { return gate_kind(p) != GateKind::none; }},
                 .distance = kInput,
                 .constant = constant::G_DTYPE,
                 .illegal = {[](Problem& p) { p.g_dtype = DType::fp16; },
                             "g_dtype is fp16 .. bf16 or fp32"}},
    ProblemField{.name = "state_dtype",
                 .member = &Problem::state_dtype,
                 .help = "of states that are given: fp32 (default), bf16, fp16; in place also "
                         "float8_e4m3, float8_e5m2",
                 .option = {"--state-dtype", For::synthetic},
                 .constant = constant::STATE_DTYPE,
                 .illegal = {[](Problem& p) { p.state_dtype = DType::float8_e4m3; },
                             "state_dtype is float8_e4m3 .. unless inplace_state is true"}},
    ProblemField{.name = "seqlens_dtype",
                 .member = &Problem::seqlens_dtype,
                 .help = "of cu_seqlens",
                 .constant = constant::SEQLENS_DTYPE,
                 .illegal = {[](Problem& p) { p.seqlens_dtype = DType::fp32; },
                             "seqlens_dtype is fp32 .. int32 or int64"}},
    ProblemField{.name = "scale",
                 .member = &Problem::scale,
                 .help = "factor on o (default K^-0.5)",
                 .option = {"--scale", For::every},
                 .illegal = {[](Problem& p) { p.scale = std::numeric_limits<float>::infinity(); },
                             "scale is inf .. finite"},
                 .shown = [](const Problem& p) -> FieldValue { return scale_of(p); }},
    ProblemField{
        .name = "precision",
        .member = &Problem::precision,
        .help = "floor of fp32 products: ieee, tf32x3 (default for fp32) or tf32",
        .option = {"--precision", For::every},
        .key = {11, "/", "floor", always,
                [](const Problem& p) { return std::string(to_string(precision_floor(p))); }},
        .illegal = {[](Problem& p) { p.precision = static_cast<Precision>(3); },
                    "precision is 3 .. tf32 (0), tf32x3 (1) or ieee (2)"},
        .shown = [](const Problem& p) -> FieldValue {
          return std::string(to_string(precision_floor(p)));
        }},
    ProblemField{.name = "lower_bound",
                 .member = &Problem::lower_bound,
                 .help = "of the gate, in [-5, 0); none: not even a preset's",
                 .scope = kBounded,
                 .option = {"--lower-bound", For::every},
                 .key = {19, ",", "bounded",
                         [](const Problem& p) { return p.use_gate_in_kernel && p.lower_bound; },
                         [](const Problem&) { return std::string(); }},
                 .constant = constant::LOWER_BOUND,
                 .flag = [](const Problem& p) { return gate_in_kernel(p) && p.lower_bound; },
                 .illegal = {[](Problem& p) { p.op = "kda", p.lower_bound = -6.0F; },
                             "lower_bound is -6 .. in [-5, 0)"}},
    ProblemField{.name = "safe_gate",
                 .member = &Problem::safe_gate,
                 .help = "promises g >= the lower bound",
                 .scope = kBounded,
                 .option = {"--safe-gate", For::every},
                 .key = {21, "/", "safe_gate",
                         [](const Problem& p) {
                           return !p.use_gate_in_kernel && gate_is_bounded(p);
                         }},
                 .constant = constant::SAFE_GATE,
                 .flag = gate_is_bounded,
                 .illegal = {[](Problem& p) { p.op = "kda", p.safe_gate = true; },
                             "safe_gate is true .. lower_bound"}},
    ProblemField{.name = "use_qk_l2norm",
                 .member = &Problem::use_qk_l2norm,
                 .help = "normalize the rows of q and k (=false where a preset would)",
                 .option = {"--use-qk-l2norm", For::every},
                 .key = {16, "/", "qk_l2norm"},
                 .distance = kInput,
                 .constant = constant::QK_L2NORM},
    ProblemField{.name = "use_gate_in_kernel",
                 .member = &Problem::use_gate_in_kernel,
                 .help = "g is the raw gate input; needs A_log (=false where a preset would)",
                 .scope = kGated,
                 .option = {"--use-gate-in-kernel", For::every},
                 .key = {17, "/", "gate"},
                 .distance = kInput,
                 .constant = constant::GATE_IN_KERNEL,
                 .flag = gate_in_kernel,
                 .illegal = {[](Problem& p) { p.op = "delta_rule", p.use_gate_in_kernel = true; },
                             "use_gate_in_kernel is true .. false for delta_rule; only"}},
    ProblemField{.name = "has_g",
                 .member = &Problem::has_g,
                 .help = "g is absent: no decay",
                 .scope = kOptionalGate,
                 .option = {"--no-g", For::synthetic},
                 .illegal = {[](Problem& p) { p.has_g = false; }, "has_g is false .. g is missing"},
                 .shown = [](const Problem& p) -> FieldValue {
                   return gate_kind(p) != GateKind::none;
                 }},
    ProblemField{.name = "has_A_log",
                 .member = &Problem::has_A_log,
                 .help = "A_log is absent; needs --lower-bound",
                 .scope = kGated,
                 .option = {"--no-A-log", For::synthetic},
                 .key = {20, ",", "no_A_log",
                         [](const Problem& p) {
                           return p.use_gate_in_kernel && p.lower_bound && !p.has_A_log;
                         }},
                 .distance = kInput,
                 .constant = constant::HAS_A_LOG,
                 .flag = [](const Problem& p) { return gate_in_kernel(p) && p.has_A_log; },
                 .illegal = {[](Problem& p) { p.use_gate_in_kernel = true, p.has_A_log = false; },
                             "has_A_log is false .. lower_bound"},
                 .shown = [](const Problem& p) -> FieldValue {
                   return p.use_gate_in_kernel && p.has_A_log;
                 }},
    ProblemField{.name = "has_dt_bias",
                 .member = &Problem::has_dt_bias,
                 .help = "dt_bias is absent",
                 .scope = kGated,
                 .option = {"--no-dt-bias", For::synthetic},
                 .key = {18, ",", "dt_bias",
                         [](const Problem& p) { return p.use_gate_in_kernel && p.has_dt_bias; }},
                 .distance = kInput,
                 .constant = constant::HAS_DT_BIAS,
                 .illegal = {[](Problem& p) { p.has_dt_bias = true; },
                             "has_dt_bias is true .. use_gate_in_kernel"}},
    ProblemField{.name = "use_beta_sigmoid",
                 .member = &Problem::use_beta_sigmoid,
                 .help = "beta are logits",
                 .scope = kBeta,
                 .option = {"--use-beta-sigmoid", For::every},
                 .key = {22, "/", "beta_sigmoid"},
                 .distance = kInput,
                 .constant = constant::BETA_SIGMOID,
                 .illegal = {[](Problem& p) { p.op = "gdn2", p.use_beta_sigmoid = true; },
                             "use_beta_sigmoid is true .. false for gdn2; only"}},
    ProblemField{.name = "allow_neg_eigval",
                 .member = &Problem::allow_neg_eigval,
                 .help = "beta is 2 sigmoid(beta); needs --use-beta-sigmoid",
                 .scope = kBeta,
                 .option = {"--allow-neg-eigval", For::every},
                 .key = {23, ",", "neg",
                         [](const Problem& p) { return p.use_beta_sigmoid && p.allow_neg_eigval; }},
                 .distance = kInput,
                 .constant = constant::NEG_EIGVAL,
                 .flag = [](const Problem& p) { return p.use_beta_sigmoid && p.allow_neg_eigval; },
                 .illegal = {[](Problem& p) { p.op = "gdn2", p.allow_neg_eigval = true; },
                             "allow_neg_eigval is true .. false for gdn2; only"}},
    ProblemField{.name = "initial_state",
                 .member = &Problem::initial_state,
                 .help = "an initial state is given",
                 .key = {13, "/", "initial_state", nullptr, text_of_state_dtype},
                 .distance = kState,
                 .constant = constant::INITIAL_STATE},
    ProblemField{.name = "output_final_state",
                 .member = &Problem::output_final_state,
                 .help = "the final state is wanted; backward: dht is given",
                 .key = {14, "/", "final_state"},
                 .distance = kState,
                 .constant = constant::FINAL_STATE,
                 .illegal = {[](Problem& p) { p.output_final_state = p.inplace_state = true; },
                             "output_final_state is true .. inplace_state"}},
    ProblemField{.name = "state_v_first",
                 .member = &Problem::state_v_first,
                 .help = "states are [N,HV,V,K]",
                 .option = {"--state-v-first", For::every},
                 .key = {15, "/", "state_v_first",
                         [](const Problem& p) { return p.state_v_first && has_states(p); }},
                 .distance = kState,
                 .constant = constant::STATE_V_FIRST},
    ProblemField{.name = "batch_invariant",
                 .member = &Problem::batch_invariant,
                 .help = "a sequence's bits do not depend on the rest of the batch or on tuning",
                 .scope = kServing,
                 .option = {"--batch-invariant", For::every},
                 .key = {29, "/", "batch_invariant"},
                 .constant = constant::BATCH_INVARIANT,
                 .illegal = {[](Problem& p) { p.pass = Pass::backward, p.batch_invariant = true; },
                             "batch_invariant is true .. false for the backward pass"}},
    ProblemField{.name = "chunk_size",
                 .member = &Problem::chunk_size,
                 .help = "16, 32, 64 or 128 (default: tuned)",
                 .option = {"--chunk-size", For::every, 16, 128},
                 .key = {24, "/", "chunk_size"},
                 .distance = kNarrowing,
                 .narrows = true,
                 .illegal = {[](Problem& p) { p.chunk_size = 48; },
                             "chunk_size is 48 .. 16, 32, 64 or 128"}},
    ProblemField{
        .name = "disable_recompute",
        .member = &Problem::disable_recompute,
        .help = "the forward pass returns intermediates that the backward pass would recompute",
        .scope = kChunked,
        .option = {"--disable-recompute", For::every},
        .key = {25, "/", "kept"},
        .distance = kNarrowing,
        .narrows = true,
        .illegal = {[](Problem& p) { p.pass = Pass::recurrent, p.disable_recompute = true; },
                    "disable_recompute is true .. false for the recurrent pass"}},
    ProblemField{
        .name = "return_intermediate_states",
        .member = &Problem::return_intermediate_states,
        .help = "the forward pass returns the state that enters every chunk",
        .scope = kChunked,
        .option = {"--return-intermediate-states", For::every},
        .key = {26, "/", "intermediate_states"},
        .distance = kNarrowing,
        .narrows = true,
        .illegal = {[](Problem& p) { p.disable_recompute = p.return_intermediate_states = true; },
                    "return_intermediate_states is true .. disable_recompute"}},
    // With sequences about as long as the mean, plans are the same as without a hint.
    ProblemField{.name = "seqlens_hint",
                 .member = &Problem::seqlens_hint,
                 .help = "tokens of the longest sequence of a packed batch, for the plan alone",
                 .scope = kChunked,
                 .option = {"--seqlens-hint", For::every, 0, kMostCount},
                 .key = {39, "/", "longest",
                         [](const Problem& p) {
                           const std::int64_t mean = p.N > 0 ? (p.B * p.T + p.N - 1) / p.N : 0;
                           return 2 * longest_sequence(p) >= 3 * mean && mean > 0;
                         },
                         [](const Problem& p) {
                           return std::to_string(bucket(longest_sequence(p)));
                         }},
                 .illegal = {[](Problem& p) { p.seqlens_hint = 4; },
                             "seqlens_hint is 4 .. absent unless the batch is packed"}},
    ProblemField{.name = "inplace_state",
                 .member = &Problem::inplace_state,
                 .help = "the state is read from and written to `state`",
                 .scope = kServing,
                 .option = {"--inplace-state", For::every},
                 .key = {27, "/", "inplace", nullptr, text_of_state_dtype},
                 .distance = kState,
                 .constant = constant::INPLACE_STATE,
                 .illegal = {[](Problem& p) { p.pass = Pass::backward, p.inplace_state = true; },
                             "inplace_state is true .. false for the backward pass"}},
    ProblemField{.name = "state_index",
                 .member = &Problem::state_index,
                 .help = "states are slots of a pool",
                 .scope = kServing,
                 .key = {28, "/", "state_index", nullptr, text_of_index_dtype},
                 .distance = kState,
                 .constant = constant::STATE_INDEX,
                 .illegal = {[](Problem& p) { p.initial_state = p.state_index = true; },
                             "state_index is true .. unless inplace_state"}},
    ProblemField{.name = "output_state_index",
                 .member = &Problem::output_state_index,
                 .help = "final states go to slots of their own",
                 .scope = kServing,
                 .key = {30, "/", "output_state_index"},
                 .distance = kState,
                 .constant = constant::OUTPUT_STATE_INDEX,
                 .illegal = {[](Problem& p) { p.inplace_state = p.output_state_index = true; },
                             "output_state_index is true .. state_index and inplace_state"}},
    // Without a piece of the key: it is a parameter of launches.
    ProblemField{.name = "null_slot_zero",
                 .member = &Problem::null_slot_zero,
                 .help = "index 0 is none of a slot, as those below 0",
                 .scope = kServing,
                 .option = {"--null-slot-zero", For::every},
                 .illegal = {[](Problem& p) { p.inplace_state = p.null_slot_zero = true; },
                             "null_slot_zero is true .. state_index"}},
    ProblemField{.name = "has_initial_state",
                 .member = &Problem::has_initial_state,
                 .help = "a tensor says which sequences start from zeros",
                 .scope = kServing,
                 .key = {31, "/", "has_initial_state"},
                 .distance = kState,
                 .constant = constant::HAS_INITIAL_STATE,
                 .illegal = {[](Problem& p) { p.initial_state = p.has_initial_state = true; },
                             "has_initial_state is true .. inplace_state"}},
    ProblemField{.name = "state_slots",
                 .member = &Problem::state_slots,
                 .help = "slots of a pool of states that an index tensor points into",
                 .scope = kServing,
                 .option = {"--state-index", For::synthetic, 1, kMostCount},
                 .illegal = {[](Problem& p) {
                               p.inplace_state = p.state_index = true, p.state_slots = -1;
                             },
                             "state_slots is -1 .. between 0"},
                 .shown = [](const Problem& p) -> FieldValue {
                   return p.state_index ? FieldValue(p.state_slots) : FieldValue();
                 }},
    ProblemField{.name = "index_dtype",
                 .member = &Problem::index_dtype,
                 .help = "of the index tensors",
                 .scope = kServing,
                 .constant = constant::INDEX_DTYPE,
                 .illegal = {[](Problem& p) { p.index_dtype = DType::fp32; },
                             "index_dtype is fp32 .. int32 or int64"}},
    // Counts of columns and rows belong to a launch; the pieces only say that there are some.
    ProblemField{.name = "index_columns",
                 .member = &Problem::index_columns,
                 .help = "columns of state_index: a slot for each token's state",
                 .scope = kDecoding,
                 .option = {"--index-columns", For::synthetic, 1, kMostCount},
                 .key = {35, "/", "index_columns", nullptr,
                         [](const Problem&) { return std::string(); }},
                 .distance = kState,
                 .constant = constant::INDEX_COLUMNS,
                 .illegal = {[](Problem& p) { p.index_columns = 4; },
                             "index_columns is 4 .. 0 for the forward pass"}},
    ProblemField{.name = "intermediate_rows",
                 .member = &Problem::intermediate_rows,
                 .help = "rows of intermediate_states, for the states after each token",
                 .scope = kDecoding,
                 .option = {"--intermediate-rows", For::synthetic, 1, kMostCount},
                 .key = {36, "/", "token_states", nullptr,
                         [](const Problem& p) {
                           return fmt::format("{}:{}", to_string(p.state_dtype),
                                              to_string(p.index_dtype));
                         }},
                 .distance = kState,
                 .constant = constant::INTERMEDIATE_STATES,
                 .illegal = {[](Problem& p) { p.intermediate_rows = 4; },
                             "intermediate_rows is 4 .. absent for the forward pass"}},
    ProblemField{.name = "draft_tokens",
                 .member = &Problem::draft_tokens,
                 .help = "tokens a row of intermediate_states and of parent",
                 .scope = kDecoding,
                 .option = {"--draft-tokens", For::synthetic, 1, 16},
                 .illegal = {[](Problem& p) { p.draft_tokens = 2; },
                             "draft_tokens is 2 .. absent unless intermediate_rows is set"}},
    ProblemField{.name = "parent",
                 .member = &Problem::parent,
                 .help = "a tensor says which token each token goes on from",
                 .scope = kDecoding,
                 .option = {"--draft-tree", For::synthetic},
                 .key = {37, "/", "parent"},
                 .distance = kState,
                 .constant = constant::PARENT,
                 .illegal = {[](Problem& p) { p.parent = true; },
                             "parent is true .. false for the forward pass"}},
    ProblemField{
        .name = "disable_state_update",
        .member = &Problem::disable_state_update,
        .help = "`state` is read, not written",
        .scope = kDecoding,
        .option = {"--disable-state-update", For::every},
        .key = {38, "/", "disable_state_update"},
        .distance = kState,
        .constant = constant::KEEP_POOL,
        .illegal = {[](Problem& p) { p.pass = Pass::recurrent, p.disable_state_update = true; },
                    "disable_state_update is true .. inplace_state"}},
    ProblemField{.name = "output_norm",
                 .member = &Problem::output_norm,
                 .help = "RMSNorm of each head's o, gated by silu or sigmoid of norm_gate",
                 .option = {"--output-norm", For::every},
                 .key = {40, "/", "output_norm"},
                 .distance = kInput,
                 .constant = constant::OUTPUT_NORM,
                 .illegal = {[](Problem& p) { p.output_norm = static_cast<Activation>(7); },
                             "output_norm is 7 .. silu (0) or sigmoid (1)"}},
    ProblemField{.name = "norm_eps",
                 .member = &Problem::norm_eps,
                 .help = "beside the mean square of that norm (default 1e-6)",
                 .option = {"--norm-eps", For::every},
                 .illegal = {[](Problem& p) { p.norm_eps = 0.1F; },
                             "norm_eps is 0.1 .. output_norm is set"}},
    ProblemField{
        .name = "keep_output",
        .member = &Problem::keep_output,
        .help = "o before that norm is returned too, for the backward pass",
        .scope = kForward,
        .option = {"--keep-output", For::every},
        .key = {41, "/", "keep_output"},
        .distance = kState,
        .constant = constant::KEEP_OUTPUT,
        .illegal = {[](Problem& p) { p.keep_output = true; },
                    "keep_output is true .. false unless output_norm is set"}},
    ProblemField{.name = "output_dtype",
                 .member = &Problem::output_dtype,
                 .help = "float8_e4m3: o is quantized, with a scale for 128 columns",
                 .scope = kServing,
                 .option = {"--output-dtype", For::every},
                 .key = {54, "/", "output"},
                 .illegal = {[](Problem& p) { p.output_dtype = DType::float8_e4m3; },
                             "output_dtype is float8_e4m3 .. absent unless output_norm is set"}},
    ProblemField{.name = "output_scale_tokens_last",
                 .member = &Problem::output_scale_tokens_last,
                 .help = "those scales have tokens side by side, not the scales of one",
                 .scope = kServing,
                 .option = {"--output-scale-tokens-last", For::every},
                 .key = {55, ",", "tokens_last"},
                 .distance = kState,
                 .constant = constant::SCALE_TOKENS_LAST,
                 .illegal = {[](Problem& p) { p.output_scale_tokens_last = true; },
                             "output_scale_tokens_last is true .. output_dtype is float8_e4m3"}},
    ProblemField{.name = "short_conv",
                 .member = &Problem::short_conv,
                 .help = "q, k and v are convolved by 2 to 4 weights a channel before all else",
                 .option = {"--short-conv", For::every, 2, 4},
                 .key = {42, "/", "short_conv"},
                 .distance = kInput,
                 .constant = constant::SHORT_CONV,
                 .flag = [](const Problem& p) { return p.short_conv.has_value(); },
                 .illegal = {[](Problem& p) { p.short_conv = 5; },
                             "short_conv is 5 .. between 2 and 4"}},
    ProblemField{.name = "conv_activation",
                 .member = &Problem::conv_activation,
                 .help = "of convolved rows: silu (default) or none",
                 .option = {"--conv-activation", For::every},
                 .key = {43, ",", "activation",
                         [](const Problem& p) {
                           return p.short_conv && p.conv_activation == Activation::none;
                         }},
                 .distance = kInput,
                 .constant = constant::CONV_SILU,
                 .flag = [](const Problem& p) { return p.conv_activation != Activation::none; },
                 .illegal = {[](Problem& p) { p.conv_activation = Activation::none; },
                             "conv_activation is none .. absent unless short_conv is set"}},
    ProblemField{.name = "has_conv_bias",
                 .member = &Problem::has_conv_bias,
                 .help = "that convolution has a bias",
                 .option = {"--conv-bias", For::synthetic},
                 .key = {44, ",", "bias"},
                 .distance = kInput,
                 .constant = constant::HAS_CONV_BIAS,
                 .illegal = {[](Problem& p) { p.has_conv_bias = true; },
                             "has_conv_bias is true .. false unless short_conv is set"}},
    ProblemField{.name = "conv_dtype",
                 .member = &Problem::conv_dtype,
                 .help = "of its weights and bias: fp32 (default) or that of q",
                 .scope = kLater,
                 .option = {"--conv-dtype", For::synthetic},
                 .key = {45, ",", "weight",
                         [](const Problem& p) {
                           return p.short_conv && p.conv_dtype != DType::fp32;
                         }},
                 .distance = kInput,
                 .constant = constant::CONV_DTYPE,
                 .illegal = {[](Problem& p) { p.short_conv = 4, p.conv_dtype = DType::fp16; },
                             "conv_dtype is fp16 .. bf16 or fp32"}},
    ProblemField{.name = "initial_conv_state",
                 .member = &Problem::initial_conv_state,
                 .help = "the rows before each sequence's first are given",
                 .key = {46, "/", "initial_conv_state"},
                 .distance = kState,
                 .constant = constant::CONV_INITIAL,
                 .illegal = {[](Problem& p) { p.initial_conv_state = true; },
                             "initial_conv_state is true .. false unless short_conv is set"}},
    ProblemField{.name = "output_conv_state",
                 .member = &Problem::output_conv_state,
                 .help = "the rows that the convolution goes on from are wanted",
                 .key = {47, "/", "final_conv_state"},
                 .distance = kState,
                 .constant = constant::CONV_FINAL,
                 .illegal = {[](Problem& p) { p.output_conv_state = true; },
                             "output_conv_state is true .. false unless short_conv is set"}},
    ProblemField{.name = "inplace_conv_state",
                 .member = &Problem::inplace_conv_state,
                 .help = "both are in slots of the pool conv_state, beside those of `state`",
                 .scope = kServing,
                 .key = {50, "/", "inplace_conv"},
                 .distance = kState,
                 .constant = constant::CONV_INPLACE,
                 .illegal = {[](Problem& p) { p.short_conv = 4, p.inplace_conv_state = true; },
                             "inplace_conv_state is true .. false unless inplace_state is true"}},
    ProblemField{.name = "conv_columns",
                 .member = &Problem::conv_columns,
                 .help = "rows that a slot of conv_state has room for (default: those in use)",
                 .scope = kServing,
                 .option = {"--conv-columns", For::every, 1, 1 << 20},
                 .key = {51, ",", "columns",
                         [](const Problem& p) {
                           return p.inplace_conv_state &&
                                  conv_columns_of(p) >= p.short_conv.value_or(0);
                         },
                         [](const Problem& p) { return std::to_string(conv_columns_of(p)); }},
                 .distance = kState,
                 .illegal = {[](Problem& p) { p.conv_columns = 3; },
                             "conv_columns is 3 .. absent unless inplace_conv_state is true"}},
    ProblemField{
        .name = "conv_tokens_first",
        .member = &Problem::conv_tokens_first,
        .help = "slots of conv_state have channels side by side",
        .scope = kServing,
        .option = {"--conv-tokens-first", For::every},
        .key = {52, ",", "tokens_first"},
        .distance = kState,
        .constant = constant::CONV_TOKENS_FIRST,
        .illegal = {[](Problem& p) { p.conv_tokens_first = true; },
                    "conv_tokens_first is true .. false unless inplace_conv_state is true"}},
    ProblemField{
        .name = "checkpoint_every",
        .member = &Problem::checkpoint_every,
        .help = "the state after every so many tokens, a multiple of 64, is written",
        .scope = kCheckpoints,
        .option = {"--checkpoint-every", For::every, 64, kMostCount},
        .key = {32, "/", "checkpoint_every"},
        .distance = kState,
        .constant = constant::CHECKPOINT_EVERY,
        .illegal = {[](Problem& p) { p.checkpoint_every = 96; },
                    "checkpoint_every is 96 .. multiple of 64"}},
    ProblemField{
        .name = "checkpoint_offsets",
        .member = &Problem::checkpoint_offsets,
        .help = "a tensor says after how many tokens of each sequence its state is written",
        .scope = kCheckpoints,
        .option = {"--checkpoint-offsets", For::synthetic},
        .key = {33, "/", "checkpoint_offsets", nullptr, text_of_index_dtype},
        .distance = kState,
        .constant = constant::CHECKPOINT_OFFSETS,
        .illegal = {[](Problem& p) { p.pass = Pass::recurrent, p.checkpoint_offsets = true; },
                    "checkpoint_offsets is true .. false for the recurrent pass"}},
    // No plan depends on the number of rows: the piece only says that there are some.
    ProblemField{.name = "checkpoint_rows",
                 .member = &Problem::checkpoint_rows,
                 .help = "rows of checkpoints with checkpoint_every",
                 .scope = kCheckpoints,
                 .key = {34, "/", "checkpoints", has_checkpoints,
                         [](const Problem& p) { return std::string(to_string(checkpoint_dtype(p))); }},
                 .distance = 0,
                 .illegal = {[](Problem& p) { p.checkpoint_rows = 3; },
                             "checkpoint_rows is 3 .. checkpoint_every"}},
    ProblemField{.name = "fp32_checkpoints",
                 .member = &Problem::fp32_checkpoints,
                 .help = "states that are written inside sequences are fp32, whatever the others are",
                 .scope = kCheckpoints,
                 .option = {"--fp32-checkpoints", For::synthetic},
                 .illegal = {[](Problem& p) { p.fp32_checkpoints = true; },
                             "fp32_checkpoints is true .. checkpoint_every and checkpoint_offsets"}},
    ProblemField{.name = "summary",
                 .member = &Problem::summary,
                 .help = "what sequences do to a state, S -> M S + R, is the only output",
                 .scope = kChunked,
                 .option = {"--summary", For::every},
                 .key = {48, "/", "summary"},
                 .constant = constant::SUMMARY,
                 .illegal = {[](Problem& p) { p.summary = p.batch_invariant = true; },
                             "summary is true .. false with batch_invariant"}},
    ProblemField{.name = "transition",
                 .member = &Problem::transition,
                 .help = "the summary has M beside R; needs --summary",
                 .scope = kForward,
                 .option = {"--transition", For::every},
                 .key = {49, ",", "transition"},
                 .distance = kState,
                 .constant = constant::TRANSITION,
                 .illegal = {[](Problem& p) { p.transition = true; },
                             "transition is true .. false unless summary is true"}},
    ProblemField{
        .name = "segment_chunks",
        .member = &Problem::segment_chunks,
        .help = "chunks of segments whose maps --summary returns, and the pass without it takes; "
                "needs --chunk-size",
        .scope = kForward,
        .option = {"--segment-chunks", For::every, 8, 32},
        .key = {53, "/", "segments"},
        .constant = constant::SEGMENTS_GIVEN,
        .flag = [](const Problem& p) { return p.segment_chunks && !p.summary; },
        .illegal = {[](Problem& p) { p.segment_chunks = 16; },
                    "segment_chunks is 16 .. absent unless chunk_size is set"}},
};

/// The pieces of the key, in their places.
std::vector<const ProblemField*> key_fields() {
  std::vector<const ProblemField*> fields;
  for (const ProblemField& field : kFields)
    if (field.key.place != 0) fields.push_back(&field);
  std::sort(fields.begin(), fields.end(), [](const ProblemField* a, const ProblemField* b) {
    return a->key.place < b->key.place;
  });
  return fields;
}

template <class T>
std::string text_of(const T& value) {
  if constexpr (std::is_enum_v<T>)
    return std::string(to_string(value));
  else
    return fmt::format("{}", value);
}
template <class T>
std::string text_of(const std::optional<T>& value) {
  return value ? text_of(*value) : std::string();
}

}  // namespace

std::span<const ProblemField> problem_fields() { return kFields; }

const ProblemField& problem_field(std::string_view name) {
  const auto found = std::find_if(kFields.begin(), kFields.end(),
                                  [&](const ProblemField& field) { return field.name == name; });
  if (found == kFields.end()) throw std::out_of_range(fmt::format("no field '{}'", name));
  return *found;
}

bool is_set(const ProblemField& field, const Problem& problem) {
  static const Problem& unset = *new Problem;  // never destroyed, as all that threads may ask for
  return std::visit([&](auto member) { return problem.*member != unset.*member; }, field.member);
}

bool applies(const ProblemField& field, const OperatorFacts& op, Pass pass) {
  const bool has_pass = ((field.scope.passes >> static_cast<int>(pass)) & 1) != 0;
  return has_pass && (field.scope.has == nullptr || field.scope.has(op));
}

std::string scope_text(const FieldScope& scope) {
  std::vector<std::string_view> passes, names;
  for (const Pass pass : {Pass::forward, Pass::backward, Pass::recurrent})
    if (((scope.passes >> static_cast<int>(pass)) & 1) != 0) passes.push_back(to_string(pass));
  for (const OperatorDefinition* definition : operator_definitions())
    if (scope.has == nullptr || scope.has(definition->facts()))
      names.push_back(definition->facts().name);
  std::string text;
  if (names.empty()) return "of no operator of this build";
  if (names.size() < operator_definitions().size())
    text = fmt::format("{} only", fmt::join(names, ", "));
  if (passes.size() < 3)
    text += fmt::format("{}{} only", text.empty() ? "" : "; ", fmt::join(passes, ", "));
  return text;
}

std::string field_text(const ProblemField& field, const Problem& problem) {
  return visit_field(field, problem, [](const auto& value) { return text_of(value); });
}

void set_constants(const Problem& problem, Constants& constants) {
  for (const ProblemField& field : kFields) {
    if (!field.constant) continue;
    std::visit(
        [&]<class T>(const Constant<T>& constant) {
          if constexpr (std::is_same_v<T, bool>)
            constants.*constant.member =
                field.flag != nullptr ? field.flag(problem) : is_set(field, problem);
          else
            constants.*constant.member = problem.*std::get<T Problem::*>(field.member);
        },
        *field.constant);
  }
}

std::string ProblemKey::to_string() const {
  return fmt::format("{}/tokens={}/sequences={}", family, tokens, sequences);
}

ProblemKey problem_key(const Problem& problem) {
  // Never destroyed: the last threads may prepare while the process ends.
  static const auto& fields = *new std::vector<const ProblemField*>(key_fields());
  std::string family;
  family.reserve(160);
  for (const ProblemField* field : fields) {
    const FieldKey& key = field->key;
    if (!(key.when != nullptr ? key.when(problem) : is_set(*field, problem))) continue;
    (family += key.before) += key.name;
    const bool flag = std::holds_alternative<bool Problem::*>(field->member);
    const std::string value = key.value != nullptr ? key.value(problem)
                              : flag               ? std::string()
                                                   : field_text(*field, problem);
    if (!value.empty() && !key.name.empty()) family += '=';
    family += value;
  }
  return {std::move(family), bucket(problem.B * problem.T), bucket(problem.N)};
}

}  // namespace wyvern
