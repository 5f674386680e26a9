// What a verb prints: text for people, or one JSON document.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace wyvern::cli {

using Json = nlohmann::ordered_json;

enum ExitCode : int {
  kDone = 0,
  kCheckFailed = 1,  ///< --verify beyond the bound
  kBadUsage = 2,     ///< bad usage or input
  kFailed = 3,       ///< a device or compiler is missing or failed
};

/// Prints a document to stdout, bytes that are not UTF-8 replaced. An infinite number becomes null.
void print_document(const Json& document);

/// Columns of text, as wide as they need be; a column whose cells all are numbers is right-aligned.
class Table {
 public:
  explicit Table(std::vector<std::string> header) { rows_.push_back(std::move(header)); }
  void row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

/// "12.3 KiB".
std::string bytes_text(double bytes);

/// A line of a report on stdout.
template <class... Args>
void say(fmt::format_string<Args...> format, Args&&... args) {
  fmt::print(format, std::forward<Args>(args)...);
  fmt::print("\n");
}

}  // namespace wyvern::cli
