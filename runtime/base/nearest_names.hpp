// The legal names in an error message about a name that is not legal.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace wyvern {

/// "a, b, c": all of `names` in their order where they are at most eight. Otherwise the eight
/// nearest to `wanted` and how many others there are: "a, b, c, d, e, f, g, h and 52 more". Names
/// that contain `wanted` are nearest, then those with the least edit distance. Where `wanted` is
/// most likely a misspelling of one " (did you mean b?)" follows.
std::string nearest_names(std::string_view wanted, std::vector<std::string_view> names);

/// The same of any list of names, which need not outlive the call.
template <class Names>
std::string nearest_names(std::string_view wanted, const Names& names) {
  return nearest_names(wanted, std::vector<std::string_view>(names.begin(), names.end()));
}

}  // namespace wyvern
