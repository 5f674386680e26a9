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

constexpr FieldOption kNoOption{};
constexpr FieldScope kEverywhere{}, kChunked{0b011}, kRecurrent{0b100}, kServing{0b101};
constexpr FieldScope kGated{0b111, [](const OperatorFacts& f) { return f.gated(); }};
constexpr FieldScope kOptionalGate{0b111, [](const OperatorFacts& f) { return f.optional_gate; }};
constexpr FieldScope kBounded{0b111, [](const OperatorFacts& f) { return f.lower_bound; }};
constexpr FieldScope kBeta{0b111, [](const OperatorFacts& f) { return f.beta; }};
constexpr FieldScope kCheckpoints{0b001, [](const OperatorFacts& f) { return !f.householder; }};
/// Drafts, and the norm of o.
constexpr FieldScope kDecoding{0b100,
                               [](const OperatorFacts& f) { return f.beta && !f.householder; }};
constexpr FieldScope kHouseholder{0b111, [](const OperatorFacts& f) { return f.householder; }};

/// Appends a label and its value.
void append(std::string& key, std::string_view label, std::string_view value) {
  key += label;
  key += value;
}
void append(std::string& key, std::string_view label, std::int64_t value) {
  const fmt::format_int digits(value);
  append(key, label, std::string_view(digits.data(), digits.size()));
}

/// The least power of two at or above; 0 stays 0.
std::int64_t bucket(std::int64_t count) {
  return count <= 0 ? 0
                    : static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(count)));
}

bool has_states(const Problem& p) {
  return p.initial_state || p.output_final_state || p.inplace_state ||
         p.return_intermediate_states || has_checkpoints(p) || p.intermediate_rows;
}

using Key = std::string&;

