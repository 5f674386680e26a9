#include "templates/cpu_contract.hpp"
#include "templates/cuda_sizes.hpp"
#include "templates/template.hpp"

namespace wyvern::chunk_index {
namespace {

/// What every variant shares.
Template stage() {
  Template t;
  t.name = "chunk_index";
  t.stages = {"chunk_index"};
  t.summary = "Sequence and chunk tables of a packed batch.";
  t.arguments = {
      {"cu_seqlens", Access::in, "SEQLENS_DTYPE", {"N+1"}, ""},
      {"seq_offsets", Access::out, "int32", {"N+1"}, ""},
      {"chunk_offsets", Access::out, "int32", {"N+1"}, ""},
      {"chunk_index", Access::out, "int32", {"NT", "2"}, ""},
  };
  t.constants = {"SEQLENS_DTYPE"};
  return t;
}

/// CUDA, sm_80 and up: one block builds all tables.
Template portable() {
  Template t = stage();
  t.variant = "portable";
  t.tunables = {{"BT", cuda::integers({64, 32, 16, 128})}};
  t.source = "chunk_index/portable.cu";
  t.illegal = [](const Values&, const Config&, const Limits&) { return std::string(); };
  t.fallback = [](const Values&, const Limits&, std::int64_t BT) { return Config{{"BT", BT}}; };
  t.geometry = [](const Values&, const Config&, const Extents&) {
    return Geometry{{1, 1, 1}, 1024, 32 * 4};
  };
  return t;
}

/// All sequences in one call: there is little to do.
Template cpu(Template t) {
  t.variant = "cpu";
  t.device = DeviceKind::cpu;
  t.source = "chunk_index/cpu.cpp";
  t.tunables = {{"BT", {64, 32, 16}}};
  t.illegal = [](const Values&, const Config&, const Limits&) { return std::string(); };
  t.fallback = [](const Values&, const Limits&, std::int64_t BT) { return Config{{"BT", BT}}; };
  t.geometry = [](const Values&, const Config&, const Extents&) { return Geometry{}; };
  return t;
}

}  // namespace

std::vector<Template> contract() { return {portable(), cpu(stage())}; }

}  // namespace wyvern::chunk_index
