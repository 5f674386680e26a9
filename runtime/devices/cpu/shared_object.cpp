#include "runtime/devices/cpu/shared_object.hpp"

#include <elf.h>
#include <link.h>

#include <cstdint>
#include <cstring>

namespace wyvern {
namespace {

/// Whether `count` pieces of `size` bytes at `offset` lie within `whole`; none of them overflows.
bool within(std::uint64_t whole, std::uint64_t offset, std::uint64_t size,
            std::uint64_t count = 1) {
  return offset <= whole && (size == 0 || count <= (whole - offset) / size);
}

/// The entry at `index` of a table of entries; the bytes need not be aligned.
template <class Entry>
Entry entry_at(std::string_view code, std::uint64_t table, std::uint64_t index) {
  Entry entry;
  std::memcpy(&entry, code.data() + table + index * sizeof(Entry), sizeof(Entry));
  return entry;
}

bool segments_within(std::string_view code, const ElfW(Ehdr) & header) {
  for (std::uint64_t i = 0; i < header.e_phnum; ++i) {
    const auto segment = entry_at<ElfW(Phdr)>(code, header.e_phoff, i);
    if (!within(code.size(), segment.p_offset, segment.p_filesz)) return false;
    if (segment.p_type == PT_LOAD && segment.p_filesz > segment.p_memsz) return false;
  }
  return true;
}

bool sections_within(std::string_view code, const ElfW(Ehdr) & header) {
  for (std::uint64_t i = 0; i < header.e_shnum; ++i) {
    const auto section = entry_at<ElfW(Shdr)>(code, header.e_shoff, i);
    if (section.sh_type == SHT_NOBITS || section.sh_type == SHT_NULL) continue;
    if (!within(code.size(), section.sh_offset, section.sh_size)) return false;
  }
  return true;
}

}  // namespace

std::string shared_object_problem(std::string_view code) {
  constexpr unsigned char kClass = sizeof(void*) == 8 ? ELFCLASS64 : ELFCLASS32;
  if (code.size() < sizeof(ElfW(Ehdr)) || code.substr(0, SELFMAG) != ELFMAG ||
      static_cast<unsigned char>(code[EI_CLASS]) != kClass)
    return "it is no shared object of this machine";
  const auto header = entry_at<ElfW(Ehdr)>(code, 0, 0);
  if (header.e_type != ET_DYN) return "it is no shared object of this machine";
  const bool tables = header.e_phnum > 0 && header.e_phentsize == sizeof(ElfW(Phdr)) &&
                      within(code.size(), header.e_phoff, sizeof(ElfW(Phdr)), header.e_phnum) &&
                      header.e_shnum > 0 && header.e_shentsize == sizeof(ElfW(Shdr)) &&
                      within(code.size(), header.e_shoff, sizeof(ElfW(Shdr)), header.e_shnum);
  if (!tables || !segments_within(code, header) || !sections_within(code, header))
    return "it is cut short";
  return {};
}

}  // namespace wyvern
