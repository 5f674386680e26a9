// What the examples share: the tensors of a launch on the host and on a device, and the comparison
// of what a launch wrote with the float64 oracle.
#pragma once

#include <wyvern/reference.hpp>
#include <wyvern/runtime.hpp>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace examples {

/// A tensor on the host and on a device.
struct Tensor {
  Tensor(const wyvern::Device& on, wyvern::DType type, std::initializer_list<std::int64_t> dims)
      : device(on), view(nullptr, type, dims) {
    host.resize(static_cast<std::size_t>(view.elements()) * wyvern::size_of(type));
    memory = device.allocate(host.size());
  }

  void upload() const { device.copy_in(memory.get(), host.data(), host.size()); }
  void download() { device.copy_out(host.data(), memory.get(), host.size()); }

  wyvern::TensorView at(void* data) const {
    wyvern::TensorView there = view;
    there.data = data;
    return there;
  }

  wyvern::Device device;
  wyvern::TensorView view;  ///< dtype and shape; the data are in `host` and `memory`
  std::vector<char> host;
  std::shared_ptr<void> memory;  ///< on the device
};

/// The tensors of a launch by their names in wyvern::Arguments. A copy shares the device's memory.
class Tensors {
 public:
  explicit Tensors(wyvern::Device device) : device_(std::move(device)) {}

  /// A tensor that a launch writes.
  void output(const std::string& name, wyvern::DType dtype,
              std::initializer_list<std::int64_t> shape) {
    tensors_.insert_or_assign(name, Tensor(device_, dtype, shape));
  }

  /// Uniform random numbers from [low, high), rounded to `dtype`: fp32 or bf16.
  void random(const std::string& name, wyvern::DType dtype,
              std::initializer_list<std::int64_t> shape, float low, float high) {
    output(name, dtype, shape);
    Tensor& tensor = tensors_.at(name);
    std::uniform_real_distribution<float> uniform(low, high);
    const std::size_t size = wyvern::size_of(dtype);
    for (std::size_t at = 0; at < tensor.host.size(); at += size) {
      const float number = uniform(generator_);
      const std::uint16_t rounded = wyvern::float_to_bf16(number);
      std::memcpy(&tensor.host[at],
                  dtype == wyvern::DType::bf16 ? static_cast<const void*>(&rounded) : &number,
                  size);
    }
    tensor.upload();
  }

  void integers(const std::string& name, const std::vector<std::int32_t>& numbers) {
    output(name, wyvern::DType::int32, {static_cast<std::int64_t>(numbers.size())});
    Tensor& tensor = tensors_.at(name);
    std::memcpy(tensor.host.data(), numbers.data(), tensor.host.size());
    tensor.upload();
  }

  void remove(const std::string& name) { tensors_.erase(name); }
  Tensor& operator[](const std::string& name) { return tensors_.at(name); }

  wyvern::Arguments on_device() const {
    wyvern::Arguments arguments;
    for (const auto& [name, tensor] : tensors_)
      arguments.tensor(name) = tensor.at(tensor.memory.get());
    return arguments;
  }

  wyvern::Arguments on_host() {
    wyvern::Arguments arguments;
    for (auto& [name, tensor] : tensors_) arguments.tensor(name) = tensor.at(tensor.host.data());
    return arguments;
  }

  /// Whether all that a launch with these inputs wrote is within its bound of the float64 oracle;
  /// prints each output's error in a line. The host's copies stay as they were before the launch.
  bool match_oracle(const wyvern::Problem& problem) {
    bool good = true;
    std::printf("errors:");
    for (const auto& [name, wanted] : wyvern::reference(problem, on_host())) {
      Tensor written = tensors_.at(name);
      written.download();
      const double error = wyvern::relative_error(written.at(written.host.data()), wanted);
      const double bound = wyvern::error_bound(problem, name);
      std::printf("  %s %.1e (at most %.0e)", name.c_str(), error, bound);
      good &= error <= bound;
    }
    std::printf("\n");
    return good;
  }

 private:
  wyvern::Device device_;
  std::map<std::string, Tensor> tensors_;
  std::mt19937 generator_{1};
};

/// Runs an example on the device that the command line names ("cpu", "cuda:0"), else on the best
/// one. The exit status of the program: 0 when the example returned true.
inline int run(int count, char** arguments,
               const std::function<bool(const wyvern::Device&)>& example) {
  try {
    const wyvern::Device device =
        count > 1 ? wyvern::Device::open(arguments[1]) : wyvern::Device::best();
    std::printf("on %s, %s\n", device.info().name.c_str(), device.info().model.c_str());
    return example(device) ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 3;
  }
}

}  // namespace examples
