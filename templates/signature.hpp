// Stages and their typed signatures: what tensors a mathematical step reads and writes.
#pragma once

#include <wyvern/dtype.hpp>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "templates/constants.hpp"
#include "templates/device/extents.hpp"

namespace wyvern {

/// Up to N values in a fixed array, so that signatures are constants of the program.
template <class T, std::size_t N>
class FixedList {
 public:
  constexpr FixedList() = default;
  constexpr FixedList(std::initializer_list<T> items) {
    for (const T& item : items) push_back(item);
  }
  constexpr void push_back(const T& item) { items_.at(size_++) = item; }
  constexpr std::size_t size() const { return size_; }
  constexpr bool empty() const { return size_ == 0; }
  constexpr const T* begin() const { return items_.data(); }
  constexpr const T* end() const { return items_.data() + size_; }
  constexpr const T& operator[](std::size_t i) const { return items_[i]; }
  constexpr bool operator==(const FixedList& other) const {
    if (size_ != other.size_) return false;
    for (std::size_t i = 0; i < size_; ++i)
      if (!(items_[i] == other.items_[i])) return false;
    return true;
  }

 private:
  std::array<T, N> items_{};
  std::size_t size_ = 0;
};

/// A size that a launch knows: a member of Extents, times a constant, plus a number.
struct ExtentName {
  std::string_view name;
  long long Extents::* member = nullptr;
  std::int64_t plus = 0;
  std::int64_t Constants::* times = nullptr;  ///< null: 1
};

namespace extent {
inline constexpr ExtentName B{"B", &Extents::B};
inline constexpr ExtentName T{"T", &Extents::T};
inline constexpr ExtentName nT{"nT", &Extents::T, 0, &Constants::STEPS};
inline constexpr ExtentName N{"N", &Extents::N};
inline constexpr ExtentName N1{"N+1", &Extents::N, 1};
inline constexpr ExtentName NT{"NT", &Extents::NT};
inline constexpr ExtentName NS{"NS", &Extents::NS};
inline constexpr ExtentName S{"S", &Extents::S};
inline constexpr ExtentName CP{"CP", &Extents::CP};
inline constexpr ExtentName M{"M", &Extents::M};
inline constexpr ExtentName R{"R", &Extents::R};
inline constexpr ExtentName D{"D", &Extents::D};
inline constexpr ExtentName P{"P", &Extents::P};
inline constexpr ExtentName TP{"TP", &Extents::TP};
inline constexpr ExtentName SR{"SR", &Extents::SR};
inline constexpr ExtentName SC{"SC", &Extents::SC};
}  // namespace extent

/// One dimension of a tensor: a size of the launch, a constant, a tunable or a number.
class Dim {
 public:
  constexpr Dim() = default;
  constexpr Dim(const ExtentName& name) : source_(name) {}
  constexpr Dim(const Constant<std::int64_t>& constant) : source_(constant) {}
  constexpr Dim(const TunableName& tunable) : source_(tunable) {}
  constexpr Dim(std::int64_t number) : source_(number) {}

  std::int64_t value(const Spec& spec, const Extents& extents) const;
  /// "N+1", "HV", "BT", "2".
  std::string text() const;
  bool operator==(const Dim& other) const { return text() == other.text(); }

 private:
  std::variant<std::int64_t, ExtentName, Constant<std::int64_t>, TunableName> source_;
};

/// A tensor's element type: fixed, or what a type constant says.
class ElementType {
 public:
  constexpr ElementType() = default;
  constexpr ElementType(DType type) : source_(type) {}
  constexpr ElementType(const Constant<DType>& constant) : source_(constant) {}

  DType of(const Constants& constants) const;
  /// As kernels spell it: "fp32", "DTYPE".
  std::string_view text() const;
  /// The constant it comes from, or null.
  const Constant<DType>* constant() const { return std::get_if<Constant<DType>>(&source_); }
  bool operator==(const ElementType& other) const { return text() == other.text(); }

