// What the templates of the reverse state scan share: bwd_dhu, bwd_dhu_segment, bwd_dhu_resume.
#pragma once

#include "templates/scan/scan_contract.hpp"

namespace wyvern::reverse_scan {

/// What the sources of all walks are specialized on.
inline const std::vector<AnyConstant> kConstants{
    constant::DTYPE,  constant::H,           constant::HV,          constant::K,        constant::V,
    constant::VARLEN, constant::SCALAR_GATE, constant::VECTOR_GATE, constant::QK_L2NORM};

/// The gate and the scales of queries and keys of one chunk.
inline std::int64_t gate_bytes(const Spec& s, std::int64_t BT) {
  if (s.VECTOR_GATE) return cuda::column_bytes(cuda::round_up(s.K, 16));
  return ((s.SCALAR_GATE ? 1 : 0) + (s.QK_L2NORM ? 2 : 0)) * cuda::column_bytes(BT);
}

inline std::int64_t shared_bytes(const Spec& s) {
  const DType type = s.DTYPE;
  const std::int64_t BT = s.BT;
  return s.num_stages * (3 * cuda::tile_bytes(BT, s.K, type) +
                         2 * cuda::tile_bytes(BT, s.BV, type) + gate_bytes(s, BT));
}

inline const scan::Direction kReverse{shared_bytes,
                                      scratch_bytes<cpu::ReverseScanLayout>,
                                      {{tunable::num_stages, cuda::integers({2, 1, 3})}}};

}  // namespace wyvern::reverse_scan
