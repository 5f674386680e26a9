// Loads and stores BV columns of a state in scratch in the layout of the caller's states.
#pragma once

#include "device/cpu/tile.hpp"
#include "device/state_unit.hpp"

namespace wyvern::cpu {

template <class S>
struct CallerState {
  static constexpr int K = S::K, V = S::V;

  /// Loads BV columns of a caller's state. Elements of 8 bits are multiplied by `scale`; others
  /// have no scale.
  template <class T>
  static void load(const T* from, int columns, Tile<S::BV> state, float scale = 1.0F) {
    if constexpr (S::STATE_V_FIRST)
      transpose(from, K, columns, K, state);
    else
      load_tile(from, V, K, columns, state);
    if constexpr (sizeof(T) == 1) scale_tile(state, K, columns, scale);
  }

  template <class T>
  static void store(Tile<S::BV> state, int columns, T* to, float scale = 1.0F) {
    if constexpr (S::STATE_V_FIRST)
      transpose<sizeof(T) == 1 || S::STATE_UNIT>(state, K, columns, to, K, 1.0F / scale);
    else
      store_tile(state, K, columns, to, V, 1.0F / scale);
  }

  /// Converts the block's columns of a state to the unit of a scan's states, at least `least`. The
  /// unit depends on the head's whole state: the K V elements at `entering`, times `scale`; null:
  /// zeros. Returns the unit, and writes it to `units` for each of `chunks` chunks from the first
  /// on, unless null.
  template <class T>
  static float enter_unit(const T* entering, float scale, Tile<S::BV> state, int columns,
                          int64 chunks, const Extents& e, float* units, float least) {
    if constexpr (!S::STATE_UNIT) return 1.0F;
    constexpr int kElements = K * V;
    f32 largest{};
    for (int i = 0; entering != nullptr && i < kElements; i += kLanes) {
      const f32 x =
          kElements - i < kLanes ? load_part(entering + i, kElements - i) : cpu::load(entering + i);
      largest = at_least(x < 0.0F ? -x : x, largest);
    }
    float of_lanes = 0.0F;
    for (int i = 0; i < kLanes; ++i) of_lanes = of_lanes < largest[i] ? largest[i] : of_lanes;
    const float unit = unit_of_states(of_lanes * scale, least);
    scale_tile(state, K, columns, 1.0F / unit);
    for (int64 c = 0; units != nullptr && c < chunks; ++c) units[c * e.HV] = unit;
    return unit;
  }

  /// Offset of the block's columns in a caller's state.
  static int64 columns_at(int first_column) {
    return S::STATE_V_FIRST ? int64{first_column} * K : first_column;
  }
  /// The same for sequence n, from the start of states [N, HV, ...].
  static int64 start(int64 n, int64 hv, int first_column, const Extents& e) {
    return (n * e.HV + hv) * K * V + columns_at(first_column);
  }
};

}  // namespace wyvern::cpu
