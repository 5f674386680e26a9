// The least time a problem can take: bytes that must move, and useful work.
#pragma once

#include <wyvern/device.hpp>
#include <wyvern/problem.hpp>

#include <string>

namespace wyvern::cli {

/// What the forward pass must do, whatever the plan.
struct Work {
  double bytes = 0;
  double flops = 0;
};

/// What a device can do, and where the figures are from.
struct Peak {
  double bytes_per_s = 0;  ///< device memory, counting reads and writes
  double flops_per_s = 0;  ///< matrix products of the problem's dtype and precision floor
  std::string basis;
};

/// bytes: q, k [B,T,H,K] and v, beta, g [B,T,HV,...] and the initial state read once, o and the final
/// state written once. FLOPs per token and value head, C = 64, the W-free form:
///   6 K V              S~ products: K S, Q S and the update K^T V'
///   + 4 C V            Tinv (V - K S) and P V'
///   + 4 C K / (HV/H)   K K^T and Q K^T, shared by the value heads of a group
///   + 2 C^2            the triangular inverse
/// K = V = 128 in 16 bits with HV/H = 1, 2, 4: 172, 156 and 147 kFLOP; 1032, 776 and 648 bytes when
/// beta is fp32.
Work forward_work(const Problem& problem);

/// On an H200 4.25 TB/s (device copy) and 780 TFLOP/s (dense bf16), both measured; on other GPUs what
/// the driver tells of memory and the architecture's dense rate at boost clock; on a CPU memory copy
/// and FMA rates measured now on all threads (about half a second).
Peak device_peak(const Device& device, const Problem& problem);

/// Seconds.
double floor_time(const Work& work, const Peak& peak);

}  // namespace wyvern::cli
