// The operators: which stages carry out each pass, and how their tensors connect.
#include <wyvern/error.hpp>

#include "runtime/plan.hpp"

namespace wyvern {
namespace {

using Uses = std::vector<StageUse>;

const std::string kCallersGate = std::string(kCallers) + "g";

bool has_gate_in_kernel(const Problem& p) {
  return p.use_gate_in_kernel && gate_kind(p) != GateKind::none;
}

/// The name that a scan's states go by.
std::string states_name(const Problem& p) {
  const bool returned = p.pass == Pass::forward && p.return_intermediate_states && !p.state_v_first;
  return returned ? "intermediate_states" : "h";
}

/// Tables of chunks, norms of rows and summed gates: what every chunked pass starts with.
void add_preparation(const Problem& p, Uses& uses) {
  if (p.packed) uses.push_back({"chunk_index", {}, {}});
  if (p.use_qk_l2norm) {
    uses.push_back({"l2norm_rstd", {{"x", "q"}, {"rstd", "q_rstd"}}, {}});
    uses.push_back({"l2norm_rstd", {{"x", "k"}, {"rstd", "k_rstd"}}, {}});
  }
  const bool vector = gate_kind(p) == GateKind::vector;
  if (gate_kind(p) == GateKind::none) return;
  Values summed;
  if (p.use_gate_in_kernel) {
    uses.push_back({vector ? "kda_gate" : "gate", {{"g_log", "g"}}, {}});
    summed.set("G_DTYPE", DType::fp32);
  }
  StageUse cumsum{"chunk_local_cumsum", {}, summed};
  if (vector) cumsum.rename.emplace("G", "Gk");
  uses.push_back(std::move(cumsum));
}

/// Up to the states: what the backward pass rebuilds when it was not kept.
void add_states(const Problem& p, Uses& uses) {
  const bool vector = gate_kind(p) == GateKind::vector;
  uses.push_back({vector ? "kda_intra" : "scaled_dot_kkt", {}, {}});
  uses.push_back({"solve_tril", {}, {}});
  uses.push_back({vector ? "kda_recompute_w_u" : "recompute_w_u", {}, {}});
  StageUse scan{"fwd_h", {}, {}};
  if (states_name(p) != "h") scan.rename.emplace("h", states_name(p));
  // FINAL_STATE of a backward problem says that its gradient is given.
  if (p.pass == Pass::backward) scan.constants.set("FINAL_STATE", false);
  // Templates cover all three, or each: then segments of long sequences are scanned at once.
  uses.push_back({"fwd_h_segment", {}, scan.constants});
  uses.push_back({"fwd_h_combine", {}, {}});
  uses.push_back(std::move(scan));
}

Uses forward(const Problem& p) {
  Uses uses;
  add_preparation(p, uses);
  add_states(p, uses);
  StageUse output{gate_kind(p) == GateKind::vector ? "kda_fwd_o" : "fwd_o", {}, {}};
  if (states_name(p) != "h") output.rename.emplace("h", states_name(p));
  uses.push_back(std::move(output));
  if (p.return_intermediate_states && p.state_v_first)
    uses.push_back({"transpose_states", {{"h_v_first", "intermediate_states"}}, {}});
  return uses;
}

/// From the gradient of every value head's scaled row of `x` to that of x.
void add_row_gradient(const Problem& p, const std::string& x, Uses& uses) {
  const bool grouped = p.HV != p.H;
  const std::string gradient = "d" + x;
  const std::string scaled = p.use_qk_l2norm ? gradient + "_scaled" : gradient;
  if (grouped)
    uses.push_back({"head_sum", {{"dy_heads", gradient + "_heads"}, {"dy", scaled}}, {}});
  if (p.use_qk_l2norm)
    uses.push_back({"l2norm_bwd",
                    {{"x", x},
                     {"rstd", x + "_rstd"},
                     {"dy", grouped ? scaled : gradient + "_heads"},
                     {"dx", gradient}},
                    {}});
}

/// From the gradient of summed gates to those of the gates and of what they are made from.
void add_gate_gradient(const Problem& p, Uses& uses) {
  const bool vector = gate_kind(p) == GateKind::vector;
  StageUse cumsum{"chunk_local_reverse_cumsum", {}, {}};
  if (vector) cumsum.rename = {{"G", "Gk"}, {"dG", "dGk"}};
  if (has_gate_in_kernel(p)) cumsum.rename.emplace("dg", "dg_log");
  uses.push_back(std::move(cumsum));
  if (!has_gate_in_kernel(p)) return;
  uses.push_back(
      {vector ? "kda_gate_bwd" : "gate_bwd", {{"g", kCallersGate}, {"dg_raw", "dg"}}, {}});
  if (p.has_A_log || p.has_dt_bias) uses.push_back({"gate_param_sum", {}, {}});
}

Uses backward(const Problem& p) {
  const bool vector = gate_kind(p) == GateKind::vector;
  Uses uses;
  add_preparation(p, uses);
  if (!p.disable_recompute) add_states(p, uses);
  uses.push_back({vector ? "kda_bwd_dv_local" : "bwd_dv_local", {}, {}});
  for (const char* stage : {"bwd_dhu_segment", "bwd_dhu_combine", "bwd_dhu"})
    uses.push_back({stage, {}, {}});
  StageUse first{vector ? "kda_bwd_dqkg" : "bwd_dqkwg", {}, {}};
  StageUse second{vector ? "kda_intra_bwd" : "wy_bwd", {}, {}};
  const bool per_head = p.HV != p.H || p.use_qk_l2norm;
  if (per_head) {
    (vector ? second : first).rename.emplace("dq", "dq_heads");
    second.rename.emplace("dk", "dk_heads");
  }
  uses.push_back(std::move(first));
  uses.push_back(std::move(second));
  if (per_head) {
    add_row_gradient(p, "q", uses);
    add_row_gradient(p, "k", uses);
  }
  if (gate_kind(p) != GateKind::none) add_gate_gradient(p, uses);
  return uses;
}

}  // namespace

std::vector<StageUse> stage_uses(const Problem& problem) {
  switch (problem.pass) {
    case Pass::forward: return forward(problem);
    case Pass::backward: return backward(problem);
    case Pass::recurrent: return {{"recurrent", {}, {}}};
  }
  return {};
}

}  // namespace wyvern
