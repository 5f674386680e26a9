// References of the stages between tensors with a row per token and tensors with a row per step,
// where a token's row stands at its last step.
#include "tests/support/stage_inputs.hpp"

namespace wyvern::testing {
namespace {

void step_seqlens(const StageContext& c, TensorMap& t) {
  Vector boundaries = t.at("cu_seqlens");
  for (double& boundary : boundaries) boundary *= static_cast<double>(c.steps);
  t["cu_seqlens_steps"] = boundaries;
}

/// Elements of a token's row.
std::size_t width(const StageContext& c) { return static_cast<std::size_t>(c.dims.H * c.dims.K); }

void expand_steps(const StageContext& c, TensorMap& t) {
  const Vector& x = t.at("x");
  const auto steps = static_cast<std::size_t>(c.steps);
  Vector rows(x.size() * steps);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const std::size_t token = i / width(c), last = token * steps + steps - 1;
    rows[last * width(c) + i % width(c)] = x[i];
  }
  t["x_steps"] = rows;
}

void compress_steps(const StageContext& c, TensorMap& t) {
  const Vector& rows = t.at("x_steps");
  const auto steps = static_cast<std::size_t>(c.steps);
  Vector x(rows.size() / steps);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const std::size_t token = i / width(c), last = token * steps + steps - 1;
    x[i] = rows[last * width(c) + i % width(c)];
  }
  t["x"] = x;
}

}  // namespace

const StageReferences& step_references() {
  static const StageReferences references{{"step_seqlens", step_seqlens},
                                          {"expand_steps", expand_steps},
                                          {"compress_steps", compress_steps}};
  return references;
}

}  // namespace wyvern::testing
