#include "runtime/devices/cuda/kernel.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <array>

#include "runtime/devices/cuda/tensor_map.hpp"
#include "runtime/operator_impl.hpp"

namespace wyvern::cuda {
namespace {

class CudaKernel final : public Kernel {
 public:
  CudaKernel(std::shared_ptr<PrimaryContext> context, const Artifact& artifact,
             const Geometry& block)
      : context_(std::move(context)) {
    const Driver& d = context_->driver;
    const Current current(d, context_->context);
    check(d.cuLibraryLoadData(&library_, artifact.code.data(), nullptr, nullptr, 0, nullptr,
                              nullptr, 0),
          "cuLibraryLoadData");
    try {
      resolve(artifact, block);
    } catch (...) {
      d.cuLibraryUnload(library_);
      throw;
    }
  }
  ~CudaKernel() override {
    Context previous = nullptr;
    const Driver& d = context_->driver;
    d.cuCtxGetCurrent(&previous);
    d.cuCtxSetCurrent(context_->context);
    d.cuLibraryUnload(library_);
    d.cuCtxSetCurrent(previous);
  }
  CudaKernel(const CudaKernel&) = delete;
  CudaKernel& operator=(const CudaKernel&) = delete;

  void launch(const Geometry& geometry, std::span<void* const> arguments,
              std::span<const BoundTensorMap> maps, std::span<const std::int64_t> strides,
              const Extents& extents, Stream stream) const override {
    if (is_empty(geometry)) return;
    const Current current(context_->driver, context_->context);
    std::array<void*, kMaxArguments + kMaxTensorMaps + kMaxStrided + 1> parameters;
    std::size_t count = 0;
    for (void* const& argument : arguments)
      parameters[count++] = const_cast<void*>(static_cast<const void*>(&argument));
    std::array<TensorMap, kMaxTensorMaps> placed;  // the driver copies parameters as it launches
    for (std::size_t i = 0; i < maps.size(); ++i) {
      placed[i] = maps[i].map;
      place(context_->driver, placed[i], arguments[maps[i].argument]);
      parameters[count++] = &placed[i];
    }
    for (const std::int64_t& stride : strides)
      parameters[count++] = const_cast<std::int64_t*>(&stride);
    parameters[count] = const_cast<Extents*>(&extents);
    const bool programmatic = geometry.programmatic && context_->programmatic;
    if (programmatic || is_cluster(geometry))
      launch_with_attributes(geometry, programmatic, parameters.data(), stream);
    else
      launch_plain(geometry, parameters.data(), stream);
  }

 private:
  static bool is_cluster(const Geometry& geometry) {
    return geometry.cluster[0] != 1 || geometry.cluster[1] != 1 || geometry.cluster[2] != 1;
  }

  void launch_plain(const Geometry& geometry, void** parameters, Stream stream) const {
    check(context_->driver.cuLaunchKernel(
              function_, static_cast<unsigned>(geometry.grid[0]),
              static_cast<unsigned>(geometry.grid[1]), static_cast<unsigned>(geometry.grid[2]),
              static_cast<unsigned>(geometry.threads), 1, 1,
              static_cast<unsigned>(geometry.shared_bytes), stream, parameters, nullptr),
          "cuLaunchKernel");
  }

  void launch_with_attributes(const Geometry& geometry, bool programmatic, void** parameters,
                              Stream stream) const {
    std::array<LaunchAttribute, 2> attributes{};
    unsigned count = 0;
    if (is_cluster(geometry)) {
      LaunchAttribute& asked = attributes[count++];
      asked.id = kClusterDimension;
      for (std::size_t i = 0; i < 3; ++i)
        asked.cluster[i] = static_cast<unsigned>(geometry.cluster[i]);
    }
    if (programmatic) {
      LaunchAttribute& asked = attributes[count++];
      asked.id = kProgrammaticStreamSerialization;
      asked.allowed = 1;
    }
    const LaunchConfig config{
        {static_cast<unsigned>(geometry.grid[0]), static_cast<unsigned>(geometry.grid[1]),
         static_cast<unsigned>(geometry.grid[2])},
        {static_cast<unsigned>(geometry.threads), 1, 1},
        static_cast<unsigned>(geometry.shared_bytes),
        stream,
        attributes.data(),
        count};
    check(context_->driver.cuLaunchKernelEx(&config, function_, parameters, nullptr),
          "cuLaunchKernelEx");
  }

  /// Resolving the function loads the code now, even with lazy CUDA_MODULE_LOADING.
  void resolve(const Artifact& artifact, const Geometry& block) {
    const Driver& d = context_->driver;
    KernelHandle kernel = nullptr;
    check(d.cuLibraryGetKernel(&kernel, library_, artifact.entry.c_str()), "cuLibraryGetKernel");
    check(d.cuKernelGetFunction(&function_, kernel), "cuKernelGetFunction");
    int threads = 0;
    check(d.cuFuncGetAttribute(&threads, kMaxThreadsPerBlock, function_), "cuFuncGetAttribute");
    if (block.threads > threads)
      throw Error(ErrorKind::kUnavailable,
                  fmt::format("{} with {} asks for {} threads a block; its registers allow {}",
                              artifact.template_id, artifact.config, block.threads, threads));
    if (const std::string problem = context_->cluster_problem(block.cluster); !problem.empty())
      throw Error(ErrorKind::kUnavailable,
                  fmt::format("{} with {} asks for clusters of {} x {} x {} blocks: {}",
                              artifact.template_id, artifact.config, block.cluster[0],
                              block.cluster[1], block.cluster[2], problem));
    if (block.shared_bytes > 0) {
      const Result result = d.cuFuncSetAttribute(function_, kMaxDynamicSharedBytes,
                                                 static_cast<int>(block.shared_bytes));
      if (result != 0)
        throw Error(ErrorKind::kUnavailable,
                    fmt::format("{} with {} asks for {} bytes of shared memory a block: {}",
                                artifact.template_id, artifact.config, block.shared_bytes,
                                d.describe(result)));
    }
  }

  std::shared_ptr<PrimaryContext> context_;
  Library library_ = nullptr;
  Function function_ = nullptr;
};

}  // namespace

std::shared_ptr<const Kernel> load_kernel(std::shared_ptr<PrimaryContext> context,
                                          const Artifact& artifact, const Geometry& block) {
  return std::make_shared<CudaKernel>(std::move(context), artifact, block);
}

}  // namespace wyvern::cuda
