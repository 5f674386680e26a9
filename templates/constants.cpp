#include "templates/constants.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace wyvern {
namespace {

#define WYVERN_ITEM(name, meaning) AnyConstant{constant::name},
constexpr std::array kConstants{WYVERN_INTEGER_CONSTANTS(WYVERN_ITEM) WYVERN_TYPE_CONSTANTS(
    WYVERN_ITEM) WYVERN_FLAG_CONSTANTS(WYVERN_ITEM)};
#undef WYVERN_ITEM
#define WYVERN_ITEM(name, meaning) tunable::name,
constexpr std::array kTunables{WYVERN_INTEGER_TUNABLES(WYVERN_ITEM) tunable::precision};
#undef WYVERN_ITEM

/// Puts `value` into the member; throws for another kind.
template <class T>
void set(Constants& constants, const Constant<T>& constant, const Value& value) {
  const T* typed = std::get_if<T>(&value);
  if (typed == nullptr)
    throw Error(ErrorKind::kBadInput,
                fmt::format("constant {} cannot be {}", constant.name, to_string(value)));
  constants.*constant.member = *typed;
}

}  // namespace

Constants Constants::with(const Values& values) const {
  Constants result = *this;
  for (const auto& [name, value] : values.items()) {
    const auto found =
        std::find_if(kConstants.begin(), kConstants.end(),
                     [&name = name](const AnyConstant& c) { return name_of(c) == name; });
    if (found == kConstants.end())
      throw Error(
          ErrorKind::kBadInput,
          fmt::format("'{}' is not a constant of kernels; templates/constants.hpp lists them",
                      name));
    std::visit([&, &value = value](const auto& c) { set(result, c, value); }, *found);
  }
  return result;
}

Values Constants::values() const {
  Values result;
  for (const AnyConstant& c : kConstants) result.set(std::string(name_of(c)), value_of(c, *this));
  return result;
}

void Spec::set(const Config& config) {
  for (const auto& [name, value] : config.items())
    for (const TunableName& known : kTunables) {
      if (known.name != name) continue;
      if (known.member == nullptr) {
        if (const auto* chosen = std::get_if<Precision>(&value)) precision = *chosen;
      } else if (const auto* number = std::get_if<std::int64_t>(&value)) {
        this->*known.member = *number;
      }
      break;
    }
}

std::span<const AnyConstant> all_constants() { return kConstants; }

std::string_view name_of(const AnyConstant& constant) {
  return std::visit([](const auto& c) { return c.name; }, constant);
}

Value value_of(const AnyConstant& constant, const Constants& constants) {
  return std::visit([&](const auto& c) { return Value{constants.*c.member}; }, constant);
}

std::span<const TunableName> all_tunables() { return kTunables; }

Value value_of(const TunableName& tunable, const Spec& spec) {
  if (tunable.member == nullptr) return Value{spec.precision};
  return Value{spec.*tunable.member};
}

}  // namespace wyvern
