#include "templates/forward/fwd_h_o/layout.hpp"
#include "templates/output/stages.hpp"
#include "templates/pool_contract.hpp"
#include "templates/scan/scan_contract.hpp"
#include "templates/scan/stages.hpp"

namespace wyvern::fwd_h_o {
namespace {

std::int64_t shared_bytes(const Spec& s) { return SharedLayout(s).bytes; }

/// Empty, or why a thread's registers do not hold the state, V' and the output.
std::string register_problem(const Spec& s) {
  const std::int64_t strips = s.BV / 16 / s.num_warps;
  const std::int64_t held = scan::accumulators(s) + strips * s.BT / 2;
  if (held <= cuda::kMaxAccumulators) return {};
  return fmt::format("num_warps={} keeps too much of the state and the output in each thread",
                     s.num_warps);
}

std::string illegal(const Spec& s, const Limits& limits) {
  if (s.KEEP_STATES) return "it does not write states and V'";
  for (std::string reason :
       {scan::strip_problem(s), register_problem(s), pool::checkpoint_problem(s)})
    if (!reason.empty()) return reason;
  return cuda::exceeds_shared(shared_bytes(s), limits);
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
  t.strided = {"q", "k", "state"};
  static const scan::Direction direction{
      shared_bytes, nullptr, {{tunable::num_stages, cuda::integers({2, 1, 3})}}};
  t = scan::portable(std::move(t), direction, scan::Scope::sequence);
  t.illegal = illegal;
  return t;
}

}  // namespace

std::vector<Template> contract() { return {whole_sequences()}; }

}  // namespace wyvern::fwd_h_o
