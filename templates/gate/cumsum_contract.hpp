// Tunables and geometry of the templates that sum gates inside chunks: chunk_local_cumsum,
// gate_cumsum.
#pragma once

#include "templates/cpu_contract.hpp"
#include "templates/cuda_contract.hpp"
#include "templates/gate/layout.hpp"
#include "templates/template.hpp"

namespace wyvern::cumsum {

/// CUDA, sm_80 and up: one block a chunk and up to 32 heads.
inline Template portable(Template t) {
  t.variant = "portable";
  t.tunables = {{tunable::BT, cuda::integers({64, 32, 16, 128})},
                {tunable::num_warps, cuda::integers({4, 2, 8})}};
  t.source = "portable.cu";
  t.illegal = [](const Spec&, const Limits&) { return std::string(); };
  t.fallback = [](Spec& s, const Limits&) { s.num_warps = 4; };
  t.geometry = [](const Spec& s, const Extents& e, const Limits&) {
    const std::int64_t groups = cuda::ceil_div(s.GATE_HEADS, 32);
    return cuda::launch(e.NT * groups, s, SharedLayout(s).bytes);
  };
  return t;
}

/// One call: a chunk, all heads.
inline Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "cpu.cpp";
  t.tunables = {{tunable::BT, kCpuChunkSizes}};
  t.illegal = [](const Spec&, const Limits&) { return std::string(); };
  t.fallback = [](Spec&, const Limits&) {};
  t.geometry = [](const Spec&, const Extents& e, const Limits&) {
    return Geometry{.grid = {e.NT, 1, 1}};
  };
  return t;
}

}  // namespace wyvern::cumsum
