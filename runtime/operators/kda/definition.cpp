// Kimi Delta Attention: the delta rule after a decay of one value a key channel.
#include "runtime/operators/chunked.hpp"

namespace wyvern::kda {
namespace {

constexpr std::array kPresets{
    Preset{"kimi-linear-48b", "kda", 32, 32, 128, 128, -5.0F},
    Preset{"kda-h64", "kda", 64, 64, 128, 128, -5.0F},
    Preset{"kda-h96", "kda", 96, 96, 128, 128, -5.0F},
};

/// What the forward pass keeps beside what every member keeps: decayed queries and keys, and their
/// products.
TensorRules own_kept_tensors() {
  const Dims row{TensorDim::B, TensorDim::T, TensorDim::HV, TensorDim::K};
  return {
      {"Aqk",
       TensorRole::kept,
       Quantity::computed,
       {TensorDim::B, TensorDim::T, TensorDim::HV, TensorDim::C},
       always_fp32,
       with_kept},
      {"qg", TensorRole::kept, Quantity::computed, row, dtype_of_rows, with_kept},
      {"kg", TensorRole::kept, Quantity::computed, row, dtype_of_rows, with_kept},
  };
}

class Kda final : public ChunkedDeltaRule {
 public:
  using ChunkedDeltaRule::ChunkedDeltaRule;

  std::span<const std::int64_t> chunk_sizes(const Problem& problem,
                                            DeviceKind device) const override {
    // The backward pass on a GPU: its kernels hold gates per channel, and with half as many rows
    // twice as many blocks fit on a multiprocessor (one H200, 2026-11-21: 64 heads, 8192 tokens
    // 13% faster).
    static constexpr std::array<std::int64_t, 4> kSmallChunksFirst{32, 64, 128, 16};
    if (device == DeviceKind::cuda && problem.pass == Pass::backward) return kSmallChunksFirst;
    return ChunkedDeltaRule::chunk_sizes(problem, device);
  }
};

}  // namespace

const OperatorDefinition& definition() {
  static const Kda definition(
      {.name = "kda",
       .summary = "the delta rule with one decay a key channel (Kimi Linear)",
       .source = "arXiv 2510.26692",
       .gate = GateKind::vector,
       .lower_bound = true,
       .beta = true,
       .presets = kPresets},
      join({row_tensors(), beta_tensors(), gate_tensors({TensorDim::K}), state_tensors(),
            kept_tensors(), own_kept_tensors()}),
      vector_gate_stages());
  return definition;
}

}  // namespace wyvern::kda
