// Sums over chunk slots of BC columns.
#include "device/cpu/gate.hpp"

/// Slots are added in groups, and groups to each other, so that long sums keep their digits.
constexpr int64 kGroup = 64;

static void sum_columns(const float* parts, float* sums, int64 first, int64 columns, int64 slots) {
  const int count = static_cast<int>(columns - first < BC ? columns - first : BC);
  for_heads(count, [&](int c, int width) {
    f32 total{};
    for (int64 slot = 0; slot < slots; slot += kGroup) {
      f32 group{};
      for (int64 s = slot; s < slots && s < slot + kGroup; ++s)
        group += load_heads(parts + s * columns + first + c, width);
      total += group;
    }
    store_heads(sums + first + c, total, width);
  });
}

WYVERN_BLOCK {
  const int64 head_tiles = HAS_A_LOG ? (e.HV + BC - 1) / BC : 0;
  if (block[0] < head_tiles)
    sum_columns(dA_part, dA_log, block[0] * BC, e.HV, e.NT);
  else
    sum_columns(dbias_part, ddt_bias, (block[0] - head_tiles) * BC, e.HV * GATE_K, e.NT);
}
