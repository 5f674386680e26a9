#include "compiler/cuda/nvrtc_file.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <string_view>
#include <system_error>
#include <vector>

#include "runtime/base/own_folder.hpp"

namespace wyvern::detail {
namespace {

namespace fs = std::filesystem;

constexpr const char* kToolkit = "/usr/local/cuda/lib64";

/// 13 for "libnvrtc.so.13".
int major_of(std::string_view name) {
  int major = 0;
  std::from_chars(name.data() + name.rfind('.') + 1, name.data() + name.size(), major);
  return major;
}

constexpr std::uint64_t aligned(std::uint64_t bytes) { return (bytes + 3) / 4 * 4; }

}  // namespace

std::string build_id(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  const auto read = [&file](std::uint64_t at, void* into, std::size_t bytes) {
    file.seekg(static_cast<std::streamoff>(at));
    return static_cast<bool>(file.read(static_cast<char*>(into), std::streamsize(bytes)));
  };
  ElfW(Ehdr) header{};
  if (!read(0, &header, sizeof header) || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0)
    return {};
  for (std::uint64_t i = 0; i < header.e_phnum; ++i) {
    ElfW(Phdr) segment{};
    if (!read(header.e_phoff + i * sizeof segment, &segment, sizeof segment)) return {};
    if (segment.p_type != PT_NOTE) continue;
    const std::uint64_t end = segment.p_offset + segment.p_filesz;
    for (std::uint64_t at = segment.p_offset; at < end;) {
      ElfW(Nhdr) note{};
      std::array<char, sizeof ELF_NOTE_GNU> owner{};
      std::array<unsigned char, 64> id{};
      if (!read(at, &note, sizeof note)) return {};
      const std::uint64_t name_at = at + sizeof note, id_at = name_at + aligned(note.n_namesz);
      at = id_at + aligned(note.n_descsz);
      if (note.n_type != NT_GNU_BUILD_ID || note.n_namesz != owner.size() ||
          note.n_descsz > id.size() || !read(name_at, owner.data(), owner.size()) ||
          std::memcmp(owner.data(), ELF_NOTE_GNU, owner.size()) != 0 ||
          !read(id_at, id.data(), note.n_descsz))
        continue;
      return fmt::format("{:02x}", fmt::join(id.begin(), id.begin() + note.n_descsz, ""));
    }
  }
  return {};
}

std::optional<NvrtcFile> find_nvrtc(std::span<const fs::path> folders) {
  for (const char* const name : kNvrtcNames) {
    if (dlopen(name, RTLD_LAZY | RTLD_NOLOAD) != nullptr) return {};
    for (const fs::path& folder : folders) {
      std::error_code error;
      const fs::path path = folder / name;
      if (fs::exists(path, error)) return NvrtcFile{path, major_of(name), build_id(path)};
    }
    if (dlopen(name, RTLD_LAZY | RTLD_LOCAL) != nullptr) return {};
  }
  return {};
}

const std::optional<NvrtcFile>& nvrtc_file() {
  // Never destroyed: the last threads may compile while the process ends.
  static const auto& file = *new std::optional<NvrtcFile>([] {
    std::vector<fs::path> folders = paths_of_variable("LD_LIBRARY_PATH");
    folders.emplace_back(kToolkit);
    return find_nvrtc(folders);
  }());
  return file;
}

}  // namespace wyvern::detail
