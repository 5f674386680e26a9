// Text for people: names with arbitrary bytes, such as file names; counts; warnings.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace wyvern {

/// The text with each byte or character that would control a terminal (line breaks, escapes,
/// overrides of reading order, invalid UTF-8) as an escape: "\n", "\x1b".
std::string printable(std::string_view text);
/// The same for a text of several lines: line feeds and tabs stay.
std::string printable_lines(std::string_view text);

/// "1 row", "2 rows": a number with its noun, whose plural ends with an s.
std::string count_text(std::int64_t count, std::string_view noun);

/// "wyvern: SENTENCE." on stderr, made printable. The sentence has no full stop.
void warn(std::string_view sentence);

}  // namespace wyvern
