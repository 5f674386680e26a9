#include <algorithm>

#include "templates/backward/kda_gradient/layout.hpp"
#include "templates/backward/kda_pass_contract.hpp"
#include "templates/backward/stages.hpp"
#include "templates/backward/views.hpp"
#include "templates/hopper_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::kda_gradient {
namespace {

constexpr std::int64_t kThreads = 512;

using backward_views::chunk_values;
using backward_views::matrices;
using backward_views::slices;
using backward_views::values;

TiledView gates(const Spec& s, const Extents& e) {
  return hopper::panels(e, s.G_DTYPE, s.HV, s.K, kRows,
                        kChannels * static_cast<std::int64_t>(size_of(s.G_DTYPE)) / 128);
}
TiledView states(const Spec& s, const Extents& e) { return matrices(s, e, s.V, s.K, s.V, 1); }

std::string illegal(const Spec& s, const Limits& limits) {
  if (std::string reason = kda_pass::unsupported(s); !reason.empty()) return reason;
  if (s.ERASE_WRITE && s.BETA_DTYPE != s.DTYPE)
    return fmt::format("erase and write are {}; they must be {}, the type of q, k and v",
                       to_string(s.BETA_DTYPE), to_string(s.DTYPE));
  return cuda::exceeds_shared(HopperLayout(s).bytes, limits);
}

/// Hopper: one persistent block per multiprocessor; it goes through chunks and heads.
Template hopper_template() {
  Template t;
  t.name = "kda_gradient";
  t.variant = "hopper";
  t.source = "hopper.cu";
  t.covers = {stages::kda_gradient};
  t.constants = {constant::DTYPE,       constant::BETA_DTYPE,  constant::G_DTYPE,
                 constant::K,           constant::V,           constant::VARLEN,
                 constant::HAS_A_LOG,   constant::HAS_DT_BIAS, constant::GATE_IN_KERNEL,
                 constant::LOWER_BOUND, constant::QK_L2NORM,   constant::BETA_SIGMOID,
                 constant::NEG_EIGVAL,  constant::ERASE_WRITE};
  t.needs.wgmma = t.needs.tensor_copies = true;
  t.tunables = {{tunable::BT, cuda::integers({kRows})}};
  t.tensor_maps = {{.name = "q_map", .argument = "q", .view = slices},
                   {.name = "k_map", .argument = "k", .view = slices},
                   {.name = "g_map", .argument = "g", .view = gates},
                   {.name = "do_map", .argument = "do", .view = values},
                   {.name = "z_map", .argument = "z", .view = chunk_values},
                   {.name = "dv_map", .argument = "dwritten", .view = values},
                   {.name = "states_map", .argument = "states", .view = states},
                   {.name = "dstates_map", .argument = "dstates", .view = states},
                   {.name = "dq_map", .argument = "dq_given", .view = slices},
                   {.name = "dk_map", .argument = "dk_given", .view = slices}};
  t.strided = {"q", "k", "v", "beta", "erase", "write", "g", "do"};
  t.illegal = illegal;
  // With kda_bwd_prepare 0.647 ms for 32 heads of 128 chunks on one H200, 2026-11-25.
  t.cost = [](const Spec& s, const Workload& w, const Limits& limits) {
    return cost::chunks(13, s, w, limits);
  };
  t.geometry = [](const Spec& s, const Extents& e, const Limits& limits) {
    const std::int64_t items = e.NT * s.HV;
    return Geometry{
        .grid = {limits.multiprocessors > 0 ? std::min<std::int64_t>(items, limits.multiprocessors)
                                            : items,
                 1, 1},
        .threads = kThreads,
        .shared_bytes = HopperLayout(s).bytes};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {hopper_template()}; }

}  // namespace wyvern::kda_gradient
