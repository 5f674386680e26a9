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
  const auto set = [&](TensorDim dim, std::int64_t extent) {
    extents[static_cast<std::size_t>(dim)] = extent;
  };
  const std::int64_t chunk = kept_chunk_size(p);
  set(TensorDim::B, p.B);
  set(TensorDim::T, p.T);
  set(TensorDim::nT, p.num_householder * p.T);
  set(TensorDim::H, p.H);
  set(TensorDim::HV, p.HV);
  set(TensorDim::K, p.K);
  set(TensorDim::V, p.V);
  set(TensorDim::N, p.N);
  set(TensorDim::N_plus_1, p.N + 1);
  set(TensorDim::NT, chunk_slots(p.B, p.num_householder * p.T, p.N, p.packed, chunk));
  set(TensorDim::C, chunk);
  set(TensorDim::slots, p.state_index ? p.state_slots : p.N);
  set(TensorDim::index_columns, p.index_columns);
  set(TensorDim::drafts, p.pass == Pass::recurrent ? draft_tokens_of(p) : 0);
  set(TensorDim::states_inside, p.pass == Pass::recurrent
                                    ? p.intermediate_rows.value_or(0)
                                    : extents[static_cast<std::size_t>(TensorDim::NT)]);
  set(TensorDim::checkpoints, checkpoint_rows(p));
  set(TensorDim::state_rows, p.state_v_first ? p.V : p.K);
  set(TensorDim::state_columns, p.state_v_first ? p.K : p.V);
  set(TensorDim::conv_channels, conv_channels(p));
  set(TensorDim::conv_width, p.short_conv.value_or(0));
  set(TensorDim::conv_before, p.short_conv.value_or(1) - 1);
  set(TensorDim::conv_rows, p.conv_tokens_first ? conv_columns_of(p) : conv_channels(p));
  set(TensorDim::conv_columns, p.conv_tokens_first ? conv_channels(p) : conv_columns_of(p));
  const std::int64_t before = p.short_conv.value_or(1) - 1;
  set(TensorDim::conv_draft_rows, p.conv_tokens_first ? before : conv_channels(p));
  set(TensorDim::conv_draft_columns, p.conv_tokens_first ? conv_channels(p) : before);
  const ScaleShape scales = output_scale_shape(p);
  set(TensorDim::scale_rows, scales.rows);
  set(TensorDim::scale_columns, scales.columns);
  set(TensorDim::summary_columns, p.V + (p.transition ? p.K : 0));
  const std::int64_t segments = chunk_slots(p.B, p.num_householder * p.T, p.N, p.packed,
                                            chunk * p.segment_chunks.value_or(1));
  set(TensorDim::NS, std::max(segments, p.N));
  return extents;
}

TensorAccess access_of(TensorRole role, const Problem& p) {
  switch (role) {
    case input: return TensorAccess::in;
    case kept: return p.pass == Pass::backward ? TensorAccess::in : TensorAccess::out;
    case shared: return p.summary ? TensorAccess::out : TensorAccess::in;
    case output: return TensorAccess::out;
    case updated: return TensorAccess::inout;
    case inside: return p.pass == Pass::recurrent ? TensorAccess::inout : TensorAccess::out;
  }
  return TensorAccess::in;
}

