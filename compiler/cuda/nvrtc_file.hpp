// Finds the NVRTC that a process should open and reads its build from its file: opening it takes
// milliseconds, most of them for the relocation of its 9 MB of pointers, and a process whose
// kernels are all cached never compiles.
#pragma once

#include <filesystem>
#include <optional>
#include <span>
#include <string>

namespace wyvern::detail {

/// Newest first.
inline constexpr const char* kNvrtcNames[] = {"libnvrtc.so.13", "libnvrtc.so.12"};

struct NvrtcFile {
  std::filesystem::path path;
  int major = 0;         ///< by its name
  std::string build_id;  ///< build_id(path)
};

/// The ID that the linker gave a program or library (`readelf -n`), in hexadecimal. Empty if the
/// file has none, is not such a file or cannot be read.
std::string build_id(const std::filesystem::path& path);

/// The newest of kNvrtcNames in the folders, the first among equals. Nothing if this process has
/// already opened NVRTC, or if the loader finds a newer one by its name, which is open from then
/// on.
std::optional<NvrtcFile> find_nvrtc(std::span<const std::filesystem::path> folders);

/// find_nvrtc() in the folders of LD_LIBRARY_PATH and in the CUDA toolkit's, which is not always
/// among the loader's. Searched once a process.
const std::optional<NvrtcFile>& nvrtc_file();

}  // namespace wyvern::detail
