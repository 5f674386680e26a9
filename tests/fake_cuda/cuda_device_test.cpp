// The CUDA side of the runtime against a driver that records what it is asked for.
#include <gtest/gtest.h>
#include <wyvern/device.hpp>
#include <wyvern/error.hpp>

#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "runtime/bind.hpp"
#include "runtime/devices/cuda/context.hpp"
#include "runtime/devices/cuda/kernel.hpp"
#include "runtime/devices/cuda/tensor_map.hpp"
#include "runtime/devices/device_impl.hpp"
#include "runtime/operator_impl.hpp"
#include "tests/fake_cuda/fake_cuda.hpp"

namespace wyvern {
namespace {

using Names = std::vector<std::string>;

fake_cuda::Gpu ampere() {
  fake_cuda::Gpu gpu;
  gpu.name = "NVIDIA A100";
  gpu.major = 8;
  gpu.multiprocessors = 108;
  gpu.clusters = false;
  return gpu;
}

Artifact artifact() {
  Artifact made;
  made.template_id = "probe.portable";
  made.entry = "wyvern_kernel";
  made.code = "code";
  return made;
}

Geometry geometry() {
  Geometry g;
  g.grid = {8, 4, 2};
  g.threads = 128;
  g.shared_bytes = 1024;
  return g;
}

template <class Call>
void expect_error(ErrorKind kind, const std::string& piece, Call call) {
  try {
    call();
    ADD_FAILURE() << "no error says: " << piece;
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind);
    EXPECT_NE(std::string(error.what()).find(piece), std::string::npos) << error.what();
  }
}

/// Opens this process's driver while it lacks nothing.
class CudaDeviceTest : public testing::Test {
 protected:
  void SetUp() override {
    fake_cuda::reset();
    ASSERT_NE(cuda::driver(), nullptr);
    cuda::driver()->cuCtxSetCurrent(nullptr);
    objects_ = fake_cuda::open_objects();
    fake_cuda::take_calls();
  }
  void TearDown() override {
    cuda::driver()->cuCtxSetCurrent(nullptr);
    EXPECT_EQ(fake_cuda::open_objects(), objects_) << "something was not given back";
  }

  /// Makes the primary context of a GPU current, as PyTorch would have.
  static void make_current(int gpu) {
    cuda::Context context = nullptr;
    cuda::driver()->cuDevicePrimaryCtxRetain(&context, gpu);
    cuda::driver()->cuCtxSetCurrent(context);
    cuda::driver()->cuDevicePrimaryCtxRelease(gpu);
  }

  /// Launches with two pointers; returns the calls of the driver.
  Names launch(const Kernel& kernel, const Geometry& how) const {
    fake_cuda::parameter_sizes({sizeof(void*), sizeof(void*), sizeof(Extents)});
    void* const pointers[] = {reinterpret_cast<void*>(0xA000), nullptr};
    fake_cuda::take_calls();
    kernel.launch(how, pointers, {}, {}, extents_, reinterpret_cast<void*>(0x5));
    return fake_cuda::take_calls();
  }

  Extents extents_{.B = 1, .T = 4096, .N = 3, .scale = 0.5F};

