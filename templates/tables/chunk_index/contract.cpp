#include "templates/cpu_contract.hpp"
#include "templates/cuda_contract.hpp"
#include "templates/tables/chunk_index/layout.hpp"
#include "templates/tables/stages.hpp"
#include "templates/template.hpp"

namespace wyvern::chunk_index {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "chunk_index";
  t.covers = {stages::chunk_index};
  return t;
}

/// CUDA, sm_80 and up: one block builds all tables.
Template portable() {
  Template t = stage();
  t.variant = "portable";
  t.tunables = {{tunable::BT, cuda::integers({64, 32, 16, 128})}};
  t.source = "portable.cu";
  t.illegal = [](const Spec&, const Limits&) { return std::string(); };
  t.fallback = [](Spec&, const Limits&) {};
  t.geometry = [](const Spec&, const Extents&, const Limits&) {
    return Geometry{{1, 1, 1}, kThreads, SharedLayout().bytes};
  };
  return t;
}

/// All sequences in one call: there is little to do.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "cpu.cpp";
  t.tunables = {{tunable::BT, kCpuChunkSizes}};
  t.illegal = [](const Spec&, const Limits&) { return std::string(); };
  t.fallback = [](Spec&, const Limits&) {};
  t.geometry = [](const Spec&, const Extents&, const Limits&) { return Geometry{}; };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(), cpu(stage())}; }

}  // namespace wyvern::chunk_index
