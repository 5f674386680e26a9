// What contracts share whose sources find states, or null sequences, by device/state_slots.hpp.
#pragma once

#include <vector>

#include "templates/constants.hpp"

namespace wyvern::pool {

/// `constants`, and those by which a source tells null sequences.
inline std::vector<AnyConstant> with_indices(std::vector<AnyConstant> constants) {
  constants.insert(constants.end(),
                   {constant::INDEX_DTYPE, constant::STATE_INDEX, constant::OUTPUT_STATE_INDEX});
  return constants;
}

/// Those by which it finds a sequence's final state too.
inline std::vector<AnyConstant> with_final_slots(std::vector<AnyConstant> constants) {
  constants = with_indices(std::move(constants));
  constants.insert(constants.end(), {constant::STATE_DTYPE, constant::INPLACE_STATE});
  return constants;
}

/// Those by which it finds both states.
inline std::vector<AnyConstant> with_slots(std::vector<AnyConstant> constants) {
  constants = with_final_slots(std::move(constants));
  constants.insert(constants.end(), {constant::INITIAL_STATE, constant::HAS_INITIAL_STATE});
  return constants;
}

}  // namespace wyvern::pool