 private:
  int objects_ = 0;
};

TEST_F(CudaDeviceTest, ListsTheDriversFacts) {
  fake_cuda::set_gpus({{}, ampere()});
  const std::vector<DeviceInfo> all = list_devices();
  ASSERT_EQ(all.size(), 3U);
  EXPECT_EQ(all[0].kind, "cpu");
  EXPECT_FALSE(all[0].cuda);
  EXPECT_EQ(all[1].name, "cuda:0");
  EXPECT_EQ(all[1].kind, "cuda");
  EXPECT_TRUE(all[1].cuda);
  EXPECT_EQ(all[1].model, "NVIDIA H200");
  EXPECT_EQ(all[1].arch, "sm_90a");
  EXPECT_EQ(all[1].units, 132);
  EXPECT_TRUE(
      all[1].driver.starts_with("13.0"));  // then the driver's own version, where there is one
  EXPECT_EQ(all[1].key, "NVIDIA H200, 132 SMs, 1980 MHz, memory 3201 MHz x 6144 bit, 140 GiB");
  EXPECT_EQ(all[2].name, "cuda:1");
  EXPECT_EQ(all[2].arch, "sm_80");
  EXPECT_EQ(Device::best().info().name, "cuda:0");
}

TEST_F(CudaDeviceTest, SaysWhichOneOfItsModelItIs) {
  fake_cuda::set_gpus({{}, {}});
  EXPECT_EQ(Device::open("cuda:1").impl().state().unit, "GPU-01020304-0506-0708-090a-0b0c0d0e0f10");
}

TEST_F(CudaDeviceTest, UnusableDevicesAreListedWithTheirProblem) {
  fake_cuda::Gpu old = ampere();
  old.major = 7;
  old.minor = 5;
  fake_cuda::set_gpus({old});
  EXPECT_NE(list_devices().at(1).problem.find("sm_80 or newer"), std::string::npos);
  EXPECT_EQ(Device::best().info().name, "cpu");
  expect_error(ErrorKind::kUnavailable, "sm_75", [] { Device::open("cuda:0"); });
  fake_cuda::refuse("cuDeviceGetName", 1);
  const DeviceInfo broken = list_devices().at(1);
  EXPECT_EQ(broken.name, "cuda");
  EXPECT_EQ(broken.kind, "cuda");
  EXPECT_TRUE(broken.cuda);
  EXPECT_EQ(broken.problem, "cuDeviceGetName failed: CUDA_ERROR_INVALID_VALUE (invalid argument)");
}

TEST_F(CudaDeviceTest, OpensByName) {
  EXPECT_EQ(Device::open("cuda").info().name, "cuda:0");
  const Device first = Device::open("cuda:0");
  EXPECT_EQ(&Device::open("cuda").impl(), &first.impl()) << "one device, opened once";
  EXPECT_NE(&Device::open("cpu").impl(), &first.impl());
  expect_error(ErrorKind::kUnavailable, "cuda:1 does not exist; this machine has 1 GPU",
               [] { Device::open("cuda:1"); });
  for (const char* name : {"gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1x", "cpu:0", ""})
    expect_error(ErrorKind::kBadInput, "it must be cpu or cuda:N", [&] { Device::open(name); });
}

TEST_F(CudaDeviceTest, TargetsCarryTheFactsOfTheGpu) {
  fake_cuda::set_gpus({{}, ampere()});
  const Device hopper = Device::open("cuda:0");
  EXPECT_EQ(hopper.impl().target().limits.multiprocessors, 132);
  EXPECT_EQ(hopper.impl().target().limits.max_cluster, 8);
  EXPECT_TRUE(hopper.impl().target().limits.tensor_copies);
  EXPECT_TRUE(hopper.impl().target().arch_specific);
  EXPECT_EQ(hopper.impl().target().limits.compute_capability, 90);
  const Device other = Device::open("cuda:1");
  EXPECT_EQ(other.impl().target().limits.multiprocessors, 108);
  EXPECT_EQ(other.impl().target().limits.max_cluster, 1);
  EXPECT_FALSE(other.impl().target().limits.tensor_copies);
}

TEST_F(CudaDeviceTest, APlainLaunchIsTwoCallsWhereTheContextIsCurrent) {
  const Device device = Device::open("cuda:0");
  const auto kernel = device.impl().load(artifact(), geometry());
  make_current(0);
  EXPECT_EQ(launch(*kernel, geometry()), (Names{"cuCtxGetCurrent", "cuLaunchKernel"}));
  cuda::driver()->cuCtxSetCurrent(nullptr);
  EXPECT_EQ(launch(*kernel, geometry()),
            (Names{"cuCtxGetCurrent", "cuCtxSetCurrent", "cuLaunchKernel", "cuCtxSetCurrent"}));
  Geometry empty = geometry();
  empty.grid[1] = 0;
  EXPECT_EQ(launch(*kernel, empty), Names{});
}

TEST_F(CudaDeviceTest, APlainLaunchPassesEverything) {
  const Device device = Device::open("cuda:0");
  const auto kernel = device.impl().load(artifact(), geometry());
  launch(*kernel, geometry());
  ASSERT_EQ(fake_cuda::launches().size(), 1U);
  const fake_cuda::Launch one = fake_cuda::launches().front();
  EXPECT_FALSE(one.with_attributes);
  EXPECT_EQ(one.entry, "wyvern_kernel");
  EXPECT_EQ(one.grid, (std::array{8U, 4U, 2U}));
  EXPECT_EQ(one.block, (std::array{128U, 1U, 1U}));
  EXPECT_EQ(one.shared_bytes, 1024U);
  EXPECT_EQ(one.stream, reinterpret_cast<void*>(0x5));
  ASSERT_EQ(one.parameters.size(), 3U);
  std::uintptr_t pointer = 0;
  std::memcpy(&pointer, one.parameters[0].data(), sizeof pointer);
  EXPECT_EQ(pointer, 0xA000U);
  std::memcpy(&pointer, one.parameters[1].data(), sizeof pointer);
  EXPECT_EQ(pointer, 0U);
  Extents extents;
  std::memcpy(&extents, one.parameters[2].data(), sizeof extents);
  EXPECT_EQ(extents.T, 4096);
  EXPECT_EQ(extents.scale, 0.5F);
}

TEST_F(CudaDeviceTest, ClustersAndProgrammaticLaunchesAreAttributes) {
  const Device device = Device::open("cuda:0");
  Geometry how = geometry();
  how.cluster = {4, 2, 1};
  const auto kernel = device.impl().load(artifact(), how);
  make_current(0);
  EXPECT_EQ(launch(*kernel, how), (Names{"cuCtxGetCurrent", "cuLaunchKernelEx"}));
  how.programmatic = true;
  launch(*kernel, how);
  how.cluster = {1, 1, 1};
  launch(*kernel, how);
  const std::vector<fake_cuda::Launch> all = fake_cuda::launches();
  ASSERT_EQ(all.size(), 3U);
  for (const fake_cuda::Launch& one : all) {
    EXPECT_TRUE(one.with_attributes);
    EXPECT_EQ(one.grid, (std::array{8U, 4U, 2U}));
    EXPECT_EQ(one.block, (std::array{128U, 1U, 1U}));
    EXPECT_EQ(one.shared_bytes, 1024U);
    EXPECT_EQ(one.stream, reinterpret_cast<void*>(0x5));
    EXPECT_EQ(one.parameters.size(), 3U);
  }
  EXPECT_EQ(all[0].cluster, (std::array{4U, 2U, 1U}));
  EXPECT_FALSE(all[0].programmatic);
  EXPECT_EQ(all[1].cluster, (std::array{4U, 2U, 1U}));
  EXPECT_TRUE(all[1].programmatic);
  EXPECT_EQ(all[2].cluster, (std::array{1U, 1U, 1U}));
  EXPECT_TRUE(all[2].programmatic);
}

TEST_F(CudaDeviceTest, AGridThatClustersDoNotDivideIsRefused) {
  const Device device = Device::open("cuda:0");
  Geometry how = geometry();
  how.cluster = {3, 1, 1};
  const auto kernel = device.impl().load(artifact(), how);
  expect_error(ErrorKind::kUnavailable, "cuLaunchKernelEx failed: CUDA_ERROR_INVALID_VALUE",
               [&] { launch(*kernel, how); });
}

TEST_F(CudaDeviceTest, ClustersThatAreNotToBeHadAreRefusedWhenLoading) {
  fake_cuda::set_gpus({{}, ampere()});
  Geometry how = geometry();
  how.cluster = {16, 1, 1};
  expect_error(ErrorKind::kUnavailable, "asks for clusters of 16 x 1 x 1 blocks: 8 is the most",
               [&] { Device::open("cuda:0").impl().load(artifact(), how); });
  how.cluster = {2, 1, 1};
  expect_error(ErrorKind::kUnavailable, "2 x 1 x 1 blocks: this GPU has none",
               [&] { Device::open("cuda:1").impl().load(artifact(), how); });
}

TEST_F(CudaDeviceTest, WhereKernelsCannotOverlapAProgrammaticLaunchIsAPlainOne) {
  fake_cuda::set_gpus({ampere()});
  const Device device = Device::open("cuda:0");
  Geometry how = geometry();
  how.programmatic = true;
  const auto kernel = device.impl().load(artifact(), how);
  make_current(0);
  EXPECT_EQ(launch(*kernel, how), (Names{"cuCtxGetCurrent", "cuLaunchKernel"}));
}

TEST_F(CudaDeviceTest, AnOldDriverLacksOnlyNewFeatures) {
  fake_cuda::lack("cuLaunchKernelEx");
  fake_cuda::lack("cuTensorMapEncodeTiled");
  std::string problem;
  const std::unique_ptr<cuda::Driver> old = cuda::open_driver("libcuda.so.1", problem);
  ASSERT_NE(old, nullptr) << problem;
  const auto context = std::make_shared<cuda::PrimaryContext>(*old, 0);
  Geometry how = geometry();
  how.programmatic = true;
  const auto kernel = cuda::load_kernel(context, artifact(), how);
  make_current(0);
  EXPECT_EQ(launch(*kernel, how), (Names{"cuCtxGetCurrent", "cuLaunchKernel"}));
  how.cluster = {2, 1, 1};
  expect_error(ErrorKind::kUnavailable, "the NVIDIA driver has no cuLaunchKernelEx; update it",
               [&] { cuda::load_kernel(context, artifact(), how); });
  EXPECT_FALSE(cuda::has_tensor_maps(*old));
  expect_error(
      ErrorKind::kUnavailable,
      "the NVIDIA driver has no cuTensorMapEncodeTiled and cuTensorMapReplaceAddress; update it",
      [&] { cuda::encode_tiled(*old, {}, DType::bf16); });
}

TEST_F(CudaDeviceTest, UnusableDriversSayHowToFixIt) {
  std::string problem;
  EXPECT_EQ(cuda::open_driver("libcuda-nowhere.so.1", problem), nullptr);
  EXPECT_EQ(problem,
            "libcuda-nowhere.so.1, the NVIDIA driver, is not on this machine; install the driver "
            "for a GPU, or use --device cpu");
  EXPECT_EQ(cuda::open_driver("libc.so.6", problem), nullptr);
  EXPECT_EQ(problem, "the NVIDIA driver is older than CUDA 12.0; update it");
  fake_cuda::refuse("cuInit", 1);
  EXPECT_EQ(cuda::open_driver("libcuda.so.1", problem), nullptr);
  EXPECT_NE(problem.find("does not start: CUDA_ERROR_INVALID_VALUE"), std::string::npos);
  fake_cuda::lack("cuMemAlloc");
  EXPECT_EQ(cuda::open_driver("libcuda.so.1", problem), nullptr);
  EXPECT_EQ(problem, "the NVIDIA driver has no cuMemAlloc; update it to CUDA 12.0 or newer");
}

TiledView tiled() {
  return {.dims = {128, 16, 4096},
          .strides = {256, 4096},
          .box = {64, 1, 64},
          .swizzle = Swizzle::bytes128};
}

TEST_F(CudaDeviceTest, TensorMapsTellTheDriverEverything) {
  const Device device = Device::open("cuda:0");
  device.impl().encode(tiled(), DType::bf16);
  device.impl().encode({.dims = {128}, .box = {4}}, DType::fp32);
  const std::vector<fake_cuda::TensorMapCall> calls = fake_cuda::tensor_maps();
  ASSERT_EQ(calls.size(), 2U);
  EXPECT_EQ(calls[0].type, 9) << "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16";
  EXPECT_EQ(calls[0].dims, (std::vector<std::uint64_t>{128, 16, 4096}));
  EXPECT_EQ(calls[0].strides, (std::vector<std::uint64_t>{256, 4096}));
  EXPECT_EQ(calls[0].box, (std::vector<std::uint32_t>{64, 1, 64}));
  EXPECT_EQ(calls[0].element_strides, (std::vector<std::uint32_t>{1, 1, 1}));
  EXPECT_EQ(calls[0].interleave, 0);
  EXPECT_EQ(calls[0].swizzle, 3) << "CU_TENSOR_MAP_SWIZZLE_128B";
  EXPECT_EQ(calls[0].fill, 0);
  EXPECT_EQ(calls[1].type, 7) << "CU_TENSOR_MAP_DATA_TYPE_FLOAT32";
  EXPECT_EQ(calls[1].swizzle, 0);
  EXPECT_TRUE(calls[1].strides.empty());
}

/// Sequences without tokens still have chunk slots, and blocks that find nothing to do.
TEST_F(CudaDeviceTest, AnEmptyTensorHasATensorMap) {
  const Device device = Device::open("cuda:0");
  device.impl().encode({.dims = {64, 0, 2}, .strides = {256, 4096}, .box = {64, 8, 1}},
                       DType::bf16);
  ASSERT_EQ(fake_cuda::tensor_maps().size(), 1U);
  EXPECT_EQ(fake_cuda::tensor_maps()[0].dims, (std::vector<std::uint64_t>{64, 1, 2}));
}

TEST_F(CudaDeviceTest, ARefusedTensorMapNamesItsFigures) {
  const Device device = Device::open("cuda:0");
  TiledView odd = tiled();
  odd.strides = {264, 4096};
  expect_error(ErrorKind::kBadInput,
               "no tensor map for bf16 with dims [128, 16, 4096], strides [264, 4096] bytes, box "
               "[64, 1, 64], swizzle 128: CUDA_ERROR_INVALID_VALUE (invalid argument)",
               [&] { device.impl().encode(odd, DType::bf16); });
  odd.strides = {256};
  expect_error(ErrorKind::kBadInput, "as many dims as box has, and one more than strides",
               [&] { device.impl().encode(odd, DType::bf16); });
  EXPECT_TRUE(fake_cuda::tensor_maps().empty());
  expect_error(ErrorKind::kUnavailable, "cpu has no TMA",
               [] { Device::open("cpu").impl().encode(tiled(), DType::bf16); });
}

TEST_F(CudaDeviceTest, ALaunchPutsTheAddressIntoItsTensorMapsAndMakesNone) {
  const Device device = Device::open("cuda:0");
  const auto kernel = device.impl().load(artifact(), geometry());
  std::vector<BoundTensorMap> maps;
  maps.push_back({2, device.impl().encode({.dims = {128}, .box = {4}}, DType::fp32)});
  maps.push_back({0, device.impl().encode(tiled(), DType::bf16)});
  make_current(0);
  fake_cuda::parameter_sizes({8, 8, 8, sizeof(TensorMap), sizeof(TensorMap), sizeof(Extents)});
  for (const std::uintptr_t base : {0xA000U, 0xB000U}) {
    void* const pointers[] = {reinterpret_cast<void*>(base), nullptr,
                              reinterpret_cast<void*>(base + 0x100)};
    fake_cuda::take_calls();
    kernel->launch(geometry(), pointers, maps, {}, extents_, nullptr);
    EXPECT_EQ(fake_cuda::take_calls(), (Names{"cuCtxGetCurrent", "cuTensorMapReplaceAddress",
                                              "cuTensorMapReplaceAddress", "cuLaunchKernel"}));
    const fake_cuda::Launch one = fake_cuda::launches().back();
    ASSERT_EQ(one.parameters.size(), 6U);
    const fake_cuda::TensorMapParameter first = fake_cuda::as_tensor_map(one.parameters[3]);
    const fake_cuda::TensorMapParameter second = fake_cuda::as_tensor_map(one.parameters[4]);
    EXPECT_EQ(first.address, base + 0x100);
    EXPECT_EQ(first.made_by, 0U);
    EXPECT_EQ(second.address, base);
    EXPECT_EQ(second.made_by, 1U);
    Extents extents;
    std::memcpy(&extents, one.parameters[5].data(), sizeof extents);
    EXPECT_EQ(extents.T, 4096);
  }
  void* const empty[] = {nullptr, nullptr, nullptr};
  fake_cuda::take_calls();
  kernel->launch(geometry(), empty, maps, {}, extents_, nullptr);
  EXPECT_EQ(fake_cuda::take_calls(), (Names{"cuCtxGetCurrent", "cuLaunchKernel"}));
}

TEST_F(CudaDeviceTest, BindingMakesTheTensorMapsOfATemplate) {
  const Device device = Device::open("cuda:0");
  Problem p;
  p.B = p.N = 2, p.T = 100;
  p.H = 3, p.HV = 6, p.K = 128, p.V = 16;
  const PlanStep plan_step{"scaled_dot_kkt.hopper", Config{{"BT", std::int64_t{64}}}};
  const auto op = bind_stage(device, p, plan_step);
  ASSERT_EQ(fake_cuda::tensor_maps().size(), 1U);
  const fake_cuda::TensorMapCall made = fake_cuda::tensor_maps().front();
  EXPECT_EQ(made.dims, (std::vector<std::uint64_t>{64, 200, 2, 3}));
  EXPECT_EQ(made.strides, (std::vector<std::uint64_t>{768, 128, 256}));
  EXPECT_EQ(made.box, (std::vector<std::uint32_t>{64, 64, 2, 1}));
  EXPECT_EQ(made.swizzle, 3);

  BoundStep& step = op->steps.front();
  step.kernel = device.impl().load(artifact(), step.geometry);
  std::vector<TensorView> tensors(step.argument_count);
  std::vector<const TensorView*> given;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    tensors[i].data = reinterpret_cast<void*>(0x1000 * (i + 1));
    given.push_back(&tensors[i]);
  }
  std::vector<std::size_t> sizes(step.argument_count, sizeof(void*));
  sizes.insert(sizes.end(), {sizeof(TensorMap), sizeof(Extents)});
  fake_cuda::parameter_sizes(sizes);
  make_current(0);
  fake_cuda::take_calls();
  op->enqueue(given, nullptr, nullptr, 0, 1);
  EXPECT_EQ(fake_cuda::take_calls(),
            (Names{"cuCtxGetCurrent", "cuTensorMapReplaceAddress", "cuLaunchKernel"}));
  const fake_cuda::Launch one = fake_cuda::launches().back();
  const auto map = fake_cuda::as_tensor_map(one.parameters.at(step.argument_count));
  EXPECT_EQ(map.address, 0x1000U) << "k is the first of the stage's tensors";
  EXPECT_EQ(map.made_by, 0U);

