#include "templates/forward/fwd_h_o/layout.hpp"

#include <algorithm>
#include <cmath>

#include "templates/cost.hpp"
#include "templates/output/stages.hpp"
#include "templates/pool_contract.hpp"
#include "templates/scan/scan_contract.hpp"
#include "templates/scan/stages.hpp"

namespace wyvern::fwd_h_o {
namespace {

std::int64_t shared_bytes(const Spec& s) { return SharedLayout(s).bytes; }

/// Accumulators of a thread beside operands and addresses: 144, with K = 256, spilled 108 bytes.
constexpr std::int64_t kMaxHeld = 136;

/// Registers of a thread that hold the state, V' and the output.
std::int64_t held(const Spec& s) {
  return scan::accumulators(s) + s.BV / 16 * s.BT / 2 / s.num_warps;
}

/// Empty, or why they are too many.
std::string register_problem(const Spec& s) {
  if (held(s) <= kMaxHeld) return {};
  return fmt::format("K={} with BT={} and num_warps={} is more than a thread's registers hold", s.K,
                     s.BT, s.num_warps);
}

std::string illegal(const Spec& s, const Limits& limits) {
  if (!cuda::is_half(s)) return "in fp32 most shapes' tiles exceed shared memory";
  if (s.KEEP_STATES) return "it does not write states and V'";
  for (std::string reason :
       {scan::strip_problem(s, true), register_problem(s), pool::checkpoint_problem(s)})
    if (!reason.empty()) return reason;
  return cuda::exceeds_shared(shared_bytes(s), limits);
}

// What the cost is made of: whole forward plans on one H200 (2026-11-28; K = V = 128, two stages,
// each warp one strip of 16 columns), less the times of their other kernels; with a gate 1.90 us a
// chunk of 32 tokens in 4 warps. Half a strip a warp takes 2.07 in 8 warps, and 1.69 in 4 with half
// the columns, where they say 2.07 and 1.62.
constexpr double kStart = 1.5;     ///< us of a block before its first chunk
constexpr double kTurn = 0.3;      ///< us of a chunk, whatever its products
constexpr double kShare = 0.22;    ///< us of a chunk, where two warps share a strip
constexpr double kTile = 0.6;      ///< us of a warp for a 16x16 tile of scores, with K = 128
constexpr double kArrival = 1.15;  ///< us until a chunk's tiles are there: of fwd_h, recorded
/// Share by which each warp of a multiprocessor past its four schedulers slows all of them.
constexpr double kCrowd = 0.07;
constexpr double kRate = 1.3e6;  ///< flops a us of a multiprocessor, with warps enough
constexpr double kLoads = 36e3;  ///< bytes a us that a multiprocessor loads, mostly from L2
/// Costs by the stages, which those of fwd_h and fwd_o are, exceed times: whole plans of both by
/// 1.3. As there, bytes are added to products.
constexpr double kOfStages = 1.25;

template <class T>
constexpr double real(T x) {
  return static_cast<double>(x);
}

/// Microseconds of a warp for a strip's products of a chunk, with K = 128.
constexpr double strip_us(std::int64_t BT) { return BT <= 16 ? 0.45 : BT <= 32 ? 1.0 : 2.2; }

/// Tiles of a chunk's scores, on and below the diagonal. Every block of a value head has them all.
std::int64_t score_tiles(const Spec& s) { return s.BT / 16 * (s.BT / 16 + 1) / 2; }

/// Products of a chunk in a block: W S, K^T V' and Q S, the scores and their product with V'.
double flops(const Spec& s) {
  const double scores = 256 * real(score_tiles(s));
  return 2 * (3 * real(s.BT) * real(s.K) * real(s.BV) + scores * real(s.K + s.BV));
}

/// Blocks that shared memory and registers leave room for on a multiprocessor.
std::int64_t residents(const Spec& s, const Limits& limits) {
  constexpr std::int64_t kReserved = 1024;  // bytes of shared memory beside each block's own
  const std::int64_t by_memory = (limits.shared_bytes + kReserved) / (shared_bytes(s) + kReserved);
  const std::int64_t registers = cuda::round_up(held(s) + 90, 8);  // of a thread, as compiled
  return std::max<std::int64_t>(1, std::min(by_memory, 65536 / (registers * 32 * s.num_warps)));
}

/// Of each of so many blocks on a multiprocessor.
cost::Pace pace(const Spec& s, double blocks) {
  const double deep = real(cuda::round_up(s.K, 16)) / 128;
  const double strips = real(s.BV) / 16 / real(s.num_warps);
  const double tiles = real(cuda::ceil_div(score_tiles(s), s.num_warps));
  const double alone = kTurn + (cuda::key_parts(s) > 1 ? kShare : 0) +
                       deep * (strips * strip_us(s.BT) + tiles * kTile);
  const double crowd = 1 + kCrowd * std::max(0.0, blocks * real(s.num_warps) - 4);
  const double loads = real(s.BT * 2 * (3 * s.K + s.BV));
  double chunk = std::max({alone * crowd, blocks * flops(s) / kRate, blocks * loads / kLoads});
  if (s.num_stages == 1)
    chunk += kArrival;
  else
    chunk = std::max(chunk, kArrival / real(s.num_stages - 1));
  return {kStart, chunk};
}

/// Microseconds to load w, u, q, k and states and to store o and states, once each.
double moved(const Spec& s, const Extents& e, const Limits& limits) {
  const double bytes_per_us = limits.bytes_per_us > 0 ? limits.bytes_per_us : 4.8e6;
  const double row = 2 * real(s.HV * (s.K + 2 * s.V) + 2 * s.H * s.K);
  const int states = s.INPLACE_STATE ? 2 : int{s.INITIAL_STATE} + int{s.FINAL_STATE};
  const double state = real(s.HV * s.K * s.V) * real(size_of(s.STATE_DTYPE));
  return (real(e.NT * s.BT) * row + real(e.N * states) * state) / bytes_per_us;
}

double launch_cost(const Spec& s, const Workload& w, const Limits& limits) {
  const std::int64_t longest = cost::longest_scan(w);
  if (longest == 0) return cost::kLaunch;
  const double chunks = real(w.extents.NT * s.HV * scan::tiles(scan::Scope::sequence, s));
  const int units = std::max(limits.multiprocessors, 1);
  const double most = std::ceil(chunks / (real(longest) * units));  // blocks of a multiprocessor
  const double together = std::clamp(most, 1.0, real(residents(s, limits)));
  Limits places = limits;
  places.multiprocessors = units * static_cast<int>(together);
  const double even = std::min(1.0, real(w.extents.NT) / real(longest * w.extents.N));
  const double scan = cost::scans(pace(s, together), real(longest), chunks, places, even);
  return kOfStages * (scan + moved(s, w.extents, limits));
}

/// CUDA, sm_80 and up: one block BV columns of V of a sequence and value head.
Template whole_sequences() {
  Template t;
  t.name = "fwd_h_o";
  t.covers = {stages::fwd_h_segment, stages::fwd_h_combine, stages::fwd_h, stages::fwd_o};
  t.summary = "The state scan and the output at once: neither states nor V' are written.";
  t.constants =
      scan::joined(pool::with_checkpoints(pool::with_slots(scan::kConstants)),
                   {constant::FINAL_STATE, constant::STATE_V_FIRST, constant::KEEP_STATES});
  t.strided = {"q", "k", "o", "state"};
  static const auto& direction = *new scan::Direction{
      shared_bytes, nullptr, {{tunable::num_stages, cuda::integers({2, 1, 3})}}};
  t = scan::portable(std::move(t), direction, scan::Scope::sequence);
  t.tunables.front() = {tunable::BT, cuda::integers({64, 32, 16})};
  t.tunables.back() = {tunable::precision, {Precision::ieee}};  // products are of 16-bit tiles
  t.illegal = illegal;
  t.fallback = nullptr;  // the default config is the cheapest
  t.cost = launch_cost;
  return t;
}

}  // namespace

std::vector<Template> contract() { return {whole_sequences()}; }

}  // namespace wyvern::fwd_h_o
