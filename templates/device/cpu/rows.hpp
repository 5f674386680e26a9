// Work on rows of K elements, held in scratch vectors.
#pragma once

#include "device/cpu/math.hpp"

namespace wyvern::cpu {

/// A row of Cols elements as fp32, padded with zeros to whole vectors.
template <int Cols>
struct Row {
  static constexpr int kVectors = round_up(Cols, kLanes) / kLanes;
  static constexpr int kWhole = Cols / kLanes;
  f32 x[kVectors] = {};

  template <class T>
  void add(const T* from) {
    for (int i = 0; i < kWhole; ++i) x[i] += load(from + i * kLanes);
    if constexpr (kWhole < kVectors)
      x[kWhole] += load_part(from + kWhole * kLanes, Cols - kWhole * kLanes);
  }
  template <class T>
  void store_to(T* to) const {
    for (int i = 0; i < kWhole; ++i) store(to + i * kLanes, x[i]);
    if constexpr (kWhole < kVectors)
      store_part(to + kWhole * kLanes, x[kWhole], Cols - kWhole * kLanes);
  }
};

/// dy, the gradient of y = x rstd, becomes that of x: rstd (dy - y (y . dy)).
template <int Cols>
inline void l2norm_gradient(const Row<Cols>& x, float rstd, Row<Cols>& dy) {
  f32 products{};
  for (int i = 0; i < x.kVectors; ++i) products += x.x[i] * dy.x[i];
  const float along = rstd * sum(products);
  for (int i = 0; i < x.kVectors; ++i) dy.x[i] = (dy.x[i] - x.x[i] * rstd * along) * rstd;
}

}  // namespace wyvern::cpu
