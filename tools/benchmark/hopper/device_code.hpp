// CUDA C++ that every program of the microbenchmarks begins with: the templates' instructions and
// tiles of templates/device/cuda/sm90/, and the few instructions that no template uses.
#pragma once

#include <string>
#include <string_view>

namespace wyvern::hopper {

/// The whole source of a program: what it begins with, includes expanded, then `program`.
std::string source_of(std::string_view program);

}  // namespace wyvern::hopper
