// The units in which a pass in fp16 computes states and values. For kernels of every device.
//
// fp16 ends at 65504, and a state may be larger though o is not. The pass is linear in the initial
// state and v together, so it may compute both in any unit: a power of two, which costs no digits.
// U is in the unit of values, which leaves room for differences of values. The states h, V' and
// their products are in a unit of their sequence (of their segment, where a scan is split) and
// head, chosen by the state that it starts from; `state_unit` has it for each chunk. Likewise
// gradients of states, dU and dv_local are linear in dht and dO: dv_local is in the unit of
// gradients, dh and dU in `dstate_unit`. Products of a state and a gradient are in no unit. S is
// the kernel's Spec; without STATE_UNIT all units are 1.
#pragma once

#include "device/extents.hpp"

namespace wyvern {

template <class S>
inline constexpr float kValueUnit = S::STATE_UNIT ? 4.0F : 1.0F;

/// The unit of gradients of values: near the factor on o, by which gradients of o are multiplied.
template <class S>
float unit_of_gradients(const Extents& e) {
  if constexpr (!S::STATE_UNIT) return 1.0F;
  const unsigned int exponent = __builtin_bit_cast(unsigned int, 16 * e.scale) & 0x7F800000U;
  const float unit = __builtin_bit_cast(float, exponent);
  return unit > 0.0F && unit < 0x1p100F ? unit : 1.0F;
}

/// The unit of states (or of their gradients), at least `unit`, where no element of the first state
/// is above `largest`: these are at most 512 units, so that products with rows of keys stay in
/// range.
inline float unit_of_states(float largest, float unit) {
  while (unit * 512 < largest) unit *= 64;
  return unit;
}

}  // namespace wyvern
