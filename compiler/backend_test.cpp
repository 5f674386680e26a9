#include "compiler/backend.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <wyvern/error.hpp>

#include <set>
#include <string>
#include <vector>

namespace wyvern::detail {
namespace {

/// A back end whose every answer is known, so that a key of it can be written down.
class KnownBackend final : public Backend {
 public:
  DeviceKind kind() const override { return DeviceKind::cuda; }
  std::optional<Target> find_target(std::string_view) const override { return {}; }
  std::string target_names(std::string_view /*wanted*/) const override { return {}; }
  std::string target_name(const Target& target) const override { return target.arch; }
  Target usual_target() const override { return {}; }
  const Dialect& dialect() const override {
    static const Dialect none{};
    return none;
  }
  void open() const override {}
  std::string version() const override { return "NVRTC 13.0"; }
  std::string identity() const override { return "NVRTC 13.0 of 113322336 bytes"; }
  std::vector<std::string> options(const Target& target) const override {
    return {"-arch=" + target.arch, "-std=c++20"};
  }
  std::span<const Form> forms() const override { return {}; }
  Code compile(const std::string&, const std::string&, const Target&, Output) const override {
    return {};
  }
  std::string resources_text(const Resources&, std::int64_t) const override { return {}; }
};

const std::string kSource = "extern \"C\" __global__ void wyvern_kernel() {}\n";

/// Artifacts that users have stored are found by these: a key may change only with what the code
/// depends on, never with how this program is written. The
/// two below are of the format's first version, and were computed outside of this program.
TEST(SourceKey, EqualsTheKeysOfStoredArtifacts) {
  Target target;
  target.device = DeviceKind::cuda;
  target.arch = "sm_90a";
  const Config config{{"BT", std::int64_t{64}}, {"precision", Precision::tf32x3}};
  EXPECT_EQ(source_key(KnownBackend(), kSource, config, target),
            "8b2906d86abb644450cf35d46cccf54561b961571931166309a1938795d2ca91");
  target.device = DeviceKind::cpu;
  target.arch = "genuineintel-6-143";
  target.features = "avx avx2 fma";
  EXPECT_EQ(source_key(KnownBackend(), kSource, {}, target),
            "6d3f4342e3d26c29615fb321c4e8323cef94ef6d2659d9208bf15b1464d436fa");
}

TEST(SourceKey, FactsThatCodeDoesNotDependOnAreNotInIt) {
  Target target = cuda_target("sm_90a");
  const std::string key = source_key(KnownBackend(), kSource, {}, target);
  target.limits.multiprocessors = 132;
  target.limits.max_cluster = 1;
  target.limits.tensor_copies = false;
  EXPECT_EQ(source_key(KnownBackend(), kSource, {}, target), key);
}

TEST(Backends, EachKindOfDeviceHasOne) {
  std::set<DeviceKind> seen;
  for (const DeviceKind kind : device_kinds()) {
    EXPECT_TRUE(seen.insert(kind).second) << to_string(kind) << " twice";
    EXPECT_EQ(backend(kind).kind(), kind);
    EXPECT_EQ(usual_target(kind).device, kind);
    EXPECT_EQ(usual_target(kind).name(), backend(kind).target_name(usual_target(kind)));
  }
  for (const Template& t : all_templates())
    EXPECT_TRUE(seen.contains(t.device)) << t.id() << " has no back end";
  EXPECT_EQ(device_kinds().front(), DeviceKind::cpu);
}

TEST(Backends, NoTwoGiveOneForm) {
  std::set<Emit> seen{Emit::source};
  for (const Backend* each : backends())
    for (const Form& form : each->forms()) EXPECT_TRUE(seen.insert(form.emit).second);
  EXPECT_EQ(seen.size(), 6U) << "some Emit is given by none";
}

TEST(Backends, KernelsOfGpusGetTensorsThenMapsThenStridesThenSizes) {
  const Template& t = *find_template("scaled_dot_kkt.hopper");
  EXPECT_EQ(
      backend(DeviceKind::cuda).dialect().parameters(t),
      "#define WYVERN_PARAMETERS const DTYPE* k, const BETA_DTYPE* beta, const float* G, const "
      "float* k_rstd, const int32* seq_offsets, const int32* chunk_index, float* A, const "
      "__grid_constant__ TensorMap k_map, int64 k_stride, int64 beta_stride, Extents e\n"
      "#define WYVERN_ARGUMENTS k, beta, G, k_rstd, seq_offsets, chunk_index, A, k_map, k_stride, "
      "beta_stride, e\n"
      "namespace {\nstruct Params {\n"
      "  const DTYPE* k;\n  const BETA_DTYPE* beta;\n  const float* G;\n  const float* k_rstd;\n"
      "  const int32* seq_offsets;\n  const int32* chunk_index;\n  float* A;\n"
      "  const TensorMap& k_map;\n  int64 k_stride;\n  int64 beta_stride;\n  const Extents& e;\n"
      "};\n}  // namespace\n");
}

TEST(Backends, StridesStandBetweenTensorsAndSizes) {
  const std::string strides =
      " int64 q_stride, int64 k_stride, int64 v_stride, int64 beta_stride, int64 "
      "erase_stride, int64 write_stride, int64 g_stride, int64 norm_gate_stride, "
      "int64 o_stride, int64 state_stride,";
  const std::string cuda =
      backend(DeviceKind::cuda).dialect().parameters(*find_template("recurrent.portable"));
  EXPECT_NE(cuda.find(strides + " Extents e\n"), std::string::npos) << cuda;
  const Template& t = *find_template("recurrent.cpu");
  const std::string cpu = backend(DeviceKind::cpu).dialect().parameters(t);
  EXPECT_NE(cpu.find(strides + " const Extents& e\n"), std::string::npos) << cpu;
  const std::string last = fmt::format(" *static_cast<const int64*>((a)[{}]), *(e)\n",
                                       t.parameters.size() + t.strided.size() - 1);
  EXPECT_TRUE(cpu.ends_with(last)) << cpu;
}

TEST(Backends, ResourcesAreThoseOfTheKind) {
  const Resources r{
      .registers = 56, .shared_bytes = 8, .stack_bytes = 0, .spill_bytes = 4, .code_bytes = 100};
  EXPECT_EQ(resources_text(cuda_target("sm_80"), r, 1024),
            "registers 56, shared memory 8 B static + 1024 B dynamic, spills 4 B");
  EXPECT_EQ(resources_text(host_target(), r, 1024),
            "registers -, shared memory 1024 B of scratch a block, spills -");
}

TEST(TargetFacts, TellHopperFromItsOwnArchitectureAndFromOlderOnes) {
  const Target ampere = cuda_target("sm_80");
  EXPECT_EQ(ampere.limits.max_cluster, 1);
  EXPECT_FALSE(ampere.limits.tensor_copies);
  EXPECT_FALSE(ampere.arch_specific);
  EXPECT_EQ(ampere.registers_per_block, 65536);
  const Target general = cuda_target("sm_90");
  EXPECT_EQ(general.limits.max_cluster, 8);
  EXPECT_TRUE(general.limits.tensor_copies);
  EXPECT_FALSE(general.arch_specific);
  EXPECT_EQ(general.limits.multiprocessors, 0) << "no GPU is looked at";
  EXPECT_TRUE(cuda_target("sm_90a").arch_specific);
  EXPECT_EQ(host_target().limits.max_cluster, 1);
  EXPECT_EQ(host_target().registers_per_block, 0);
}

TEST(ParseTarget, UnknownNamesAreAnsweredWithNamesOfEveryKind) {
  for (const char* name : {"gfx942", "native-gpu", ""}) {
    try {
      parse_target(name);
      ADD_FAILURE() << name;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kBadInput);
      EXPECT_EQ(std::string(error.what())
                    .find("target '" + std::string(name) +
                          "' is not known; it must be native-cpu or one of sm_"),
                0U)
          << error.what();
      EXPECT_TRUE(std::string_view(error.what()).ends_with(" and 8 more")) << error.what();
    }
  }
}

}  // namespace
}  // namespace wyvern::detail