  p.T = 0;
  EXPECT_TRUE(bind_stage(device, p, plan_step)->steps.front().maps.empty());
  EXPECT_EQ(fake_cuda::tensor_maps().size(), 1U) << "there is nothing to copy";
}

/// For strided rows a launch encodes the tensor maps again and passes the strides among the
/// kernel's parameters.
TEST_F(CudaDeviceTest, ALaunchMakesTheTensorMapsOfStridedRows) {
  const Device device = Device::open("cuda:0");
  Problem p;
  p.B = p.N = 2, p.T = 100;
  p.H = 2, p.HV = 4, p.K = 128, p.V = 64;
  const auto op = bind_stage(device, p,
                             {"delta_forward.hopper", Config{{"BT", std::int64_t{64}},
                                                             {"BV", std::int64_t{64}},
                                                             {"num_stages", std::int64_t{3}}}});
  BoundStep& step = op->steps.front();
  step.kernel = device.impl().load(artifact(), step.geometry);
  std::vector<TensorView> tensors;
  std::vector<const TensorView*> given;
  for (const TensorSpec& spec : op->expected()) {
    TensorView& view = tensors.emplace_back();
    view.dtype = spec.dtype, view.rank = spec.rank, view.shape = spec.shape;
    std::int64_t stride = 1;
    for (auto i = static_cast<std::size_t>(spec.rank); i-- > 0; stride *= spec.shape[i])
      view.strides[i] = stride;
    view.data = reinterpret_cast<void*>(0x100000 * tensors.size());
    if (!spec.present) view = {};
  }
  for (const TensorView& view : tensors) given.push_back(&view);
  const auto place = [&](std::string_view name) {
    std::size_t i = 0;
    while (op->expected()[i].name != name) ++i;
    return i;
  };
  std::vector<std::size_t> sizes(step.argument_count, sizeof(void*));
  sizes.insert(sizes.end(), 4, sizeof(TensorMap));
  sizes.insert(sizes.end(), 7, sizeof(std::int64_t));
  sizes.push_back(sizeof(Extents));
  fake_cuda::parameter_sizes(sizes);
  const auto strides = [&] {
    std::array<std::int64_t, 7> all{};
    for (std::size_t i = 0; i < all.size(); ++i)
      std::memcpy(&all[i],
                  fake_cuda::launches().back().parameters.at(step.argument_count + 4 + i).data(),
                  sizeof all[i]);
    return all;
  };
  make_current(0);
  op->check(given, nullptr);
  op->enqueue(given, nullptr, nullptr, 0, 1);
  EXPECT_EQ(strides(), (std::array<std::int64_t, 7>{256, 256, 4, 4, 256, 32768, 256}));
  EXPECT_EQ(fake_cuda::tensor_maps().size(), 4U) << "none at a launch of dense tensors";

  TensorView& v = tensors[place("v")];
  v.strides = {76800, 768, 64, 1, 0};  // the last third of a projection
  tensors[place("g")].strides = {800, 8, 1, 0, 0};
  op->check(given, nullptr);
  op->enqueue(given, nullptr, nullptr, 0, 1);
  EXPECT_EQ(strides(), (std::array<std::int64_t, 7>{256, 256, 8, 4, 768, 32768, 256}));
  ASSERT_EQ(fake_cuda::tensor_maps().size(), 5U);
  EXPECT_EQ(fake_cuda::tensor_maps()[4].dims, fake_cuda::tensor_maps()[2].dims);
  EXPECT_EQ(fake_cuda::tensor_maps()[4].strides, (std::vector<std::uint64_t>{1536, 128, 128}));
  const auto map =
      fake_cuda::as_tensor_map(fake_cuda::launches().back().parameters.at(step.argument_count + 2));
  EXPECT_EQ(map.made_by, 4U);
  EXPECT_EQ(map.address, reinterpret_cast<std::uintptr_t>(v.data));

  const auto refused = [&](TensorView& tensor, std::array<std::int64_t, kMaxRank> wrong) {
    const auto good = std::exchange(tensor.strides, wrong);
    expect_error(ErrorKind::kBadInput, "or have contiguous rows of tokens at equal distances",
                 [&] { op->check(given, nullptr); });
    tensor.strides = good;
  };
  refused(v, {76800, 767, 64, 1, 0});               // not a multiple of 16 bytes
  refused(v, {76801, 768, 64, 1, 0});               // sequences that do not follow one another
  refused(v, {76800, 768, 128, 1, 0});              // heads apart
  refused(v, {25600, 256, 64, 2, 0});               // elements apart
  refused(v, {12800, 128, 64, 1, 0});               // rows that overlap
  refused(v, {0, 0, 64, 1, 0});                     // one row for all
  refused(v, {-76800, -768, 64, 1, 0});             // backwards
  refused(v, {100LL << 40, 1LL << 40, 64, 1, 0});   // farther than a map tells
  refused(tensors[place("g")], {600, 6, 1, 0, 0});  // 24 bytes
  tensors[place("o")].data = static_cast<char*>(v.data) + 512;
  expect_error(ErrorKind::kBadInput, "o overlaps v", [&] { op->check(given, nullptr); });
}

