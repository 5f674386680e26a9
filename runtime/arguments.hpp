// A table of the tensors of Arguments.
#pragma once

#include <wyvern/runtime.hpp>

#include <array>
#include <cstddef>
#include <string_view>

namespace wyvern {

/// A tensor of Arguments and its name in SPECIFICATION.md.
struct ArgumentTensor {
  std::string_view name;
  TensorView Arguments::* member;
};

/// Every tensor of Arguments, in binding order, the order of tensor_specs().
inline constexpr auto kArguments = std::to_array<ArgumentTensor>({
    {"q", &Arguments::q},
    {"k", &Arguments::k},
    {"v", &Arguments::v},
    {"beta", &Arguments::beta},
    {"erase", &Arguments::erase},
    {"write", &Arguments::write},
    {"g", &Arguments::g},
    {"initial_state", &Arguments::initial_state},
    {"cu_seqlens", &Arguments::cu_seqlens},
    {"A_log", &Arguments::A_log},
    {"dt_bias", &Arguments::dt_bias},
    {"norm_weight", &Arguments::norm_weight},
    {"norm_gate", &Arguments::norm_gate},
    {"do", &Arguments::do_},
    {"dht", &Arguments::dht},
    {"state_index", &Arguments::state_index},
    {"output_state_index", &Arguments::output_state_index},
    {"has_initial_state", &Arguments::has_initial_state},
    {"state_scale", &Arguments::state_scale},
    {"num_accepted", &Arguments::num_accepted},
    {"intermediate_index", &Arguments::intermediate_index},
    {"parent", &Arguments::parent},
    {"checkpoint_offsets", &Arguments::checkpoint_offsets},
    {"Tinv", &Arguments::Tinv},
    {"Aqk", &Arguments::Aqk},
    {"w", &Arguments::w},
    {"qg", &Arguments::qg},
    {"kg", &Arguments::kg},
    {"h", &Arguments::h},
    {"v_new", &Arguments::v_new},
    {"checkpoints", &Arguments::checkpoints},
    {"state", &Arguments::state},
    {"o", &Arguments::o},
    {"final_state", &Arguments::final_state},
    {"intermediate_states", &Arguments::intermediate_states},
    {"dq", &Arguments::dq},
    {"dk", &Arguments::dk},
    {"dv", &Arguments::dv},
    {"dbeta", &Arguments::dbeta},
    {"derase", &Arguments::derase},
    {"dwrite", &Arguments::dwrite},
    {"dg", &Arguments::dg},
    {"dA_log", &Arguments::dA_log},
    {"ddt_bias", &Arguments::ddt_bias},
    {"dinitial_state", &Arguments::dinitial_state},
});

inline constexpr std::size_t kOperatorTensors = kArguments.size();

// The table has every tensor of Arguments.
static_assert(sizeof(Arguments) == kOperatorTensors * sizeof(TensorView) +
                                       sizeof(decltype(Arguments::cu_seqlens_host)) +
                                       sizeof(ShownName));

/// A tensor's index in the table; kOperatorTensors for an unknown name.
constexpr std::size_t argument_index(std::string_view name) noexcept {
  std::size_t i = 0;
  while (i < kOperatorTensors && kArguments[i].name != name) ++i;
  return i;
}

}  // namespace wyvern
