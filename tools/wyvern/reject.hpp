// How the command refuses what it is given.
#pragma once

#include <wyvern/error.hpp>

#include <fmt/format.h>

#include <utility>

namespace wyvern::cli {

/// Throws Error(kBadInput) of this sentence.
template <class... Args>
[[noreturn]] void reject(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ErrorKind::kBadInput, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace wyvern::cli
