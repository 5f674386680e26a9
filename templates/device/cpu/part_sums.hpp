// Sums over the parts of tensors [parts, columns].
#pragma once

#include "device/cpu/gate.hpp"

namespace wyvern::cpu {

/// BC columns from `first` on of `count` parts. These are added in groups, and groups to each
/// other, so that long sums keep their digits.
template <int BC>
inline void sum_parts(const float* parts, float* sums, int64 first, int64 columns, int64 count) {
  constexpr int64 kGroup = 64;
  const int width = static_cast<int>(columns - first < BC ? columns - first : BC);
  for_heads(width, [&](int c, int lanes) {
    f32 total{};
    for (int64 begin = 0; begin < count; begin += kGroup) {
      f32 group{};
      for (int64 i = begin; i < count && i < begin + kGroup; ++i)
        group += load_heads(parts + i * columns + first + c, lanes);
      total += group;
    }
    store_heads(sums + first + c, total, lanes);
  });
}

}  // namespace wyvern::cpu
