#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <fstream>
#include <map>
#include <sstream>

#include "compiler/compiler.hpp"

namespace wyvern {
namespace {

/// Scratch of one CPU block. Every worker thread keeps this much, and past the second-level cache
/// of current cores (1 to 2 MiB) a block only streams, so twice the larger is beyond any good
/// config.
constexpr std::int64_t kCpuScratch = std::int64_t{4} << 20;

/// The first processor's fields of /proc/cpuinfo.
std::map<std::string, std::string> first_processor() {
  std::map<std::string, std::string> fields;
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line) && !line.empty();) {
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const std::size_t name_end = line.find_last_not_of(" \t", colon - 1);
    const std::size_t value = std::min(line.find_first_not_of(" \t", colon + 1), line.size());
    fields.emplace(line.substr(0, name_end + 1), line.substr(value));
  }
  return fields;
}

/// Whether a flag of /proc/cpuinfo is an instruction set that a compiler uses; the others are about
/// power, virtualization and mitigations, and change with microcode and kernel.
bool is_instruction_set(std::string_view flag) {
  constexpr std::array<std::string_view, 24> kPrefixes{
      "sse",   "pni",  "avx",    "amx",  "fma",           "f16c",       "bmi",    "abm",
      "adx",   "aes",  "pclmul", "sha",  "vaes",          "vpclmulqdq", "gfni",   "popcnt",
      "movbe", "lahf", "movdir", "cx16", "3dnowprefetch", "clwb",       "prfchw", "xop"};
  return flag.starts_with("ssse3") ||
         std::any_of(kPrefixes.begin(), kPrefixes.end(),
                     [flag](std::string_view prefix) { return flag.starts_with(prefix); });
}

/// Sorted, so that the identity does not depend on the kernel's order.
std::string instruction_sets(const std::string& flags, bool every) {
  std::vector<std::string> names;
  std::istringstream words(flags);
  for (std::string word; words >> word;)
    if (every || is_instruction_set(word)) names.push_back(word);
  std::sort(names.begin(), names.end());
  return fmt::format("{}", fmt::join(names, " "));
}

bool has_word(const std::string& words, std::string_view word) {
  std::istringstream stream(words);
  for (std::string each; stream >> each;)
    if (each == word) return true;
  return false;
}

std::string lower_joined(const std::map<std::string, std::string>& fields,
                         std::initializer_list<const char*> names) {
  std::string text;
  for (const char* name : names) {
    const auto field = fields.find(name);
    if (field == fields.end()) continue;
    if (!text.empty()) text += '-';
    for (const char c : field->second)
      if (std::isalnum(static_cast<unsigned char>(c)) != 0)
        text += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return text;
}

Target describe_host() {
  const std::map<std::string, std::string> cpu = first_processor();
  Target target;
  target.device = DeviceKind::cpu;
  target.limits.shared_bytes = kCpuScratch;
  target.limits.vector_bits = 128;
#if defined(__x86_64__)
  target.arch = lower_joined(cpu, {"vendor_id", "cpu family", "model"});
  const auto flags = cpu.find("flags");
  if (flags != cpu.end()) target.features = instruction_sets(flags->second, /*every=*/false);
  if (has_word(target.features, "avx")) target.limits.vector_bits = 256;
  if (has_word(target.features, "avx512f")) target.limits.vector_bits = 512;
#else
  target.arch = lower_joined(cpu, {"CPU implementer", "CPU part", "CPU variant"});
  const auto flags = cpu.find("Features");
  if (flags != cpu.end()) target.features = instruction_sets(flags->second, /*every=*/true);
#endif
  if (target.arch.empty()) target.arch = "unknown";
  return target;
}

}  // namespace

const Target& host_target() {
  // Never destroyed: the last threads may compile while the process ends.
  static const Target& target = *new Target(describe_host());
  return target;
}

}  // namespace wyvern
