#include "autotune/gzip.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>
#include <zlib.h>

#include <array>

namespace wyvern {
namespace {

constexpr int kGzipFormat = 15 + 16;  // the largest window, with gzip's header
constexpr int kMemoryLevel = 8;       // zlib's own default

/// zlib's input, which it does not write.
Bytef* input(std::string_view text) {
  return const_cast<Bytef*>(reinterpret_cast<const Bytef*>(text.data()));
}

}  // namespace

std::string gzip(std::string_view text) {
  z_stream stream{};
  if (deflateInit2(&stream, Z_BEST_COMPRESSION, Z_DEFLATED, kGzipFormat, kMemoryLevel,
                   Z_DEFAULT_STRATEGY) != Z_OK)
    throw Error(ErrorKind::kUnavailable, "zlib cannot compress: it lacks memory");
  std::string data(deflateBound(&stream, static_cast<uLong>(text.size())), '\0');
  stream.next_in = input(text);
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(data.data());
  stream.avail_out = static_cast<uInt>(data.size());
  const int status = deflate(&stream, Z_FINISH);
  data.resize(stream.total_out);
  deflateEnd(&stream);
  if (status != Z_STREAM_END)
    throw Error(ErrorKind::kUnavailable, fmt::format("zlib cannot compress: error {}", status));
  return data;
}

std::string gunzip(std::string_view data, std::size_t most) {
  if (!data.starts_with("\x1f\x8b")) return std::string(data);
  z_stream stream{};
  if (inflateInit2(&stream, kGzipFormat) != Z_OK)
    throw Error(ErrorKind::kUnavailable, "zlib cannot decompress: it lacks memory");
  stream.next_in = input(data);
  stream.avail_in = static_cast<uInt>(data.size());
  std::string text;
  std::array<char, 1 << 16> piece{};
  int status = Z_OK;
  while (status == Z_OK && text.size() <= most) {
    stream.next_out = reinterpret_cast<Bytef*>(piece.data());
    stream.avail_out = static_cast<uInt>(piece.size());
    status = inflate(&stream, Z_NO_FLUSH);
    text.append(piece.data(), piece.size() - stream.avail_out);
  }
  inflateEnd(&stream);
  if (status != Z_STREAM_END)
    throw Error(ErrorKind::kBadInput,
                text.size() > most ? fmt::format("the gzip data holds more than {} bytes", most)
                                   : "the gzip data is damaged or ends too early");
  return text;
}

}  // namespace wyvern