std::string_view symbol(TensorDim dim, const Problem& p) {
  switch (dim) {
    case TensorDim::B: return "B";
    case TensorDim::T: return "T";
    case TensorDim::nT: return "nT";
    case TensorDim::H: return "H";
    case TensorDim::HV: return "HV";
    case TensorDim::K: return "K";
    case TensorDim::V: return "V";
    case TensorDim::N: return "N";
    case TensorDim::N_plus_1: return "N+1";
    case TensorDim::NT: return "NT";
    case TensorDim::C: return "C";
    case TensorDim::slots: return p.state_index ? "S" : "N";
    case TensorDim::index_columns: return "M";
    case TensorDim::drafts: return "D";
    case TensorDim::states_inside: return p.pass == Pass::recurrent ? "R" : "NT";
    case TensorDim::checkpoints: return p.checkpoint_offsets ? "N" : "CP";
    case TensorDim::state_rows: return p.state_v_first ? "V" : "K";
    case TensorDim::state_columns: return p.state_v_first ? "K" : "V";
    case TensorDim::conv_channels: return "C";
    case TensorDim::conv_width: return "W";
    case TensorDim::conv_before: return "W-1";
    case TensorDim::conv_rows: return p.conv_tokens_first ? "L" : "C";
    case TensorDim::conv_columns: return p.conv_tokens_first ? "C" : "L";
    case TensorDim::conv_draft_rows: return p.conv_tokens_first ? "W-1" : "C";
    case TensorDim::conv_draft_columns: return p.conv_tokens_first ? "C" : "W-1";
    case TensorDim::summary_columns: return p.transition ? "V+K" : "V";
    case TensorDim::scale_rows: return p.output_scale_tokens_last ? "HV V/128" : "B T";
    case TensorDim::scale_columns: return p.output_scale_tokens_last ? "4 ceil(B T/4)" : "HV V/128";
    case TensorDim::NS: return "NS";
  }
  return "?";
}

DType dtype_of_gates(const Problem& p) { return p.g_dtype; }
DType dtype_of_states(const Problem& p) { return p.state_dtype; }
bool outside_forward_summary(const Problem& p) { return !p.summary || p.pass != Pass::forward; }
bool outside_backward_summary(const Problem& p) { return !p.summary || p.pass != Pass::backward; }
bool with_segments(const Problem& p) { return p.segment_chunks.has_value(); }
bool with_output(const Problem& p) { return p.pass != Pass::backward && !p.summary; }
bool with_gate(const Problem& p) { return p.has_g; }
bool with_rate(const Problem& p) { return p.has_g && p.use_gate_in_kernel && p.has_A_log; }
bool with_bias(const Problem& p) { return p.has_g && p.use_gate_in_kernel && p.has_dt_bias; }

/// Whether the problem's tensors have the dimension: some exist with an option alone.
bool exists(TensorDim dim, const Problem& p) {
  if (dim == TensorDim::index_columns) return p.index_columns != 0;
  return dim != TensorDim::drafts || p.pass == Pass::recurrent;
}

/// [HV, channels...] after the leading dimensions.
Dims with_channels(std::initializer_list<TensorDim> leading,
                   std::initializer_list<TensorDim> channels) {
  Dims dims(leading);
  for (const TensorDim channel : channels) dims.at[static_cast<std::size_t>(dims.rank++)] = channel;
  return dims;
}

}  // namespace

bool Dims::has(TensorDim dim) const noexcept {
  return std::find(at.begin(), at.begin() + rank, dim) != at.begin() + rank;
}

DType dtype_of_rows(const Problem& p) { return p.dtype; }
DType dtype_of_output(const Problem& p) { return p.output_dtype.value_or(p.dtype); }
DType dtype_of_rates(const Problem& p) { return p.beta_dtype; }
DType always_fp32(const Problem&) { return DType::fp32; }
bool always(const Problem&) { return true; }
bool in_backward(const Problem& p) { return p.pass == Pass::backward; }
bool with_kept(const Problem& p) { return p.disable_recompute; }
bool with_gradients(const Problem& p) { return in_backward(p) && !p.summary; }

TensorRules row_tensors(TensorDim rows) {
  const Dims query{TensorDim::B, TensorDim::T, TensorDim::H, TensorDim::K},
      key{TensorDim::B, rows, TensorDim::H, TensorDim::K};
  const Dims value{TensorDim::B, rows, TensorDim::HV, TensorDim::V},
      out{TensorDim::B, TensorDim::T, TensorDim::HV, TensorDim::V};
  return {
      {"q", input, directions, query, dtype_of_rows, outside_forward_summary, kStrided},
      {"k", input, directions, key, dtype_of_rows, always, kStrided},
      {"v", input, values, value, dtype_of_rows, outside_backward_summary, kStrided},
      {"do", input, values, out, dtype_of_rows, in_backward, kStrided},
      {"o", output, computed, out, dtype_of_output, with_output, kStrided},
      {"dq", output, computed, query, dtype_of_rows, with_gradients},
      {"dk", output, computed, key, dtype_of_rows, with_gradients},
      {"dv", output, computed, value, dtype_of_rows, with_gradients},
  };
}

