// From the stages that a template covers to its kernel's parameters.
#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "templates/template.hpp"

namespace wyvern {
namespace {

template <class... Parts>
[[noreturn]] void reject(const Template& t, fmt::format_string<Parts...> format, Parts&&... parts) {
  throw Error(
      ErrorKind::kBadInput,
      fmt::format("template {}: {}", t.id(), fmt::format(format, std::forward<Parts>(parts)...)));
}

class Derivation {
 public:
  explicit Derivation(const Template& t) : t_(t) {}

  std::vector<Parameter> parameters() {
    // A parameter is a kilobyte, so the vector must not grow.
    std::size_t most = t_.additional.size();
    for (const Cover& cover : t_.covers) most += cover.stage->arguments.size();
    parameters_.reserve(most);
    find_read_later();
    for (std::size_t i = 0; i < t_.covers.size(); ++i) take(i);
    for (const Argument& argument : t_.additional) {
      if (find(argument.name) != nullptr)
        reject(t_, "{} is additional, but a covered stage has it", argument.name);
      parameters_.push_back({argument, t_.covers.size()});
    }
    for (const Keep& keep : t_.keeps)
      if (!inner_.contains(keep.name))
        reject(t_, "it keeps {}, which no later covered stage reads", keep.name);
    std::vector<Parameter> ordered;
    ordered.reserve(parameters_.size());
    for (const int wanted : {0, 1, 2, 3})
      for (const Parameter& p : parameters_)
        if (place(p) == wanted) ordered.push_back(p);
    return ordered;
  }

 private:
  static int place(const Parameter& p) {
    return p.access == Access::in ? (p.table ? 1 : 0) : p.access == Access::scratch ? 3 : 2;
  }

  /// inner_: outputs that a later covered stage reads.
  void find_read_later() {
    std::set<std::string_view> written;
    for (const Cover& cover : t_.covers) {
      for (const auto& [argument, name] : cover.rename)
        if (cover.stage->find(argument) == nullptr)
          reject(t_, "stage {} has no tensor {} to be renamed to {}", cover.stage->name, argument,
                 name);
      if (cover.done) continue;
      for (const Argument& argument : cover.stage->arguments)
        if (argument.access != Access::out && written.contains(cover.local(argument.name)))
          inner_.insert(cover.local(argument.name));
      for (const Argument& argument : cover.stage->arguments)
        if (argument.access != Access::in) written.insert(cover.local(argument.name));
    }
  }

  Parameter* find(std::string_view name) {
    const auto found = std::find_if(parameters_.begin(), parameters_.end(),
                                    [&](const Parameter& p) { return p.name == name; });
    return found == parameters_.end() ? nullptr : &*found;
  }

  void take(std::size_t index) {
    const Cover& cover = t_.covers[index];
    if (cover.done) return;
    std::vector<std::string_view> written;
    for (const Argument& argument : cover.stage->arguments) {
      Parameter p{argument, index};
      p.name = cover.local(argument.name);
      if (cover.only_when && !restrict(p, *cover.only_when)) continue;
      if (argument.access == Access::in) {
        // Where an optional stage is left out, its output is an input of the kernel.
        const auto maker = made_.find(p.name);
        if (maker == made_.end())
          read(p);
        else if (const auto left_out = maker->second.negated(); left_out&& restrict(p, *left_out))
          read(p);
        continue;
      }
      written.push_back(p.name);
      if (inner_.contains(p.name)) {
        const auto keep = std::find_if(t_.keeps.begin(), t_.keeps.end(),
                                       [&](const Keep& k) { return k.name == p.name; });
        if (keep == t_.keeps.end()) continue;
        if (!restrict(p, keep->when)) continue;
      }
      Parameter* const other = find(p.name);
      if (other == nullptr) {
        parameters_.push_back(p);
        continue;
      }
      // A pool that an earlier stage reads and this one updates.
      if (argument.access != Access::inout || other->access != Access::in)
        reject(t_, "{} is both read and written; rename one of them", p.name);
      p.present = p.present.or_else(other->present);
      *other = p;
    }
    for (const std::string_view name : written)
      made_.insert_or_assign(name, cover.only_when.value_or(Presence()));
  }

  /// False when the parameter is then never present.
  static bool restrict(Parameter& p, const Presence& when) {
    const auto both = p.present.and_also(when);
    if (both) p.present = *both;
    return both.has_value();
  }

