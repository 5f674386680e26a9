// Prefill: the forward pass over a prompt, with the state that decoding continues from.
#include "tensors.hpp"

namespace {

using wyvern::DType;

bool prefill(const wyvern::Device& device) {
  constexpr std::int64_t T = 512, H = 4, HV = 8, K = 128, V = 128;
  wyvern::Problem problem;  // gated_delta_rule, forward, bf16
  problem.T = T;
  problem.H = H;  // query and key heads; each serves HV / H value heads
  problem.HV = HV;
  problem.K = K;
  problem.V = V;
  problem.use_qk_l2norm = true;     // rows of q and k are normalized where they are read
  problem.use_beta_sigmoid = true;  // beta are logits
  problem.output_final_state = true;

  wyvern::Runtime runtime;
  const wyvern::Operator op = runtime.prepare(device, problem);  // finds a plan, compiles, loads
  const auto workspace = device.allocate(op.workspace_bytes());

  examples::Tensors tensors(device);
  tensors.random("q", DType::bf16, {1, T, H, K}, -1, 1);
  tensors.random("k", DType::bf16, {1, T, H, K}, -1, 1);
  tensors.random("v", DType::bf16, {1, T, HV, V}, -1, 1);
  tensors.random("beta", DType::bf16, {1, T, HV}, -2, 2);
  tensors.random("g", DType::fp32, {1, T, HV}, -0.2F, 0);  // natural logarithms of the decay
  tensors.output("o", DType::bf16, {1, T, HV, V});
  tensors.output("final_state", DType::fp32, {1, HV, K, V});

  op.launch(tensors.on_device(), workspace.get());
  device.synchronize();
  std::printf("prefill of %lld tokens: %zu kernels, %zu bytes of workspace\n",
              static_cast<long long>(T), op.plan().size(), op.workspace_bytes());
  return tensors.match_oracle(problem);
}

}  // namespace

int main(int count, char** arguments) { return examples::run(count, arguments, prefill); }
