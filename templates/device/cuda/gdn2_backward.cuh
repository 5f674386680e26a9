// Gradients of gdn2's chunks: kda's blocks with a rate of one number an element in beta's place.
#pragma once

#include "device/cuda/gdn2.cuh"
#include "device/cuda/kda_backward.cuh"

namespace wyvern::cuda::gdn2 {

/// The erase gate as rates of kda's blocks.
template <class Gate, int Size, int Cols>
struct ElementRates {
  Tile<Gate, Size, Cols> gate;

  struct Row {
    const Gate* gates;
    WYVERN_DEVICE float operator()(int c) const { return to_float(gates[c]); }
  };
  WYVERN_DEVICE Row row(int r) const { return {gate.at(r, 0)}; }
};

/// Their gradients in sixteen rows and sixteen columns.
struct ElementGradients {
  Accumulator x[2];
};
WYVERN_DEVICE void add_product(ElementGradients& d, int half, int n, int j, float a, float b) {
  d.x[n].x[2 * half + j] += a * b;
}

/// Where a pair of accumulators adds its part: with a rate an element, each to its own.
template <int N>
WYVERN_DEVICE ElementGradients& gradients_of(ElementGradients (&d)[N], int pair) {
  return d[pair];
}

}  // namespace wyvern::cuda::gdn2
