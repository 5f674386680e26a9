#include "templates/source.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <map>
#include <mutex>
#include <set>
#include <vector>

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
  std::vector<std::string> files;  ///< in the order in which they begin

  /// Appends the file. An #include is replaced by its file, the second time by nothing.
  void add(std::string_view path) {
    if (!seen_.emplace(path).second) return;
    files.emplace_back(path);
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
        add(name);
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

std::string definition(std::string_view name, const Value& value) {
  struct Visitor {
    std::string_view name;
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

/// A member of the kernel's Spec, under which building blocks that are templates find the value.
std::string member(std::string_view name, const Value& value) {
  struct Visitor {
    std::string_view name;
    std::string operator()(bool v) const { return member("bool", v ? "true" : "false"); }
    std::string operator()(std::int64_t v) const { return member("int", std::to_string(v)); }
    std::string operator()(DType v) const {
      return member("wyvern::DType", fmt::format("wyvern::DType::{}", to_string(v)));
    }
    std::string operator()(Precision v) const {
      return member("wyvern::Precision", fmt::format("wyvern::Precision::{}", to_string(v)));
    }
    std::string member(std::string_view type, std::string_view text) const {
      return fmt::format("  static constexpr {} {} = {};\n", type, name, text);
    }
  };
  return std::visit(Visitor{name}, value);
}

/// The constants and tunables of one kernel, twice: by their plain names for the template's own
/// file, and as members of `Spec` for building blocks and layouts, which take it as a parameter.
std::string definitions(const Template& t, const Constants& constants, const Config& config) {
  std::string plain;
  std::string spec = "namespace {\nstruct Spec {\n";
  const auto add = [&](std::string_view name, const Value& value) {
    plain += definition(name, value);
    spec += member(name, value);
  };
  for (const AnyConstant& constant : t.constants)
    add(name_of(constant), value_of(constant, constants));
  for (const Tunable& tunable : t.tunables) {
    if (tunable.at_launch) continue;
    const Value* value = config.find(tunable.name);
    if (value == nullptr)
      throw Error(ErrorKind::kBadInput,
                  fmt::format("template {} needs the tunable {}", t.id(), tunable.name));
    add(tunable.name, *value);
  }
  return plain + spec + "};\n}  // namespace\n";
}

/// The generated text between the prelude and the template's file.
std::string generated(const Template& t, const Constants& constants, const Config& config,
                      const Dialect& dialect) {
  return fmt::format(
      "#line 1 \"specialization\"\nusing namespace wyvern;\nusing namespace {};\n{}{}",
      dialect.blocks, definitions(t, constants, config), dialect.parameters(t));
}

/// A line for each file that the template's source expands to. Computed once a process.
std::string file_digests(const Template& t, const Dialect& dialect) {
  static std::mutex mutex;
  // Guarded by `mutex`. Never shrinks and is never destroyed: the last threads may compile while
  // the process ends.
  static auto& known = *new std::map<std::string, std::string>;
  const std::lock_guard lock(mutex);
  std::string& lines = known[t.source];
  if (lines.empty()) {
    const SourceOverrides none;
    Expansion expansion(none);
    expansion.add(dialect.prelude);
    expansion.add(t.source);
    for (const std::string& path : expansion.files)
      fmt::format_to(std::back_inserter(lines), "{} {}\n", path, find_source(path)->sha256);
  }
  return lines;
}

/// A tensor's name in a kernel: `do` is a word of C++.
std::string_view kernel_name(const Parameter& p) { return p.name == "do" ? "dO" : p.name; }

}  // namespace

std::string_view source_text(std::string_view path) {
  const EmbeddedSource* source = find_source(path);
  if (source == nullptr)
    throw Error(ErrorKind::kBadInput,
                fmt::format("template source '{}' is not part of this build", path));
  return source->text;
}

std::string declaration(const Parameter& p) {
  const std::string_view type = p.type.text();
  return fmt::format("{}{}* {}", p.access == Access::in ? "const " : "",
                     type == "fp32" ? "float" : type, kernel_name(p));
}

std::string stride_declaration(const Parameter& p) {
  return fmt::format("int64 {}_stride", kernel_name(p));
}

std::string specialize(const Template& t, const Constants& constants, const Config& config,
                       const Dialect& dialect, const SourceOverrides& overrides) {
  Expansion out(overrides);
  out.add(dialect.prelude);
  out.text += generated(t, constants, config, dialect);
  out.add(t.source);
  return std::move(out.text);
}

std::string source_identity(const Template& t, const Constants& constants, const Config& config,
                            const Dialect& dialect) {
  return file_digests(t, dialect) + generated(t, constants, config, dialect);
}

}  // namespace wyvern
