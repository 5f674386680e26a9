// Elementary functions on vectors, to about one unit in the last place of fp32.
#pragma once

#include "device/cpu/vector.hpp"

namespace wyvern::cpu {

/// e^x. Exactly 1 at 0, exactly 0 below -86.5 (so that no result is subnormal), infinite above the
/// range, NaN for NaN. Range reduction to |r| <= ln(2)/2 and the polynomial of Cephes' expf.
inline f32 exp(f32 x) {
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: adding it leaves the nearest integer
  const f32 y = at_most(at_least(x, splat(-87.0F)), splat(89.0F));
  const f32 shifted = y * 1.44269504F + kRound;
  const f32 n = shifted - kRound;
  const f32 r = (y - n * 0.693359375F) + n * 2.12194440e-4F;
  f32 p = r * 1.9875691500e-4F + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  p = p * (r * r) + r + 1.0F;
  // 2^(n-1): n can be 128, one past what an exponent field holds.
  const u32 half_scale = (bits_as<u32>(shifted) << 23) + (126U << 23);
  const f32 result = (p + p) * bits_as<f32>(half_scale);
  const f32 large = x > 88.7228391F ? splat(__builtin_inff()) : result;
  return x < -86.5F ? f32{} : large;
}

/// log(1 + y) for y in [0, 1]: 2 atanh(y / (2 + y)) by its series.
inline f32 log1p_unit(f32 y) {
  const f32 s = y / (y + 2.0F);
  const f32 z = s * s;
  f32 p = z * (1.0F / 17) + 1.0F / 15;
  p = p * z + 1.0F / 13;
  p = p * z + 1.0F / 11;
  p = p * z + 1.0F / 9;
  p = p * z + 1.0F / 7;
  p = p * z + 1.0F / 5;
  p = p * z + 1.0F / 3;
  return (s + s) * (p * z) + (s + s);
}

/// log(1 + e^x), at any x.
inline f32 softplus(f32 x) { return at_least(x, f32{}) + log1p_unit(exp(x < 0.0F ? x : -x)); }

inline f32 sigmoid(f32 x) { return 1.0F / (exp(-x) + 1.0F); }

/// The sum of the lanes, always in the same order.
inline float sum(f32 v) {
  float part[kLanes];
  store(part, v);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) part[i] += part[i + width];
  return part[0];
}

}  // namespace wyvern::cpu
