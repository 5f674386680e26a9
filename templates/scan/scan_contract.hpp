// Shared by the templates of the forward state scan, fwd_h, fwd_h_segment and fwd_h_resume, and in
// part by those of the reverse scan (reverse_scan_contract.hpp).
#pragma once

#include "templates/cpu_contract.hpp"
#include "templates/cuda_contract.hpp"
#include "templates/device/cpu/scan_layout.hpp"
#include "templates/device/cuda/scan_layout.hpp"
#include "templates/pool_contract.hpp"
#include "templates/template.hpp"

namespace wyvern::scan {

/// Constants of the sources of all forward scans.
inline const std::vector<AnyConstant>& kConstants = *new std::vector<AnyConstant>{
    constant::DTYPE,      constant::U_DTYPE,     constant::K,           constant::V,
    constant::VARLEN,     constant::SCALAR_GATE, constant::VECTOR_GATE, constant::QK_L2NORM,
    constant::NEG_EIGVAL, constant::STATE_UNIT};

template <class T>
std::vector<T> joined(std::vector<T> first, const std::vector<T>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

/// Chunks a segment, where a scan is split: so close together that for most numbers of heads some
/// length fills the last wave of blocks.
inline std::vector<Value> segment_lengths() {
  return cuda::integers({16, 8, 12, 20, 24, 28, 32, 40, 48, 56, 64});
}

inline std::int64_t shared_bytes(const Spec& s) { return cuda::ForwardScanLayout(s).bytes; }

/// A scan's direction: bytes of a block's shared memory or scratch, and tunables of CUDA templates.
struct Direction {
  std::int64_t (*shared_bytes)(const Spec&);
  ScratchBytes cpu_scratch;
  std::vector<Tunable> tunables;  ///< beside BT, BV, num_warps and precision
};
inline const Direction& kForward =
    *new Direction{shared_bytes,
                   scratch_bytes<cpu::ForwardScanLayout>,
                   {{tunable::num_stages, cuda::integers({2, 3, 1, 4})},
                    {tunable::min_blocks, cuda::integers({0, 2, 4})}}};

/// What a block scans: a sequence; a segment from the state that enters it; or a segment for its
/// map of states, whose columns of M or R the block has.
enum class Scope { sequence, segment, segment_map };

/// Blocks that divide a scan's columns, BV columns each: of the state, or of M and R.
inline std::int64_t tiles(Scope scope, const Spec& s) {
  const std::int64_t BV = s.BV;
  const std::int64_t values = cuda::ceil_div(s.V, BV);
  return scope == Scope::segment_map ? values + cuda::ceil_div(s.K, BV) : values;
}
inline std::int64_t scans(Scope scope, const Extents& e) {
  return scope == Scope::sequence ? e.N : e.NS;
}

/// Registers of a thread that hold the state and V'.
inline std::int64_t accumulators(const Spec& s) {
  const std::int64_t parts = cuda::key_parts(s);
  const std::int64_t strips = s.BV / 16 * parts / s.num_warps;
  return strips * (cuda::round_up(s.K, 16) / parts + s.BT) / 2;
}

/// Empty, or why a block's warps cannot share its columns of the state by pairs.
inline std::string sharing_problem(const Spec& s) {
  const int parts = cuda::key_parts(s);
  if (parts == 1) return {};
  if (parts > 2) return fmt::format("num_warps={} are more than two for a strip", s.num_warps);
  if (!cuda::is_half(s) || s.U_DTYPE == DType::fp32 || s.NEG_EIGVAL)
    return "two warps share columns only where V' enters the state as 16-bit numbers";
  if (s.K % 32 != 0 || s.BT % 32 != 0)
    return fmt::format("K={} and BT={} are not two times multiples of 16", s.K, s.BT);
  if (s.CHECKPOINTS) return "checkpoints inside chunks need all rows in one warp";
  return {};
}

/// Empty, or why a block's warps cannot divide its columns of the state, which two may share where
/// a template lets them: on an H200 it makes fwd_h and bwd_dhu slower.
inline std::string strip_problem(const Spec& s, bool may_share = false) {
  const std::int64_t BV = s.BV;
  const std::int64_t warps = s.num_warps;
  // Errors of a segment's M grow with the chunk: on an H200 with bf16 they reached 8.1e-3.
  if (s.VECTOR_GATE && s.BT > 64)
    return fmt::format("BT={} is more than the 64 rows of all stages with a gate per key channel",
                       s.BT);
  if (std::string reason = cuda::exceeds_dimension("BV", BV, "V", s.V); !reason.empty())
    return reason;
  if (std::string reason = sharing_problem(s); may_share && !reason.empty()) return reason;
  const std::int64_t parts = may_share ? cuda::key_parts(s) : 1;
  if (BV * parts % (16 * warps) != 0)
    return fmt::format("BV={} is not a multiple of 16 columns for each of {} warps", BV, warps);
  if (BV / 16 * parts / warps > 2 || accumulators(s) > cuda::kMaxAccumulators)
    return fmt::format("num_warps={} keeps too much of the state in each thread", warps);
  return {};
}

/// Empty, or why min_blocks cannot be met or has no effect. It caps registers at 128, at the cost
/// of a few spills, where the compiler would use more.
inline std::string min_blocks_problem(const Spec& s, std::int64_t bytes, const Limits& limits) {
  const std::int64_t blocks = s.min_blocks;
  if (blocks == 0) return {};
  const std::int64_t registers = accumulators(s);
  if (registers < 80 || registers > 96)
    return fmt::format("min_blocks={} does not change the {} registers of the state and V'", blocks,
                       registers);
  return cuda::min_blocks_problem(s, bytes, limits);
}

/// CUDA, sm_80 and up: one block BV columns of a scan, for one value head.
inline Template portable(Template t, const Direction& direction, Scope scope) {
  t.variant = "portable";
  t.tunables = {{tunable::BT, cuda::integers({64, 32, 16, 128})},
                {tunable::BV, cuda::integers({64, 32, 128, 16})},
                {tunable::num_warps, cuda::integers({4, 2, 8, 1})}};
  t.tunables = joined(t.tunables, direction.tunables);
  t.tunables.push_back({tunable::precision, cuda::kPrecisionValues});
  t.source = "portable.cu";
  const auto bytes = direction.shared_bytes;
  t.illegal = [bytes](const Spec& s, const Limits& limits) {
    const std::int64_t needed = bytes(s);
    for (std::string reason : {strip_problem(s), min_blocks_problem(s, needed, limits)})
      if (!reason.empty()) return reason;
    return cuda::exceeds_shared(needed, limits);
  };
  t.redundant = cuda::repeats_precision;
  t.fallback = [bytes, scope](Spec& s, const Limits& limits) {
    s.BV = s.V > 32 ? 64 : s.V > 16 ? 32 : 16;
    s.num_warps = s.BV / 16;
    s.precision = cuda::default_precision(s);
    const auto fit = [&](std::int64_t blocks) { return blocks * bytes(s) <= limits.shared_bytes; };
    // A short chunk of a whole sequence is computed before the next has arrived: on an H200 a third
    // buffer took fwd_h from 369 to 343 us and bwd_dhu from 452 to 433.
    const bool waits = scope == Scope::sequence && s.BT <= 32 && s.K <= 128 && cuda::is_half(s);
    s.num_stages = 3;
    if (!waits || !fit(2)) s.num_stages = 2;
    if (!fit(1)) s.num_stages = 1;
  };
  t.geometry = [bytes, scope](const Spec& s, const Extents& e, const Limits&) {
    return cuda::launch(scans(scope, e) * s.HV * tiles(scope, s), s, bytes(s));
  };
  return t;
}

/// The same on the CPU: one call is a block.
inline Template cpu(Template t, const Direction& direction, Scope scope) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "cpu.cpp";
  t.tunables = {{tunable::BT, kCpuChunkSizes}, {tunable::BV, {128, 64, 32}}};
  const auto bytes = direction.cpu_scratch;
  t.illegal = [bytes](const Spec& s, const Limits& limits) {
    const std::string problem = column_block_problem("BV", s.BV, s.V);
    return problem.empty() ? scratch_problem(bytes(s), limits) : problem;
  };
  // The scan has only heads and columns to spread over the cores: narrower blocks for few heads.
  t.fallback = [](Spec& s, const Limits&) {
    const std::int64_t widest = s.HV < 16 ? 64 : 128;
    s.BV = column_block(s.V, widest);
  };
  t.geometry = [bytes, scope](const Spec& s, const Extents& e, const Limits&) {
    return Geometry{.grid = {tiles(scope, s), s.HV, scans(scope, e)}, .shared_bytes = bytes(s)};
  };
  return t;
}

/// The length of a segment as a tunable.
inline Tunable segments(std::vector<Value> lengths = segment_lengths()) {
  Tunable tunable{tunable::SEG, std::move(lengths)};
  tunable.at_launch = true;
  return tunable;
}

/// Adds it to a scan's tunables.
inline Template split(Template t, std::vector<Value> lengths = segment_lengths()) {
  t.tunables.push_back(segments(std::move(lengths)));
  return t;
}

/// Empty, or why a segment is too long. A summary's M is sent to other ranks and multiplied with
/// theirs: its factors are of at most 32 chunks, past which gates a channel cost digits. Templates
/// of a summary alone have no longer SEG.
inline std::string summary_problem(const Spec& s) {
  if (!s.SUMMARY || s.SEG <= 32) return {};
  return fmt::format("SEG={} is more than the 32 chunks of a summary's maps", s.SEG);
}

/// The template with that rule too.
inline Template with_summary(Template t) {
  t.illegal = [illegal = t.illegal](const Spec& s, const Limits& limits) {
    const std::string problem = summary_problem(s);
    return problem.empty() ? illegal(s, limits) : problem;
  };
  return t;
}

/// A stage's templates with this scope, for every device.
inline std::vector<Template> templates(const Template& stage, const Direction& direction,
                                       Scope scope) {
  std::vector<Template> all{portable(stage, direction, scope), cpu(stage, direction, scope)};
  if (scope != Scope::sequence)
    for (Template& t : all) t = split(std::move(t));
  if (scope == Scope::segment_map)
    for (Template& t : all) t = with_summary(std::move(t));
  return all;
}

/// The templates of a scan that writes checkpoints: a chunk must end at each.
inline std::vector<Template> with_checkpoints(std::vector<Template> all) {
  for (Template& t : all)
    t.illegal = [illegal = t.illegal](const Spec& s, const Limits& limits) {
      const std::string problem = pool::checkpoint_problem(s);
      return problem.empty() ? illegal(s, limits) : problem;
    };
  return all;
}

}  // namespace wyvern::scan
