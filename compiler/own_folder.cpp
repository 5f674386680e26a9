#include "compiler/own_folder.hpp"

#include <dlfcn.h>
#include <link.h>

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

}  // namespace wyvern
