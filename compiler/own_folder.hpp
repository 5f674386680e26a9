// Where this build's files are, whatever they are linked into.
#pragma once

#include <filesystem>

namespace wyvern {

/// The folder of the program or library that holds Wyvern's code, without symbolic links; empty
/// where the system does not tell. Thread-safe.
std::filesystem::path own_folder();

}  // namespace wyvern
