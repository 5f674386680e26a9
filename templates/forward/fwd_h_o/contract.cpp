#include "templates/forward/fwd_h_o/layout.hpp"

#include <algorithm>

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

/// Empty, or why a thread's registers do not hold the state, V' and the output.
std::string register_problem(const Spec& s) {
  const std::int64_t strips = s.BV / 16 / s.num_warps;
  const std::int64_t held = scan::accumulators(s) + strips * s.BT / 2;
  if (held <= kMaxHeld) return {};
  return fmt::format("K={} with BT={} and num_warps={} is more than a thread's registers hold", s.K,
                     s.BT, s.num_warps);
}

std::string illegal(const Spec& s, const Limits& limits) {
  if (!cuda::is_half(s)) return "in fp32 most shapes' tiles exceed shared memory";
  if (s.KEEP_STATES) return "it does not write states and V'";
  for (std::string reason :
       {scan::strip_problem(s), register_problem(s), pool::checkpoint_problem(s)})
    if (!reason.empty()) return reason;
  return cuda::exceeds_shared(shared_bytes(s), limits);
}

// What the cost is made of: times of fwd_h.portable on one H200 (recorded spaces, 2026-11-23; a
// chunk of 16, 32 and 64 rows and 64 columns took 0.82, 1.34 and 2.25 us with four warps and stages
// enough), the output's products at the same rate. None is a time of this kernel.
constexpr double kStart = 1.5;     ///< us of a block before its first chunk
constexpr double kTurn = 0.36;     ///< us of a chunk, whatever its rows
constexpr double kArrival = 1.15;  ///< us until a chunk's tiles are there
constexpr double kRate = 1.09e6;   ///< flops a us of a multiprocessor, with four warps or more
/// A cost by the stages, as fwd_h and fwd_o have, over the time: 752 to 522 us of both with 64
/// heads and 8192 tokens.
constexpr double kOfStages = 1.44;

template <class T>
constexpr double real(T x) {
  return static_cast<double>(x);
}

/// Products of a chunk in a block: W S, K^T V' and Q S, and of the scores and their product with V'
/// the tiles on and below the diagonal. Every block of a value head has all scores.
double flops(const Spec& s) {
  const double lower = real(s.BT) * real(s.BT + 16) / 2;
  return 2 * (3 * real(s.BT) * real(s.K) * real(s.BV) + lower * real(s.K + s.BV));
}

cost::Pace pace(const Spec& s) {
  const double busy = kTurn + flops(s) / (kRate * std::min(1.0, real(s.num_warps) / 4));
  const double chunk =
      s.num_stages == 1 ? busy + kArrival : std::max(busy, kArrival / real(s.num_stages - 1));
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
  const std::int64_t blocks_a_sequence = s.HV * scan::tiles(scan::Scope::sequence, s);
  const double even = std::min(1.0, real(w.extents.NT) / real(longest * w.extents.N));
  const double scan =
      cost::scans(pace(s), real(longest), real(w.extents.NT * blocks_a_sequence), limits, even);
  return kOfStages * std::max(scan, cost::kLaunch + kStart + moved(s, w.extents, limits));
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
  static const scan::Direction direction{
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
