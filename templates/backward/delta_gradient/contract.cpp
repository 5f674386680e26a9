#include <algorithm>

#include "templates/backward/delta_gradient/layout.hpp"
#include "templates/backward/stages.hpp"
#include "templates/backward/views.hpp"
#include "templates/hopper_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::delta_gradient {
namespace {

constexpr std::int64_t kThreads = 384;

using backward_views::chunk_values;
using backward_views::keys;
using backward_views::matrices;
using backward_views::slices;
using backward_views::values;

/// A part of a slice of states.
TiledView state_parts(const Spec& s, const Extents& e) {
  return matrices(s, e, s.V, s.K, HopperLayout(s).part_rows, 1);
}
/// The same of states with K first.
TiledView kept_parts(const Spec& s, const Extents& e) {
  return matrices(s, e, s.K, s.V, kChannels, HopperLayout(s).part_rows / 64);
}

std::string illegal(const Spec& s, const Limits& limits) {
  if (s.VECTOR_GATE) return "it has one gate a head, not one per key channel";
  if (s.BT != kRows)
    return fmt::format("BT={} is not the {} rows of a warpgroup's product", s.BT, kRows);
  if (s.DTYPE != DType::bf16)
    return "DTYPE must be bf16: its operands need bf16's range, which fp16 lacks, and wgmma has no "
           "fp32 products";
  for (const std::int64_t width : {s.K, s.V})
    if (width != 64 && width != 128 && width != 256)
      return fmt::format("K={} and V={} must be 64, 128 or 256", s.K, s.V);
  return cuda::exceeds_shared(HopperLayout(s).bytes, limits);
}

/// Hopper: one persistent block per multiprocessor; it goes through chunks and key heads. `z`, Z or
/// V', and `states` are what it has of the scan.
Template gradient(const StageDefinition& stage, std::string source, const TensorMapUse& z,
                  const TensorMapUse& states) {
  Template t;
  t.name = stage.name;
  t.variant = "hopper";
  t.source = std::move(source);
  t.covers = {stage};
  t.constants = {constant::DTYPE,       constant::BETA_DTYPE,
                 constant::G_DTYPE,     constant::GROUP,
                 constant::K,           constant::V,
                 constant::VARLEN,      constant::SCALAR_GATE,
                 constant::VECTOR_GATE, constant::HAS_A_LOG,
                 constant::HAS_DT_BIAS, constant::GATE_IN_KERNEL,
                 constant::QK_L2NORM,   constant::BETA_SIGMOID,
                 constant::NEG_EIGVAL};
  t.needs.wgmma = t.needs.tensor_copies = true;
  t.tunables = {{tunable::BT, cuda::integers({kRows})}};
  t.tensor_maps = {{.name = "q_map", .argument = "q", .view = keys},
                   {.name = "k_map", .argument = "k", .view = keys},
                   {.name = "do_map", .argument = "do", .view = values},
                   z,
                   {.name = "dv_map", .argument = "dv", .view = values},
                   states,
                   {.name = "dstates_map", .argument = "dstates", .view = state_parts},
                   {.name = "dq_map", .argument = "dq_given", .view = slices},
                   {.name = "dk_map", .argument = "dk_given", .view = slices}};
  t.strided = {"q", "k", "beta", "g", "do"};
  t.illegal = illegal;
  t.cost = [](const Spec& s, const Workload& w, const Limits& limits) {
    return cost::chunks(s.K == 256 ? 12 : 6, s, w, limits);
  };
  t.geometry = [](const Spec& s, const Extents& e, const Limits& limits) {
    const std::int64_t items = e.NT * s.H;
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

std::vector<Template> contract() {
  Template own = gradient(stages::delta_gradient, "hopper.cu",
                          {.name = "z_map", .argument = "z", .view = chunk_values},
                          {.name = "states_map", .argument = "states", .view = state_parts});
  own.summary =
      "All gradients of a chunk but v's, for a gate a head or none, from both scans' states.";
  Template kept = gradient(stages::delta_gradient_kept, "kept.cu",
                           {.name = "z_map", .argument = "v_new", .view = values},
                           {.name = "states_map", .argument = "h", .view = kept_parts});
  kept.summary = "The same from the states and values that the forward pass has kept.";
  return {own, kept};
}

}  // namespace wyvern::delta_gradient
