// JSON that others wrote: rows of packs and of the database, plans, documents.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string_view>

namespace wyvern {

/// Far more than anything of ours has. What the JSON library does with a parsed value, copying and
/// writing it, goes down its levels by recursion, which a text of a few hundred kB can make deeper
/// than a stack.
constexpr int kDeepestJson = 64;

/// Whether lists and objects lie in each other more than kDeepestJson deep, in JSON or in what is
/// meant to be.
bool is_too_deep(std::string_view json) noexcept;

/// The value of a text; a discarded one where it is no JSON, or too deep.
nlohmann::json parse_json(std::string_view text);

}  // namespace wyvern
