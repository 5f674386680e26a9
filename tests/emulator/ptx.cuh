// The emulator's stand-in for device/cuda/ptx.cuh: the same functions, on the host. By built-in
// functions: reading <cmath> and <algorithm> took longer than compiling most kernels.
#include <type_traits>
#include <utility>

#include "device/cuda/types.cuh"
#include "emulator/machine.hpp"

#define WYVERN_DEVICE inline
#define WYVERN_KERNEL(threads, blocks) void wyvern_kernel(WYVERN_PARAMETERS)

extern "C" {
__attribute__((visibility("default"))) wyvern::emulator::Machine* wyvern_machine = nullptr;
}

namespace wyvern::cuda {

using emulator::Collective;
using emulator::LaneOperands;

inline int thread_index() { return wyvern_machine->thread; }
inline int block_index() {
  return static_cast<int>(wyvern_machine->block % wyvern_machine->blocks);
}
inline int block_count() { return static_cast<int>(wyvern_machine->blocks); }
inline int block_row() { return static_cast<int>(wyvern_machine->block / wyvern_machine->blocks); }
inline int lane_index() { return wyvern_machine->thread % 32; }
inline int warp_index() { return wyvern_machine->thread / 32; }
inline unsigned char* shared_memory() { return wyvern_machine->shared; }
inline void sync_block() { wyvern_machine->sync_block(); }
inline void sync_named(int name, int threads) { wyvern_machine->sync_named(name, threads, true); }
inline void arrive_named(int name, int threads) {
  wyvern_machine->sync_named(name, threads, false);
}
inline void sync_warp() {
  LaneOperands lane;
  wyvern_machine->collective(Collective::sync_warp, lane);
}

// ---- numbers ------------------------------------------------------------------------------------

template <class To, class From>
To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  __builtin_memcpy(&y, &x, sizeof(y));
  return y;
}
inline uint32 float_bits(float x) { return bits_as<uint32>(x); }
inline float bits_float(uint32 x) { return bits_as<float>(x); }

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return bits_float(static_cast<uint32>(x.bits) << 16U); }
inline float to_float(fp16 x) { return static_cast<float>(bits_as<_Float16>(x.bits)); }

template <class T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline bf16 from_float<bf16>(float x) {
  if (__builtin_isnan(x)) return bf16{0x7FFF};
  const uint32 bits = float_bits(x);
  return bf16{static_cast<uint16>((bits + 0x7FFFU + ((bits >> 16U) & 1U)) >> 16U)};
}
template <>
inline fp16 from_float<fp16>(float x) {
  return fp16{bits_as<uint16>(static_cast<_Float16>(x))};
}
template <class T>
uint32 pack(float low, float high) {
  return from_float<T>(low).bits | static_cast<uint32>(from_float<T>(high).bits) << 16U;
}

template <class T>
uint32 pack_within_range(float low, float high) {
  return pack<T>(low, high);
}
template <>
inline uint32 pack_within_range<fp16>(float low, float high) {
  // NaN stays: it compares as neither.
  const auto clamp = [](float x) {
    return x < -65504.0f ? -65504.0f : x > 65504.0f ? 65504.0f : x;
  };
  return pack<fp16>(clamp(low), clamp(high));
}

inline float to_tf32(float x) {
  if (!__builtin_isfinite(x)) return x;
  return bits_float((float_bits(x) + 0x1000U) & 0xFFFFE000U);
}
inline float exp2_fast(float x) {
  const float y = __builtin_exp2f(x);
  return y < 0x1p-126f ? 0.0f : y;
}
inline float reciprocal_fast(float x) { return 1.0f / x; }
inline float exponential(float x) { return __builtin_expf(x); }
inline float log_one_plus(float x) { return __builtin_log1pf(x); }
inline float reciprocal_sqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float reciprocal_sqrt_fast(float x) { return reciprocal_sqrt(x); }
inline float fused_multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float maximum(float a, float b) { return __builtin_fmaxf(a, b); }
inline float absolute(float x) { return __builtin_fabsf(x); }

// ---- warps --------------------------------------------------------------------------------------

