// Shared by the templates of the reverse state scan: bwd_dhu, bwd_dhu_segment, bwd_dhu_resume.
#pragma once

#include "templates/scan/scan_contract.hpp"

namespace wyvern::reverse_scan {

/// Constants of the sources of all reverse scans.
inline const std::vector<AnyConstant>& kConstants = *new std::vector<AnyConstant>{
    constant::DTYPE,       constant::K,           constant::V,         constant::VARLEN,
    constant::SCALAR_GATE, constant::VECTOR_GATE, constant::QK_L2NORM, constant::STATE_UNIT};

inline std::int64_t shared_bytes(const Spec& s) { return cuda::ReverseScanLayout(s).bytes; }

inline const scan::Direction& kReverse =
    *new scan::Direction{shared_bytes,
                         scratch_bytes<cpu::ReverseScanLayout>,
                         {{tunable::num_stages, cuda::integers({2, 1, 3})}}};

}  // namespace wyvern::reverse_scan
