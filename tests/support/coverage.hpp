// What a run of the suite would try, for coverage.py.
#pragma once

#include <wyvern/problem.hpp>

#include <string_view>

namespace wyvern::testing {

/// Whether WYVERN_TESTS_COVERAGE names a file: tests then list what they would try and try nothing.
bool is_listing();

/// Notes that the template is tried on the problem. Where is_listing(), adds a line to that file:
/// operator, pass, template and the problem's options. Returns is_listing(). Thread-safe, and among
/// processes.
bool is_only_listed(const Problem& problem, std::string_view template_id);

/// Whether nothing that this process has noted has the operator's pass with the template, or one of
/// the two with an option's value of the problem. Short sweeps try such points too.
bool is_new(const Problem& problem, std::string_view template_id);

}  // namespace wyvern::testing
