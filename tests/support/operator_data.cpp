#include "tests/support/operator_data.hpp"

#include <fmt/format.h>

#include <cmath>
#include <numeric>

namespace wyvern::testing {
namespace {

/// Raw gate inputs that give the decays of `gate` after -exp(A_log) softplus(g + dt_bias).
HostTensor raw_gates(Engine& engine, DType dtype, Shape shape, Gate gate) {
  std::normal_distribution<double> typical(-3, 1);
  std::uniform_int_distribution<int> eighth(0, 7);
  HostTensor tensor(dtype, std::move(shape));
  tensor.fill([&]() -> double {
    if (gate == Gate::zero) return -200;
    if (gate == Gate::very_negative) return 1000;
    if (gate == Gate::mixed && eighth(engine) == 0) return 1000;
    return typical(engine);
  });
  return tensor;
}

TensorView view_of(const HostTensor& tensor) {
  return tensor.shape().empty() ? TensorView{} : tensor.view();
}

}  // namespace

Arguments OperatorData::arguments() const {
  Arguments a;
  a.q = view_of(q);
  a.k = view_of(k);
  a.v = view_of(v);
  a.beta = view_of(beta);
  a.g = view_of(g);
  a.initial_state = view_of(initial_state);
  a.cu_seqlens = view_of(seqlens);
  a.A_log = view_of(A_log);
  a.dt_bias = view_of(dt_bias);
  return a;
}

Problem packed(Problem problem, const std::vector<std::int64_t>& lengths) {
  problem.packed = true;
  problem.B = 1;
  problem.N = static_cast<std::int64_t>(lengths.size());
  problem.T = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  return problem;
}

OperatorData make_data(const Problem& problem, Gate gate, std::uint64_t seed,
                       const std::vector<std::int64_t>& lengths) {
  Engine engine(seed);
  OperatorData data;
  data.problem = problem.packed ? packed(problem, lengths) : problem;
  const Problem& p = data.problem;
  const Shape qk{p.B, p.T, p.H, p.K}, scalars{p.B, p.T, p.HV};
  if (p.use_qk_l2norm) {
    data.q = normal(engine, p.dtype, qk);
    data.k = normal(engine, p.dtype, qk);
  } else {
    data.q = unit_rows(engine, p.dtype, qk);
    data.k = unit_rows(engine, p.dtype, qk);
  }
  data.v = normal(engine, p.dtype, {p.B, p.T, p.HV, p.V});
  data.beta = p.use_beta_sigmoid ? normal(engine, p.beta_dtype, scalars)
                                 : uniform(engine, p.beta_dtype, scalars, 0, 1);
  data.g = p.use_gate_in_kernel ? raw_gates(engine, p.g_dtype, scalars, gate)
                                : gates(engine, p.g_dtype, scalars, gate);
  if (p.use_gate_in_kernel) data.A_log = uniform(engine, DType::fp32, {p.HV}, 0, std::log(16.0));
  if (p.has_dt_bias) data.dt_bias = uniform(engine, DType::fp32, {p.HV}, -2, 0);
  if (p.initial_state)
    data.initial_state =
        normal(engine, p.state_dtype,
               p.state_v_first ? Shape{p.N, p.HV, p.V, p.K} : Shape{p.N, p.HV, p.K, p.V}, 0.5);
  if (p.packed) {
    data.cu_seqlens = {0};
    for (const std::int64_t length : lengths)
      data.cu_seqlens.push_back(data.cu_seqlens.back() + length);
    data.seqlens = HostTensor(p.seqlens_dtype, {p.N + 1},
                              {data.cu_seqlens.begin(), data.cu_seqlens.end()});
  }
  return data;
}

std::string describe(const Problem& p) {
  return fmt::format("{} B={} T={} N={}{}", problem_key(p).family, p.B, p.T, p.N,
                     p.scale ? fmt::format(" scale={}", *p.scale) : "");
}

}  // namespace wyvern::testing
