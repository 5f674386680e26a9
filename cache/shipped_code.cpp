#include "cache/shipped_code.hpp"

#include <wyvern/error.hpp>
#include <wyvern/sha256.hpp>

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "runtime/base/json_text.hpp"
#include "runtime/base/own_folder.hpp"
#include "runtime/base/printable.hpp"

namespace wyvern {
namespace {

namespace fs = std::filesystem;

constexpr int kVersion = 1;
constexpr std::string_view kPythonFolders = "wyvern_kernels_sm";

fs::path path_of(const fs::path& folder, std::string_view target, std::string_view key) {
  return folder / target / fmt::format("{}.kernel", key);
}

/// The row of a file's text, or why it is not a row.
ArtifactRow row_of(std::string_view text) {
  const std::size_t end = text.find('\n');
  const auto head = parse_json(text.substr(0, end));
  if (end == text.npos || !head.is_object() || head.value("row", "") != "kernel")
    throw Error(ErrorKind::kBadInput, "is no kernel");
  if (const int version = head.value("version", 0); version != kVersion)
    throw Error(ErrorKind::kBadInput,
                fmt::format("has version {}; this library reads {}", version, kVersion));
  ArtifactRow row;
  row.code = text.substr(end + 1);
  if (sha256_hex(row.code) != head.value("digest", ""))
    throw Error(ErrorKind::kBadInput, "is damaged: its code has another digest");
  row.key = head.value("key", "");
  row.template_id = head.value("template", "");
  row.target = head.value("target", "");
  row.config = head.value("config", "");
  row.compile_ms = head.value("compile_ms", 0.0);
  row.metadata = head.value("metadata", nlohmann::json::object()).dump();
  return row;
}

}  // namespace

std::vector<fs::path> ShippedCode::default_folders(const fs::path& own) {
  std::vector<fs::path> folders = paths_of_variable("WYVERN_CODE");
  if (fs::path folder = shared_folder("code"); !folder.empty()) folders.push_back(folder);
  // Beside the Python package whose lib or bin `own` is, wherever that is installed.
  std::error_code error;
  std::vector<fs::path> packages;
  const fs::path package = own.parent_path();
  if (fs::is_regular_file(package / "__init__.py", error))
    for (const auto& entry : fs::directory_iterator(package.parent_path(), error))
      if (entry.path().filename().string().starts_with(kPythonFolders))
        packages.push_back(entry.path());
  std::ranges::sort(packages);
  folders.insert(folders.end(), packages.begin(), packages.end());
  return folders;
}

std::shared_ptr<const ShippedCode> ShippedCode::shared() {
  // Never destroyed: a runtime in a static object may ask at the end of the process.
  static const auto* const code = new std::shared_ptr<const ShippedCode>(
      std::make_shared<const ShippedCode>(default_folders()));
  return *code;
}

ShippedCode::ShippedCode(std::vector<fs::path> folders,
                         std::function<void(const std::string&)> report)
    : folders_(std::move(folders)), report_(report ? std::move(report) : warn) {}

std::optional<ArtifactRow> ShippedCode::find(std::string_view target,
                                             std::string_view code_key) const {
  for (const fs::path& folder : folders_) {
    const fs::path path = path_of(folder, target, code_key);
    std::ifstream file(path, std::ios::binary);
    if (!file) continue;
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    try {
      return row_of(text);
    } catch (const std::exception& error) {
      report_(
          fmt::format("{} {}, so this kernel is compiled", printable(path.string()), error.what()));
    }
  }
  return {};
}

void ShippedCode::write(const fs::path& folder, std::string_view code_key, const ArtifactRow& row) {
  const fs::path path = path_of(folder, row.target, code_key);
  const nlohmann::json head = {{"row", "kernel"},
                               {"version", kVersion},
                               {"key", row.key},
                               {"template", row.template_id},
                               {"target", row.target},
                               {"config", row.config},
                               {"compile_ms", row.compile_ms},
                               {"metadata", parse_json(row.metadata)},
                               {"digest", sha256_hex(row.code)}};
  std::error_code error;
  fs::create_directories(path.parent_path(), error);
  const fs::path part = fmt::format("{}.{}.part", path.string(), ::getpid());
  std::ofstream file(part, std::ios::binary);
  file << head.dump() << '\n' << row.code;
  file.close();
  if (file) fs::rename(part, path, error);
  if (!file || error) {
    std::error_code ignored;
    fs::remove(part, ignored);
    throw Error(ErrorKind::kIo, fmt::format("{} cannot be written", printable(path.string())));
  }
}

}  // namespace wyvern
