#include <algorithm>

#include "templates/cpu_contract.hpp"
#include "templates/decode/decode_contract.hpp"
#include "templates/decode/recurrent/cpu_layout.hpp"
#include "templates/decode/recurrent/hopper_layout.hpp"
#include "templates/decode/recurrent/portable_layout.hpp"
#include "templates/decode/stages.hpp"
#include "templates/layer/stages.hpp"
#include "templates/pool_contract.hpp"

namespace wyvern::recurrent {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "recurrent";
  t.covers = {stages::recurrent};
  t.constants = pool::with_slots({constant::DTYPE,
                                  constant::BETA_DTYPE,
                                  constant::G_DTYPE,
                                  constant::SEQLENS_DTYPE,
                                  constant::GROUP,
                                  constant::K,
                                  constant::V,
                                  constant::GATE_K,
                                  constant::STEPS,
                                  constant::VARLEN,
                                  constant::GATED,
                                  constant::SCALAR_GATE,
                                  constant::VECTOR_GATE,
                                  constant::GATE_IN_KERNEL,
                                  constant::HAS_A_LOG,
                                  constant::HAS_DT_BIAS,
                                  constant::LOWER_BOUND,
                                  constant::QK_L2NORM,
                                  constant::BETA_SIGMOID,
                                  constant::NEG_EIGVAL,
                                  constant::ERASE_WRITE,
                                  constant::FINAL_STATE,
                                  constant::STATE_V_FIRST,
                                  constant::INDEX_COLUMNS,
                                  constant::INTERMEDIATE_STATES,
                                  constant::PARENT,
                                  constant::KEEP_POOL,
                                  constant::OUTPUT_NORM,
                                  constant::NORM_SILU});
  t.strided = {"q", "k", "v", "beta", "erase", "write", "g", "norm_gate", "o", "state"};
  return t;
}

std::string hopper_illegal(const Spec& s, const Limits& limits) {
  if (s.PARENT) return "parent (a tree of drafts) needs earlier states, which it has overwritten";
  if (s.FINAL_STATE && s.STATE_DTYPE != DType::fp32)
    return fmt::format("final states are fp32, but it stores states as {}, the type that it loads",
                       to_string(s.STATE_DTYPE));
  if (s.K % 4 != 0 || s.V % kStateWarps != 0)
    return fmt::format("K={} is not a multiple of 4, or V={} not one of {}", s.K, s.V, kStateWarps);
  if (const std::int64_t columns = s.V / kStateWarps; decode::power_of_two(columns) != columns)
    return fmt::format("V={} leaves each of {} warps {} columns, which is no power of two", s.V,
                       kStateWarps, columns);
  Spec block = s;
  block.BV = s.V;
  block.num_warps = kStateWarps;
  if (std::string reason = decode::illegal(block); !reason.empty()) return reason;
  return cuda::exceeds_shared(HopperLayout(s).bytes, limits);
}

std::string hopper_conv_illegal(const Spec& s, const Limits& limits) {
  if (s.CONV_WIDTH == 0) return "the problem has no short_conv";
  if (s.DTYPE == DType::fp32) return "a warp has no registers for windows of fp32 rows";
  if (s.INDEX_COLUMNS || s.INTERMEDIATE_STATES) return "it convolves no drafts";
  if (std::string reason = hopper_illegal(s, limits); !reason.empty()) return reason;
  return cuda::exceeds_shared(HopperLayout(s, true).bytes, limits);
}

/// Of a launch: at most one a multiprocessor, of which each takes whole groups of items.
std::int64_t blocks(std::int64_t groups, const Limits& limits) {
  return limits.multiprocessors > 0 ? std::min<std::int64_t>(groups, limits.multiprocessors)
                                    : groups;
}

