// What the build generates from the folders of templates/: their sources and their contracts.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "templates/template.hpp"

namespace wyvern::detail {

struct EmbeddedSource {
  std::string_view path;  ///< relative to templates/
  std::string_view text;
  std::string_view sha256;  ///< of the text, in hex
};

std::span<const EmbeddedSource> embedded_sources();

/// Calls contract() of every template folder.
std::vector<Template> collect_templates();

}  // namespace wyvern::detail