TEST_F(CudaDeviceTest, MoreBlocksThanALaunchMayHaveAreRefused) {
  const Device device = Device::open("cuda:0");
  Problem p;
  p.T = 1, p.H = p.HV = 2, p.K = 128, p.V = 16;
  const PlanStep plan_step{"scaled_dot_kkt.hopper", Config{{"BT", std::int64_t{64}}}};
  p.B = p.N = (std::int64_t{1} << 30) - 1;
  EXPECT_EQ(bind_stage(device, p, plan_step)->steps.front().geometry.grid[0], 2147483646);
  for (const std::int64_t B : {std::int64_t{1} << 30, (std::int64_t{1} << 31) - 1}) {
    p.B = p.N = B;  // the driver would be given the low 32 bits: 2^31, and 2^32 - 2
    expect_error(ErrorKind::kBadInput,
                 "needs " + std::to_string(2 * B) + " blocks in x, cuda:0 takes at most 2147483647",
                 [&] { (void)bind_stage(device, p, plan_step); });
    expect_error(ErrorKind::kBadInput, "B = " + std::to_string(B),
                 [&] { (void)bind_stage(device, p, plan_step); });
  }
}

/// A step with scratch memory, as binding makes it.
TEST_F(CudaDeviceTest, ScratchMemoryIsZeroedBeforeTheLaunch) {
  const Device device = Device::open("cuda:0");
  OperatorImpl op(device);
  BoundStep& step = op.steps.emplace_back();
  step.geometry = geometry();
  step.kernel = device.impl().load(artifact(), geometry());
  step.argument_count = 2;
  step.bindings[0] = {Binding::From::workspace, 0};
  step.bindings[1] = {Binding::From::workspace, 256};
  step.zeroed = {{256, 64}};
  std::array<unsigned char, 512> workspace;
  workspace.fill(7);
  make_current(0);
  fake_cuda::parameter_sizes({sizeof(void*), sizeof(void*), sizeof(Extents)});
  fake_cuda::take_calls();
  op.enqueue({}, workspace.data(), nullptr, 0, 1);
  EXPECT_EQ(fake_cuda::take_calls(),
            (Names{"cuCtxGetCurrent", "cuMemsetD8Async", "cuCtxGetCurrent", "cuLaunchKernel"}));
  for (std::size_t i = 0; i < workspace.size(); ++i)
    EXPECT_EQ(workspace.at(i), i >= 256 && i < 320 ? 0 : 7) << "byte " << i;
  std::uintptr_t pointer = 0;
  std::memcpy(&pointer, fake_cuda::launches().back().parameters.at(1).data(), sizeof pointer);
  EXPECT_EQ(pointer, reinterpret_cast<std::uintptr_t>(workspace.data()) + 256);
}