inline uint32 exchange(uint32 x, int source_lane) {
  LaneOperands lane;
  uint32 result = 0;
  lane.a[0] = x;
  lane.b[0] = static_cast<unsigned>(source_lane);
  lane.r = &result;
  wyvern_machine->collective(Collective::shuffle, lane);
  return result;
}
inline float shuffle(float x, int source_lane) {
  return bits_float(exchange(float_bits(x), source_lane));
}
inline float shuffle_xor(float x, int mask) { return shuffle(x, lane_index() ^ mask); }
inline float shuffle_xor_in_order(float x, int mask) { return shuffle_xor(x, mask); }
inline uint32 shuffle_xor(uint32 x, int mask) { return exchange(x, lane_index() ^ mask); }
inline int shuffle_up(int x, int distance) {
  const int lane = lane_index();
  return static_cast<int>(
      exchange(static_cast<uint32>(x), lane >= distance ? lane - distance : lane));
}
inline uint32 transpose_8x8(uint32 x) {
  LaneOperands lane;
  uint32 result = 0;
  lane.a[0] = x;
  lane.r = &result;
  wyvern_machine->collective(Collective::transpose_8x8, lane);
  return result;
}

inline bool in_shared_memory(const void* pointer) {
  const long offset = static_cast<const unsigned char*>(pointer) - shared_memory();
  return offset >= 0 && offset < wyvern_machine->shared_bytes;
}
/// The instructions take aligned addresses of their own memory only.
template <int N>
void store_words(void* to, const uint32 (&x)[N]) {
  static_assert(N == 2 || N == 4);
  if (reinterpret_cast<unsigned long>(to) % sizeof(x) != 0 || in_shared_memory(to))
    __builtin_trap();
  __builtin_memcpy(to, x, sizeof(x));
}
template <int N>
void store_shared_words(void* to, const uint32 (&x)[N]) {
  static_assert(N == 2 || N == 4);
  if (reinterpret_cast<unsigned long>(to) % sizeof(x) != 0 || !in_shared_memory(to))
    __builtin_trap();
  __builtin_memcpy(to, x, sizeof(x));
}

// Blocks run one after the other: what is waited for has been, or never will be.
inline void fence_device() {}
inline void add_to_counter(int32* counter, int32 x) { *counter += x; }
inline void await_counter(const int32* counter, int32 count) {
  if (*counter != count) __builtin_trap();
}

template <int Bytes>
void copy_async(void* destination, const void* source, bool valid) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16);
  wyvern_machine->copy_async(destination, source, Bytes, valid);
}
inline void copy_async_commit() { wyvern_machine->copy_async_commit(); }
template <int Pending>
void copy_async_wait() {
  wyvern_machine->copy_async_wait(Pending);
}

inline void load_matrix_x4(uint32 (&r)[4], const void* row) {
  LaneOperands lane;
  lane.row = row;
  lane.r = r;
  wyvern_machine->collective(Collective::load_matrix_x4, lane);
}
inline void load_matrix_x4_transposed(uint32 (&r)[4], const void* row) {
  LaneOperands lane;
  lane.row = row;
  lane.r = r;
  wyvern_machine->collective(Collective::load_matrix_x4_transposed, lane);
}

template <class T>
inline constexpr Collective kMma = Collective::mma_bf16;
template <>
inline constexpr Collective kMma<fp16> = Collective::mma_fp16;

template <class T>
void mma_m16n8k16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  LaneOperands lane;
  for (int i = 0; i < 4; ++i) lane.a[i] = a[i];
  lane.b[0] = b0;
  lane.b[1] = b1;
  lane.d = d;
  wyvern_machine->collective(kMma<T>, lane);
}
inline void mma_m16n8k8_tf32(float (&d)[4], const float (&a)[4], float b0, float b1) {
  LaneOperands lane;
  for (int i = 0; i < 4; ++i) lane.a[i] = float_bits(a[i]);
  lane.b[0] = float_bits(b0);
  lane.b[1] = float_bits(b1);
  lane.d = d;
  wyvern_machine->collective(Collective::mma_tf32, lane);
}

// ---- the host's way in --------------------------------------------------------------------------

template <class Kernel>
struct KernelCall;
template <class... Arguments>
struct KernelCall<void(Arguments...)> {
  template <class Argument>
  static Argument pick(void* const* arguments, const Extents& e, unsigned long i) {
    if constexpr (std::is_pointer_v<Argument>)
      return static_cast<Argument>(arguments[i]);
    else if constexpr (std::is_same_v<Argument, Extents>)
      return e;
    else
      return *static_cast<const Argument*>(arguments[i]);
  }
  template <unsigned long... I>
  static void run(void (*kernel)(Arguments...), void* const* arguments, const Extents& e,
                  std::index_sequence<I...>) {
    kernel(pick<Arguments>(arguments, e, I)...);
  }
};
template <class... Arguments>
void call_kernel(void (*kernel)(Arguments...), void* const* arguments, const Extents& e) {
  KernelCall<void(Arguments...)>::run(kernel, arguments, e,
                                      std::make_index_sequence<sizeof...(Arguments)>());
}

}  // namespace wyvern::cuda
