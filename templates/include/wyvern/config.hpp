// Named compile-time values: a template's tunables (a Config) and a problem's constants.
#pragma once

#include <wyvern/dtype.hpp>
#include <wyvern/export.hpp>

#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace wyvern WYVERN_API {

using Value = std::variant<bool, std::int64_t, DType, Precision>;

/// "true", "64", "bf16", "tf32x3".
std::string to_string(const Value& value);

/// An ordered set of name -> value pairs with one canonical spelling, "BK=64,BT=64,num_warps=4".
/// A value type: copies are independent; const use from several threads is safe.
class Values {
 public:
  using Map = std::map<std::string, Value, std::less<>>;

  Values() = default;
  Values(std::initializer_list<Map::value_type> items) : items_(items) {}

  [[nodiscard]] bool contains(std::string_view name) const {
    return items_.find(name) != items_.end();
  }
  [[nodiscard]] const Value* find(std::string_view name) const;
  void set(std::string name, Value value) { items_.insert_or_assign(std::move(name), value); }

  /// The value under `name`; throws Error(kBadInput) naming it when it is absent or of another
  /// kind.
  std::int64_t integer(std::string_view name) const;
  bool flag(std::string_view name) const;
  DType dtype(std::string_view name) const;
  Precision precision(std::string_view name) const;

  /// These values, with those of `other` in their place where both have the name.
  [[nodiscard]] Values merged(const Values& other) const;

  std::string to_string() const;
  /// Parses "BT=64,precision=tf32x3,FLAG=true" (empty text gives no values); throws
  /// Error(kBadInput) that names the piece that is not NAME=VALUE.
  static Values parse(std::string_view text);

  const Map& items() const noexcept { return items_; }
  [[nodiscard]] bool empty() const noexcept { return items_.empty(); }
  auto operator<=>(const Values&) const = default;

 private:
  Map items_;
};

/// Values for a template's tunables.
using Config = Values;

}  // namespace wyvern WYVERN_API
