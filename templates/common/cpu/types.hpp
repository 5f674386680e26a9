// Element types and launch sizes of CPU templates; the generator puts this before everything else.
#pragma once

using int64 = long;
using int32 = int;
using uint32 = unsigned int;
using uint16 = unsigned short;

/// Storage formats: 16 bits that only the conversions of this folder look into.
struct bf16 {
  uint16 bits;
};
struct fp16 {
  uint16 bits;
};
using fp32 = float;

/// How fp32 matrix products are computed, least accurate first.
enum class Precision { tf32, tf32x3, ieee };

/// Same layout as wyvern::Extents on the host.
struct Extents {
  int64 B, T, N, NT, NS, S;
  float scale, gate_floor, lower_bound;
};
