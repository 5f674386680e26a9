#include "tools/wyvern/operands.hpp"

#include <wyvern/error.hpp>
#include <wyvern/runtime.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "runtime/base/nearest_names.hpp"
#include "runtime/operators/operator.hpp"
#include "tools/wyvern/output.hpp"
#include "tools/wyvern/reject.hpp"

namespace wyvern::cli {
namespace {

using Shape = std::vector<std::int64_t>;

const HostTensor* find(const Tensors& tensors, const std::string& name) {
  const auto found = tensors.find(name);
  return found == tensors.end() ? nullptr : &found->second;
}

/// A file may hold any number of tensors with names of any length.
std::string names_in(const Tensors& tensors, std::string_view wanted) {
  constexpr std::size_t kLongest = 60;
  std::vector<std::string> names;
  for (const auto& [name, tensor] : tensors) names.push_back(shortened(printable(name), kLongest));
  return nearest_names(wanted, names);
}

const HostTensor& need(const Tensors& tensors, const std::string& name, std::string_view shape) {
  if (const HostTensor* tensor = find(tensors, name)) return *tensor;
  reject("{} is missing from the input, which holds [{}]; it must be there with shape {}", name,
         names_in(tensors, name), shape);
}

void need_rank(const HostTensor& tensor, std::string_view name, std::size_t rank,
               std::string_view shape) {
  if (tensor.shape.size() != rank)
    reject("{} has shape {}; it must have {} dimensions, {}", name, shape_text(tensor.shape), rank,
           shape);
}

void need_dtype(const HostTensor& tensor, std::string_view name, std::vector<DType> legal) {
  if (std::find(legal.begin(), legal.end(), tensor.dtype) != legal.end()) return;
  std::sort(legal.begin(), legal.end());
  legal.erase(std::unique(legal.begin(), legal.end()), legal.end());
  std::vector<std::string_view> names;
  for (const DType type : legal) names.push_back(to_string(type));
  reject("{} is {}; it must be {}", name, to_string(tensor.dtype), fmt::join(names, " or "));
}

/// An input's shape in SPECIFICATION.md's letters.
std::string symbols_of(std::string_view name, const Problem& p) {
  return wyvern::symbols_of(definition_of(p).rule(name), p);
}

/// The tensors that give B, T, H, K and HV, V: q and v, or of a summary without them k and do.
void infer_dimensions(const Tensors& tensors, Problem& p) {
  const bool backward = p.pass == Pass::backward;
  const std::string rows = p.summary && !backward ? "k" : "q",
                    values = p.summary && backward ? "do" : "v";
  const HostTensor& q = need(tensors, rows, symbols_of(rows, p));
  need_rank(q, rows, 4, symbols_of(rows, p));
  need_dtype(q, rows, {DType::bf16, DType::fp16, DType::fp32});
  p.B = p.N = q.shape[0];
  p.T = rows == "k" ? q.shape[1] / std::max<std::int64_t>(p.num_householder, 1) : q.shape[1];
  p.H = q.shape[2];
  p.K = q.shape[3];
  p.dtype = q.dtype;
  need(tensors, "k", symbols_of("k", p));
  const HostTensor& v = need(tensors, values, symbols_of(values, p));
  need_rank(v, values, 4, symbols_of(values, p));
  p.HV = v.shape[2];
  p.V = v.shape[3];
}

/// Dtypes of rates and gates are the caller's choice.
void infer_dtypes(const Tensors& tensors, Problem& p) {
  p.beta_dtype = p.dtype;
  for (const TensorRule& rule : definition_of(p).tensors()) {
    const HostTensor* tensor = find(tensors, std::string(rule.name));
    if (tensor == nullptr) continue;
    if (rule.holds == Quantity::rates) {
      need_dtype(*tensor, rule.name, {p.dtype, DType::fp32});
      p.beta_dtype = tensor->dtype;
    } else if (rule.holds == Quantity::gates) {
      if (gate_kind(p) == GateKind::vector)
        need_dtype(*tensor, rule.name, {DType::bf16, DType::fp16, DType::fp32});
      else
        need_dtype(*tensor, rule.name, {p.dtype, DType::fp32});
      p.g_dtype = tensor->dtype;
    }
  }
}

/// The values of a 1-D tensor of int32 or int64.
std::vector<std::int64_t> integers(const HostTensor& tensor) {
  std::vector<std::int64_t> values(static_cast<std::size_t>(tensor.elements()));
  if (tensor.dtype == DType::int64) {
    std::memcpy(values.data(), tensor.data.get(), tensor.bytes());
  } else {
    const auto* narrow = static_cast<const std::int32_t*>(tensor.data.get());
    std::copy(narrow, narrow + values.size(), values.begin());
  }
  return values;
}

void infer_seqlens(const Tensors& tensors, Selection& selection) {
  const HostTensor* seqlens = find(tensors, "cu_seqlens");
  if (seqlens == nullptr) return;
  Problem& p = selection.problem;
  need_rank(*seqlens, "cu_seqlens", 1, "[N+1]");
  need_dtype(*seqlens, "cu_seqlens", {DType::int32, DType::int64});
  if (seqlens->shape[0] < 1) reject("cu_seqlens has shape [0]; it must be [N+1]");
  if (p.B != 1) reject("B is {}; with cu_seqlens it must be 1", p.B);
  p.packed = true;
  p.N = seqlens->shape[0] - 1;
  p.seqlens_dtype = seqlens->dtype;
  selection.cu_seqlens = integers(*seqlens);
}

/// The state that is read, the one that is updated, the gradient of the final one, and the index.
void infer_states(Tensors& tensors, Problem& p) {
  if (p.inplace_state && !tensors.contains("state") && tensors.contains("initial_state"))
    tensors.insert({"state", tensors.at("initial_state")});
  const std::string name = p.inplace_state ? "state" : "initial_state";
  const HostTensor* state = find(tensors, name);
  if (state != nullptr) {
    if (p.inplace_state)
      need_dtype(*state, name,
                 {DType::fp32, DType::bf16, DType::fp16, DType::float8_e4m3, DType::float8_e5m2});
    else
      need_dtype(*state, name, {DType::fp32, DType::bf16, DType::fp16});
    p.state_dtype = state->dtype;
  }
  const bool backward = p.pass == Pass::backward;
  p.initial_state = state != nullptr && !p.inplace_state && !(p.summary && backward);
  p.output_final_state = backward ? tensors.contains("dht") : !p.inplace_state && !p.summary;

  const HostTensor* index = find(tensors, "state_index");
  const bool serves = p.pass == Pass::recurrent || (p.pass == Pass::forward && p.inplace_state);
  p.has_initial_state = p.inplace_state && serves && tensors.contains("has_initial_state");
  if (index == nullptr || !serves) return;
  need_dtype(*index, "state_index", {DType::int32, DType::int64});
  p.state_index = true;
  p.index_dtype = index->dtype;
  p.output_state_index = p.inplace_state && tensors.contains("output_state_index");
  const HostTensor& pool = need(tensors, name, symbols_of(name, p));
  need_rank(pool, name, 4, symbols_of(name, p));
  p.state_slots = pool.shape[0];
}

/// Slots for each token of a sequence, states of each token, which are zeros in front of them where
/// no tensor is given, and trees of drafts.
void infer_drafts(Tensors& tensors, Problem& p) {
  if (p.pass != Pass::recurrent) return;
  if (p.state_index && tensors.at("state_index").shape.size() == 2)
    p.index_columns = tensors.at("state_index").shape[1];
  const HostTensor* rows = find(tensors, "intermediate_index");
  if (rows == nullptr) return;
  need_dtype(*rows, "intermediate_index", {DType::int32, DType::int64});
  if (!p.state_index) p.index_dtype = rows->dtype;
  p.intermediate_rows = p.N;
  const HostTensor* parent = find(tensors, "parent");
  p.parent = parent != nullptr;
  const HostTensor* given = find(tensors, "intermediate_states");
  if (given == nullptr) {
    // Of a pack the longest sequence says how many tokens a row has.
    std::int64_t tokens = p.packed ? 0 : p.T;
    if (p.packed) {
      const std::vector<std::int64_t> ends = integers(tensors.at("cu_seqlens"));
      for (std::size_t n = 1; n < ends.size(); ++n)
        tokens = std::max(tokens, ends[n] - ends[n - 1]);
    }
    if (parent != nullptr && parent->shape.size() == 2) tokens = parent->shape[1];
    if (p.packed) p.draft_tokens = tokens;
    HostTensor zeros = HostTensor::make(
        p.state_dtype,
        {p.N, tokens, p.HV, p.state_v_first ? p.V : p.K, p.state_v_first ? p.K : p.V});
    std::memset(zeros.data.get(), 0, zeros.bytes());
    tensors.insert({"intermediate_states", std::move(zeros)});
    return;
  }
  need_rank(*given, "intermediate_states", 5, symbols_of("intermediate_states", p));
  if (!p.initial_state && !p.inplace_state) {
    need_dtype(*given, "intermediate_states", {DType::fp32, DType::bf16, DType::fp16});
    p.state_dtype = given->dtype;
  }
  p.intermediate_rows = given->shape[0];
  if (p.packed) p.draft_tokens = given->shape[1];
}

/// Where states inside sequences go, which are zeros in front of them where no tensor is given.
void infer_checkpoints(Tensors& tensors, Problem& p) {
  if (p.pass != Pass::forward) return;
  const HostTensor* offsets = find(tensors, "checkpoint_offsets");
  p.checkpoint_offsets = offsets != nullptr && p.checkpoint_every == 0;
  if (!has_checkpoints(p)) return;
  if (p.checkpoint_offsets && !p.state_index) {
    need_dtype(*offsets, "checkpoint_offsets", {DType::int32, DType::int64});
    p.index_dtype = offsets->dtype;
  }
  const HostTensor* given = find(tensors, "checkpoints");
  if (given == nullptr) {
    HostTensor zeros = HostTensor::make(
        checkpoint_dtype(p),
        {checkpoint_rows(p), p.HV, p.state_v_first ? p.V : p.K, p.state_v_first ? p.K : p.V});
    std::memset(zeros.data.get(), 0, zeros.bytes());
    tensors.insert({"checkpoints", std::move(zeros)});
    return;
  }
  need_rank(*given, "checkpoints", 4, symbols_of("checkpoints", p));
  if (!p.initial_state && !p.inplace_state) {
    need_dtype(*given, "checkpoints", {DType::fp32, DType::bf16, DType::fp16});
    p.state_dtype = given->dtype;
  }
  p.fp32_checkpoints = given->dtype == DType::fp32 && p.state_dtype != DType::fp32;
  if (p.checkpoint_every != 0) p.checkpoint_rows = given->shape[0];
}

/// Final rows are always wanted, as final states are; backward, where their gradient is given. With
/// states in place rows are too. Rows behind drafts are zeros where no tensor is given.
void infer_conv(Tensors& tensors, Problem& p) {
  if (!p.short_conv) return;
  if (const HostTensor* weight = find(tensors, "conv_weight")) p.conv_dtype = weight->dtype;
  p.has_conv_bias = tensors.contains("conv_bias");
  p.inplace_conv_state = p.inplace_state;
  if (p.intermediate_rows && !tensors.contains("intermediate_conv_states")) {
    const std::int64_t channels = conv_channels(p), before = *p.short_conv - 1;
    HostTensor zeros = HostTensor::make(
        p.dtype, {*p.intermediate_rows, draft_tokens_of(p), p.conv_tokens_first ? before : channels,
                  p.conv_tokens_first ? channels : before});
    std::memset(zeros.data.get(), 0, zeros.bytes());
    tensors.insert({"intermediate_conv_states", std::move(zeros)});
  }
  if (p.inplace_state) return;
  p.initial_conv_state = tensors.contains("initial_conv_state");
  p.output_conv_state = p.pass != Pass::backward || tensors.contains("dfinal_conv_state");
}

void infer_gate(const Tensors& tensors, Problem& p) {
  if (definition_of(p).facts().optional_gate) p.has_g = tensors.contains("g");
  if (!p.use_gate_in_kernel) return;
  p.has_A_log = tensors.contains("A_log") || !p.lower_bound;
  p.has_dt_bias = tensors.contains("dt_bias");
}

/// Every input of the problem is there with its dtype and shape.
void check_inputs(const Tensors& tensors, const Problem& p) {
  for (const TensorSpec& spec : tensor_specs(p)) {
    if (!spec.present || spec.access == TensorAccess::out) continue;
    const std::string name(spec.name);
    const Shape wanted(spec.shape.begin(), spec.shape.begin() + spec.rank);
    const std::string legal = fmt::format("{} = {}", symbols_of(name, p), shape_text(wanted));
    const HostTensor& tensor = need(tensors, name, legal);
    if (tensor.shape != wanted)
      reject("{} has shape {}; it must be {}", name, shape_text(tensor.shape), legal);
    need_dtype(tensor, name, {spec.dtype});
  }
}

/// A state that two sequences update at once would be neither's.
void check_slots(const Tensors& tensors, const Problem& p) {
  if (!p.state_index || !p.inplace_state) return;
  struct Use {
    const char* tensor;
    std::size_t sequence;
  };
  std::map<std::int64_t, Use> owner;
  const auto check = [&](const char* name) {
    const std::vector<std::int64_t> slots = integers(tensors.at(name));
    for (std::size_t n = 0; n < slots.size(); ++n) {
      if (slots[n] < (p.null_slot_zero ? 1 : 0)) continue;
      const auto [held, fresh] = owner.emplace(slots[n], Use{name, n});
      if (!fresh && held->second.sequence != n)
        reject(
            "{}[{}] is {}, as {}[{}] is; with --inplace-state every sequence must have slots of "
            "its own",
            name, n, slots[n], held->second.tensor, held->second.sequence);
    }
  };
  check("state_index");
  if (p.output_state_index) check("output_state_index");
}

}  // namespace

Selection infer(const std::string& op, Tensors& tensors, const OptionFlags& options) {
  require_operator(op);
  Selection selection;
  Problem& p = selection.problem;
  p.op = op;
  apply(options, p);
  infer_dimensions(tensors, p);
  infer_dtypes(tensors, p);
  infer_seqlens(tensors, selection);
  infer_states(tensors, p);
  infer_drafts(tensors, p);
  infer_checkpoints(tensors, p);
  infer_conv(tensors, p);
  infer_gate(tensors, p);
  validate(p);
  check_inputs(tensors, p);
  if (p.packed) validate_seqlens(p, selection.cu_seqlens);
  check_slots(tensors, p);
  return selection;
}

}  // namespace wyvern::cli
