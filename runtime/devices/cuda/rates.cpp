#include "runtime/devices/cuda/rates.hpp"

#include <array>
#include <string_view>
#include <utility>

namespace wyvern::cuda {
namespace {

/// Dense bf16 operations a clock of one multiprocessor.
double operations_per_clock(std::string_view arch) {
  constexpr std::array<std::pair<std::string_view, double>, 5> kRates{
      {{"sm_100", 8192}, {"sm_103", 8192}, {"sm_90", 4096}, {"sm_80", 2048}, {"", 1024}}};
  for (const auto& [prefix, rate] : kRates)
    if (arch.starts_with(prefix)) return rate;
  return 1024;
}

}  // namespace

Rates rates(const DeviceInfo& info) {
  const bool h200 = info.model.find("H200") != std::string::npos;
  const double clock_hz = info.clock_ghz * 1e9;
  return {
      .bytes_per_s = h200 ? 4.25e12 : info.peak_bytes_per_s,
      .matrix_flops_per_s = h200 ? 780e12 : operations_per_clock(info.arch) * info.units * clock_hz,
      .scalar_flops_per_s = 256.0 * info.units * clock_hz,  // 128 FMA units a multiprocessor
      .cached = {},
      .basis = h200 ? "measured on an H200" : "the driver's figures and the architecture's rates"};
}

}  // namespace wyvern::cuda