TEST_F(CudaDeviceTest, MemoryTimersAndReplaysAreGivenBack) {
  const Device device = Device::open("cuda:0");
  const std::shared_ptr<void> memory = device.allocate(8);
  std::uint64_t value = 42;
  device.copy_in(memory.get(), &value, sizeof value);
  device.fill(memory.get(), 1, 1);
  device.copy_out(&value, memory.get(), sizeof value);
  EXPECT_EQ(value, 1U);
  const auto timer = device.impl().make_timer();
  timer->start(nullptr);
  timer->stop(nullptr);
  EXPECT_EQ(timer->elapsed_us(), 1000.0);
  const auto kernel = device.impl().load(artifact(), geometry());
  make_current(0);
  const auto replay = device.impl().capture([&](Stream stream) {
    EXPECT_NE(stream, nullptr);
    launch(*kernel, geometry());
  });
  fake_cuda::take_calls();
  replay->launch(nullptr);
  EXPECT_EQ(fake_cuda::take_calls(), (Names{"cuCtxGetCurrent", "cuGraphLaunch"}));
  EXPECT_THROW(device.impl().capture([](Stream) { throw Error(ErrorKind::kBadInput, "stop"); }),
               Error);
}

TEST_F(CudaDeviceTest, SaysHowItIsMeasured) {
  const Device device = Device::open("cuda:0");
  EXPECT_FALSE(device.impl().host_memory());
  EXPECT_TRUE(device.impl().measuring().cold);
  EXPECT_TRUE(device.impl().measuring().beside_compilers);
  EXPECT_EQ(device.impl().rates().basis, "measured on an H200");
  const Device host = Device::open("cpu");
  EXPECT_TRUE(host.impl().host_memory());
  EXPECT_FALSE(host.impl().measuring().cold);
  EXPECT_FALSE(host.impl().measuring().beside_compilers);
}

}  // namespace
}  // namespace wyvern
