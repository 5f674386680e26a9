// What the contracts of the templates over common/cuda/backward.cuh share: bwd_dqkwg, wy_bwd,
// wy_dqkg.
#pragma once

#include <algorithm>

#include "templates/cuda_sizes.hpp"
#include "templates/template.hpp"

namespace wyvern::backward {

/// The sizes in shared memory of what portable.cu keeps there, in bytes.
struct Sizes {
  std::int64_t keys, values, states, square, column, columns, row_sums, warp_rows, block_sum;

  Sizes(const Values& constants, const Config& config) {
    const DType type = constants.dtype("DTYPE");
    const std::int64_t BT = config.integer("BT");
    const std::int64_t BK = config.integer("BK");
    const std::int64_t V = constants.integer("V");
    const std::int64_t warps = config.integer("num_warps");
    keys = cuda::tile_bytes(BT, BK, type);
    values = cuda::tile_bytes(BT, V, type);
    states = cuda::tile_bytes(BK, V, type);
    square = cuda::tile_bytes(BT, BT, type);
    column = cuda::column_bytes(BT);
    columns =
        ((constants.flag("SCALAR_GATE") ? 1 : 0) + (constants.flag("QK_L2NORM") ? 2 : 0)) * column;
    row_sums = warps / (BT / 16) * column;
    warp_rows = warps * column;
    block_sum = cuda::column_bytes(warps);
  }
};

/// What portable templates have in common: tunables, legality and launch; `shared_bytes` counts
/// the template's own shared memory.
inline Template portable(Template t, std::int64_t (*shared_bytes)(const Values&, const Config&)) {
  t.variant = "portable";
  t.tunables = {{"BT", cuda::integers({64, 32, 16})},
                {"BK", cuda::integers({32, 64, 16})},
                {"num_warps", cuda::integers({4, 8, 2, 1})},
                {"num_stages", cuda::integers({1, 2})},
                {"precision", cuda::kPrecisionValues}};
  t.source = t.name + "/portable.cu";
  t.illegal = [shared_bytes](const Values& constants, const Config& config, const Limits& limits) {
    const std::int64_t K = constants.integer("K");
    const std::int64_t BT = config.integer("BT");
    const std::int64_t BK = config.integer("BK");
    const std::int64_t warps = config.integer("num_warps");
    const std::int64_t stages = config.integer("num_stages");
    if (std::string reason = cuda::exceeds_dimension("BK", BK, "K", K); !reason.empty())
      return reason;
    if (stages > cuda::ceil_div(K, BK))
      return fmt::format("num_stages={} is more than the {} tiles of K", stages,
                         cuda::ceil_div(K, BK));
    const std::int64_t across = warps / (BT / 16);
    if (across == 0) return fmt::format("num_warps={} is less than BT/16={}", warps, BT / 16);
    if (BK % (across * 16) != 0)
      return fmt::format("num_warps={} leaves warps without columns", warps);
    return cuda::exceeds_shared(shared_bytes(constants, config), limits);
  };
  t.redundant = cuda::repeats_precision;
  t.fallback = [shared_bytes](const Values& constants, const Limits& limits, std::int64_t BT) {
    Config config{{"BT", BT},
                  {"BK", std::int64_t{32}},
                  {"num_warps", std::max<std::int64_t>(BT / 16, 2)},
                  {"num_stages", std::int64_t{1}},
                  {"precision", cuda::default_precision(constants)}};
    if (shared_bytes(constants, config) > limits.shared_bytes) {
      config.set("BK", std::int64_t{16});
      config.set("num_warps", BT / 16);
    }
    return config;
  };
  t.geometry = cuda::chunk_blocks(shared_bytes);
  return t;
}

}  // namespace wyvern::backward
