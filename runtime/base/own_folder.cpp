#include "runtime/base/own_folder.hpp"

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>
#include <system_error>

namespace wyvern {

std::filesystem::path own_folder() {
  Dl_info info{};
  link_map* map = nullptr;
  const auto* self = reinterpret_cast<const void*>(&own_folder);
  const bool found =
      dladdr1(self, &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) != 0 && map != nullptr;
  // The program itself has no name in the link map, and its argv[0] need not be a path.
  const bool is_library = found && map->l_name != nullptr && map->l_name[0] != '\0';
  std::error_code error;
  const std::filesystem::path file =
      std::filesystem::canonical(is_library ? map->l_name : "/proc/self/exe", error);
  return file.parent_path();
}

std::filesystem::path shared_folder(std::string_view name) {
  std::error_code error;
  for (const char* const place : {"../share/wyvern", "../../share/wyvern"}) {
    const auto folder = (own_folder() / place / name).lexically_normal();
    if (std::filesystem::is_directory(folder, error)) return folder;
  }
  return {};
}

std::vector<std::filesystem::path> paths_of_variable(const char* name) {
  std::vector<std::filesystem::path> paths;
  const char* const value = ::secure_getenv(name);
  std::string_view text = value != nullptr ? value : "";
  while (!text.empty()) {
    const std::size_t end = text.find(':');
    if (end != 0) paths.emplace_back(text.substr(0, end));
    text.remove_prefix(end == text.npos ? text.size() : end + 1);
  }
  return paths;
}

}  // namespace wyvern
