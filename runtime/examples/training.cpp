// A training step: forward, then backward, which recomputes intermediates of the forward pass or,
// with disable_recompute, reads them: more memory, less time.
#include <algorithm>

#include "tensors.hpp"

namespace {

using wyvern::DType;

constexpr std::int64_t T = 512, H = 2, HV = 4, K = 128, V = 128;

wyvern::Problem problem_of(wyvern::Pass pass, bool keep) {
  wyvern::Problem problem;  // gated_delta_rule, bf16
  problem.pass = pass;
  problem.T = T;
  problem.H = H;
  problem.HV = HV;
  problem.K = K;
  problem.V = V;
  problem.use_qk_l2norm = problem.use_beta_sigmoid = true;
  problem.output_final_state = true;  // in the backward pass: its gradient, dht, is given
  problem.disable_recompute = keep;
  return problem;
}

/// What the forward pass hands to the backward pass with disable_recompute.
void add_kept(examples::Tensors& tensors, const wyvern::Problem& problem) {
  const std::int64_t C = wyvern::kept_chunk_size(problem);
  tensors.output("h", DType::bf16, {(T + C - 1) / C, HV, K, V});  // the state entering each chunk
  tensors.output("v_new", DType::bf16, {1, T, HV, V});
}

bool step(const wyvern::Device& device, wyvern::Runtime& runtime, bool keep) {
  const wyvern::Problem forward_problem = problem_of(wyvern::Pass::forward, keep);
  const wyvern::Problem backward_problem = problem_of(wyvern::Pass::backward, keep);
  const wyvern::Operator forward = runtime.prepare(device, forward_problem);
  const wyvern::Operator backward = runtime.prepare(device, backward_problem);
  const auto workspace =
      device.allocate(std::max(forward.workspace_bytes(), backward.workspace_bytes()));

  examples::Tensors tensors(device);
  tensors.random("q", DType::bf16, {1, T, H, K}, -1, 1);
  tensors.random("k", DType::bf16, {1, T, H, K}, -1, 1);
  tensors.random("v", DType::bf16, {1, T, HV, V}, -1, 1);
  tensors.random("beta", DType::bf16, {1, T, HV}, -2, 2);
  tensors.random("g", DType::fp32, {1, T, HV}, -0.2F, 0);
  if (keep) add_kept(tensors, forward_problem);

  // The backward pass takes the same tensors but for the outputs, which become gradients.
  examples::Tensors gradients = tensors;
  tensors.output("o", DType::bf16, {1, T, HV, V});
  tensors.output("final_state", DType::fp32, {1, HV, K, V});
  gradients.random("do", DType::bf16, {1, T, HV, V}, -1, 1);
  gradients.random("dht", DType::fp32, {1, HV, K, V}, -1, 1);
  gradients.output("dq", DType::bf16, {1, T, H, K});
  gradients.output("dk", DType::bf16, {1, T, H, K});
  gradients.output("dv", DType::bf16, {1, T, HV, V});
  gradients.output("dbeta", DType::bf16, {1, T, HV});
  gradients.output("dg", DType::fp32, {1, T, HV});

  forward.launch(tensors.on_device(), workspace.get());
  backward.launch(gradients.on_device(), workspace.get());
  device.synchronize();
  std::printf("%s: %zu kernels forward, %zu backward\n", keep ? "kept" : "rebuilt",
              forward.plan().size(), backward.plan().size());
  const bool outputs = tensors.match_oracle(forward_problem);
  return gradients.match_oracle(backward_problem) && outputs;
}

bool training(const wyvern::Device& device) {
  wyvern::Runtime runtime;
  const bool rebuilt = step(device, runtime, false);
  return step(device, runtime, true) && rebuilt;
}

}  // namespace

int main(int count, char** arguments) { return examples::run(count, arguments, training); }
