// Shared by the three kernels of kda's backward pass on Hopper, which a plan uses together or not
// at all.
#pragma once

#include "templates/cuda_contract.hpp"

namespace wyvern::kda_pass {

constexpr int kRows = 64;  ///< of a chunk

/// Empty for problems that all three support, else the reason.
inline std::string unsupported(const Spec& s) {
  if (s.BT != kRows)
    return fmt::format("BT={} is not the {} rows of a warpgroup's product", s.BT, kRows);
  if (s.DTYPE != DType::bf16)
    return "DTYPE must be bf16: its operands need bf16's range, which fp16 lacks, and wgmma has no "
           "fp32 products";
  if (s.H != s.HV)
    return fmt::format("H={} must be HV={}: no gradients are summed over value heads", s.H, s.HV);
  if (s.K != 64 && s.K != 128) return fmt::format("K={} must be 64 or 128", s.K);
  if (s.V != 64 && s.V != 128) return fmt::format("V={} must be 64 or 128", s.V);
  if (s.NEG_EIGVAL) return "allow_neg_eigval needs more digits than 16-bit products keep";
  return {};
}

}  // namespace wyvern::kda_pass
