// Decoding: one token for each of several sequences, whose states lie in a pool that an index
// points into, as servers with paged memory keep them, and are updated in place.
#include <algorithm>

#include "tensors.hpp"

namespace {

using wyvern::DType;

bool decode(const wyvern::Device& device) {
  constexpr std::int64_t N = 4, H = 4, HV = 8, K = 128, V = 128, slots = 6;
  constexpr int tokens = 3;
  wyvern::Problem problem;  // gated_delta_rule, bf16
  problem.pass = wyvern::Pass::recurrent;
  problem.B = problem.N = N;
  problem.T = 1;
  problem.H = H;
  problem.HV = HV;
  problem.K = K;
  problem.V = V;
  problem.use_qk_l2norm = problem.use_beta_sigmoid = true;
  problem.inplace_state = problem.state_index = true;
  problem.state_slots = slots;

  wyvern::Runtime runtime;
  const wyvern::Operator op = runtime.prepare(device, problem);
  const auto workspace = device.allocate(op.workspace_bytes());

  examples::Tensors tensors(device);
  tensors.random("state", DType::fp32, {slots, HV, K, V}, -0.1F, 0.1F);
  tensors.integers("state_index", {3, 0, -1, 5});  // -1: padding; its rows of o become 0
  tensors.output("o", DType::bf16, {N, 1, HV, V});

  bool good = true;
  for (int token = 0; token < tokens; ++token) {
    tensors.random("q", DType::bf16, {N, 1, H, K}, -1, 1);
    tensors.random("k", DType::bf16, {N, 1, H, K}, -1, 1);
    tensors.random("v", DType::bf16, {N, 1, HV, V}, -1, 1);
    tensors.random("beta", DType::bf16, {N, 1, HV}, -2, 2);
    tensors.random("g", DType::fp32, {N, 1, HV}, -0.2F, 0);
    op.launch(tensors.on_device(), workspace.get());
    device.synchronize();
    std::printf("token %d of each sequence, ", token);
    good &= tensors.match_oracle(problem);

    // The oracle's next step starts from the pool as this one left it. Slots that no sequence
    // points to keep their bytes.
    const std::vector<char> before = tensors["state"].host;
    tensors["state"].download();
    const std::vector<char>& after = tensors["state"].host;
    const std::ptrdiff_t slot = HV * K * V * static_cast<std::ptrdiff_t>(sizeof(float));
    for (const int unused : {1, 2, 4})
      good &= std::equal(before.begin() + unused * slot, before.begin() + (unused + 1) * slot,
                         after.begin() + unused * slot);
  }
  return good;
}

}  // namespace

int main(int count, char** arguments) { return examples::run(count, arguments, decode); }
