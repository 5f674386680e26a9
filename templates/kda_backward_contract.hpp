// What the contracts of kda_bwd_dqkg, kda_intra_bwd and kda_wy_dqkg share: inputs, the sizes of
// what blocks of common/cuda/kda_backward.cuh and common/cpu/kda_*backward.hpp lay out, and the
// CUDA templates of a chunk's whole gradients.
#pragma once

#include <algorithm>

#include "templates/common/cpu/scratch.hpp"
#include "templates/cuda_sizes.hpp"
#include "templates/template.hpp"

namespace wyvern::kda_backward {

inline std::vector<Argument> inputs() {
  const std::vector<std::string> values{"B", "T", "HV", "V"}, states{"NT", "HV", "K", "V"};
  return {
      {"q", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"k", Access::in, "DTYPE", {"B", "T", "H", "K"}, ""},
      {"v", Access::in, "DTYPE", values, ""},
      {"v_new", Access::in, "DTYPE", values, ""},
      {"beta", Access::in, "BETA_DTYPE", {"B", "T", "HV"}, ""},
      {"Tinv", Access::in, "DTYPE", {"B", "T", "HV", "BT"}, ""},
      {"Gk", Access::in, "fp32", {"B", "T", "HV", "K"}, ""},
      {"q_rstd", Access::in, "fp32", {"B", "T", "H"}, "QK_L2NORM"},
      {"k_rstd", Access::in, "fp32", {"B", "T", "H"}, "QK_L2NORM"},
      {"h", Access::in, "DTYPE", states, ""},
      {"dh", Access::in, "DTYPE", states, ""},
      {"do", Access::in, "DTYPE", values, ""},
      {"du", Access::in, "DTYPE", values, ""},
      {"seq_offsets", Access::in, "int32", {"N+1"}, "VARLEN"},
      {"chunk_index", Access::in, "int32", {"NT", "2"}, "VARLEN"},
  };
}

/// Shared memory of a block, without what a template keeps beside it.
inline std::int64_t shared_bytes(const Values& constants, const Config& config) {
  const DType type = constants.dtype("DTYPE");
  const std::int64_t BT = config.integer("BT"), BK = config.integer("BK");
  const std::int64_t V = constants.integer("V");
  const std::int64_t buffer = 2 * cuda::tile_bytes(BK, V, type) +
                              2 * cuda::tile_bytes(BT, BK, type) +
                              cuda::tile_bytes(BT, BK, DType::fp32);
  return std::max(config.integer("num_stages") * buffer, cuda::tile_bytes(BT, BT, type)) +
         3 * cuda::tile_bytes(BT, V, type) +
         (constants.flag("QK_L2NORM") ? 3 : 1) * cuda::column_bytes(BT) +
         cuda::column_bytes(config.integer("num_warps") * BT) + cuda::column_bytes(BK) +
         cuda::column_bytes(BT / 16 * BK);
}

/// Empty, or why warps cannot share out the strips and columns of K tiles.
inline std::string uneven_warps(const Config& config) {
  const std::int64_t BK = config.integer("BK"), BT = config.integer("BT");
  const std::int64_t warps = config.integer("num_warps");
  if (warps % (BT / 16) != 0)
    return fmt::format("num_warps={} does not share out the {} strips of BT={}", warps, BT / 16,
                       BT);
  if (BK % (warps * 256 / BT) != 0)
    return fmt::format("num_warps={} leaves warps without 16 columns of BK={}", warps, BK);
  return {};
}

/// Empty, or why the tiles of K or the warps do not suit the problem.
inline std::string unsuitable(const Values& constants, const Config& config) {
  const std::int64_t K = constants.integer("K"), BK = config.integer("BK");
  const std::int64_t stages = config.integer("num_stages");
  if (std::string reason = cuda::exceeds_dimension("BK", BK, "K", K); !reason.empty())
    return reason;
  if (stages > cuda::ceil_div(K, BK))
    return fmt::format("num_stages={} is more than the {} tiles of K", stages,
                       cuda::ceil_div(K, BK));
  return uneven_warps(config);
}

/// CUDA, sm_80 and up: one block a chunk and value head, tiles of BK columns of K. `bytes` counts
/// the template's own shared memory.
inline Template portable(Template t, std::int64_t (*bytes)(const Values&, const Config&)) {
  t.variant = "portable";
  t.tunables = {{"BT", cuda::integers({64, 32, 16})},
                {"BK", cuda::integers({32, 64, 16})},
                {"num_warps", cuda::integers({4, 8, 2, 1})},
                {"num_stages", cuda::integers({1, 2})},
                {"precision", cuda::kPrecisionValues}};
  t.source = t.name + "/portable.cu";
  t.illegal = [bytes](const Values& constants, const Config& config, const Limits& limits) {
    const std::string reason = unsuitable(constants, config);
    return reason.empty() ? cuda::exceeds_shared(bytes(constants, config), limits) : reason;
  };
  t.redundant = cuda::repeats_precision;
  t.fallback = [](const Values& constants, const Limits&, std::int64_t BT) {
    return Config{{"BT", BT},
                  {"BK", std::int64_t{32}},
                  {"num_warps", BT / 8},
                  {"num_stages", std::int64_t{1}},
                  {"precision", cuda::default_precision(constants)}};
  };
  t.geometry = cuda::chunk_blocks(bytes);
  return t;
}

/// Floats of common/cpu/kda_backward.hpp's IntraScratch.
constexpr std::int64_t intra_scratch(std::int64_t BT, std::int64_t BK) {
  return 5 * scratch::tile(16, BK) + 3 * scratch::tile(BT, BK);
}

/// Floats of common/cpu/kda_state_backward.hpp's StateBackward.
constexpr std::int64_t state_scratch(std::int64_t BT, std::int64_t BK, std::int64_t V) {
  return 3 * scratch::tile(BT, V) + scratch::tile(V, BT) + 2 * scratch::tile(V, BK) +
         scratch::tile(BT, BT) + 6 * scratch::tile(BT, BK) + scratch::vector(BK) +
         4 * scratch::vector(BT);
}

}  // namespace wyvern::kda_backward
