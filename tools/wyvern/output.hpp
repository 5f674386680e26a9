// The output of a verb: text for people, or one JSON document.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/printable.hpp"

namespace wyvern::cli {

using Json = nlohmann::ordered_json;

enum ExitCode : int {
  kDone = 0,
  kCheckFailed = 1,  ///< --verify beyond the bound
  kBadUsage = 2,     ///< bad usage, input, file or standard output
  kFailed = 3,       ///< a device or compiler is missing or failed
};

/// Writes to stdout as it is. Throws Error(kIo) when stdout takes no more; flush_output() writes
/// the rest of its buffer.
void put(std::string_view text);
void flush_output();

/// Writes to stderr as it is. Where that is closed or full the text is lost: there is no other
/// place to tell of it, and the work goes on.
void note(std::string_view text) noexcept;

/// Prints a document to stdout, bytes that are not UTF-8 replaced. An infinite number becomes null.
void print_document(const Json& document);

/// At most about `most` bytes of a printable text, which loses its middle.
std::string shortened(const std::string& text, std::size_t most);

/// Columns of text, as wide as they need be; a column whose cells all are numbers is right-aligned.
class Table {
 public:
  explicit Table(std::vector<std::string> header) { rows_.push_back(std::move(header)); }
  void row(std::vector<std::string> cells);
  std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

/// "12.3 KiB".
std::string bytes_text(double bytes);

/// A line of a report on stdout, made printable.
template <class... Args>
void say(fmt::format_string<Args...> format, Args&&... args) {
  put(printable(fmt::format(format, std::forward<Args>(args)...)) + '\n');
}

}  // namespace wyvern::cli