 private:
  std::variant<DType, Constant<DType>> source_{DType::fp32};
};

/// A flag that must, or must not, hold.
struct FlagIs {
  const Constant<bool>* flag = nullptr;  ///< of namespace constant
  bool required = true;
  constexpr FlagIs() = default;
  constexpr FlagIs(const Constant<bool>& constant, bool value = true)
      : flag(&constant), required(value) {}
  FlagIs(const Constant<bool>&& constant, bool value = true) = delete;  // would dangle
  bool operator==(const FlagIs&) const = default;
};
constexpr FlagIs operator!(const Constant<bool>& flag) { return {flag, false}; }

/// Flags that must all have the required values.
using AllOf = FixedList<FlagIs, 6>;

/// When a tensor is present: always, or when one of several lists of flags holds.
class Presence {
 public:
  constexpr Presence() = default;  ///< always
  constexpr Presence(std::initializer_list<FlagIs> flags) {
    if (flags.size() != 0) alternatives_.push_back(AllOf(flags));
  }
  /// When one of two lists holds.
  constexpr Presence(const AllOf& one, const AllOf& other) {
    alternatives_.push_back(one);
    alternatives_.push_back(other);
  }

  bool always() const { return alternatives_.empty(); }
  bool holds(const Constants& constants) const;
  /// The lists, none for always.
  const FixedList<AllOf, 4>& alternatives() const { return alternatives_; }
  /// When both hold; nothing if they never do.
  std::optional<Presence> and_also(const Presence& other) const;
  /// When one of them holds.
  Presence or_else(const Presence& other) const;
  /// When this does not hold; nothing for always.
  std::optional<Presence> negated() const;
  /// "QK_L2NORM,!VECTOR_GATE or GATED"; empty: always.
  std::string text() const;
  bool operator==(const Presence&) const = default;

 private:
  FixedList<AllOf, 4> alternatives_;
};

enum class Access : std::uint8_t {
  in,
  out,
  inout,
  scratch,  ///< of one launch: zeros when the kernel starts, undefined afterwards
};

/// One tensor of a signature. A kernel receives a null pointer for one that is absent.
struct Argument {
  std::string_view name;  ///< canonical; plans connect stages by it
  Access access = Access::in;
  ElementType type{};
  FixedList<Dim, 5> shape{};
  Presence present{};
  /// Index tables of a packed batch: in a fused template they come after the other inputs.
  bool table = false;

  /// The same tensor, present only when the condition holds.
  constexpr Argument when(Presence condition) const {
    Argument result = *this;
    result.present = condition;
    return result;
  }
  /// The same tensor as an output.
  constexpr Argument out() const {
    Argument result = *this;
    result.access = Access::out;
    return result;
  }
  constexpr Argument inout() const {
    Argument result = *this;
    result.access = Access::inout;
    return result;
  }
  bool operator==(const Argument&) const = default;
};

/// Whether the argument is present with these constants.
inline bool is_present(const Argument& argument, const Constants& constants) {
  return argument.present.holds(constants);
}

/// A product [rows, inner] x [inner, cols] of matrices.
struct Product {
  Dim rows{}, cols{}, inner{};
  int times = 1;
};

/// Which chunks of a value head a stage computes one after another.
enum class Scan : std::uint8_t {
  none,      ///< none: chunks are independent
  sequence,  ///< all of a sequence, or of a segment where sequences are split
  segment,   ///< all of a segment; no work where sequences are not split
  segments,  ///< segments, not chunks: one after another
};

/// A mathematical step and its signature: inputs, then index tables, then outputs. One object for
/// each stage, defined in the stages.hpp of its family.
struct StageDefinition {
  std::string_view name;
  std::string_view summary;
  FixedList<Argument, 28> arguments;
  /// Of a chunk (of a segment: Scan::segments) and value head, for costs; small ones are left out.
  FixedList<Product, 10> products{};
  Scan scan = Scan::none;

  /// The argument of that name, or null.
  const Argument* find(std::string_view argument) const;
};

}  // namespace wyvern