/// The rows are in the order of Problem; a piece of the key stands where its place says, so that a
/// new field changes no existing key.
const std::array kFields{
    ProblemField{"op", &Problem::op, "the operator", kEverywhere, kNoOption, 1,
                 [](const Problem& p, Key key) { key += p.op; }, "operator"},
    ProblemField{"pass",
                 &Problem::pass,
                 "forward, backward or recurrent (default forward)",
                 kEverywhere,
                 {"--pass", For::every},
                 2,
                 [](const Problem& p, Key key) { append(key, "/", to_string(p.pass)); }},
    ProblemField{"B", &Problem::B, "batch size"},
    ProblemField{"T", &Problem::T, "tokens of a sequence, or of a packed batch"},
    ProblemField{"H", &Problem::H, "query and key heads", kEverywhere, kNoOption, 3,
                 [](const Problem& p, Key key) { append(key, "/H=", p.H); }},
    ProblemField{"HV", &Problem::HV, "value heads", kEverywhere, kNoOption, 4,
                 [](const Problem& p, Key key) { append(key, ",HV=", p.HV); }},
    ProblemField{"K", &Problem::K, "key dimension", kEverywhere, kNoOption, 5,
                 [](const Problem& p, Key key) { append(key, ",K=", p.K); }},
    ProblemField{"V", &Problem::V, "value dimension", kEverywhere, kNoOption, 6,
                 [](const Problem& p, Key key) { append(key, ",V=", p.V); }},
    ProblemField{"N", &Problem::N, "sequences"},
    // With the dtype of cu_seqlens: the dtype of an absent tensor makes no difference to any plan.
    ProblemField{"packed", &Problem::packed, "sequences are packed, cu_seqlens is given",
                 kEverywhere, kNoOption, 12,
                 [](const Problem& p, Key key) {
                   if (p.packed) append(key, "/packed=", to_string(p.seqlens_dtype));
                 }},
    ProblemField{"num_householder",
                 &Problem::num_householder,
                 "steps of a token (default 1)",
                 kHouseholder,
                 {"--num-householder", For::every, 1, 1024},
                 7,
                 [](const Problem& p, Key key) {
                   if (p.num_householder != 1) append(key, ",n=", p.num_householder);
                 }},
    ProblemField{"dtype", &Problem::dtype, "of q, k, v and o: bf16, fp16 or fp32", kEverywhere,
                 kNoOption, 8,
                 [](const Problem& p, Key key) { append(key, "/", to_string(p.dtype)); }},
    ProblemField{"beta_dtype", &Problem::beta_dtype, "of beta, or of erase and write", kEverywhere,
                 kNoOption, 9,
                 [](const Problem& p, Key key) { append(key, ",beta=", to_string(p.beta_dtype)); }},
    ProblemField{"g_dtype",
                 &Problem::g_dtype,
                 "of g: bf16, fp16 or fp32 (default)",
                 kGated,
                 {"--g-dtype", For::synthetic},
                 10,
                 [](const Problem& p, Key key) {
                   if (gate_kind(p) != GateKind::none) append(key, ",g=", to_string(p.g_dtype));
                 }},
    ProblemField{"state_dtype",
                 &Problem::state_dtype,
                 "of states that are given: fp32 (default), bf16, fp16; in place also float8_e4m3, "
                 "float8_e5m2",
                 kEverywhere,
                 {"--state-dtype", For::synthetic}},
    ProblemField{"seqlens_dtype", &Problem::seqlens_dtype, "of cu_seqlens"},
    ProblemField{"scale",
                 &Problem::scale,
                 "factor on o (default K^-0.5)",
                 kEverywhere,
                 {"--scale", For::every},
                 0,
                 nullptr,
                 {},
                 [](const Problem& p) -> FieldValue { return scale_of(p); }},
    ProblemField{
        "precision",
        &Problem::precision,
        "floor of fp32 products: ieee, tf32x3 (default for fp32) or tf32",
        kEverywhere,
        {"--precision", For::every},
        11,
        [](const Problem& p, Key key) { append(key, "/floor=", to_string(precision_floor(p))); },
        {},
        [](const Problem& p) -> FieldValue { return std::string(to_string(precision_floor(p))); }},
    ProblemField{"lower_bound",
                 &Problem::lower_bound,
                 "of the gate, in [-5, 0); none: not even a preset's",
                 kBounded,
                 {"--lower-bound", For::every},
                 19,
                 [](const Problem& p, Key key) {
                   if (p.use_gate_in_kernel && p.lower_bound) key += ",bounded";
                 }},
    ProblemField{"safe_gate",
                 &Problem::safe_gate,
                 "promises g >= the lower bound",
                 kBounded,
                 {"--safe-gate", For::every},
                 21,
                 [](const Problem& p, Key key) {
                   if (!p.use_gate_in_kernel && gate_is_bounded(p)) key += "/safe_gate";
                 }},
    ProblemField{"use_qk_l2norm",
                 &Problem::use_qk_l2norm,
                 "normalize the rows of q and k (=false where a preset would)",
                 kEverywhere,
                 {"--use-qk-l2norm", For::every},
                 16,
                 [](const Problem& p, Key key) {
                   if (p.use_qk_l2norm) key += "/qk_l2norm";
                 }},
    ProblemField{"use_gate_in_kernel",
                 &Problem::use_gate_in_kernel,
                 "g is the raw gate input; needs A_log (=false where a preset would)",
                 kGated,
                 {"--use-gate-in-kernel", For::every},
                 17,
                 [](const Problem& p, Key key) {
                   if (p.use_gate_in_kernel) key += "/gate";
                 }},
    ProblemField{"has_g",
                 &Problem::has_g,
                 "g is absent: no decay",
                 kOptionalGate,
                 {"--no-g", For::synthetic},
                 0,
                 nullptr,
                 {},
                 [](const Problem& p) -> FieldValue { return gate_kind(p) != GateKind::none; }},
    ProblemField{
        "has_A_log",
        &Problem::has_A_log,
        "A_log is absent; needs --lower-bound",
        kGated,
        {"--no-A-log", For::synthetic},
        20,
        [](const Problem& p, Key key) {
          if (p.use_gate_in_kernel && p.lower_bound && !p.has_A_log) key += ",no_A_log";
        },
        {},
        [](const Problem& p) -> FieldValue { return p.use_gate_in_kernel && p.has_A_log; }},
    ProblemField{"has_dt_bias",
                 &Problem::has_dt_bias,
                 "dt_bias is absent",
                 kGated,
                 {"--no-dt-bias", For::synthetic},
                 18,
                 [](const Problem& p, Key key) {
                   if (p.use_gate_in_kernel && p.has_dt_bias) key += ",dt_bias";
                 }},
    ProblemField{"use_beta_sigmoid",
                 &Problem::use_beta_sigmoid,
                 "beta are logits",
                 kBeta,
                 {"--use-beta-sigmoid", For::every},
                 22,
                 [](const Problem& p, Key key) {
                   if (p.use_beta_sigmoid) key += "/beta_sigmoid";
                 }},
    ProblemField{"allow_neg_eigval",
                 &Problem::allow_neg_eigval,
                 "beta is 2 sigmoid(beta); needs --use-beta-sigmoid",
                 kBeta,
                 {"--allow-neg-eigval", For::every},
                 23,
                 [](const Problem& p, Key key) {
                   if (p.use_beta_sigmoid && p.allow_neg_eigval) key += ",neg";
                 }},
    ProblemField{"initial_state", &Problem::initial_state, "an initial state is given", kEverywhere,
                 kNoOption, 13,
                 [](const Problem& p, Key key) {
                   if (p.initial_state) append(key, "/initial_state=", to_string(p.state_dtype));
                 }},
    ProblemField{"output_final_state", &Problem::output_final_state,
                 "the final state is wanted; backward: dht is given", kEverywhere, kNoOption, 14,
                 [](const Problem& p, Key key) {
                   if (p.output_final_state) key += "/final_state";
                 }},
    ProblemField{"state_v_first",
                 &Problem::state_v_first,
                 "states are [N,HV,V,K]",
                 kEverywhere,
                 {"--state-v-first", For::every},
                 15,
                 [](const Problem& p, Key key) {
                   if (p.state_v_first && has_states(p)) key += "/state_v_first";
                 }},
    ProblemField{"batch_invariant",
                 &Problem::batch_invariant,
                 "a sequence's bits do not depend on the rest of the batch or on tuning",
                 kServing,
                 {"--batch-invariant", For::every},
                 29,
                 [](const Problem& p, Key key) {
                   if (p.batch_invariant) key += "/batch_invariant";
                 }},
    ProblemField{"chunk_size",
                 &Problem::chunk_size,
                 "16, 32, 64 or 128 (default: tuned)",
                 kEverywhere,
                 {"--chunk-size", For::every, 16, 128},
                 24,
                 [](const Problem& p, Key key) {
                   if (p.chunk_size) append(key, "/chunk_size=", *p.chunk_size);
                 }},
    ProblemField{"disable_recompute",
                 &Problem::disable_recompute,
                 "the forward pass returns intermediates that the backward pass would recompute",
                 kChunked,
                 {"--disable-recompute", For::every},
                 25,
                 [](const Problem& p, Key key) {
                   if (p.disable_recompute) key += "/kept";
                 }},
    ProblemField{"return_intermediate_states",
                 &Problem::return_intermediate_states,
                 "the forward pass returns the state that enters every chunk",
                 kChunked,
                 {"--return-intermediate-states", For::every},
                 26,
                 [](const Problem& p, Key key) {
                   if (p.return_intermediate_states) key += "/intermediate_states";
                 }},
    // Of sequences about as long as the mean plans are those without a hint.
    ProblemField{"seqlens_hint",
                 &Problem::seqlens_hint,
                 "tokens of the longest sequence of a packed batch, for the plan alone",
                 kChunked,
                 {"--seqlens-hint", For::every, 0, kMostCount},
                 39,
                 [](const Problem& p, Key key) {
                   const std::int64_t mean = p.N > 0 ? (p.B * p.T + p.N - 1) / p.N : 0;
                   const std::int64_t longest = longest_sequence(p);
                   if (2 * longest >= 3 * mean && mean > 0)
                     append(key, "/longest=", bucket(longest));
                 }},
    ProblemField{"inplace_state",
                 &Problem::inplace_state,
                 "the state is read from and written to `state`",
                 kServing,
                 {"--inplace-state", For::every},
                 27,
                 [](const Problem& p, Key key) {
                   if (p.inplace_state) append(key, "/inplace=", to_string(p.state_dtype));
                 }},
    ProblemField{"state_index", &Problem::state_index, "states are slots of a pool", kServing,
                 kNoOption, 28,
                 [](const Problem& p, Key key) {
                   if (p.state_index) append(key, "/state_index=", to_string(p.index_dtype));
                 }},
    ProblemField{"output_state_index", &Problem::output_state_index,
                 "final states go to slots of their own", kServing, kNoOption, 30,
                 [](const Problem& p, Key key) {
                   if (p.output_state_index) key += "/output_state_index";
                 }},
    // Without a piece of the key: kernels take it when they are launched.
    ProblemField{"null_slot_zero",
                 &Problem::null_slot_zero,
                 "index 0 is none of a slot, as those below 0",
                 kServing,
                 {"--null-slot-zero", For::every}},
    ProblemField{"has_initial_state", &Problem::has_initial_state,
                 "a tensor says which sequences start from zeros", kServing, kNoOption, 31,
                 [](const Problem& p, Key key) {
                   if (p.has_initial_state) key += "/has_initial_state";
                 }},
    ProblemField{"state_slots",
                 &Problem::state_slots,
                 "slots of a pool of states that an index tensor points into",
                 kServing,
                 {"--state-index", For::synthetic, 1, kMostCount},
                 0,
                 nullptr,
                 {},
                 [](const Problem& p) -> FieldValue {
                   return p.state_index ? FieldValue(p.state_slots) : FieldValue();
                 }},
    ProblemField{"index_dtype", &Problem::index_dtype, "of the index tensors", kServing},
    // Counts of columns and rows are of a launch: the pieces say what there is.
    ProblemField{"index_columns",
                 &Problem::index_columns,
                 "columns of state_index: a slot for each token's state",
                 kDecoding,
                 {"--index-columns", For::synthetic, 1, kMostCount},
                 35,
                 [](const Problem& p, Key key) {
                   if (p.index_columns != 0) key += "/index_columns";
                 }},
    ProblemField{"intermediate_rows",
                 &Problem::intermediate_rows,
                 "rows of intermediate_states, for the states after each token",
                 kDecoding,
                 {"--intermediate-rows", For::synthetic, 1, kMostCount},
                 36,
                 [](const Problem& p, Key key) {
                   if (p.intermediate_rows)
                     key += fmt::format("/token_states={}:{}", to_string(p.state_dtype),
                                        to_string(p.index_dtype));
                 }},
    ProblemField{"draft_tokens",
                 &Problem::draft_tokens,
                 "tokens a row of intermediate_states and of parent",
                 kDecoding,
                 {"--draft-tokens", For::synthetic, 1, 16}},
    ProblemField{"parent",
                 &Problem::parent,
                 "a tensor says which token each token goes on from",
                 kDecoding,
                 {"--draft-tree", For::synthetic},
                 37,
                 [](const Problem& p, Key key) {
                   if (p.parent) key += "/parent";
                 }},
    ProblemField{"disable_state_update",
                 &Problem::disable_state_update,
                 "`state` is read, not written",
                 kDecoding,
                 {"--disable-state-update", For::every},
                 38,
                 [](const Problem& p, Key key) {
                   if (p.disable_state_update) key += "/disable_state_update";
                 }},
    ProblemField{"output_norm",
                 &Problem::output_norm,
                 "RMSNorm of each head's o, gated by silu or sigmoid of norm_gate",
                 kDecoding,
                 {"--output-norm", For::every},
                 40,
                 [](const Problem& p, Key key) {
                   if (p.output_norm) append(key, "/output_norm=", to_string(*p.output_norm));
                 }},
    ProblemField{"norm_eps",
                 &Problem::norm_eps,
                 "beside the mean square of that norm (default 1e-6)",
                 kDecoding,
                 {"--norm-eps", For::every}},
    ProblemField{"checkpoint_every",
                 &Problem::checkpoint_every,
                 "the state after every so many tokens, a multiple of 64, is written",
                 kCheckpoints,
                 {"--checkpoint-every", For::every, 64, kMostCount},
                 32,
                 [](const Problem& p, Key key) {
                   if (p.checkpoint_every != 0)
                     append(key, "/checkpoint_every=", p.checkpoint_every);
                 }},
    ProblemField{"checkpoint_offsets",
                 &Problem::checkpoint_offsets,
                 "a tensor says after how many tokens of each sequence its state is written",
                 kCheckpoints,
                 {"--checkpoint-offsets", For::synthetic},
                 33,
                 [](const Problem& p, Key key) {
                   if (p.checkpoint_offsets)
                     append(key, "/checkpoint_offsets=", to_string(p.index_dtype));
                 }},
    // How many rows there are no plan depends on: the piece is that there are some.
    ProblemField{"checkpoint_rows", &Problem::checkpoint_rows,
                 "rows of checkpoints with checkpoint_every", kCheckpoints, kNoOption, 34,
                 [](const Problem& p, Key key) {
                   if (has_checkpoints(p))
                     append(key, "/checkpoints=", to_string(checkpoint_dtype(p)));
                 }},
    ProblemField{"fp32_checkpoints",
                 &Problem::fp32_checkpoints,
                 "states that are written inside sequences are fp32, whatever the others are",
                 kCheckpoints,
                 {"--fp32-checkpoints", For::synthetic}},
};

/// The pieces of the key, in their places.
std::vector<const ProblemField*> key_fields() {
  std::vector<const ProblemField*> fields;
  for (const ProblemField& field : kFields)
    if (field.key_place != 0) fields.push_back(&field);
  std::sort(fields.begin(), fields.end(), [](const ProblemField* a, const ProblemField* b) {
    return a->key_place < b->key_place;
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

std::string ProblemKey::to_string() const {
  return fmt::format("{}/tokens={}/sequences={}", family, tokens, sequences);
}

ProblemKey problem_key(const Problem& problem) {
  // Never destroyed: the last threads may prepare while the process ends.
  static const auto& fields = *new std::vector<const ProblemField*>(key_fields());
  std::string family;
  family.reserve(160);
  for (const ProblemField* field : fields) field->add_key(problem, family);
  return {std::move(family), bucket(problem.B * problem.T), bucket(problem.N)};
}

}  // namespace wyvern
