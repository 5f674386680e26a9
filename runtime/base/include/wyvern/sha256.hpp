// SHA-256 (FIPS 180-4): names artifacts and guards stored blobs.
#pragma once

#include <string>
#include <string_view>

namespace wyvern {

/// SHA-256 of `bytes` as 64 lower-case hexadecimal digits. Thread-safe.
[[nodiscard]] std::string sha256_hex(std::string_view bytes);

}  // namespace wyvern
