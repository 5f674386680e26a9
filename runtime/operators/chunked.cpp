#include "runtime/operators/chunked.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "templates/backward/stages.hpp"
#include "templates/decode/stages.hpp"
#include "templates/forward/stages.hpp"
#include "templates/gate/stages.hpp"
#include "templates/gradient/stages.hpp"
#include "templates/intra/stages.hpp"
#include "templates/output/stages.hpp"
#include "templates/rows/stages.hpp"
#include "templates/scan/stages.hpp"
#include "templates/tables/stages.hpp"

namespace wyvern {
namespace {

bool has_gate(const Problem& p) { return gate_kind(p) != GateKind::none; }

/// The name of a scan's states.
std::string states_name(const Problem& p) {
  const bool returned = p.pass == Pass::forward && p.return_intermediate_states && !p.state_v_first;
  return returned ? "intermediate_states" : "h";
}

/// Whether the gradients of q and k pass through a tensor with a row for every value head.
bool per_value_head(const Problem& p) { return p.HV != p.H || p.use_qk_l2norm; }

double real(std::int64_t count) { return static_cast<double>(count); }
double tokens_of(const Problem& p) { return real(p.B) * real(p.T); }
double steps_of(const Problem& p) { return tokens_of(p) * real(p.num_householder); }

/// FLOPs of a token and value head as multiples of K V, C V, C K (some shared by the value heads of
/// a group unless the gate is a vector) and C^2.
struct Products {
  double KV, CV, CK, shared_CK, CC;
};

Products products_of(const Problem& p) {
  const double n = real(p.num_householder);
  if (p.pass == Pass::recurrent) return {4 * n + 2, 0, 0, 0, 0};
  if (p.summary && p.pass == Pass::forward) return {4 * n, 2 * n, 0, 2 * n, 2 * n};
  if (p.pass == Pass::forward || p.summary) return {4 * n + 2, 2 * n + 2, 0, 2 * n + 2, 2 * n};
  if (p.disable_recompute && gate_kind(p) == GateKind::vector)
    return {8 * n + 4, 4 * n + 4, 6 * n + 4, 2 * n + 2, 0};
  if (p.disable_recompute) return {8 * n + 4, 6 * n + 4, 8 * n + 4, 2 * n + 2, 2 * n};
  return {12 * n + 4, 6 * n + 4, 8 * n + 4, 2 * n + 2, 2 * n};
}

}  // namespace

const ChunkedStages& scalar_gate_stages() {
  // Never destroyed: the last threads may prepare while the process ends.
  static const ChunkedStages& stages = *new ChunkedStages{
      .gate = &stages::gate,
      .intra = &stages::scaled_dot_kkt,
      .recompute = &stages::recompute_w_u,
      .output = &stages::fwd_o,
      .dv_local = &stages::bwd_dv_local,
      .d_first = &stages::bwd_dqkwg,
      .d_second = &stages::wy_bwd,
      .gate_bwd = &stages::gate_bwd,
      .recurrent = &stages::recurrent,
      .segment = &stages::delta_segment,
      .resume = &stages::delta_resume,
      .whole_pass = {{&stages::delta_scans, {}, {}}, {&stages::delta_gradient, {}, {}}},
      .scans_segment = &stages::delta_scans_segment,
      .scans_resume = &stages::delta_scans_resume,
      .kept_pass = {{&stages::delta_reverse, {}, {}}, {&stages::delta_gradient_kept, {}, {}}},
      .kept_resume = &stages::delta_reverse_resume};
  return stages;
}

const ChunkedStages& vector_gate_stages() {
  // Never destroyed: the last threads may prepare while the process ends.
  static const ChunkedStages& stages = *new ChunkedStages{.gate = &stages::kda_gate,
                                                          .intra = &stages::kda_intra,
                                                          .recompute = &stages::kda_recompute_w_u,
                                                          .output = &stages::kda_fwd_o,
                                                          .dv_local = &stages::kda_bwd_dv_local,
                                                          .d_first = &stages::kda_bwd_dqkg,
                                                          .d_second = &stages::kda_intra_bwd,
                                                          .gate_bwd = &stages::kda_gate_bwd,
                                                          .sums = "Gk",
                                                          .d_sums = "dGk",
                                                          .second_has_dq = true,
                                                          .keeps_intra = true,
                                                          .recurrent = &stages::recurrent};
  return stages;
}

void add_chunk_tables(const Problem& p, Uses& uses) {
  if (p.packed) uses.push_back({&stages::chunk_index, {}, {}});
}

void add_group(const Uses& group, Uses& uses) {
  const std::size_t first = uses.size();
  uses.insert(uses.end(), group.begin(), group.end());
  uses[first].optional_group = group.size();
}

void add_segments(const Problem& p, const ChunkedStages& stages, Uses& uses) {
  if (stages.segment == nullptr) return;
  Uses group;
  if (!p.segment_chunks)
    group.push_back({stages.segment, {{"share_M", "segment_M"}, {"share_R", "segment_R"}}, {}});
  group.push_back({&stages::fwd_h_combine, {}, {}});
  group.push_back({stages.resume, {}, {}});
  add_group(group, uses);
}

namespace {

/// Whether the pass has what the forward scan finds.
bool has_kept(const Problem& p, const ChunkedStages& stages) {
  return p.disable_recompute && !stages.kept_pass.empty();
}
const Uses& whole_pass_of(const Problem& p, const ChunkedStages& stages) {
  return has_kept(p, stages) ? stages.kept_pass : stages.whole_pass;
}

/// The kernels in front of the whole pass that split it into segments.
Uses pass_segments(const Problem& p, const ChunkedStages& stages) {
  const Names gradients{{"share_dM", "segment_dM"}, {"share_dR", "segment_dR"}};
  if (has_kept(p, stages))  // the maps of a summary: those of gradients alone
    return {{stages.scans_segment, gradients, Values{{"SUMMARY", true}}},
            {&stages::bwd_dhu_combine, {}, {}},
            {stages.kept_resume, {}, {}}};
  Names all = gradients;
  all.insert({{"share_M", "segment_M"}, {"share_R", "segment_R"}});
  return {{stages.scans_segment, all, {}},
          {&stages::fwd_h_combine, {}, {}},
          {&stages::bwd_dhu_combine, {}, {}},
          {stages.scans_resume, {}, {}}};
}

}  // namespace

void add_whole_pass(const Problem& p, const ChunkedStages& stages, Uses& uses) {
  if (stages.scans_segment != nullptr) add_group(pass_segments(p, stages), uses);
  Uses group = whole_pass_of(p, stages);
  if (group.empty()) return;
  group.back().rename.insert({{"dq_given", "dq"},
                              {"dk_given", "dk"},
                              {"dg_given", "dg"},
                              {"dA_chunk", "dA_part"},
                              {"dbias_chunk", "dbias_part"}});
  add_group(group, uses);
}

void end_whole_pass(const Problem& p, const ChunkedStages& stages, Uses& uses) {
  const Uses& pass = whole_pass_of(p, stages);
  if (pass.empty()) return;
  const auto gradient = std::ranges::find(uses, pass.back().stage, &StageUse::stage);
  if (gradient == uses.end()) return;
  const auto behind = uses.end() - gradient - 1;
  const bool sums = uses.back().stage == &stages::gate_param_sum;
  gradient->replaces = static_cast<std::size_t>(behind) - (sums ? 1 : 0);
}

void add_row_scales(const Problem& p, const std::string& x, Uses& uses) {
  if (p.use_qk_l2norm)
    uses.push_back({&stages::l2norm_rstd, {{"x", x}, {"rstd", x + "_rstd"}}, {}});
}

void add_row_preparation(const Problem& p, Uses& uses) {
  add_chunk_tables(p, uses);
  add_row_scales(p, "q", uses);
  add_row_scales(p, "k", uses);
}

void add_gate(const Problem& p, const ChunkedStages& stages, Uses& uses) {
  if (has_gate(p) && p.use_gate_in_kernel) uses.push_back({stages.gate, {{"g_log", "g"}}, {}});
}

void add_sums(const Problem& p, const ChunkedStages& stages, Uses& uses) {
  if (!has_gate(p)) return;
  StageUse sums{&stages::chunk_local_cumsum, {}, {}};
  if (p.use_gate_in_kernel) sums.constants.set("G_DTYPE", DType::fp32);
  if (stages.sums != "G") sums.rename.emplace("G", stages.sums);
  uses.push_back(std::move(sums));
}

void add_gate_sums(const Problem& p, const ChunkedStages& stages, Uses& uses) {
  add_gate(p, stages, uses);
  add_sums(p, stages, uses);
}

void add_intra(const ChunkedStages& stages, Uses& uses, const Names& names) {
  for (const StageDefinition* stage : {stages.intra, &stages::solve_tril, stages.recompute}) {
    StageUse use{stage, {}, {}};
    for (const auto& [name, other] : names)
      if (stage->find(name) != nullptr) use.rename.emplace(name, other);
    uses.push_back(std::move(use));
  }
}

void add_forward_scan(const Problem& p, Uses& uses) {
  StageUse scan{&stages::fwd_h, {}, {}};
  if (states_name(p) != "h") scan.rename.emplace("h", states_name(p));
  // FINAL_STATE of a backward problem says that its gradient is given.
  if (p.pass == Pass::backward) scan.constants.set("FINAL_STATE", false);
  // Templates cover all three, or each: then segments of long sequences are scanned at once.
  if (!p.segment_chunks) uses.push_back({&stages::fwd_h_segment, {}, scan.constants});
  uses.push_back({&stages::fwd_h_combine, {}, {}});
  uses.push_back(std::move(scan));
}

void add_output(const Problem& p, const ChunkedStages& stages, Uses& uses) {
  StageUse output{stages.output, {}, {}};
  if (states_name(p) != "h") output.rename.emplace("h", states_name(p));
  uses.push_back(std::move(output));
  if (p.return_intermediate_states && p.state_v_first)
    uses.push_back({&stages::transpose_states, {{"h_v_first", "intermediate_states"}}, {}});
}

void add_reverse_scan(const ChunkedStages& stages, Uses& uses) {
  uses.push_back({stages.dv_local, {}, {}});
  for (const StageDefinition* stage :
       {&stages::bwd_dhu_segment, &stages::bwd_dhu_combine, &stages::bwd_dhu})
    uses.push_back({stage, {}, {}});
}

std::string chunk_gradient(const Problem& p, const std::string& x) {
  return "d" + x + (per_value_head(p) ? "_heads" : "");
}

void add_chunk_gradients(const Problem& p, const ChunkedStages& stages, Uses& uses) {
  StageUse first{stages.d_first, {}, {}}, second{stages.d_second, {}, {}};
  if (per_value_head(p)) {
    (stages.second_has_dq ? second : first).rename.emplace("dq", chunk_gradient(p, "q"));
    second.rename.emplace("dk", chunk_gradient(p, "k"));
  }
  uses.push_back(std::move(first));
  uses.push_back(std::move(second));
}

void add_row_gradient(const Problem& p, const std::string& x, Uses& uses) {
  if (!per_value_head(p)) return;
  const bool grouped = p.HV != p.H;
  const std::string gradient = "d" + x;
  const std::string scaled = p.use_qk_l2norm ? gradient + "_scaled" : gradient;
  if (grouped)
    uses.push_back({&stages::head_sum, {{"dy_heads", chunk_gradient(p, x)}, {"dy", scaled}}, {}});
  if (p.use_qk_l2norm)
    uses.push_back({&stages::l2norm_bwd,
                    {{"x", x},
                     {"rstd", x + "_rstd"},
                     {"dy", grouped ? scaled : chunk_gradient(p, x)},
                     {"dx", gradient}},
                    {}});
}

void add_sums_gradient(const Problem& p, const ChunkedStages& stages, Uses& uses) {
  if (!has_gate(p)) return;
  StageUse sums{&stages::chunk_local_reverse_cumsum, {}, {}};
  if (stages.sums != "G") sums.rename = {{"G", stages.sums}, {"dG", stages.d_sums}};
  if (p.use_gate_in_kernel) sums.rename.emplace("dg", "dg_log");
  uses.push_back(std::move(sums));
}

void add_raw_gate_gradient(const Problem& p, const ChunkedStages& stages, Uses& uses) {
  if (!has_gate(p) || !p.use_gate_in_kernel) return;
  uses.push_back({stages.gate_bwd, {{"g", std::string(kCallers) + "g"}, {"dg_raw", "dg"}}, {}});
  if (p.has_A_log || p.has_dt_bias) uses.push_back({&stages::gate_param_sum, {}, {}});
}

void add_gate_gradient(const Problem& p, const ChunkedStages& stages, Uses& uses) {
  add_sums_gradient(p, stages, uses);
  add_raw_gate_gradient(p, stages, uses);
}

void add_forward_summary(Uses& uses) {
  uses.push_back({&stages::fwd_h_segment, {}, {}});
  uses.push_back({&stages::fwd_h_summary, {}, {}});
}

void add_reverse_summary(const ChunkedStages& stages, Uses& uses) {
  uses.push_back({stages.dv_local, {}, {}});
  uses.push_back({&stages::bwd_dhu_segment, {}, {}});
  uses.push_back({&stages::bwd_dhu_summary, {}, {}});
}

namespace {

/// The list of a problem with `summary`: an optional kernel finds the maps of segments in the place
/// of all stages up to them, or an optional group is the whole of it.
Uses summary_stages(const Problem& p, const ChunkedStages& stages) {
  const bool forward = p.pass == Pass::forward;
  Uses uses;
  add_chunk_tables(p, uses);
  const std::size_t group = uses.size();
  if (forward && stages.segment != nullptr)
    add_group({{stages.segment, {{"share_M", "segment_M"}, {"share_R", "segment_R"}}, {}}}, uses);
  if (!forward && stages.scans_segment != nullptr)
    add_group({{stages.scans_segment,
                {{"v", "do"}, {"share_dM", "segment_dM"}, {"share_dR", "segment_dR"}},
                {}}},
              uses);
  const bool whole = !forward && !stages.whole_summary.empty();
  if (whole) add_group(stages.whole_summary, uses);
  const std::size_t behind = uses.size();
  if (!forward) add_row_scales(p, "q", uses);
  add_row_scales(p, "k", uses);
  add_gate_sums(p, stages, uses);
  // Nothing reads what is made of queries, or of values: others are in their place.
  add_intra(stages, uses, forward ? Names{{"q", "k"}, {"q_rstd", "k_rstd"}} : Names{{"v", "do"}});
  if (forward)
    add_forward_summary(uses);
  else
    add_reverse_summary(stages, uses);
  if (behind > group) uses[behind - 1].replaces = uses.size() - behind - (whole ? 0 : 1);
  return uses;
}

}  // namespace

Uses chunked_stages(const Problem& p, const ChunkedStages& stages) {
  if (p.pass == Pass::recurrent) return {{stages.recurrent, {}, {}}};
  if (p.summary) return summary_stages(p, stages);
  Uses uses;
  add_chunk_tables(p, uses);
  if (p.pass == Pass::forward)
    add_segments(p, stages, uses);
  else
    add_whole_pass(p, stages, uses);
  for (const char* const x : {"q", "k"}) add_row_scales(p, x, uses);
  add_gate_sums(p, stages, uses);
  const bool kept = p.pass == Pass::backward && p.disable_recompute;
  if (!kept || !stages.keeps_intra) add_intra(stages, uses);
  if (!kept) add_forward_scan(p, uses);
  if (p.pass == Pass::forward) {
    add_output(p, stages, uses);
    return uses;
  }
  add_reverse_scan(stages, uses);
  add_chunk_gradients(p, stages, uses);
  add_row_gradient(p, "q", uses);
  add_row_gradient(p, "k", uses);
  add_gate_gradient(p, stages, uses);
  end_whole_pass(p, stages, uses);
  return uses;
}

std::span<const std::int64_t> ChunkedDeltaRule::chunk_sizes(const Problem& p,
                                                            DeviceKind device) const {
  // The backward pass on a GPU: its kernels hold gates per channel, and with half as many rows
  // twice as many blocks fit on a multiprocessor (kda on one H200, 2026-11-21: 64 heads, 8192
  // tokens 13% faster).
  static constexpr std::array<std::int64_t, 4> kSmallChunksFirst{32, 64, 128, 16};
  if (facts().gate == GateKind::vector && device == DeviceKind::cuda && p.pass == Pass::backward)
    return kSmallChunksFirst;
  return OperatorDefinition::chunk_sizes(p, device);
}

double chunked_flops(const Problem& p) {
  const Products n = products_of(p);
  const double K = real(p.K), V = real(p.V + (p.transition ? p.K : 0));
  const double longest = p.N > 0 ? std::ceil(steps_of(p) / real(p.N)) : 0;
  const double C = std::min(real(kept_chunk_size(p)), longest);
  const double shared =
      gate_kind(p) == GateKind::vector ? n.shared_CK : n.shared_CK * real(p.H) / real(p.HV);
  return tokens_of(p) * real(p.HV) *
         (n.KV * K * V + n.CV * C * V + (n.CK + shared) * C * K + n.CC * C * C);
}

double chunked_rebuilt_bytes(const Problem& p) {
  if (p.pass != Pass::backward || p.summary || p.disable_recompute || tokens_of(p) == 0) return 0;
  const double chunks = std::max(steps_of(p) / real(kept_chunk_size(p)), real(p.N));
  return 2 * chunks * real(p.HV * p.K) * real(p.V) *
         real(static_cast<std::int64_t>(size_of(p.dtype)));
}

}  // namespace wyvern