/// Hopper: one persistent block per multiprocessor; it goes through states of heads.
Template hopper(Template t) {
  t.variant = "hopper";
  t.source = "hopper.cu";
  t.needs.tensor_copies = true;
  t.tunables = {{tunable::num_stages, cuda::integers({6, 4, 3, 2})}};
  t.illegal = hopper_illegal;
  // One H200, 2026-11-25: 64 sequences of 32 heads take 75 us, of four tokens each 83 us, of eight
  // 124 us, by then bound by the preparation of rows; one of 64 tokens 50 us. Among equals more
  // states in flight are better.
  t.cost = [](const Spec& s, const Workload& w, const Limits& limits) {
    constexpr double kFilled = 4;
    const double row = s.OUTPUT_NORM ? 1.0 : 0.9;  // with the norm not measured
    const std::int64_t items =
        cuda::ceil_div(w.extents.N * s.HV, std::max(limits.multiprocessors, 1));
    return cost::kLaunch + kFilled +
           std::max(
               decode::moved_states(0.80, s, w, limits) + decode::moved_gates(0.80, s, w, limits),
               row * static_cast<double>(items * w.longest * s.STEPS)) -
           0.01 * static_cast<double>(s.num_stages);
  };
  t.geometry = [](const Spec& s, const Extents& e, const Limits& limits) {
    return Geometry{.grid = {blocks(e.N * s.HV, limits), 1, 1},
                    .threads = block_warps(false) * 32,
                    .shared_bytes = HopperLayout(s).bytes};
  };
  return t;
}

/// Hopper: the same with the convolution of q, k and v; a block takes all value heads of a key
/// head, whose window only it reads and writes.
Template hopper_with_conv(Template t) {
  t = hopper(std::move(t));
  t.name = "recurrent_conv";
  t.summary = "The recurrence token by token, with the convolution in front of it.";
  t.covers = {stages::short_conv_step,
              {stages::recurrent, {{"q", "q_conv"}, {"k", "k_conv"}, {"v", "v_conv"}}}};
  t.constants.insert(t.constants.end(), {constant::CONV_WIDTH, constant::CONV_SILU,
                                         constant::CONV_LENGTH, constant::CONV_TOKENS_FIRST});
  t.strided.push_back("conv_state");
  t.illegal = hopper_conv_illegal;
  // Beside the recurrence: a constant, each further state of a group that a block takes in turn,
  // and the bytes of windows and rows at half of memory's rate. One H100, 2026-11-28, 24 of 24
  // heads with a gate a channel: one sequence takes 12.0 us, in two launches 13.6; 256 take 313
  // and 310. Rows that are convolved hold up states of 16 bits: one H200, the same day, bf16, 16 of
  // 32 heads: 8 sequences take 10.4 us, behind vLLM's convolution 10.8; 64 take 54.1 and 45.5.
  t.cost = [apart = t.cost](const Spec& s, const Workload& w, const Limits& limits) {
    constexpr double kFirst = 1.9, kState = 1.7, kRate = 0.55, kItem = 3.2;
    const std::int64_t blocks = std::max(limits.multiprocessors, 1);
    const std::int64_t later = s.GROUP * cuda::ceil_div(w.extents.N * s.H, blocks) -
                               cuda::ceil_div(w.extents.N * s.HV, blocks);
    const auto rows =
        static_cast<double>(w.extents.B * w.extents.T + 2 * w.extents.N * s.CONV_COLUMNS);
    const double bytes =
        rows * static_cast<double>(s.CONV_CHANNELS) * static_cast<double>(size_of(s.DTYPE));
    const double prepared =
        kItem * static_cast<double>(w.extents.N * s.HV) / static_cast<double>(blocks);
    return std::max(apart(s, w, limits), prepared + cost::kLaunch + 2) + kFirst +
           kState * static_cast<double>(later) + bytes / (kRate * decode::bytes_per_us(limits));
  };
  t.geometry = [](const Spec& s, const Extents& e, const Limits& limits) {
    return Geometry{.grid = {blocks(e.N * s.H, limits), 1, 1},
                    .threads = block_warps(true) * 32,
                    .shared_bytes = HopperLayout(s, true).bytes};
  };
  return t;
}

}  // namespace

std::vector<Template> contract() {
  return {decode::portable(stage(),
                           [](const Spec& s) -> std::int64_t { return PortableLayout(s).bytes; }),
          hopper(stage()), hopper_with_conv(stage()),
          decode::cpu(stage(), scratch_bytes<ScratchLayout>)};
}

}  // namespace wyvern::recurrent
