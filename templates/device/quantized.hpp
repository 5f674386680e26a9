// Rows of o in e4m3 and their scales. For kernels of every device.
#pragma once

#include "device/types.hpp"

namespace wyvern {

/// The largest number of e4m3, and the least that is scaled to it.
inline constexpr float kLargestScaled = 448.0F, kLeastScaled = 1e-10F;

/// Whether a kernel with the Spec S covers output_quantize.
template <class S>
constexpr bool kQuantizes = requires { S::SCALE_TOKENS_LAST; };

/// Writes the scale of a token's group of kScaledColumns columns; that of the last token fills the
/// columns of no token too.
template <class S>
void store_scale(float* o_scale, decltype(Extents::SC) token, decltype(Extents::SC) group,
                 float scale, const Extents& e) {
  if constexpr (S::SCALE_TOKENS_LAST) {
    float* const row = o_scale + group * e.SC;
    row[token] = scale;
    if (token + 1 == e.B * e.T)
      for (decltype(Extents::SC) at = token + 1; at < e.SC; ++at) row[at] = 0.0F;
  } else {
    o_scale[token * e.SC + group] = scale;
  }
}

}  // namespace wyvern
