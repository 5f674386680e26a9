#include <wyvern/runtime.hpp>

#include "templates/template.hpp"

namespace wyvern {
namespace {

using Shape = std::initializer_list<std::int64_t>;

/// Collects specs in the order of Arguments.
class Specs {
 public:
  void add(std::string_view name, TensorAccess access, bool present, DType dtype, Shape shape) {
    TensorSpec spec{name, access, dtype, static_cast<int>(shape.size()), {}, present};
    std::copy(shape.begin(), shape.end(), spec.shape.begin());
    specs_.push_back(spec);
  }
  std::vector<TensorSpec> take() { return std::move(specs_); }

 private:
  std::vector<TensorSpec> specs_;
};

/// What the specs of a problem share.
struct Sizes {
  std::int64_t chunk, NT, rows, columns, slots;
  bool backward, kda, gated, gate_in_kernel;

  explicit Sizes(const Problem& p)
      : chunk(kept_chunk_size(p)),
        NT(chunk_slots(p.B, p.T, p.N, p.packed, chunk)),
        rows(p.state_v_first ? p.V : p.K),
        columns(p.state_v_first ? p.K : p.V),
        slots(p.state_index ? p.state_slots : p.N),
        backward(p.pass == Pass::backward),
        kda(gate_kind(p) == GateKind::vector),
        gated(gate_kind(p) != GateKind::none),
        gate_in_kernel(gated && p.use_gate_in_kernel) {}
};

/// A tensor with a value for every gate: of each token, or of all tokens where `leading` is false.
void add_gate(Specs& specs, std::string_view name, TensorAccess access, bool present, DType dtype,
              const Problem& p, bool leading) {
  const bool kda = gate_kind(p) == GateKind::vector;
  if (leading && kda)
    specs.add(name, access, present, dtype, {p.B, p.T, p.HV, p.K});
  else if (leading)
    specs.add(name, access, present, dtype, {p.B, p.T, p.HV});
  else if (kda)
    specs.add(name, access, present, dtype, {p.HV, p.K});
  else
    specs.add(name, access, present, dtype, {p.HV});
}

void add_inputs(Specs& specs, const Problem& p, const Sizes& s) {
  constexpr TensorAccess in = TensorAccess::in;
  const bool recurrent = p.pass == Pass::recurrent;
  specs.add("q", in, true, p.dtype, {p.B, p.T, p.H, p.K});
  specs.add("k", in, true, p.dtype, {p.B, p.T, p.H, p.K});
  specs.add("v", in, true, p.dtype, {p.B, p.T, p.HV, p.V});
  specs.add("beta", in, true, p.beta_dtype, {p.B, p.T, p.HV});
  add_gate(specs, "g", in, s.gated, p.g_dtype, p, true);
  specs.add("initial_state", in, p.initial_state && !p.inplace_state, p.state_dtype,
            {s.slots, p.HV, s.rows, s.columns});
  specs.add("cu_seqlens", in, p.packed, p.seqlens_dtype, {p.N + 1});
  specs.add("A_log", in, s.gate_in_kernel && p.has_A_log, DType::fp32, {p.HV});
  add_gate(specs, "dt_bias", in, s.gate_in_kernel && p.has_dt_bias, DType::fp32, p, false);
  specs.add("do", in, s.backward, p.dtype, {p.B, p.T, p.HV, p.V});
  specs.add("dht", in, s.backward && p.output_final_state, DType::fp32,
            {p.N, p.HV, s.rows, s.columns});
  specs.add("state_index", in, recurrent && p.state_index, p.index_dtype, {p.N});
}

/// disable_recompute: what the forward pass writes and the backward pass reads.
void add_kept(Specs& specs, const Problem& p, const Sizes& s) {
  const TensorAccess access = s.backward ? TensorAccess::in : TensorAccess::out;
  const bool kept = p.disable_recompute;
  specs.add("Tinv", access, kept, p.dtype, {p.B, p.T, p.HV, s.chunk});
  specs.add("Aqk", access, kept && s.kda, DType::fp32, {p.B, p.T, p.HV, s.chunk});
  specs.add("w", access, kept, p.dtype, {p.B, p.T, p.HV, p.K});
  specs.add("qg", access, kept && s.kda, p.dtype, {p.B, p.T, p.HV, p.K});
  specs.add("kg", access, kept && s.kda, p.dtype, {p.B, p.T, p.HV, p.K});
  specs.add("h", access, kept, p.dtype, {s.NT, p.HV, p.K, p.V});
  specs.add("v_new", access, kept, p.dtype, {p.B, p.T, p.HV, p.V});
}

void add_outputs(Specs& specs, const Problem& p, const Sizes& s) {
  constexpr TensorAccess out = TensorAccess::out;
  const bool states = p.pass == Pass::forward && p.return_intermediate_states;
  specs.add("state", TensorAccess::inout, p.inplace_state, p.state_dtype,
            {s.slots, p.HV, s.rows, s.columns});
  specs.add("o", out, !s.backward, p.dtype, {p.B, p.T, p.HV, p.V});
  specs.add("final_state", out, !s.backward && p.output_final_state, DType::fp32,
            {p.N, p.HV, s.rows, s.columns});
  specs.add("intermediate_states", out, states, p.dtype, {s.NT, p.HV, s.rows, s.columns});
  specs.add("dq", out, s.backward, p.dtype, {p.B, p.T, p.H, p.K});
  specs.add("dk", out, s.backward, p.dtype, {p.B, p.T, p.H, p.K});
  specs.add("dv", out, s.backward, p.dtype, {p.B, p.T, p.HV, p.V});
  specs.add("dbeta", out, s.backward, p.beta_dtype, {p.B, p.T, p.HV});
  add_gate(specs, "dg", out, s.backward && s.gated, p.g_dtype, p, true);
  specs.add("dA_log", out, s.backward && s.gate_in_kernel && p.has_A_log, DType::fp32, {p.HV});
  add_gate(specs, "ddt_bias", out, s.backward && s.gate_in_kernel && p.has_dt_bias, DType::fp32, p,
           false);
  specs.add("dinitial_state", out, s.backward && p.initial_state, DType::fp32,
            {p.N, p.HV, s.rows, s.columns});
}

}  // namespace

std::vector<TensorSpec> tensor_specs(const Problem& problem) {
  Specs specs;
  const Sizes sizes(problem);
  add_inputs(specs, problem, sizes);
  add_kept(specs, problem, sizes);
  add_outputs(specs, problem, sizes);
  return specs.take();
}

}  // namespace wyvern
