// JSON from outside: rows of packs and of the database, plans, documents.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string_view>

namespace wyvern {

/// Far deeper than any document of Wyvern. The JSON library copies and writes a parsed value by
/// recursion over its levels, which a text of a few hundred kB can make deeper than a stack.
constexpr int kDeepestJson = 64;

/// Whether lists and objects nest more than kDeepestJson deep; the text need not be valid JSON.
bool is_too_deep(std::string_view json) noexcept;

/// The value of a text; a discarded one if it is not JSON, or too deep.
nlohmann::json parse_json(std::string_view text);

}  // namespace wyvern
