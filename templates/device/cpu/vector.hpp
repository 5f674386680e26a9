// Vectors of fp32, as wide as the processor's registers, and their loads and stores.
#pragma once

#include "device/cpu/types.hpp"
#include "device/float8.hpp"

namespace wyvern::cpu {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

using f32 = float __attribute__((vector_size(4 * kLanes)));
using i32 = int __attribute__((vector_size(4 * kLanes)));
using u32 = unsigned int __attribute__((vector_size(4 * kLanes)));
using u16 = unsigned short __attribute__((vector_size(2 * kLanes)));
using u8 = unsigned char __attribute__((vector_size(kLanes)));
using f16 = _Float16 __attribute__((vector_size(2 * kLanes)));

/// `n` rounded up to a multiple of `unit`.
constexpr int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

inline f32 splat(float x) { return x - f32{}; }

/// 0, 1, 2, ...
inline i32 lane_numbers() {
  i32 lanes{};
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  return lanes;
}

/// Keeps `a` where it is NaN.
inline f32 at_least(f32 a, f32 low) { return a < low ? low : a; }
inline f32 at_most(f32 a, f32 high) { return a > high ? high : a; }

inline f32 widen(f32 v) { return v; }
inline f32 widen_bf16(u16 v) { return bits_as<f32>(__builtin_convertvector(v, u32) << 16); }
inline f32 widen_fp16(u16 v) { return __builtin_convertvector(bits_as<f16>(v), f32); }

/// Round to nearest even; a NaN stays one.
inline u16 narrow_bf16(f32 v) {
  const u32 bits = bits_as<u32>(v);
  const u32 rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  const u32 quiet = (bits >> 16) | 0x40U;
  return __builtin_convertvector(v == v ? rounded : quiet, u16);
}
inline u16 narrow_fp16(f32 v) { return bits_as<u16>(__builtin_convertvector(v, f16)); }

/// kLanes elements from any address, as fp32.
inline f32 load(const float* p) {
  f32 v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline f32 load(const bf16* p) {
  u16 v;
  __builtin_memcpy(&v, p, sizeof v);
  return widen_bf16(v);
}
inline f32 load(const fp16* p) {
  u16 v;
  __builtin_memcpy(&v, p, sizeof v);
  return widen_fp16(v);
}

inline f32 load(const float8_e4m3* p) {
  u8 v;
  __builtin_memcpy(&v, p, sizeof v);
  return float8_value<DType::float8_e4m3, f32>(__builtin_convertvector(v, u32));
}
inline f32 load(const float8_e5m2* p) {
  u8 v;
  __builtin_memcpy(&v, p, sizeof v);
  return float8_value<DType::float8_e5m2, f32>(__builtin_convertvector(v, u32));
}

/// kLanes elements to any address, rounded to its type.
inline void store(float* p, f32 v) { __builtin_memcpy(p, &v, sizeof v); }
inline void store(bf16* p, f32 v) {
  const u16 narrow = narrow_bf16(v);
  __builtin_memcpy(p, &narrow, sizeof narrow);
}
inline void store(fp16* p, f32 v) {
  const u16 narrow = narrow_fp16(v);
  __builtin_memcpy(p, &narrow, sizeof narrow);
}

inline void store(float8_e4m3* p, f32 v) {
  const u8 narrow = __builtin_convertvector(float8_code<DType::float8_e4m3, u32>(v), u8);
  __builtin_memcpy(p, &narrow, sizeof narrow);
}
inline void store(float8_e5m2* p, f32 v) {
  const u8 narrow = __builtin_convertvector(float8_code<DType::float8_e5m2, u32>(v), u8);
  __builtin_memcpy(p, &narrow, sizeof narrow);
}

/// The first n < kLanes elements; the other lanes are 0 and their memory is not touched.
template <class T>
inline f32 load_part(const T* p, int n) {
  T part[kLanes] = {};
  __builtin_memcpy(part, p, static_cast<unsigned long>(n) * sizeof(T));
  return load(part);
}
template <class T>
inline void store_part(T* p, f32 v, int n) {
  T part[kLanes];
  store(part, v);
  __builtin_memcpy(p, part, static_cast<unsigned long>(n) * sizeof(T));
}

/// One element as fp32.
inline float load_one(const float* p) { return *p; }
inline float load_one(const bf16* p) { return bits_as<float>(static_cast<uint32>(p->bits) << 16); }
inline float load_one(const fp16* p) { return static_cast<float>(bits_as<_Float16>(p->bits)); }

}  // namespace wyvern::cpu
