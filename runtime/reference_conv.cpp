#include "runtime/reference_conv.hpp"

#include <cstring>
#include <utility>

#include "runtime/reference_inputs.hpp"

namespace wyvern {
namespace {

void store_rounded(std::vector<unsigned char>& bytes, DType dtype, std::int64_t at, double value) {
  const auto number = static_cast<float>(value);
  const auto put = [&](const auto& stored) {
    std::memcpy(bytes.data() + static_cast<std::size_t>(at) * sizeof stored, &stored,
                sizeof stored);
  };
  if (dtype == DType::bf16)
    put(float_to_bf16(number));
  else if (dtype == DType::fp16)
    put(float_to_fp16(number));
  else
    put(number);
}

}  // namespace

ConvolvedRows::ConvolvedRows(const Problem& problem, const Arguments& host)
    : p_(problem), host_(host), arguments_(host), offsets_(sequence_offsets(problem, host)) {
  const std::int64_t keys = p_.H * p_.K;
  if (p_.output_conv_state)
    windows_.resize(static_cast<std::size_t>(p_.N * conv_channels(p_) * (*p_.short_conv - 1)));
  convolve(&Arguments::q, 0, keys);
  convolve(&Arguments::k, keys, p_.num_householder * keys);
  convolve(&Arguments::v, keys + p_.num_householder * keys, p_.num_householder * p_.HV * p_.V);
}

void ConvolvedRows::finish(Reference& result) && {
  if (p_.output_conv_state) result["final_conv_state"] = std::move(windows_);
}

void ConvolvedRows::convolve(TensorView Arguments::* rows, std::int64_t channel,
                             std::int64_t width) {
  TensorView& view = arguments_.*rows;
  const TensorView given = host_.*rows;
  const std::int64_t tokens = p_.B * p_.T, all = conv_channels(p_);
  const std::int64_t before = *p_.short_conv - 1;
  std::vector<unsigned char>& bytes =
      bytes_.emplace_back(static_cast<std::size_t>(tokens * width) * size_of(given.dtype));
  for (std::int64_t n = 0; n < p_.N; ++n) {
    const std::int64_t first = offsets_[static_cast<std::size_t>(n)];
    const std::int64_t length = offsets_[static_cast<std::size_t>(n) + 1] - first;
    for (std::int64_t c = channel; c < channel + width; ++c) {
      // Row t of the sequence, or with t < 0 of its initial window.
      const auto row = [&](std::int64_t t) {
        if (t >= 0) return load(given, (first + t) * width + c - channel);
        return p_.initial_conv_state
                   ? load(host_.initial_conv_state, (n * all + c + 1) * before + t)
                   : 0.0;
      };
      for (std::int64_t t = 0; t < length; ++t) {
        double sum = p_.has_conv_bias ? load(host_.conv_bias, c) : 0;
        for (std::int64_t i = 0; i <= before; ++i)
          sum += load(host_.conv_weight, c * (before + 1) + i) * row(t - before + i);
        if (p_.conv_activation != Activation::none) sum *= sigmoid(sum);
        store_rounded(bytes, given.dtype, (first + t) * width + c - channel, sum);
      }
      for (std::int64_t j = 0; p_.output_conv_state && j < before; ++j)
        windows_[static_cast<std::size_t>((n * all + c) * before + j)] = row(length - before + j);
    }
  }
  view.data = bytes.data();
}

}  // namespace wyvern
