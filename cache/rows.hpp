// Rows as text: one JSON object a line, the same bytes for the same row on every machine. Packs and
// exports are made of them, and a row's digest, by which merging knows it again, is of its line.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "cache/cache.hpp"

namespace wyvern {

/// Without line feed, members in the alphabet's order; what is empty, 0 or not known is left out,
/// so that a member that is added to rows one day changes no line of before. The row's id is no
/// part of it. Bytes that are not UTF-8 are replaced.
std::string to_line(const MeasurementRow& row);
std::string to_line(const WinnerRow& row);

using TextRow = std::variant<MeasurementRow, WinnerRow>;

/// The row of a line; nothing where it is none, with one clause of why in `problem`. Members that
/// are not known are passed over.
std::optional<TextRow> from_line(std::string_view line, std::string& problem);

/// SHA-256 of the row's line: equal for equal rows, whatever cache they lie in.
std::string digest_of(const MeasurementRow& row);
std::string digest_of(const WinnerRow& row);

/// Median of plan / default over samples taken in turn, of which equal indices are neighbours; 0
/// where there are none.
double paired_ratio(const WinnerRow& row);
/// The ratio that winners are ranked by: `ratio` where it was measured, else that of the medians; 1
/// where neither is known.
double rank_of(const WinnerRow& row);

/// What a row keeps in columns of JSON: its samples as "[1.5,null,"inf"]", a NaN being null, and
/// what no look-up needs.
std::string samples_text(const MeasurementRow& row);
std::string more_text(const MeasurementRow& row);
std::string more_text(const WinnerRow& row);
/// And back; what is not as it was written leaves the row as it is.
void read_samples(const std::string& text, MeasurementRow& row);
void read_more(const std::string& text, MeasurementRow& row);
void read_more(const std::string& text, WinnerRow& row);

/// Now in UTC with milliseconds: "2026-11-22T10:00:00.000Z".
std::string timestamp();

}  // namespace wyvern
