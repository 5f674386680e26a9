// `wyvern bench` by two builds of the command, in turn.
#pragma once

#include <string>

#include "tools/wyvern/output.hpp"

namespace wyvern::cli {

/// Whether the path is a program, and so a build of the command rather than a cache.
bool is_build(const std::string& path);

/// Runs this process's own command line without --compare by this build and by the other, in turn,
/// a few times each; the document of both. Throws Error(kBadInput) where the other one fails.
Json compare_builds(const std::string& other);

/// As text.
void print_builds(const Json& document);

}  // namespace wyvern::cli
