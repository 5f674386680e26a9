#include <algorithm>

#include "templates/backward/delta_gradient/layout.hpp"
#include "templates/backward/stages.hpp"
#include "templates/backward/views.hpp"
#include "templates/hopper_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::delta_gradient {
namespace {

constexpr std::int64_t kThreads = 384;

using backward_views::keys;
using backward_views::matrices;
using backward_views::slices;

/// Rows of a band's columns.
TiledView values(const Spec& s, const Extents& e) {
  return hopper::panels(e, s.DTYPE, s.HV, s.V, kRows, HopperLayout(s).band / 64);
}
/// Z of a chunk and a band.
TiledView chunk_values(const Spec& s, const Extents& e) {
  return matrices(s, e, kRows, s.V, kRows, HopperLayout(s).band / 64);
}
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
  if (s.K != 64 && s.K != 128 && s.K != 256)
    return fmt::format("K={} is not one of 64, 128 and 256", s.K);
  if (s.V % 64 != 0) return fmt::format("V={} is not a multiple of 64", s.V);
  return cuda::exceeds_shared(HopperLayout(s).bytes, limits);
}

/// Microseconds of a chunk and value head. More columns than one band has are more bytes.
double item_time(const Spec& s) {
  const double columns = s.K == 256 ? 256 : 128;
  return 6 * columns / 128 * std::max(1.0, static_cast<double>(s.V) / columns);
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
    return cost::chunks(item_time(s), s, w, limits);
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
