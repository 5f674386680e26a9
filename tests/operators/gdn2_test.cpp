// gdn2 whose gates all are kda's beta is kda: by the oracle and by kernels.
#include <wyvern/reference.hpp>

#include <cmath>

#include "tests/operators/fixture.hpp"

namespace wyvern::testing {
namespace {

/// Inputs of kda in fp32, and the same for gdn2 with erase = write = beta.
struct Pair {
  OperatorData kda, gdn2;

  explicit Pair(Pass pass) {
    Problem p = base({"kda", pass}, DType::fp32);
    p.precision = Precision::ieee;
    p.initial_state = p.packed = p.use_qk_l2norm = true;
    p.K = 40, p.V = 24;
    const bool recurrent = pass == Pass::recurrent;
    kda = make_data(p, Gate::mixed, 4, recurrent ? Lengths{2, 0, 7} : Lengths{70, 0, 17});
    gdn2 = kda;
    gdn2.problem.op = "gdn2";
    gdn2.tensors.erase("beta");
    gdn2.tensors["erase"] = repeated(p.K);
    gdn2.tensors["write"] = repeated(p.V);
  }

  /// beta, `width` times in a row.
  HostTensor repeated(std::int64_t width) const {
    const HostTensor& beta = kda.tensors.at("beta");
    Shape shape = beta.shape();
    shape.push_back(width);
    HostTensor wide(beta.dtype(), shape);
    for (std::int64_t i = 0; i < wide.elements(); ++i) wide.set(i, beta.at(i / width));
    return wide;
  }
};

using Vectors = std::map<std::string, std::vector<double>>;

/// rms(x - y) / rms(y).
double distance(const std::vector<double>& x, const std::vector<double>& y) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < y.size(); ++i) {
    difference += (x[i] - y[i]) * (x[i] - y[i]);
    norm += y[i] * y[i];
  }
  return std::sqrt(difference / norm);
}

/// Adds the sums of `gates`, `width` in a row, to `sums`.
void add_rows(std::vector<double>& sums, const std::vector<double>& gates) {
  const std::size_t width = gates.size() / sums.size();
  for (std::size_t i = 0; i < gates.size(); ++i) sums[i / width] += gates[i];
}

/// Holds gdn2's outputs to kda's; beta's gradient is the sum of its gates'.
void expect_same(const Problem& kda, const Vectors& expected, Vectors found, double share) {
  if (kda.pass == Pass::backward) {
    std::vector<double>& dbeta = found["dbeta"];
    dbeta.assign(expected.at("dbeta").size(), 0);
    add_rows(dbeta, found.at("derase"));
    add_rows(dbeta, found.at("dwrite"));
  }
  for (const auto& [name, values] : expected)
    EXPECT_LE(distance(found.at(name), values), share * error_bound(kda, name)) << name;
}

Vectors values_of(const HostTensors& tensors) {
  Vectors all;
  for (const auto& [name, tensor] : tensors) all[name] = tensor.values();
  return all;
}

Vectors oracle(const OperatorData& data) {
  const Reference r = reference(data.problem, data.arguments(), 2);
  return {r.begin(), r.end()};
}

constexpr Pass kPasses[] = {Pass::forward, Pass::backward, Pass::recurrent};

TEST(Gdn2, WithEqualGatesIsKdaForTheOracle) {
  for (const Pass pass : kPasses) {
    const Pair pair(pass);
    expect_same(pair.kda.problem, oracle(pair.kda), oracle(pair.gdn2), 1e-7);
  }
}

class Gdn2OnDevice : public OperatorTest, public ::testing::WithParamInterface<DeviceKind> {};

TEST_P(Gdn2OnDevice, WithEqualGatesIsKda) {
  WYVERN_OPEN_OR_SKIP(GetParam());
  for (const Pass pass : kPasses) {
    const Pair pair(pass);
    const auto run = [&](const OperatorData& data) {
      return values_of(run_operator(device(), prepare(data.problem), data));
    };
    // Each is that far from what is exact.
    expect_same(pair.kda.problem, run(pair.kda), run(pair.gdn2), 2);
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, Gdn2OnDevice, ::testing::Values(DeviceKind::cpu));
INSTANTIATE_TEST_SUITE_P(Gpu, Gdn2OnDevice, ::testing::Values(DeviceKind::cuda));

}  // namespace
}  // namespace wyvern::testing
