// How this program starts itself as the tuner's worker.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace wyvern::cli {

inline constexpr std::string_view kWorkerArgument = "tuning-worker";

inline std::vector<std::string> worker_command() {
  return {std::filesystem::read_symlink("/proc/self/exe").string(), std::string(kWorkerArgument)};
}

}  // namespace wyvern::cli
