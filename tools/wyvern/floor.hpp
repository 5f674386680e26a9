// The least time a problem can take: bytes that must move, and useful work.
#pragma once

#include <wyvern/device.hpp>
#include <wyvern/problem.hpp>

#include <string>

namespace wyvern::cli {

/// What a pass must do, whatever the plan.
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

/// bytes: every input read once and every output written once (a state updated in place both), and
/// for a backward pass that rebuilds the states those of every chunk written and read once.
/// FLOPs per token and value head, C the chunk size, 64 when the problem names none:
///   forward, the W-free form
///     6 K V              K S, Q S and the update K^T V'
///     + 4 C V            Tinv (V - K S) and P V'
///     + 4 C K / (HV/H)   K K^T and Q K^T, shared by the value heads of a group (by none in kda)
///     + 2 C^2            the triangular inverse
///   backward
///     16 K V             W S, K^T V'; K dS', Q^T dO, W^T dV'; dO S^T, V' dS'^T, dV' S^T
///     + 10 C V           U; P^T dO, dO V'^T, Tinv^T dU, X V'^T
///     + 4 C K / (HV/H)   K K^T, Q K^T
///     + 12 C K           W; dP K, dP^T Q, Tinv^T dW, M K, M^T K
///     + 2 C^2            the inverse
///     less W S, K^T V', U, W and the inverse where the forward pass kept them
///   recurrent
///     6 K V              S^T k, k u^T, S^T q
/// K = V = 128, bf16, HV/H = 1, 2, 4: forward 172, 156 and 147 kFLOP and 1030, 774 and 646 bytes,
/// backward 483 kFLOP and 2828 bytes (HV = H).
Work work_of(const Problem& problem);

/// On an H200 4.25 TB/s (device copy) and 780 TFLOP/s (dense bf16), both measured; on other GPUs
/// what the driver tells of memory and the architecture's dense rate at boost clock; on a CPU
/// memory copy and FMA rates measured now on all threads (about half a second).
Peak device_peak(const Device& device, const Problem& problem);

/// Seconds.
double floor_time(const Work& work, const Peak& peak);

}  // namespace wyvern::cli
