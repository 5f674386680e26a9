// Views of tensors for TMA, shared by Hopper templates of the backward pass.
#pragma once

#include "templates/hopper_contract.hpp"
#include "templates/tiled_view.hpp"

namespace wyvern::backward_views {

using hopper::matrices;

constexpr std::int64_t kRows = 64;  ///< of a chunk

/// Rows of q or k of a key head.
inline TiledView keys(const Spec& s, const Extents& e) {
  return hopper::panels(e, s.DTYPE, s.H, s.K, kRows, s.K / 64);
}
/// 64 channels of such rows, or of their gradients.
inline TiledView slices(const Spec& s, const Extents& e) {
  return hopper::panels(e, s.DTYPE, s.H, s.K, kRows, 1);
}
/// Rows of a value head.
inline TiledView values(const Spec& s, const Extents& e) {
  return hopper::panels(e, s.DTYPE, s.HV, s.V, kRows, s.V / 64);
}
/// Z of a chunk and head.
inline TiledView chunk_values(const Spec& s, const Extents& e) {
  return matrices(s, e, kRows, s.V, kRows, s.V / 64);
}

}  // namespace wyvern::backward_views
