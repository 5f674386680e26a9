// Data flow in PTX text: a check on what the compiler made of a kernel.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace wyvern::testing {

/// The registers of a PTX module's kernel that some path reads before anything set them, by a
/// backward analysis of liveness. Instructions under a predicate count as if they always ran.
std::vector<std::string> registers_read_unset(std::string_view ptx);

}  // namespace wyvern::testing
