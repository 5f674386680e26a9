// Rows of o to e4m3: 128 columns, which share a scale, to 16 or 32 lanes of a warp, BC such groups
// at once, so that enough bytes are under way.
#include "device/cuda/quantize.cuh"
#include "device/cuda/rows.cuh"

constexpr int kThreads = num_warps * 32;
using Shape = RowShape<DTYPE, kScaledColumns>;
constexpr int kVector = Shape::kVector;
constexpr int kSideBySide = kThreads / Shape::kLanes;
static_assert(Shape::kPerLane == 1);

WYVERN_KERNEL(kThreads, 0) {
  const int groups = e.HV * (V / kScaledColumns);  // of a token
  const int64 first = int64{block_index()} * (kSideBySide * BC);
  const int64 token = first / groups;
  const int group = static_cast<int>(first - token * groups);
  const int column = thread_index() % Shape::kLanes * kVector;
  const auto local = [&](int i) { return i * kSideBySide + thread_index() / Shape::kLanes; };
  const auto active = [&](int i) { return first + local(i) < e.B * e.T * groups; };
  Vector<DTYPE, kVector> y[BC] = {};
#pragma unroll
  for (int i = 0; i < BC; ++i)
    if (active(i)) y[i] = load<kVector>(o_norm + (first + local(i)) * kScaledColumns + column);
#pragma unroll
  for (int i = 0; i < BC; ++i) {
    Vector<float8_e4m3, kVector> codes;
    const float scale = quantize(y[i], codes);
    if (!active(i)) continue;
    const int64 of = token + (group + local(i)) / groups;
    const int in_token = (group + local(i)) % groups;
    store_vector(o + of * o_stride + int64{in_token} * kScaledColumns + column, codes);
    if (column == 0) store_scale<Spec>(o_scale, of, in_token, scale, e);
  }
}
