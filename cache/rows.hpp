// Rows as text: one JSON object a line, the same bytes for the same row on every machine. Packs and
// exports are made of them, and a row's digest, by which merging knows it again, is of its line.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "cache/cache.hpp"

namespace wyvern {

/// Without line feed, members in the alphabet's order; members that are empty, 0 or unknown are
/// left out, so that a new member changes no old line. The row's id is no part of it. Bytes that
/// are not UTF-8 are replaced.
std::string to_line(const MeasurementRow& row);
std::string to_line(const WinnerRow& row);

using TextRow = std::variant<MeasurementRow, WinnerRow>;

/// The row of a line; nothing if it is not a row, with the reason as one clause in `problem`.
/// Unknown members are ignored.
std::optional<TextRow> from_line(std::string_view line, std::string& problem);

/// SHA-256 of the row's line: equal for equal rows of any cache.
std::string digest_of(const MeasurementRow& row);
std::string digest_of(const WinnerRow& row);

/// No problem is tuned more often; a larger count in a file is nonsense. A tuning after a row of so
/// many counts one more, so that it answers.
inline constexpr std::int64_t kMostRounds = 1'000'000;

/// Median of plan / default over samples measured in turn, where equal indices are close in time; 0
/// without samples.
double paired_ratio(const WinnerRow& row);
/// The ratio that winners are ranked by: `ratio` where it was measured, else the ratio of the
/// medians; 1 where neither is known.
double rank_of(const WinnerRow& row);

/// A row's columns of JSON: its samples as "[1.5,null,"inf"]", a NaN being null, and the members
/// that no look-up needs.
std::string samples_text(const MeasurementRow& row);
std::string more_text(const MeasurementRow& row);
std::string more_text(const WinnerRow& row);
/// And back; a malformed text leaves the row unchanged.
void read_samples(const std::string& text, MeasurementRow& row);
void read_more(const std::string& text, MeasurementRow& row);
void read_more(const std::string& text, WinnerRow& row);

/// A device key in two: what it is, and how many threads it has (0: the key says none), by which
/// alone the keys of one processor differ: "model, target, 8 threads".
struct DeviceParts {
  std::string_view model;
  std::int64_t threads = 0;
};
DeviceParts device_parts(std::string_view key);
/// How much of one GPU differs from another of its architecture: doublings of multiprocessors and
/// of memory's speed, by their keys. Nothing where one is no GPU that is known here, or they are of
/// different architectures: the plans of neither say anything of the other then.
std::optional<double> devices_apart(std::string_view key, std::string_view other);
/// The key as people read it: "model, target, 1 thread", which rows have as "1 threads".
std::string device_text(std::string_view key);

/// How far two problems of a family are from each other: sum of |log2| distances of tokens and of
/// sequences; 0 counts as 1.
double extents_apart(std::int64_t tokens, std::int64_t sequences, std::int64_t other_tokens,
                     std::int64_t other_sequences);

/// Now in UTC with milliseconds: "2026-11-22T10:00:00.000Z".
std::string timestamp();

}  // namespace wyvern