TensorRules beta_tensors(TensorDim rows) {
  const Dims dims{TensorDim::B, rows, TensorDim::HV};
  return {
      {"beta", input, rates, dims, dtype_of_rates, always, kStrided},
      {"dbeta", output, computed, dims, dtype_of_rates, with_gradients},
  };
}

TensorRules gate_tensors(std::initializer_list<TensorDim> channels) {
  const Dims gate = with_channels({TensorDim::B, TensorDim::T, TensorDim::HV}, channels);
  const Dims bias = with_channels({TensorDim::HV}, channels), rate{TensorDim::HV};
  return {
      {"g", input, gates, gate, dtype_of_gates, with_gate, kStrided},
      {"A_log", input, gate_rates, rate, always_fp32, with_rate},
      {"dt_bias", input, gate_biases, bias, always_fp32, with_bias},
      {"dg", output, computed, gate, dtype_of_gates,
       [](const Problem& p) { return with_gradients(p) && with_gate(p); }},
      {"dA_log", output, computed, rate, always_fp32,
       [](const Problem& p) { return with_gradients(p) && with_rate(p); }},
      {"ddt_bias", output, computed, bias, always_fp32,
       [](const Problem& p) { return with_gradients(p) && with_bias(p); }},
  };
}

TensorRules state_tensors() {
  const Dims pool{TensorDim::slots, TensorDim::HV, TensorDim::state_rows, TensorDim::state_columns};
  const Dims each{TensorDim::N, TensorDim::HV, TensorDim::state_rows, TensorDim::state_columns};
  const Dims checkpoints{TensorDim::checkpoints, TensorDim::HV, TensorDim::state_rows,
                         TensorDim::state_columns};
  const Dims drafts{TensorDim::states_inside, TensorDim::drafts, TensorDim::HV,
                    TensorDim::state_rows, TensorDim::state_columns};
  return {
      {"initial_state", input, states, pool, dtype_of_states,
       [](const Problem& p) { return p.initial_state && !p.inplace_state; }},
      {"cu_seqlens",
       input,
       seqlens,
       {TensorDim::N_plus_1},
       [](const Problem& p) { return p.seqlens_dtype; },
       [](const Problem& p) { return p.packed; }},
      {"dht", input, state_gradient, each, always_fp32,
       [](const Problem& p) { return in_backward(p) && p.output_final_state; }},
      {"state_index",
       input,
       state_slots,
       {TensorDim::N, TensorDim::index_columns},
       [](const Problem& p) { return p.index_dtype; },
       [](const Problem& p) { return !in_backward(p) && p.state_index; }},
      {"output_state_index",
       input,
       state_slots,
       {TensorDim::N},
       [](const Problem& p) { return p.index_dtype; },
       [](const Problem& p) { return !in_backward(p) && p.output_state_index; }},
      {"has_initial_state",
       input,
       choices,
       {TensorDim::N},
       [](const Problem&) { return DType::boolean; },
       [](const Problem& p) { return !in_backward(p) && p.has_initial_state; }},
      {"state_scale",
       input,
       state_scales,
       {TensorDim::slots, TensorDim::HV},
       always_fp32,
       has_state_scale},
      {"num_accepted",
       input,
       accepted,
       {TensorDim::N},
       [](const Problem& p) { return p.index_dtype; },
       [](const Problem& p) { return p.index_columns != 0; }},
      {"intermediate_index",
       input,
       rows,
       {TensorDim::N},
       [](const Problem& p) { return p.index_dtype; },
       [](const Problem& p) { return p.intermediate_rows.has_value(); }},
      {"parent",
       input,
       parents,
       {TensorDim::N, TensorDim::drafts},
       [](const Problem& p) { return p.index_dtype; },
       [](const Problem& p) { return p.parent; }},
      {"checkpoint_offsets",
       input,
       offsets,
       {TensorDim::N},
       [](const Problem& p) { return p.index_dtype; },
       [](const Problem& p) { return p.checkpoint_offsets; }},
      // Updated: rows of no checkpoint keep their bytes.
      {"checkpoints", updated, states, checkpoints, checkpoint_dtype, has_checkpoints},
      {"state", updated, states, pool, dtype_of_states,
       [](const Problem& p) { return p.inplace_state; }, kStrided},
      {"final_state", output, computed, each, always_fp32,
       [](const Problem& p) { return !in_backward(p) && p.output_final_state; }},
      {"intermediate_states", inside, states, drafts,
       [](const Problem& p) { return p.pass == Pass::recurrent ? p.state_dtype : p.dtype; },
       [](const Problem& p) {
         return p.pass == Pass::recurrent ? p.intermediate_rows.has_value()
                                          : p.pass == Pass::forward && p.return_intermediate_states;
       }},
      {"dinitial_state", output, computed, each, always_fp32,
       [](const Problem& p) { return in_backward(p) && p.initial_state; }},
      {"summary",
       output,
       computed,
       {TensorDim::N, TensorDim::HV, TensorDim::K, TensorDim::summary_columns},
       always_fp32,
       [](const Problem& p) { return !in_backward(p) && p.summary; }},
      {"dsummary",
       output,
       computed,
       {TensorDim::N, TensorDim::HV, TensorDim::K, TensorDim::V},
       always_fp32,
       [](const Problem& p) { return in_backward(p) && p.summary; }},
      {"segment_M",
       shared,
       computed,
       {TensorDim::NS, TensorDim::HV, TensorDim::K, TensorDim::K},
       always_fp32,
       with_segments},
      {"segment_R",
       shared,
       computed,
       {TensorDim::NS, TensorDim::HV, TensorDim::K, TensorDim::V},
       always_fp32,
       with_segments},
  };
}

