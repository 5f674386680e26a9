#include "templates/template.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "templates/embedded.hpp"

namespace wyvern {
namespace {

using detail::EmbeddedSource;

const EmbeddedSource* find_source(std::string_view path) {
  for (const EmbeddedSource& source : detail::embedded_sources())
    if (source.path == path) return &source;
  return nullptr;
}

/// The quoted name of an #include line, or empty.
std::string_view included_name(std::string_view line) {
  const std::size_t start = line.find_first_not_of(" \t");
  constexpr std::string_view kDirective = "#include \"";
  if (start == std::string_view::npos || line.substr(start, kDirective.size()) != kDirective)
    return {};
  line.remove_prefix(start + kDirective.size());
  return line.substr(0, line.find('"'));
}

/// Writes a template's files into one text, each file once.
class Expansion {
 public:
  explicit Expansion(const SourceOverrides& overrides) : overrides_(overrides) {}

  std::string text;

  /// Appends the file, each file that it includes in its place the first time it is named.
  void add(std::string_view path) {
    seen_.emplace(path);
    fmt::format_to(std::back_inserter(text), "#line 1 \"{}\"\n", path);
    std::string_view rest = source(path);
    for (int line_number = 1; !rest.empty(); ++line_number) {
      const std::size_t end = std::min(rest.find('\n'), rest.size());
      const std::string_view line = rest.substr(0, end);
      rest.remove_prefix(std::min(end + 1, rest.size()));
      const std::string_view name = included_name(line);
      if (name.empty()) {
        if (line.find("#pragma once") == std::string_view::npos) text.append(line);
        text.push_back('\n');
      } else {
        if (!seen_.contains(name)) add(name);
        fmt::format_to(std::back_inserter(text), "#line {} \"{}\"\n", line_number + 1, path);
      }
    }
  }

 private:
  std::string_view source(std::string_view path) const {
    const auto it = overrides_.find(path);
    return it == overrides_.end() ? source_text(path) : std::string_view(it->second);
  }

  const SourceOverrides& overrides_;
  std::set<std::string, std::less<>> seen_;
};

std::string definition(const std::string& name, const Value& value) {
  struct Visitor {
    const std::string& name;
    std::string operator()(bool v) const {
      return fmt::format("constexpr bool {} = {};\n", name, v);
    }
    std::string operator()(std::int64_t v) const {
      return fmt::format("constexpr int {} = {};\n", name, v);
    }
    std::string operator()(DType v) const {
      return fmt::format("using {} = {};\n", name, to_string(v));
    }
    std::string operator()(Precision v) const {
      return fmt::format("constexpr Precision {} = Precision::{};\n", name, to_string(v));
    }
  };
  return std::visit(Visitor{name}, value);
}

bool agrees(const Config& config, std::string_view name, std::int64_t wanted) {
  return wanted == 0 || !config.contains(name) || config.integer(name) == wanted;
}

bool within(const Config& config, Precision floor, PlanShape shape) {
  const Value* precision = config.find("precision");
  if (precision != nullptr && std::get<Precision>(*precision) < floor) return false;
  return agrees(config, "BT", shape.BT) && agrees(config, "SEG", shape.SEG);
}

}  // namespace

std::string_view to_string(DeviceKind kind) noexcept {
  return kind == DeviceKind::cpu ? "cpu" : "cuda";
}

std::int64_t chunk_slots(std::int64_t B, std::int64_t T, std::int64_t N, bool packed,
                         std::int64_t BT) {
  return packed ? T / BT + N : B * ((T + BT - 1) / BT);
}

bool is_present(const Argument& argument, const Values& constants) {
  std::string_view flags = argument.present;
  while (!flags.empty()) {
    const std::size_t end = std::min(flags.find(','), flags.size());
    const bool wanted = flags.front() != '!';
    if (constants.flag(flags.substr(wanted ? 0 : 1, end - (wanted ? 0 : 1))) != wanted)
      return false;
    flags.remove_prefix(std::min(end + 1, flags.size()));
  }
  return true;
}

bool Template::covers(std::string_view stage) const {
  return std::find(stages.begin(), stages.end(), stage) != stages.end();
}

const Tunable* Template::tunable(std::string_view tunable_name) const {
  for (const Tunable& t : tunables)
    if (t.name == tunable_name) return &t;
  return nullptr;
}

const std::vector<Template>& all_templates() {
  static const std::vector<Template> templates = [] {
    std::vector<Template> all = detail::collect_templates();
    std::sort(all.begin(), all.end(),
              [](const Template& a, const Template& b) { return a.id() < b.id(); });
    return all;
  }();
  return templates;
}

const Template* find_template(std::string_view id) {
  for (const Template& t : all_templates())
    if (t.id() == id) return &t;
  return nullptr;
}

std::vector<Config> space(const Template& t, const Values& constants, const Limits& limits,
                          Precision floor, PlanShape shape) {
  std::vector<Config> configs{Config{}};
  for (const Tunable& tunable : t.tunables) {
    std::vector<Config> extended;
    extended.reserve(configs.size() * tunable.values.size());
    for (const Config& config : configs)
      for (const Value& value : tunable.values) {
        extended.push_back(config);
        extended.back().set(tunable.name, value);
      }
    configs = std::move(extended);
  }
  std::erase_if(configs, [&](const Config& config) {
    return !within(config, floor, shape) || !t.illegal(constants, config, limits).empty() ||
           (t.redundant && t.redundant(constants, config));
  });
  return configs;
}

std::optional<Config> default_config(const Template& t, const Values& constants,
                                     const Limits& limits, Precision floor, PlanShape shape) {
  Config config = t.fallback(constants, limits, shape.BT);
  if (shape.SEG != 0 && t.tunable("SEG") != nullptr) config.set("SEG", shape.SEG);
  if (within(config, floor, shape) && t.illegal(constants, config, limits).empty()) return config;
  const std::vector<Config> legal = space(t, constants, limits, floor, shape);
  if (legal.empty()) return {};
  return legal.front();
}

std::string_view source_text(std::string_view path) {
  const EmbeddedSource* source = find_source(path);
  if (source == nullptr)
    throw Error(ErrorKind::kBadInput,
                fmt::format("template source '{}' is not part of this build", path));
  return source->text;
}

std::string specialize(const Template& t, const Values& constants, const Config& config,
                       const SourceOverrides& overrides) {
  const std::string_view prelude =
      t.device == DeviceKind::cuda ? "common/cuda/types.cuh" : "common/cpu/types.hpp";
  Expansion out(overrides);
  out.add(prelude);
  out.text += "#line 1 \"specialization\"\n";
  for (const std::string& name : t.constants) {
    const Value* value = constants.find(name);
    if (value == nullptr)
      throw Error(ErrorKind::kBadInput,
                  fmt::format("template {} needs the constant {}", t.id(), name));
    out.text += definition(name, *value);
  }
  for (const Tunable& tunable : t.tunables) {
    const Value* value = config.find(tunable.name);
    if (value == nullptr)
      throw Error(ErrorKind::kBadInput,
                  fmt::format("template {} needs the tunable {}", t.id(), tunable.name));
    out.text += definition(tunable.name, *value);
  }
  out.add(t.source);
  return std::move(out.text);
}

}  // namespace wyvern
