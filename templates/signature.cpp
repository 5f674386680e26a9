#include "templates/signature.hpp"

#include <algorithm>

namespace wyvern {

std::int64_t Dim::value(const Spec& spec, const Extents& extents) const {
  struct Visitor {
    const Spec& spec;
    const Extents& extents;
    std::int64_t operator()(std::int64_t number) const { return number; }
    std::int64_t operator()(const ExtentName& e) const { return extents.*e.member + e.plus; }
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

bool holds(const Presence& condition, const Constants& constants) {
  return std::all_of(condition.begin(), condition.end(),
                     [&](const FlagIs& f) { return constants.*f.flag.member == f.wanted; });
}

std::string to_string(const Presence& condition) {
  std::string text;
  for (const FlagIs& f : condition) {
    if (!text.empty()) text += ',';
    if (!f.wanted) text += '!';
    text += f.flag.name;
  }
  return text;
}

const Argument* StageDefinition::find(std::string_view argument) const {
  const auto found = std::find_if(arguments.begin(), arguments.end(),
                                  [&](const Argument& a) { return a.name == argument; });
  return found == arguments.end() ? nullptr : found;
}

}  // namespace wyvern
