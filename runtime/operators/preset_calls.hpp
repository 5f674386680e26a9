// The calls that the models of a preset make: what `wyvern tune --preset` tunes.
#pragma once

#include <wyvern/problem.hpp>

#include <string>
#include <string_view>
#include <vector>

namespace wyvern {

/// One call of an operator in a model's life.
struct PresetCall {
  std::string name;  ///< "transformers: first prefill"
  Problem problem;   ///< T is 0, the caller's choice, or the most that the call has
  /// Call it when T and options have been set; null: nothing is left to do.
  void (*finish)(Problem&) = nullptr;
};

/// For each library whose models have the preset's heads, its main one first: the first prefill (no
/// initial state), a prefill that continues from a state, the forward and the backward pass of a
/// training step, decoding, and where its layers do so prefills by the recurrent pass, and all of
/// these packed, or those of training alone; behind them the same of its layers as a whole, between
/// their projections. `dtype` is the dtype of q, k, v and o. Throws Error(kBadInput) that lists the
/// presets.
std::vector<PresetCall> preset_calls(std::string_view preset, DType dtype);

}  // namespace wyvern
