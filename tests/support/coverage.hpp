// What a run of the suite has tried, for coverage.py.
#pragma once

#include <wyvern/problem.hpp>

#include <string_view>

namespace wyvern::testing {

/// Adds a line to the file that WYVERN_TESTS_COVERAGE names, if it is set: operator, pass, template
/// and the problem's options. Thread-safe, and among processes.
void note_tried(const Problem& problem, std::string_view template_id);

}  // namespace wyvern::testing
