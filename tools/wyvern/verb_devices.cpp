#include <wyvern/device.hpp>
#include <wyvern/error.hpp>

#include "compiler/compiler.hpp"
#include "tools/wyvern/command.hpp"
#include "tools/wyvern/describe.hpp"
#include "tools/wyvern/output.hpp"

namespace wyvern::cli {
namespace {

/// The compiler's version, or why there is none.
Json compiler_json(DeviceKind kind) {
  std::string problem = compiler_problem(kind);
  std::string version;
  if (problem.empty()) {
    try {
      version = compiler_version(kind);
    } catch (const Error& error) {
      problem = error.what();
    }
  }
  return {{"kind", to_string(kind)},
          {"version", version},
          {"usable", problem.empty()},
          {"problem", problem}};
}

int list(bool json) {
  Json document{{"devices", Json::array()}, {"compilers", Json::array()}};
  for (const DeviceInfo& device : list_devices()) document["devices"].push_back(to_json(device));
  for (const DeviceKind kind : device_kinds()) document["compilers"].push_back(compiler_json(kind));
  if (json) {
    print_document(document);
    return kDone;
  }
  Table devices({"device", "model", "arch", "units", "memory", "driver or compiler"});
  for (const Json& d : document["devices"])
    if (d["usable"].get<bool>())
      devices.row({d["name"], d["model"], d["arch"], std::to_string(d["units"].get<int>()),
                   bytes_text(d["memory_bytes"].get<double>()), d["driver"]});
  put(devices.text());
  for (const Json& d : document["devices"])
    if (!d["usable"].get<bool>())
      say("{} cannot be used: {}", d["name"].get<std::string>(), d["problem"].get<std::string>());
  for (const Json& c : document["compilers"])
    say("{} compiler: {}", c["kind"].get<std::string>(),
        c[c["usable"].get<bool>() ? "version" : "problem"].get<std::string>());
  return kDone;
}

}  // namespace

void add_devices(Command& command) {
  command.verb("devices", "the devices and compilers of this machine", list);
}

}  // namespace wyvern::cli
