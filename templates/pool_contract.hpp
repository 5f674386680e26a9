// What contracts share whose sources find states, or null sequences, by device/state_slots.hpp, or
// checkpoints by device/checkpoints.hpp.
#pragma once

#include <fmt/format.h>

#include <string>
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
  constants.insert(constants.end(),
                   {constant::STATE_DTYPE, constant::STATE_SCALE, constant::INPLACE_STATE});
  return constants;
}

/// Those by which it finds both states.
inline std::vector<AnyConstant> with_slots(std::vector<AnyConstant> constants) {
  constants = with_final_slots(std::move(constants));
  constants.insert(constants.end(), {constant::INITIAL_STATE, constant::HAS_INITIAL_STATE});
  return constants;
}

/// Those by which it finds a final state's slot, with those by which it finds checkpoints.
inline std::vector<AnyConstant> with_checkpoints(std::vector<AnyConstant> constants) {
  constants.insert(constants.end(), {constant::CHECKPOINT_EVERY, constant::CHECKPOINTS,
                                     constant::CHECKPOINT_OFFSETS, constant::CHECKPOINT_DTYPE});
  return constants;
}

/// Empty, or why a walk that takes no scale does not read or write the pool.
inline std::string scale_problem(const Spec& s) {
  return s.STATE_SCALE ? "elements of its states count as they are" : std::string();
}

/// Empty, or why a walk in chunks of BT does not come to every checkpoint at a chunk's end.
inline std::string checkpoint_problem(const Spec& s) {
  if (s.CHECKPOINT_EVERY % s.BT == 0) return {};
  return fmt::format("BT={} does not divide checkpoint_every={}", s.BT, s.CHECKPOINT_EVERY);
}

}  // namespace wyvern::pool
