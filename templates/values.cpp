#include <wyvern/config.hpp>
#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <array>
#include <bit>
#include <charconv>
#include <cmath>

#include "templates/device/float8.hpp"

namespace wyvern {
namespace {

constexpr std::array kDTypes{DType::fp32,  DType::fp16,    DType::bf16,        DType::int32,
                             DType::int64, DType::boolean, DType::float8_e4m3, DType::float8_e5m2};
constexpr std::array kPrecisions{Precision::tf32, Precision::tf32x3, Precision::ieee};

template <class T>
const T& get(const Values& values, std::string_view name, std::string_view kind) {
  const Value* value = values.find(name);
  if (value == nullptr)
    throw Error(ErrorKind::kBadInput, fmt::format("{} is missing; it must be {}", name, kind));
  if (const T* typed = std::get_if<T>(value)) return *typed;
  throw Error(ErrorKind::kBadInput,
              fmt::format("{} is {}; it must be {}", name, to_string(*value), kind));
}

std::optional<Value> parse_value(std::string_view text) {
  if (text == "true") return Value{true};
  if (text == "false") return Value{false};
  if (const auto dtype = parse_dtype(text)) return Value{*dtype};
  if (const auto precision = parse_precision(text)) return Value{*precision};
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size() || text.empty()) return {};
  return Value{number};
}

}  // namespace

std::string_view to_string(DType type) noexcept {
  switch (type) {
    case DType::fp32: return "fp32";
    case DType::fp16: return "fp16";
    case DType::bf16: return "bf16";
    case DType::int32: return "int32";
    case DType::int64: return "int64";
    case DType::boolean: return "boolean";
    case DType::float8_e4m3: return "float8_e4m3";
    case DType::float8_e5m2: return "float8_e5m2";
  }
  return "?";
}

std::optional<DType> parse_dtype(std::string_view text) noexcept {
  for (const DType type : kDTypes)
    if (to_string(type) == text) return type;
  return {};
}

std::string_view to_string(Precision precision) noexcept {
  switch (precision) {
    case Precision::tf32: return "tf32";
    case Precision::tf32x3: return "tf32x3";
    case Precision::ieee: return "ieee";
  }
  return "?";
}

std::optional<Precision> parse_precision(std::string_view text) noexcept {
  for (const Precision precision : kPrecisions)
    if (to_string(precision) == text) return precision;
  return {};
}

std::uint16_t float_to_bf16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

float bf16_to_float(std::uint16_t bits) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

std::uint16_t float_to_fp16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | 0x7E00U);
  if (magnitude >= 65520.0F) return static_cast<std::uint16_t>(sign | 0x7C00U);
  if (magnitude < 0x1p-14F) {
    // Adding 0.5 aligns a subnormal's last place (2^-24) with float's, so the hardware rounds it.
    const float aligned = magnitude + 0.5F;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(aligned) - 0x3F000000U));
  }
  const std::uint32_t rounded = (bits & 0x7FFFFFFFU) + 0xFFFU + ((bits >> 13) & 1U) - (112U << 23);
  return static_cast<std::uint16_t>(sign | (rounded >> 13));
}

float fp16_to_float(std::uint16_t bits) noexcept {
  const std::uint32_t sign = (bits & 0x8000U) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1FU;
  const std::uint32_t mantissa = bits & 0x3FFU;
  if (exponent == 0) {
    const float value = static_cast<float>(mantissa) * 0x1p-24F;
    return sign != 0 ? -value : value;
  }
  const std::uint32_t wide = exponent == 31 ? 255U : exponent + 112U;
  return std::bit_cast<float>(sign | (wide << 23) | (mantissa << 13));
}

std::uint8_t float_to_e4m3(float value) noexcept {
  return static_cast<std::uint8_t>(float8_code<DType::float8_e4m3, std::uint32_t>(value));
}
float e4m3_to_float(std::uint8_t bits) noexcept {
  return float8_value<DType::float8_e4m3, float>(std::uint32_t{bits});
}
std::uint8_t float_to_e5m2(float value) noexcept {
  return static_cast<std::uint8_t>(float8_code<DType::float8_e5m2, std::uint32_t>(value));
}
float e5m2_to_float(std::uint8_t bits) noexcept {
  return float8_value<DType::float8_e5m2, float>(std::uint32_t{bits});
}

std::string to_string(const Value& value) {
  struct Visitor {
    std::string operator()(bool v) const { return v ? "true" : "false"; }
    std::string operator()(std::int64_t v) const { return std::to_string(v); }
    std::string operator()(DType v) const { return std::string(to_string(v)); }
    std::string operator()(Precision v) const { return std::string(to_string(v)); }
  };
  return std::visit(Visitor{}, value);
}

const Value* Values::find(std::string_view name) const {
  const auto it = items_.find(name);
  return it == items_.end() ? nullptr : &it->second;
}

std::int64_t Values::integer(std::string_view name) const {
  return get<std::int64_t>(*this, name, "an integer");
}
bool Values::flag(std::string_view name) const { return get<bool>(*this, name, "true or false"); }
DType Values::dtype(std::string_view name) const {
  return get<DType>(*this, name,
                    "one of fp32, fp16, bf16, int32, int64, boolean, float8_e4m3, float8_e5m2");
}
Precision Values::precision(std::string_view name) const {
  return get<Precision>(*this, name, "one of tf32, tf32x3, ieee");
}

Values Values::merged(const Values& other) const {
  Values result = *this;
  for (const auto& [name, value] : other.items_) result.set(name, value);
  return result;
}

std::string Values::to_string() const {
  std::string text;
  for (const auto& [name, value] : items_) {
    if (!text.empty()) text += ',';
    text += name + '=' + wyvern::to_string(value);
  }
  return text;
}

Values Values::parse(std::string_view text) {
  Values result;
  while (!text.empty()) {
    const std::string_view piece = text.substr(0, text.find(','));
    text.remove_prefix(std::min(piece.size() + 1, text.size()));
    const std::size_t equals = piece.find('=');
    const auto value = equals == std::string_view::npos || equals == 0
                           ? std::nullopt
                           : parse_value(piece.substr(equals + 1));
    if (!value)
      throw Error(ErrorKind::kBadInput,
                  fmt::format("'{}' is not NAME=VALUE; a value is an integer, true, false, a "
                              "dtype or a precision",
                              piece));
    result.set(std::string(piece.substr(0, equals)), *value);
  }
  return result;
}

}  // namespace wyvern
