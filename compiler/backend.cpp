#include "compiler/backend.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>

namespace wyvern {
namespace detail {

std::span<const Backend* const> backends() {
  static const std::array<const Backend*, 2> all{&cpu_backend(), &cuda_backend()};
  return all;
}

const Backend& backend(DeviceKind kind) {
  for (const Backend* each : backends())
    if (each->kind() == kind) return *each;
  throw Error(ErrorKind::kUnavailable,
              fmt::format("this build compiles nothing for {}", to_string(kind)));
}

Code compile_source(const std::string& source, const std::string& label, const Target& target,
                    Output output) {
  return backend(target.device).compile(source, label, target, output);
}

}  // namespace detail

std::vector<DeviceKind> device_kinds() {
  std::vector<DeviceKind> kinds;
  for (const detail::Backend* each : detail::backends()) kinds.push_back(each->kind());
  return kinds;
}

std::string Target::name() const { return detail::backend(device).target_name(*this); }

Target usual_target(DeviceKind device) { return detail::backend(device).usual_target(); }

Target parse_target(std::string_view text) {
  std::vector<std::string> names;
  for (const detail::Backend* each : detail::backends()) {
    if (const std::optional<Target> target = each->find_target(text)) return *target;
    names.push_back(each->target_names(text));
  }
  throw Error(ErrorKind::kBadInput, fmt::format("target '{}' is not known; it must be {}", text,
                                                fmt::join(names, " or ")));
}

std::string compiler_problem(DeviceKind device) {
  try {
    detail::backend(device).open();
    return {};
  } catch (const Error& error) {
    return error.what();
  }
}

std::string compiler_version(DeviceKind device) { return detail::backend(device).version(); }

std::string resources_text(const Target& target, const Resources& resources,
                           std::int64_t block_bytes) {
  return detail::backend(target.device).resources_text(resources, block_bytes);
}

}  // namespace wyvern
