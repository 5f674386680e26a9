#include "compiler/cuda/targets.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <array>
#include <utility>
#include <vector>

#include "compiler/compiler.hpp"
#include "runtime/base/nearest_names.hpp"

namespace wyvern {
namespace {

constexpr std::int64_t kKiB = 1024;

/// Shared memory that one block may opt into: CUDA programming guide, "Technical Specifications per
/// Compute Capability". A name ending in "a" also allows features that only that one architecture
/// has.
struct CudaArch {
  std::string_view name;
  int compute_capability;
  std::int64_t shared_kib;
};
constexpr std::array kCudaArchs{
    CudaArch{"sm_80", 80, 163},    CudaArch{"sm_86", 86, 99},     CudaArch{"sm_87", 87, 163},
    CudaArch{"sm_89", 89, 99},     CudaArch{"sm_90", 90, 227},    CudaArch{"sm_90a", 90, 227},
    CudaArch{"sm_100", 100, 227},  CudaArch{"sm_100a", 100, 227}, CudaArch{"sm_103", 103, 227},
    CudaArch{"sm_103a", 103, 227}, CudaArch{"sm_110", 110, 227},  CudaArch{"sm_110a", 110, 227},
    CudaArch{"sm_120", 120, 99},   CudaArch{"sm_120a", 120, 99},  CudaArch{"sm_121", 121, 99},
    CudaArch{"sm_121a", 121, 99},
};

/// The largest GPU of a compute capability that models are trained and served on: data sheets.
struct UsualGpu {
  int compute_capability;
  int multiprocessors;
  double bytes_per_us;
};
constexpr std::array kUsualGpus{
    UsualGpu{80, 108, 2.04e6},   // A100
    UsualGpu{86, 84, 0.696e6},   // A40
    UsualGpu{89, 142, 0.864e6},  // L40
    UsualGpu{90, 132, 4.8e6},    // H200
    UsualGpu{100, 148, 8e6},     // B200
    UsualGpu{120, 188, 1.79e6},  // RTX PRO 6000
};

/// On every architecture in the table above.
constexpr std::int64_t kRegistersPerBlock = 65536;
/// Clusters and TMA came with Hopper; every GPU with clusters allows this many blocks in one.
constexpr int kFirstWithClusters = 90;
constexpr int kPortableCluster = 8;
/// Blocks of a launch in x, y and z, since sm_30.
constexpr std::array<std::int64_t, 3> kMaxGrid{2147483647, 65535, 65535};

}  // namespace

std::string detail::nearest_archs(std::string_view wanted) {
  std::vector<std::string_view> names;
  for (const CudaArch& arch : kCudaArchs) names.push_back(arch.name);
  return nearest_names(wanted, std::move(names));
}

Target cuda_target(std::string_view arch) {
  for (const CudaArch& known : kCudaArchs) {
    if (known.name != arch) continue;
    Target target;
    target.device = DeviceKind::cuda;
    target.arch = arch;
    target.limits.shared_bytes = known.shared_kib * kKiB;
    target.limits.compute_capability = known.compute_capability;
    target.registers_per_block = kRegistersPerBlock;
    target.limits.wgmma = arch == "sm_90a";  // later architectures have other products
    target.arch_specific = arch.ends_with('a');
    target.limits.tensor_copies = known.compute_capability >= kFirstWithClusters;
    target.limits.max_cluster = target.limits.tensor_copies ? kPortableCluster : 1;
    target.max_grid = kMaxGrid;
    return target;
  }
  throw Error(ErrorKind::kBadInput, fmt::format("arch '{}' is not known; it must be one of {}",
                                                arch, detail::nearest_archs(arch)));
}

Target on_usual_gpu(Target target) {
  for (const UsualGpu& gpu : kUsualGpus) {
    if (gpu.compute_capability != target.limits.compute_capability) continue;
    target.limits.multiprocessors = gpu.multiprocessors;
    target.limits.bytes_per_us = gpu.bytes_per_us;
  }
  return target;
}

}  // namespace wyvern
