// What a run of the suite would try, for coverage.py.
#pragma once

#include <wyvern/problem.hpp>

#include <string>
#include <string_view>
#include <vector>

namespace wyvern::testing {

/// Whether WYVERN_TESTS_COVERAGE names a file: tests then list what they would try and try nothing.
bool is_listing();

/// Where is_listing(), adds a line for the template on the problem to that file: operator, pass,
/// template and the problem's options. Returns is_listing(). Thread-safe, and among processes.
bool is_only_listed(const Problem& problem, std::string_view template_id);

/// What coverage.py counts of the template on the problem: "kda forward by fwd_o.portable",
/// "fwd_o.portable with packed=true" and so on, by each option.
std::vector<std::string> template_pairs(const Problem& problem, std::string_view template_id);

}  // namespace wyvern::testing
