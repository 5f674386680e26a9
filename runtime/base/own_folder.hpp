// Where this build's files are, in whatever they are linked into, or where the environment says
// they are.
#pragma once

#include <filesystem>
#include <string_view>
#include <vector>

namespace wyvern {

/// The folder of the program or library that holds Wyvern's code, without symbolic links; empty if
/// the system does not say. Thread-safe.
std::filesystem::path own_folder();
/// share/wyvern/NAME beside the bin/ or lib/ that own_folder() is, or is in; empty where there is
/// none. Thread-safe.
std::filesystem::path shared_folder(std::string_view name);
/// The paths that an environment variable names, separated by colons. None if this program has more
/// rights than its caller, whose environment is ignored then.
std::vector<std::filesystem::path> paths_of_variable(const char* name);

}  // namespace wyvern
