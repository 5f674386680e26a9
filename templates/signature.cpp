#include "templates/signature.hpp"

#include <algorithm>

namespace wyvern {

std::int64_t Dim::value(const Spec& spec, const Extents& extents) const {
  struct Visitor {
    const Spec& spec;
    const Extents& extents;
    std::int64_t operator()(std::int64_t number) const { return number; }
    std::int64_t operator()(const ExtentName& e) const {
      const std::int64_t times = e.times == nullptr ? 1 : spec.*e.times;
      return extents.*e.member * times + e.plus;
    }
    std::int64_t operator()(const Constant<std::int64_t>& c) const { return spec.*c.member; }
    std::int64_t operator()(const TunableName& t) const { return spec.*t.member; }
  };
  return std::visit(Visitor{spec, extents}, source_);
}

std::string Dim::text() const {
  struct Visitor {
    std::string operator()(std::int64_t number) const { return std::to_string(number); }
    std::string operator()(const ExtentName& e) const { return std::string(e.name); }
    std::string operator()(const Constant<std::int64_t>& c) const { return std::string(c.name); }
    std::string operator()(const TunableName& t) const { return std::string(t.name); }
  };
  return std::visit(Visitor{}, source_);
}

DType ElementType::of(const Constants& constants) const {
  if (const Constant<DType>* c = constant()) return constants.*c->member;
  return std::get<DType>(source_);
}

std::string_view ElementType::text() const {
  if (const Constant<DType>* c = constant()) return c->name;
  return to_string(std::get<DType>(source_));
}

bool Presence::holds(const Constants& constants) const {
  const auto holds = [&](const FlagIs& f) { return constants.*f.flag->member == f.required; };
  return always() || std::any_of(alternatives_.begin(), alternatives_.end(), [&](const AllOf& all) {
           return std::all_of(all.begin(), all.end(), holds);
         });
}

std::optional<Presence> Presence::and_also(const Presence& other) const {
  if (always()) return other;
  if (other.always()) return *this;
  Presence result;
  for (const AllOf& a : alternatives_)
    for (const AllOf& b : other.alternatives_) {
      AllOf both = a;
      bool possible = true;
      for (const FlagIs& flag : b) {
        const FlagIs opposite(*flag.flag, !flag.required);
        possible &= std::find(a.begin(), a.end(), opposite) == a.end();
        if (std::find(a.begin(), a.end(), flag) == a.end()) both.push_back(flag);
      }
      if (possible) result.alternatives_.push_back(both);
    }
  if (result.always()) return {};
  return result;
}

Presence Presence::or_else(const Presence& other) const {
  if (always() || other.always()) return {};
  if (other.negated() == *this) return {};
  Presence result = *this;
  for (const AllOf& all : other.alternatives_)
    if (std::find(alternatives_.begin(), alternatives_.end(), all) == alternatives_.end())
      result.alternatives_.push_back(all);
  return result;
}

std::optional<Presence> Presence::negated() const {
  if (always()) return {};
  std::optional<Presence> result = Presence();
  for (const AllOf& all : alternatives_) {
    Presence none;  // one of the list's flags does not hold
    for (const FlagIs& flag : all) {
      const Presence opposite{FlagIs(*flag.flag, !flag.required)};
      none = none.always() ? opposite : none.or_else(opposite);
    }
    if (result) result = result->and_also(none);
  }
  return result;
}

std::string Presence::text() const {
  std::string text;
  for (const AllOf& all : alternatives_) {
    if (!text.empty()) text += " or ";
    for (const FlagIs& f : all) {
      if (&f != all.begin()) text += ',';
      if (!f.required) text += '!';
      text += f.flag->name;
    }
  }
  return text;
}

const Argument* StageDefinition::find(std::string_view argument) const {
  const auto found = std::find_if(arguments.begin(), arguments.end(),
                                  [&](const Argument& a) { return a.name == argument; });
  return found == arguments.end() ? nullptr : found;
}

}  // namespace wyvern
