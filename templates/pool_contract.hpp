// Shared by contracts of sources that use device/state_slots.hpp (states of a pool, null sequences)
// or device/checkpoints.hpp.
#pragma once

#include <fmt/format.h>

#include <string>
#include <vector>

#include "templates/constants.hpp"

namespace wyvern::pool {

/// Adds the constants by which a source recognizes null sequences.
inline std::vector<AnyConstant> with_indices(std::vector<AnyConstant> constants) {
  constants.insert(constants.end(),
                   {constant::INDEX_DTYPE, constant::STATE_INDEX, constant::OUTPUT_STATE_INDEX});
  return constants;
}

/// Adds these and the constants by which it finds a sequence's final state.
inline std::vector<AnyConstant> with_final_slots(std::vector<AnyConstant> constants) {
  constants = with_indices(std::move(constants));
  constants.insert(constants.end(),
                   {constant::STATE_DTYPE, constant::STATE_SCALE, constant::INPLACE_STATE});
  return constants;
}

/// Adds these and the constants by which it finds the initial state.
inline std::vector<AnyConstant> with_slots(std::vector<AnyConstant> constants) {
  constants = with_final_slots(std::move(constants));
  constants.insert(constants.end(), {constant::INITIAL_STATE, constant::HAS_INITIAL_STATE});
  return constants;
}

/// Adds the constants by which a source finds checkpoints.
inline std::vector<AnyConstant> with_checkpoints(std::vector<AnyConstant> constants) {
  constants.insert(constants.end(), {constant::CHECKPOINT_EVERY, constant::CHECKPOINTS,
                                     constant::CHECKPOINT_OFFSETS, constant::CHECKPOINT_DTYPE});
  return constants;
}

/// Empty, or why a kernel that does not apply state_scale cannot use the pool.
inline std::string scale_problem(const Spec& s) {
  return s.STATE_SCALE ? "it does not apply state_scale" : std::string();
}

/// Empty, or why not every checkpoint is at the end of a chunk of BT tokens.
inline std::string checkpoint_problem(const Spec& s) {
  if (s.CHECKPOINT_EVERY % s.BT == 0) return {};
  return fmt::format("BT={} does not divide checkpoint_every={}", s.BT, s.CHECKPOINT_EVERY);
}

}  // namespace wyvern::pool
