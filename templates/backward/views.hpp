// Views of tensors for TMA, shared by Hopper templates of the backward pass.
#pragma once

#include "templates/hopper_contract.hpp"
#include "templates/tiled_view.hpp"

namespace wyvern::backward_views {

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
/// Matrices of a chunk slot and value head, [NT, HV, rows, columns]; a TMA load or store moves
/// `part` rows of `panels` panels of 64 columns.
inline TiledView matrices(const Spec& s, const Extents& e, std::int64_t rows, std::int64_t columns,
                          std::int64_t part, std::int64_t panels) {
  const auto size = static_cast<std::int64_t>(size_of(s.DTYPE));
  return {.dims = {64, rows, columns / 64, e.NT * s.HV},
          .strides = {columns * size, 64 * size, rows * columns * size},
          .box = {64, part, panels, 1},
          .swizzle = Swizzle::bytes128};
}
/// Z of a chunk and head.
inline TiledView chunk_values(const Spec& s, const Extents& e) {
  return matrices(s, e, kRows, s.V, kRows, s.V / 64);
}

}  // namespace wyvern::backward_views