TensorRules kept_tensors(TensorDim rows) {
  return {
      {"h",
       kept,
       computed,
       {TensorDim::NT, TensorDim::HV, TensorDim::K, TensorDim::V},
       dtype_of_rows,
       with_kept},
      {"v_new",
       kept,
       computed,
       {TensorDim::B, rows, TensorDim::HV, TensorDim::V},
       dtype_of_rows,
       with_kept},
  };
}

TensorRules kept_decayed_tensors() {
  const Dims row{TensorDim::B, TensorDim::T, TensorDim::HV, TensorDim::K};
  const Dims square{TensorDim::B, TensorDim::T, TensorDim::HV, TensorDim::C};
  return {
      {"Tinv", kept, computed, square, dtype_of_rows, with_kept},
      {"Aqk", kept, computed, square, always_fp32, with_kept},
      {"w", kept, computed, row, dtype_of_rows, with_kept},
      {"qg", kept, computed, row, dtype_of_rows, with_kept},
      {"kg", kept, computed, row, dtype_of_rows, with_kept},
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
    const TensorDim dim = rule.dims.at[static_cast<std::size_t>(i)];
    if (!exists(dim, problem)) continue;
    if (i > 0) text += ',';
    text += symbol(dim, problem);
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
    for (int d = 0; d < rule->dims.rank; ++d) {
      const TensorDim dim = rule->dims.at[static_cast<std::size_t>(d)];
      if (exists(dim, problem))
        spec.shape[static_cast<std::size_t>(spec.rank++)] = extents[static_cast<std::size_t>(dim)];
    }
    spec.present = rule->present(problem);
    if (rule->dims.at[0] == TensorDim::slots && rule->dims.rank > 2) spec.outer_dims = 1;
  }
  return specs;
}

}  // namespace wyvern
