// Text in fewer bytes: the gzip format (RFC 1952), by zlib.
#pragma once

#include <string>
#include <string_view>

namespace wyvern {

/// Deterministic: no time and no name are in it.
std::string gzip(std::string_view text);

/// The text of gzip data; other data is returned unchanged. Throws Error(kBadInput) for data that
/// is damaged or more than `most` bytes long.
std::string gunzip(std::string_view data, std::size_t most = std::size_t{256} << 20);

}  // namespace wyvern
