#include "templates/backward/kda_pass_contract.hpp"
#include "templates/backward/stages.hpp"
#include "templates/forward/kda_prepare/layout.hpp"
#include "templates/gate/stages.hpp"
#include "templates/hopper_contract.hpp"
#include "templates/intra/stages.hpp"
#include "templates/rows/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::kda_prepare {
namespace {

TiledView keys(const Spec& s, const Extents& e) {
  return hopper::panels(e, s.DTYPE, s.H, s.K, kChunk, s.K / 64);
}
TiledView values(const Spec& s, const Extents& e) {
  return hopper::panels(e, s.DTYPE, s.HV, s.V, kChunk, s.V / 64);
}
TiledView gates(const Spec& s, const Extents& e) {
  return hopper::panels(e, s.G_DTYPE, s.HV, s.K, kChunk,
                        s.K * static_cast<std::int64_t>(size_of(s.G_DTYPE)) / 128);
}

/// Square matrices of a chunk slot and value head, [NT, HV, 2, BT, BT].
TiledView squares(const Spec& s, const Extents& e) {
  return {.dims = {64, e.NT * s.HV * 2 * kChunk, 1, 1},
          .strides = {128, 128, 128},
          .box = {64, kChunk, 1, 1},
          .swizzle = Swizzle::bytes128};
}

std::string illegal(const Spec& s) {
  if (s.BT != kChunk)
    return fmt::format("BT={} is not the {} rows of a warpgroup's product", s.BT, kChunk);
  if (s.K != 64 && s.K != 128 && s.K != 256)
    return fmt::format("K={} is not one of 64, 128 and 256, which warps divide into groups", s.K);
  if (s.num_warps * 8 > s.K)
    return fmt::format("num_warps={} leaves warps without channels", s.num_warps);
  if (s.num_warps * 16 < s.K)
    return fmt::format("num_warps={} cannot hold the gates of K={}", s.num_warps, s.K);
  if (s.ERASE_WRITE && s.BETA_DTYPE != s.DTYPE)
    return fmt::format("erase and write are {}; they must be {}, the type of q, k and v",
                       to_string(s.BETA_DTYPE), to_string(s.DTYPE));
  if (s.NEG_EIGVAL) return "allow_neg_eigval needs more digits than 16-bit products keep";
  return {};
}
std::string forward_illegal(const Spec& s, const Limits& limits) {
  if (std::string reason = illegal(s); !reason.empty()) return reason;
  if (!cuda::is_half(s)) return "wgmma has no fp32 products";
  if (s.U_DTYPE != s.DTYPE) return "U is written in 16 bits";
  if (s.V % 64 != 0) return fmt::format("V={} is not a multiple of 64", s.V);
  if (s.KEEP_STATES || s.KEEP_INVERSE) return "it does not write norms and the inverse";
  return cuda::exceeds_shared(HopperLayout(s, s.V).bytes, limits);
}
std::string backward_illegal(const Spec& s, const Limits& limits) {
  if (std::string reason = kda_pass::unsupported(s); !reason.empty()) return reason;
  if (std::string reason = illegal(s); !reason.empty()) return reason;
  return cuda::exceeds_shared(HopperLayout(s, 0).bytes, limits);
}

/// Microseconds of a chunk and head on a multiprocessor of its own, and of a launch's start and
/// end.
constexpr double kBlock = 8, kStarted = 4;

/// Hopper: one block a chunk and value head.
Template prepare(std::string name, std::string source, bool backward) {
  Template t;
  t.name = std::move(name);
  t.variant = "hopper";
  t.source = std::move(source);
  t.constants = {constant::DTYPE,      constant::BETA_DTYPE,   constant::G_DTYPE,
                 constant::K,          constant::VARLEN,       constant::GATE_IN_KERNEL,
                 constant::HAS_A_LOG,  constant::HAS_DT_BIAS,  constant::LOWER_BOUND,
                 constant::QK_L2NORM,  constant::BETA_SIGMOID, constant::NEG_EIGVAL,
                 constant::ERASE_WRITE};
  t.needs.wgmma = t.needs.tensor_copies = true;
  t.tunables = {{tunable::BT, cuda::integers({kChunk})},
                {tunable::num_warps, cuda::integers({8, 16})}};
  t.tensor_maps = {{.name = "q_map", .argument = "q", .view = keys},
                   {.name = "k_map", .argument = "k", .view = keys},
                   {.name = "g_map", .argument = "g", .view = gates}};
  t.strided = {"q", "k", "v", "beta", "erase", "write", "g"};
  // Two blocks of 8 warps share a multiprocessor; a block alone is faster with 16. With K = 256
  // occupancy is one block.
  t.cost = [](const Spec& s, const Workload& w, const Limits& limits) {
    const bool alone = w.extents.NT * s.HV <= limits.multiprocessors;
    const double pace = s.K == 256 ? 2.6 : (s.num_warps == 16) == (alone && s.K == 128) ? 1.0 : 1.1;
    return kStarted + cost::chunks(pace * kBlock, s, w, limits);
  };
  t.geometry = [backward](const Spec& s, const Extents& e, const Limits&) {
    return cuda::launch_rows(e.NT, s.HV, s, HopperLayout(s, backward ? 0 : s.V).bytes);
  };
  return t;
}

Template forward_pass() {
  Template t = prepare("kda_prepare", "hopper.cu", false);
  t.summary = "Everything of a chunk that needs no state, for a gate a key channel, in one kernel.";
  t.covers = {
      hopper::when({stages::l2norm_rstd, {{"x", "q"}, {"rstd", "q_rstd"}}}, {constant::QK_L2NORM}),
      hopper::when({stages::l2norm_rstd, {{"x", "k"}, {"rstd", "k_rstd"}}}, {constant::QK_L2NORM}),
      hopper::when({stages::kda_gate, {{"g_log", "g"}}}, {constant::GATE_IN_KERNEL}),
      {stages::chunk_local_cumsum, {{"G", "Gk"}}},
      stages::kda_intra,
      stages::solve_tril,
      stages::kda_recompute_w_u};
  t.keeps = {{.name = "Gk", .whole = {constant::CHECKPOINT_OFFSETS}}};
  t.constants.insert(t.constants.end(),
                     {constant::U_DTYPE, constant::STATE_UNIT, constant::V, constant::SCALAR_GATE,
                      constant::VECTOR_GATE, constant::CHECKPOINT_OFFSETS});
  t.tensor_maps.push_back({.name = "v_map", .argument = "v", .view = values});
  t.illegal = forward_illegal;
  return t;
}

Template backward_pass() {
  Template t = prepare("kda_bwd_prepare", "backward.cu", true);
  t.covers = {stages::kda_bwd_prepare};
  t.constants.push_back(constant::V);
  t.tensor_maps.push_back({.name = "squares_map", .argument = "squares", .view = squares});
  t.illegal = backward_illegal;
  return t;
}

}  // namespace

std::vector<Template> contract() { return {forward_pass(), backward_pass()}; }

}  // namespace wyvern::kda_prepare
