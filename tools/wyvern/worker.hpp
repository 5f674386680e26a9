// How this program starts itself as the tuner's worker.
#pragma once

#include <wyvern/error.hpp>

#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace wyvern::cli {

inline constexpr std::string_view kWorkerArgument = "tuning-worker";

/// Throws Error(kUnavailable) where the system does not say which file this program is.
inline std::vector<std::string> worker_command() {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error)
    throw Error(ErrorKind::kUnavailable,
                "cannot read the link /proc/self/exe (" + error.message() +
                    "), by which the command starts its worker processes: mount /proc");
  return {self.string(), std::string(kWorkerArgument)};
}

}  // namespace wyvern::cli
