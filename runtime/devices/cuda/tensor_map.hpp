// Tensor maps, which describe to TMA the tensors whose tiles it loads and stores.
#pragma once

#include <wyvern/dtype.hpp>

#include "runtime/devices/cuda/cuda_driver.hpp"
#include "templates/tiled_view.hpp"

namespace wyvern::cuda {

/// Whether this driver supports tensor maps.
inline bool has_tensor_maps(const Driver& d) {
  return d.cuTensorMapEncodeTiled != nullptr && d.cuTensorMapReplaceAddress != nullptr;
}

/// The map of this view of a tensor whose address is not known yet. Enqueues nothing; thread-safe.
/// Throws Error(kUnavailable) when the driver has no tensor maps, Error(kBadInput) with the figures
/// when it refuses them.
TensorMap encode_tiled(const Driver& d, const TiledView& view, DType dtype);

/// Makes `map` one of the tensor at `address`, which is aligned to 16 bytes; null, as empty tensors
/// have it, leaves the map as it is. Allocates nothing, takes no lock, enqueues nothing.
inline void place(const Driver& d, TensorMap& map, void* address) {
  if (address == nullptr) return;  // the driver refuses it
  check(d.cuTensorMapReplaceAddress(&map, address), "cuTensorMapReplaceAddress");
}

}  // namespace wyvern::cuda
