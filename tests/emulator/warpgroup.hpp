// wgmma: the products that a warpgroup starts, and that end when it waits for them.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tests/emulator/machine.hpp"
#include "tests/emulator/proxies.hpp"

namespace wyvern::emulator {

/// When operands in shared memory are read. Hardware may read them at any time between.
enum class ReadOperands : std::uint8_t { at_the_wait, at_once };

/// The products of one warp's 16 rows. Accumulators are NaNs from the instruction to the wait. What
/// returns text returns what is wrong, or nothing.
class WarpProducts {
 public:
  using Lanes = std::array<LaneOperands*, 32>;

  /// `warp` is its place in the warpgroup; `proxies`, of its block, outlives this.
  WarpProducts(int warp, std::span<const unsigned char> shared, ReadOperands reads,
               const ProxyOrder* proxies);

  std::string execute(Collective operation, const Lanes& lanes);
  /// Whether products are under way.
  bool busy() const { return !open_.empty() || !groups_.empty(); }

  /// What a product is besides registers: equal in all warps of a warpgroup.
  struct Signature {
    int n;
    bool fp16, a_in_registers, a_mn_major, b_mn_major, accumulate;
    std::uint64_t a_descriptor, b_descriptor;
    bool operator==(const Signature&) const = default;
  };
  const std::vector<Signature>& started() const { return started_; }
  /// The numbers of registers that the warp has asked for.
  const std::vector<int>& registers() const { return registers_; }

 private:
  struct Sum {
    std::array<float*, 32> registers{};
    std::vector<float> values;  ///< [32][n / 2]
    int products = 0;           ///< under way
  };
  struct Product {
    Signature signature;
    std::array<std::array<unsigned, 4>, 32> a{};
    std::shared_ptr<Sum> sum;
  };

  std::string start(const Lanes& lanes);
  std::string wait(int pending);
  std::string finish(const std::vector<Product>& group);
  std::string carry_out(const Product& product) const;
  std::shared_ptr<Sum> sum_of(const Lanes& lanes, int n, std::string& problem);
  /// `rows` rows of an operand in shared memory, to values[k][row].
  std::string read(std::uint64_t descriptor, bool mn_major, bool fp16, int first_row, int rows,
                   float* values) const;

  int warp_;
  std::span<const unsigned char> shared_;
  ReadOperands reads_;
  const ProxyOrder* proxies_;
  bool fenced_ = false;
  std::vector<Product> open_;  ///< not committed yet
  std::deque<std::vector<Product>> groups_;
  std::vector<std::shared_ptr<Sum>> sums_;  ///< of products under way
  std::vector<Signature> started_;
  std::vector<int> registers_;
};

}  // namespace wyvern::emulator