  /// One parameter for a tensor that several covered stages read.
  void read(const Parameter& p) {
    Parameter* known = find(p.name);
    if (known == nullptr) {
      parameters_.push_back(p);
      return;
    }
    if (!(known->type == p.type))
      reject(t_, "{} is {} for {} and {} for {}", p.name, known->type.text(),
             t_.covers[known->cover].stage->name, p.type.text(), t_.covers[p.cover].stage->name);
    // A stage that always reads the tensor describes it better than one that does so at times.
    if (p.present.always() && !known->present.always()) {
      *known = p;
      return;
    }
    known->present = known->present.or_else(p.present);
  }

  const Template& t_;
  std::set<std::string_view> inner_;           // outputs that a later covered stage reads
  std::map<std::string_view, Presence> made_;  // what earlier covered stages wrote, and when
  std::vector<Parameter> parameters_;
};

bool has_constant(const Template& t, std::string_view name) {
  return std::any_of(t.constants.begin(), t.constants.end(),
                     [&](const AnyConstant& c) { return name_of(c) == name; });
}

/// Adds the types and flags by which the source declares its parameters.
void add_constants(Template& t) {
  const auto add = [&](const auto& constant) {
    if (!has_constant(t, constant.name)) t.constants.emplace_back(constant);
  };
  for (const Parameter& p : t.parameters) {
    if (const Constant<DType>* type = p.type.constant()) add(*type);
    for (const AllOf& all : p.present.alternatives())
      for (const FlagIs& f : all) add(*f.flag);
  }
}

/// Finds the tensor of each map; rejects maps without one.
void check_tensor_maps(Template& t) {
  if (t.tensor_maps.size() > kMaxTensorMaps)
    reject(t, "it has {} tensor maps; {} is the most", t.tensor_maps.size(), kMaxTensorMaps);
  if (!t.tensor_maps.empty() && !t.needs.tensor_copies)
    reject(t, "it has tensor maps, so needs.tensor_copies must be true");
  std::set<std::string_view> names;
  for (const Parameter& p : t.parameters) names.insert(p.name);
  for (TensorMapUse& map : t.tensor_maps) {
    if (!names.insert(map.name).second) reject(t, "two parameters are called {}", map.name);
    const auto tensor = std::find_if(t.parameters.begin(), t.parameters.end(),
                                     [&](const Parameter& p) { return p.name == map.argument; });
    if (tensor == t.parameters.end())
      reject(t, "{} is a map of {}, which is not among its arguments", map.name, map.argument);
    if (const auto absent = tensor->present.negated(); absent && absent->and_also(map.when))
      reject(t, "{} is a map of {}, which is present only with {}", map.name, map.argument,
             tensor->present.text());
    if (!map.view) reject(t, "{} has no view", map.name);
    map.parameter = static_cast<std::size_t>(tensor - t.parameters.begin());
  }
}

/// Marks the parameters that may have strided rows.
void mark_strided(Template& t) {
  if (t.strided.size() > kMaxStrided)
    reject(t, "it has {} strided tensors; {} is the most", t.strided.size(), kMaxStrided);
  for (const std::string_view name : t.strided) {
    const auto tensor = std::find_if(t.parameters.begin(), t.parameters.end(),
                                     [&](const Parameter& p) { return p.name == name; });
    if (tensor == t.parameters.end()) reject(t, "{} is strided, but not among its arguments", name);
    const auto& shape = tensor->shape;
    const bool rows = shape.size() >= 3 && shape[0] == Dim(extent::B) &&
                      (shape[1] == Dim(extent::T) || shape[1] == Dim(extent::nT));
    if (!rows && outer_dims(*tensor) != 1)
      reject(t, "{} is strided, but has no row for each token and no slots", name);
    tensor->strided = true;
  }
}

void check_launch(const Template& t) {
  if (!t.geometry) reject(t, "it has no launch");
  if (!t.fallback && !t.cost) reject(t, "it has no default config");
}

}  // namespace

std::int64_t dense_stride(const Argument& argument, const Spec& spec, const Extents& extents) {
  std::int64_t elements = 1;
  for (auto i = static_cast<std::size_t>(outer_dims(argument)); i < argument.shape.size(); ++i)
    elements *= argument.shape[i].value(spec, extents);
  return elements;
}

int outer_dims(const Argument& argument) {
  return !argument.shape.empty() && argument.shape[0] == Dim(extent::S) ? 1 : 2;
}

std::string_view Cover::local(std::string_view argument) const {
  const auto it = rename.find(argument);
  return it == rename.end() ? argument : std::string_view(it->second);
}

void register_template(Template& t) {
  if (t.covers.empty()) reject(t, "it covers no stage");
  t.parameters = Derivation(t).parameters();
  add_constants(t);
  check_tensor_maps(t);
  mark_strided(t);
  check_launch(t);
  if (t.summary.empty()) t.summary = t.covers.front().stage->summary;
}

}  // namespace wyvern
