#include "runtime/operators/tensors.hpp"

#include <algorithm>

#include "runtime/operators/operator.hpp"
#include "templates/template.hpp"

namespace wyvern {
namespace {

using enum TensorRole;
using enum Quantity;

/// Every dimension's extent for a problem.
std::array<std::int64_t, kDims> extents_of(const Problem& p) {
  std::array<std::int64_t, kDims> extents{};
  const auto set = [&](Dim dim, std::int64_t extent) {
    extents[static_cast<std::size_t>(dim)] = extent;
  };
  const std::int64_t chunk = kept_chunk_size(p);
  set(Dim::B, p.B);
  set(Dim::T, p.T);
  set(Dim::nT, p.num_householder * p.T);
  set(Dim::H, p.H);
  set(Dim::HV, p.HV);
  set(Dim::K, p.K);
  set(Dim::V, p.V);
  set(Dim::N, p.N);
  set(Dim::N_plus_1, p.N + 1);
  set(Dim::NT, chunk_slots(p.B, p.T, p.N, p.packed, chunk));
  set(Dim::C, chunk);
  set(Dim::slots, p.state_index ? p.state_slots : p.N);
  set(Dim::state_rows, p.state_v_first ? p.V : p.K);
  set(Dim::state_columns, p.state_v_first ? p.K : p.V);
  return extents;
}

TensorAccess access_of(TensorRole role, const Problem& p) {
  switch (role) {
    case input: return TensorAccess::in;
    case kept: return p.pass == Pass::backward ? TensorAccess::in : TensorAccess::out;
    case output: return TensorAccess::out;
    case updated: return TensorAccess::inout;
  }
  return TensorAccess::in;
}

std::string_view symbol(Dim dim, const Problem& p) {
  switch (dim) {
    case Dim::B: return "B";
    case Dim::T: return "T";
    case Dim::nT: return "nT";
    case Dim::H: return "H";
    case Dim::HV: return "HV";
    case Dim::K: return "K";
    case Dim::V: return "V";
    case Dim::N: return "N";
    case Dim::N_plus_1: return "N+1";
    case Dim::NT: return "NT";
    case Dim::C: return "C";
    case Dim::slots: return p.state_index ? "S" : "N";
    case Dim::state_rows: return p.state_v_first ? "V" : "K";
    case Dim::state_columns: return p.state_v_first ? "K" : "V";
  }
  return "?";
}

DType dtype_of_gates(const Problem& p) { return p.g_dtype; }
DType dtype_of_states(const Problem& p) { return p.state_dtype; }
bool outside_backward(const Problem& p) { return p.pass != Pass::backward; }
bool with_gate(const Problem& p) { return p.has_g; }
bool with_rate(const Problem& p) { return p.has_g && p.use_gate_in_kernel && p.has_A_log; }
bool with_bias(const Problem& p) { return p.has_g && p.use_gate_in_kernel && p.has_dt_bias; }

/// [HV, channels...] after the leading dimensions.
Dims with_channels(std::initializer_list<Dim> leading, std::initializer_list<Dim> channels) {
  Dims dims(leading);
  for (const Dim channel : channels) dims.at[static_cast<std::size_t>(dims.rank++)] = channel;
  return dims;
}

}  // namespace

bool Dims::has(Dim dim) const noexcept {
  return std::find(at.begin(), at.begin() + rank, dim) != at.begin() + rank;
}

DType dtype_of_rows(const Problem& p) { return p.dtype; }
DType dtype_of_rates(const Problem& p) { return p.beta_dtype; }
DType always_fp32(const Problem&) { return DType::fp32; }
bool always(const Problem&) { return true; }
bool in_backward(const Problem& p) { return p.pass == Pass::backward; }
bool with_kept(const Problem& p) { return p.disable_recompute; }

TensorRules row_tensors(Dim rows) {
  const Dims query{Dim::B, Dim::T, Dim::H, Dim::K}, key{Dim::B, rows, Dim::H, Dim::K};
  const Dims value{Dim::B, rows, Dim::HV, Dim::V}, out{Dim::B, Dim::T, Dim::HV, Dim::V};
  return {
      {"q", input, directions, query, dtype_of_rows, always},
      {"k", input, directions, key, dtype_of_rows, always},
      {"v", input, values, value, dtype_of_rows, always},
      {"do", input, values, out, dtype_of_rows, in_backward},
      {"o", output, computed, out, dtype_of_rows, outside_backward},
      {"dq", output, computed, query, dtype_of_rows, in_backward},
      {"dk", output, computed, key, dtype_of_rows, in_backward},
      {"dv", output, computed, value, dtype_of_rows, in_backward},
  };
}

TensorRules beta_tensors(Dim rows) {
  const Dims dims{Dim::B, rows, Dim::HV};
  return {
      {"beta", input, rates, dims, dtype_of_rates, always},
      {"dbeta", output, computed, dims, dtype_of_rates, in_backward},
  };
}

TensorRules gate_tensors(std::initializer_list<Dim> channels) {
  const Dims gate = with_channels({Dim::B, Dim::T, Dim::HV}, channels);
  const Dims bias = with_channels({Dim::HV}, channels), rate{Dim::HV};
  return {
      {"g", input, gates, gate, dtype_of_gates, with_gate},
      {"A_log", input, gate_rates, rate, always_fp32, with_rate},
      {"dt_bias", input, gate_biases, bias, always_fp32, with_bias},
      {"dg", output, computed, gate, dtype_of_gates,
       [](const Problem& p) { return in_backward(p) && with_gate(p); }},
      {"dA_log", output, computed, rate, always_fp32,
       [](const Problem& p) { return in_backward(p) && with_rate(p); }},
      {"ddt_bias", output, computed, bias, always_fp32,
       [](const Problem& p) { return in_backward(p) && with_bias(p); }},
  };
}

TensorRules state_tensors() {
  const Dims pool{Dim::slots, Dim::HV, Dim::state_rows, Dim::state_columns};
  const Dims each{Dim::N, Dim::HV, Dim::state_rows, Dim::state_columns};
  const Dims chunks{Dim::NT, Dim::HV, Dim::state_rows, Dim::state_columns};
  return {
      {"initial_state", input, states, pool, dtype_of_states,
       [](const Problem& p) { return p.initial_state && !p.inplace_state; }},
      {"cu_seqlens",
       input,
       seqlens,
       {Dim::N_plus_1},
       [](const Problem& p) { return p.seqlens_dtype; },
       [](const Problem& p) { return p.packed; }},
      {"dht", input, state_gradient, each, always_fp32,
       [](const Problem& p) { return in_backward(p) && p.output_final_state; }},
      {"state_index",
       input,
       state_slots,
       {Dim::N},
       [](const Problem& p) { return p.index_dtype; },
       [](const Problem& p) { return p.pass == Pass::recurrent && p.state_index; }},
      {"state", updated, states, pool, dtype_of_states,
       [](const Problem& p) { return p.inplace_state; }},
      {"final_state", output, computed, each, always_fp32,
       [](const Problem& p) { return !in_backward(p) && p.output_final_state; }},
      {"intermediate_states", output, computed, chunks, dtype_of_rows,
       [](const Problem& p) { return p.pass == Pass::forward && p.return_intermediate_states; }},
      {"dinitial_state", output, computed, each, always_fp32,
       [](const Problem& p) { return in_backward(p) && p.initial_state; }},
  };
}

TensorRules kept_tensors() {
  return {
      {"Tinv", kept, computed, {Dim::B, Dim::T, Dim::HV, Dim::C}, dtype_of_rows, with_kept},
      {"w", kept, computed, {Dim::B, Dim::T, Dim::HV, Dim::K}, dtype_of_rows, with_kept},
      {"h", kept, computed, {Dim::NT, Dim::HV, Dim::K, Dim::V}, dtype_of_rows, with_kept},
      {"v_new", kept, computed, {Dim::B, Dim::T, Dim::HV, Dim::V}, dtype_of_rows, with_kept},
  };
}

TensorRules join(std::initializer_list<TensorRules> groups) {
  TensorRules all;
  for (const TensorRules& group : groups) all.insert(all.end(), group.begin(), group.end());
  return all;
}

std::string symbols_of(const TensorRule& rule, const Problem& problem) {
  std::string text = "[";
  for (int i = 0; i < rule.dims.rank; ++i) {
    if (i > 0) text += ',';
    text += symbol(rule.dims.at[static_cast<std::size_t>(i)], problem);
  }
  return text + "]";
}

std::vector<TensorSpec> tensor_specs(const Problem& problem) {
  const OperatorDefinition& definition = definition_of(problem);
  const std::array<std::int64_t, kDims> extents = extents_of(problem);
  std::vector<TensorSpec> specs(kOperatorTensors);
  for (std::size_t i = 0; i < kOperatorTensors; ++i) {
    TensorSpec& spec = specs[i];
    spec.name = kArguments[i].name;
    const TensorRule* rule = definition.rule(i);
    if (rule == nullptr) continue;
    spec.access = access_of(rule->role, problem);
    spec.dtype = rule->dtype(problem);
    spec.rank = rule->dims.rank;
    for (int d = 0; d < spec.rank; ++d) {
      const auto at = static_cast<std::size_t>(d);
      spec.shape[at] = extents[static_cast<std::size_t>(rule->dims.at[at])];
    }
    spec.present = rule->present(problem);
  }
  return specs;
}

}  // namespace wyvern
