#include "tests/emulator/warpgroup.hpp"

#include <wyvern/dtype.hpp>

#include <fmt/format.h>

#include <cstring>

#include "tests/emulator/warp.hpp"

namespace wyvern::emulator {
namespace {

constexpr int kDepth = 16;

float number(std::uint16_t bits, bool fp16) {
  return fp16 ? fp16_to_float(bits) : bf16_number(bits);
}

/// The offset in shared memory of element (row, k) of an operand: the canonical layouts with
/// 128-byte swizzle. Along k, eight rows of 128 bytes follow one another and the next eight rows
/// are `stride` away; along m or n, 64 elements make 128 bytes, eight k follow one another, the
/// next eight are `stride` away and the next 64 elements `leading`.
std::int64_t offset_of(std::uint64_t descriptor, bool mn_major, std::int64_t row, std::int64_t k) {
  const auto field = [descriptor](int shift) {
    return static_cast<std::int64_t>(descriptor >> shift & 0x3FFFU) * 16;
  };
  const std::int64_t start = field(0);
  const std::int64_t leading = field(16);
  const std::int64_t stride = field(32);
  const std::int64_t linear =
      mn_major ? start + row / 64 * leading + row % 64 * 2 + k / 8 * stride + k % 8 * 128
               : start + row / 8 * stride + row % 8 * 128 + k * 2;
  return linear ^ (linear / 128 % 8 * 16);
}

}  // namespace

WarpProducts::WarpProducts(int warp, std::span<const unsigned char> shared, ReadOperands reads,
                           const ProxyOrder* proxies)
    : warp_(warp), shared_(shared), reads_(reads), proxies_(proxies) {}

std::string WarpProducts::execute(Collective operation, const Lanes& lanes) {
  switch (operation) {
    case Collective::wgmma_fence: fenced_ = true; return {};
    case Collective::wgmma: return start(lanes);
    case Collective::wgmma_commit:
      groups_.push_back(std::move(open_));
      open_.clear();
      return {};
    case Collective::wgmma_wait: return wait(lanes[0]->pending);
    case Collective::set_registers: registers_.push_back(lanes[0]->pending); return {};
    default: return "not an instruction of a warpgroup";
  }
}

std::string WarpProducts::start(const Lanes& lanes) {
  const auto signature = [](const WarpgroupProduct& p) {
    return Signature{p.n,          p.fp16,       p.a != nullptr, p.a_mn_major,
                     p.b_mn_major, p.accumulate, p.a_descriptor, p.b_descriptor};
  };
  Product product{.signature = signature(*lanes[0]->product), .a = {}, .sum = {}};
  for (const LaneOperands* lane : lanes)
    if (signature(*lane->product) != product.signature)
      return "lanes of a warp start different products";
  if (!fenced_) return "wgmma without a wgmma.fence since its registers were last free";
  for (std::size_t lane = 0; lane < 32 && product.signature.a_in_registers; ++lane)
    std::memcpy(product.a[lane].data(), lanes[lane]->product->a, sizeof(product.a[lane]));
  for (const std::uint64_t descriptor :
       {product.signature.a_in_registers ? product.signature.b_descriptor
                                         : product.signature.a_descriptor,
        product.signature.b_descriptor})
    if (descriptor >> 62 != 1 || (descriptor >> 49 & 7U) != 0)
      return "a wgmma descriptor without 128-byte swizzle, or with a base offset: not emulated";

  std::string problem;
  product.sum = sum_of(lanes, product.signature.n, problem);
  if (!problem.empty()) return problem;
  ++product.sum->products;
  if (reads_ == ReadOperands::at_once) problem = carry_out(product);
  started_.push_back(product.signature);
  open_.push_back(std::move(product));
  return problem;
}

std::shared_ptr<WarpProducts::Sum> WarpProducts::sum_of(const Lanes& lanes, int n,
                                                        std::string& problem) {
  const auto count = static_cast<std::size_t>(n / 2);
  for (const auto& sum : sums_)
    if (sum->registers[0] == lanes[0]->product->d) {
      if (sum->values.size() != 32 * count)
        problem = "products of different shapes share an accumulator";
      return sum;
    }
  auto sum = std::make_shared<Sum>();
  sum->values.resize(32 * count);
  for (std::size_t lane = 0; lane < 32; ++lane) {
    float* const registers = lanes[lane]->product->d;
    sum->registers[lane] = registers;
    std::memcpy(&sum->values[lane * count], registers, count * sizeof(float));
    std::memset(registers, 0xFF, count * sizeof(float));
  }
  sums_.push_back(sum);
  return sum;
}

std::string WarpProducts::wait(int pending) {
  while (static_cast<int>(groups_.size()) > pending) {
    if (std::string problem = finish(groups_.front()); !problem.empty()) return problem;
    groups_.pop_front();
    fenced_ = false;
  }
  return {};
}

std::string WarpProducts::finish(const std::vector<Product>& group) {
  for (const Product& product : group) {
    if (reads_ == ReadOperands::at_the_wait)
      if (std::string problem = carry_out(product); !problem.empty()) return problem;
    Sum& sum = *product.sum;
    if (--sum.products > 0) continue;
    const std::size_t count = sum.values.size() / 32;
    for (std::size_t lane = 0; lane < 32; ++lane)
      std::memcpy(sum.registers[lane], &sum.values[lane * count], count * sizeof(float));
    std::erase(sums_, product.sum);
  }
  return {};
}

std::string WarpProducts::read(std::uint64_t descriptor, bool mn_major, bool fp16, int first_row,
                               int rows, float* values) const {
  // Eight elements along m or n, or along k, lie together, whatever the swizzle.
  constexpr int kPiece = 8;
  std::array<std::uint16_t, kPiece> bits;
  for (int k = 0; k < kDepth; k += mn_major ? 1 : kPiece)
    for (int row = 0; row < rows; row += mn_major ? kPiece : 1) {
      const std::int64_t offset = offset_of(descriptor, mn_major, first_row + row, k);
      if (offset + static_cast<std::int64_t>(sizeof(bits)) >
          static_cast<std::int64_t>(shared_.size()))
        return fmt::format("a wgmma descriptor leads to {}, outside shared memory", offset);
      // At the wait it is too late to tell what was so when the product began.
      if (reads_ == ReadOperands::at_once && proxies_->written(offset))
        return fmt::format(
            "wgmma reads shared memory at {} that was written without a fence.proxy.async since",
            offset);
      std::memcpy(bits.data(), shared_.data() + offset, sizeof(bits));
      float* to = values + k * rows + row;
      for (const std::uint16_t element : bits) {
        *to = number(element, fp16);
        to += mn_major ? 1 : rows;
      }
    }
  return {};
}

std::string WarpProducts::carry_out(const Product& product) const {
  const Signature& s = product.signature;
  float a[kDepth][16];
  const auto columns = static_cast<std::size_t>(s.n);
  std::vector<float> b(kDepth * columns);  // [k][n]
  std::string problem;
  if (s.a_in_registers)
    for (int k = 0; k < kDepth; ++k)
      for (int row = 0; row < 16; ++row) {
        const unsigned word = product.a.at(row % 8 * 4 + k % 8 / 2).at(row / 8 + k / 8 * 2);
        a[k][row] = number(static_cast<std::uint16_t>(word >> (k % 2 * 16)), s.fp16);
      }
  else
    problem = read(s.a_descriptor, s.a_mn_major, s.fp16, warp_ * 16, 16, &a[0][0]);
  if (problem.empty()) problem = read(s.b_descriptor, s.b_mn_major, s.fp16, 0, s.n, b.data());
  if (!problem.empty()) return problem;
  // The inner loop goes over columns, so that the compiler carries out several at once.
  std::vector<float> sum(16 * columns);  // [row][n]
  for (std::size_t row = 0; row < 16; ++row)
    for (std::size_t k = 0; k < kDepth; ++k)
      for (std::size_t n = 0; n < columns; ++n)
        sum[row * columns + n] += a[k][row] * b[k * columns + n];
  float* d = product.sum->values.data();
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < s.n / 2; ++i, ++d) {
      const auto row = static_cast<std::size_t>(lane / 4 + i / 2 % 2 * 8);
      const auto n = static_cast<std::size_t>(i / 4 * 8 + lane % 4 * 2 + i % 2);
      *d = s.accumulate ? *d + sum[row * columns + n] : sum[row * columns + n];
    }
  return {};
}

}  // namespace wyvern::emulator
