// The table of the tensors of Arguments: every list of tensors by name follows from it.
#pragma once

#include <wyvern/runtime.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace wyvern {

/// How PyTorch's operators (runtime/python/extension) pass a tensor. wyvern::forward takes the
/// inputs, wyvern::backward output gradients too, wyvern::update what is beside them, updated or an
/// output.
enum class Passing : std::uint8_t {
  required,         ///< an input that is always there but for problems with `summary`
  input,            ///< an optional input; its gradient, where there is one, is "d" + name
  output_gradient,  ///< an input of the backward pass alone
  beside,           ///< an input of an update alone
  updated,          ///< of an update, which writes it
  kept,             ///< for the backward pass: an output forwards, an input backwards
  output,           ///< an output, and of an update a tensor of the caller that it writes
  gradient,         ///< an output of the backward pass
  summary,          ///< the output of wyvern::summary and wyvern::backward_summary
  segments,         ///< beside it an output of wyvern::shared_summary, an input of wyvern::resume
};

/// What dtypes a tensor may have.
enum class Elements : std::uint8_t { numbers, integers, booleans };

/// A tensor of Arguments.
struct ArgumentTensor {
  std::string_view name;  ///< in SPECIFICATION.md; a literal
  TensorView Arguments::* member;
  Passing passing;
  /// Its place in the schemas of PyTorch's operators, among inputs or among what an update takes
  /// beside them. Places are published: a new tensor has the next one.
  int place = -1;
  Elements elements = Elements::numbers;
  std::string_view python = name;  ///< the parameter of wyvern.ops; a literal
};

/// Every tensor of Arguments, in binding order, the order of tensor_specs().
inline constexpr auto kArguments = [] {
  using enum Passing;
  using A = Arguments;
  constexpr Elements integers = Elements::integers;
  return std::to_array<ArgumentTensor>({
      {"q", &A::q, required, 0},
      {"k", &A::k, required, 1},
      {"v", &A::v, required, 2},
      {"beta", &A::beta, input, 4},
      {"erase", &A::erase, input, 5, Elements::numbers, "b"},
      {"write", &A::write, input, 6, Elements::numbers, "w"},
      {"g", &A::g, input, 3},
      {"initial_state", &A::initial_state, input, 7},
      {"cu_seqlens", &A::cu_seqlens, input, 8, integers},
      {"A_log", &A::A_log, input, 9},
      {"dt_bias", &A::dt_bias, input, 10},
      {"norm_weight", &A::norm_weight, input, 11},
      {"norm_gate", &A::norm_gate, input, 12},
      {"conv_weight", &A::conv_weight, input, 13},
      {"conv_bias", &A::conv_bias, input, 14},
      {"initial_conv_state", &A::initial_conv_state, input, 15},
      {"do", &A::do_, output_gradient},
      {"dht", &A::dht, output_gradient},
      {"dfinal_conv_state", &A::dfinal_conv_state, output_gradient},
      {"state_index", &A::state_index, beside, 2, integers},
      {"output_state_index", &A::output_state_index, beside, 3, integers},
      {"has_initial_state", &A::has_initial_state, beside, 4, Elements::booleans},
      {"state_scale", &A::state_scale, beside, 1},
      {"num_accepted", &A::num_accepted, beside, 5, integers},
      {"intermediate_index", &A::intermediate_index, beside, 6, integers},
      {"parent", &A::parent, beside, 7, integers},
      {"checkpoint_offsets", &A::checkpoint_offsets, beside, 8, integers},
      {"Tinv", &A::Tinv, kept},
      {"Aqk", &A::Aqk, kept},
      {"w", &A::w, kept},
      {"qg", &A::qg, kept},
      {"kg", &A::kg, kept},
      {"h", &A::h, kept},
      {"v_new", &A::v_new, kept},
      {"o_raw", &A::o_raw, kept},
      {"checkpoints", &A::checkpoints, updated, 9},
      {"state", &A::state, updated, 0},
      {"o", &A::o, output, 11, Elements::numbers, "out"},
      {"final_state", &A::final_state, output, 12},
      {"intermediate_states", &A::intermediate_states, output, 10},
      {"final_conv_state", &A::final_conv_state, output, 13},
      {"o_scale", &A::o_scale, output, 16},
      {"conv_state", &A::conv_state, updated, 14},
      {"intermediate_conv_states", &A::intermediate_conv_states, updated, 15},
      {"dq", &A::dq, gradient},
      {"dk", &A::dk, gradient},
      {"dv", &A::dv, gradient},
      {"dbeta", &A::dbeta, gradient},
      {"derase", &A::derase, gradient},
      {"dwrite", &A::dwrite, gradient},
      {"dg", &A::dg, gradient},
      {"dA_log", &A::dA_log, gradient},
      {"ddt_bias", &A::ddt_bias, gradient},
      {"dnorm_weight", &A::dnorm_weight, gradient},
      {"dnorm_gate", &A::dnorm_gate, gradient},
      {"dinitial_state", &A::dinitial_state, gradient},
      {"dconv_weight", &A::dconv_weight, gradient},
      {"dconv_bias", &A::dconv_bias, gradient},
      {"dinitial_conv_state", &A::dinitial_conv_state, gradient},
      {"summary", &A::summary, summary},
      {"dsummary", &A::dsummary, summary},
      {"segment_M", &A::segment_M, segments},
      {"segment_R", &A::segment_R, segments},
  });
}();

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
