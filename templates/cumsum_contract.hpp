// Tunables and geometry of the templates that sum gates inside chunks: chunk_local_cumsum,
// gate_cumsum.
#pragma once

#include "templates/cpu_contract.hpp"
#include "templates/cuda_sizes.hpp"
#include "templates/template.hpp"

namespace wyvern::cumsum {

/// CUDA, sm_80 and up: one block a chunk and up to 32 heads.
inline Template portable(Template t) {
  t.variant = "portable";
  t.tunables = {{"BT", cuda::integers({64, 32, 16, 128})},
                {"num_warps", cuda::integers({4, 2, 8})}};
  t.source = t.name + "/portable.cu";
  t.illegal = [](const Values&, const Config&, const Limits&) { return std::string(); };
  t.fallback = [](const Values&, const Limits&, std::int64_t BT) {
    return Config{{"BT", BT}, {"num_warps", std::int64_t{4}}};
  };
  t.geometry = [](const Values& constants, const Config& config, const Extents& e) {
    const std::int64_t threads = config.integer("num_warps") * 32;
    const std::int64_t groups = cuda::ceil_div(constants.integer("GATE_HEADS"), 32);
    return Geometry{{e.NT * groups, 1, 1}, threads, threads * 4};
  };
  return t;
}

/// One call: a chunk, all heads.
inline Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = t.name + "/cpu.cpp";
  t.tunables = {{"BT", {64, 32, 16}}};
  t.illegal = [](const Values&, const Config&, const Limits&) { return std::string(); };
  t.fallback = [](const Values&, const Limits&, std::int64_t BT) { return Config{{"BT", BT}}; };
  t.geometry = [](const Values&, const Config&, const Extents& e) {
    return Geometry{.grid = {e.NT, 1, 1}};
  };
  return t;
}

}  // namespace wyvern::cumsum
