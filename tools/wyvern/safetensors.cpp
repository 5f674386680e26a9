#include "tools/wyvern/safetensors.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

namespace wyvern::cli {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

constexpr std::uint64_t kLongestHeader = 100'000'000;  // the limit of the format's own reader

constexpr std::array<std::pair<std::string_view, DType>, 5> kDTypeNames{{{"F32", DType::fp32},
                                                                         {"F16", DType::fp16},
                                                                         {"BF16", DType::bf16},
                                                                         {"I32", DType::int32},
                                                                         {"I64", DType::int64}}};

std::string_view name_of(DType type) {
  for (const auto& [name, dtype] : kDTypeNames)
    if (dtype == type) return name;
  return "?";
}

/// Bytes of a tensor, or nothing when a dimension is negative or the size passes 2^62.
std::optional<std::uint64_t> byte_size(DType dtype, const std::vector<std::int64_t>& shape) {
  constexpr std::uint64_t kMost = std::uint64_t{1} << 62;
  std::uint64_t bytes = size_of(dtype);
  bool empty = false;
  for (const std::int64_t dim : shape) {
    if (dim < 0) return {};
    if (dim == 0) {
      empty = true;
    } else if (bytes > kMost / static_cast<std::uint64_t>(dim)) {
      return {};
    } else {
      bytes *= static_cast<std::uint64_t>(dim);
    }
  }
  return empty ? 0 : bytes;
}

/// A tensor's entry in the header.
struct Entry {
  std::string name;
  DType dtype;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, end = 0;  ///< bytes after the header
};

class Reader {
 public:
  explicit Reader(const std::filesystem::path& file) : path_(file.string()) {
    std::error_code error;
    if (std::filesystem::is_directory(file, error))
      throw Error(ErrorKind::kIo, fmt::format("cannot read '{}': it is a directory", path_));
    stream_.open(file, std::ios::binary);
    if (!stream_)
      throw Error(ErrorKind::kIo, fmt::format("cannot read '{}': {}", path_, std::strerror(errno)));
    stream_.seekg(0, std::ios::end);
    const std::streamoff size = stream_.tellg();
    if (size < 0) throw Error(ErrorKind::kIo, fmt::format("cannot read '{}'", path_));
    size_ = static_cast<std::uint64_t>(size);
    stream_.seekg(0);
  }

  Tensors read() {
    const std::vector<Entry> entries = read_header();
    check_layout(entries);
    Tensors tensors;
    for (const Entry& entry : entries) {
      HostTensor tensor = HostTensor::make(entry.dtype, entry.shape);
      stream_.seekg(static_cast<std::streamoff>(data_start_ + entry.begin));
      read_bytes(tensor.data.get(), tensor.bytes());
      tensors.emplace(entry.name, std::move(tensor));
    }
    return tensors;
  }

 private:
  [[noreturn]] void reject(const std::string& reason) const {
    throw Error(ErrorKind::kBadInput,
                fmt::format("'{}' is not a valid safetensors file: {}", path_, reason));
  }

  void read_bytes(void* to, std::size_t bytes) {
    stream_.read(static_cast<char*>(to), static_cast<std::streamsize>(bytes));
    if (!stream_) throw Error(ErrorKind::kIo, fmt::format("cannot read '{}' to its end", path_));
  }

  std::vector<Entry> read_header() {
    if (size_ < 8) reject(fmt::format("it has {} bytes; the header's length alone takes 8", size_));
    std::uint64_t length = 0;
    read_bytes(&length, 8);
    if (length > kLongestHeader || length > size_ - 8)
      reject(
          fmt::format("its header claims {} bytes; the file has {} after the length, and the "
                      "limit is {}",
                      length, size_ - 8, kLongestHeader));
    std::string text(length, '\0');
    read_bytes(text.data(), text.size());
    data_start_ = 8 + length;

    std::set<std::string> names;
    std::string duplicate;
    const auto watch = [&](int depth, nlohmann::json::parse_event_t event, nlohmann::json& parsed) {
      if (event == nlohmann::json::parse_event_t::key && depth == 1 &&
          !names.insert(parsed.get<std::string>()).second)
        duplicate = parsed.get<std::string>();
      return depth <= 8;  // deeper values are dropped, and what they belonged to is rejected
    };
    const nlohmann::json header = nlohmann::json::parse(text, watch, /*allow_exceptions=*/false);
    if (header.is_discarded() || !header.is_object()) reject("its header is not a JSON object");
    if (!duplicate.empty()) reject(fmt::format("it holds the tensor '{}' twice", duplicate));

    std::vector<Entry> entries;
    for (const auto& [name, value] : header.items())
      if (name != "__metadata__") entries.push_back(parse_entry(name, value));
    return entries;
  }

  Entry parse_entry(const std::string& name, const nlohmann::json& value) const {
    Entry entry{.name = name, .dtype = DType::fp32, .shape = {}};
    if (!value.is_object() || !value.contains("dtype") || !value.contains("shape") ||
        !value.contains("data_offsets"))
      reject(fmt::format("tensor '{}' needs dtype, shape and data_offsets", name));
    const auto& dtype = value["dtype"];
    const auto known = std::find_if(kDTypeNames.begin(), kDTypeNames.end(), [&](const auto& pair) {
      return dtype.is_string() && dtype.get_ref<const std::string&>() == pair.first;
    });
    if (known == kDTypeNames.end())
      reject(
          fmt::format("the dtype of tensor '{}' is {}; it must be one of F32, F16, BF16, I32, I64",
                      name, printable(dtype)));
    entry.dtype = known->second;

    const auto& shape = value["shape"];
    if (!shape.is_array() || shape.size() > 16 || !all_counts(shape))
      reject(fmt::format("the shape of tensor '{}' is {}; it must be a list of at most 16 sizes",
                         name, printable(shape)));
    entry.shape = shape.get<std::vector<std::int64_t>>();

    const auto& offsets = value["data_offsets"];
    if (!offsets.is_array() || offsets.size() != 2 || !all_counts(offsets))
      reject(fmt::format("the data_offsets of tensor '{}' are {}; they must be two byte offsets",
                         name, printable(offsets)));
    entry.begin = offsets[0].get<std::uint64_t>();
    entry.end = offsets[1].get<std::uint64_t>();
    const auto bytes = byte_size(entry.dtype, entry.shape);
    if (!bytes || entry.end < entry.begin || entry.end - entry.begin != *bytes)
      reject(fmt::format("tensor '{}' of {} {} does not fill its bytes {} to {}", name,
                         to_string(entry.dtype), shape_text(entry.shape), entry.begin, entry.end));
    return entry;
  }

  /// A value of the header, cut short for a message.
  static std::string printable(const nlohmann::json& value) {
    const std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
    return text.size() <= 60 ? text : text.substr(0, 57) + "...";
  }

  /// Whether all are integers from 0 to 2^63 - 1.
  static bool all_counts(const nlohmann::json& list) {
    return std::all_of(list.begin(), list.end(), [](const nlohmann::json& number) {
      return number.is_number_unsigned() && number.get<std::uint64_t>() <= INT64_MAX;
    });
  }

  /// The byte ranges must follow each other from the first byte to the last.
  void check_layout(std::vector<Entry> entries) const {
    std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
      return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    });
    std::uint64_t at = 0;
    for (const Entry& entry : entries) {
      if (entry.begin != at)
        reject(
            fmt::format("tensor '{}' starts at byte {} where byte {} is next, so the data "
                        "overlap or have a hole",
                        entry.name, entry.begin, at));
      at = entry.end;
    }
    if (at != size_ - data_start_)
      reject(fmt::format("its tensors take {} bytes, but {} follow the header", at,
                         size_ - data_start_));
  }

  std::string path_;
  std::ifstream stream_;
  std::uint64_t size_ = 0;
  std::uint64_t data_start_ = 0;
};

}  // namespace

HostTensor HostTensor::make(DType dtype, std::vector<std::int64_t> shape) {
  constexpr std::uint64_t kAlignment = 64;
  const auto bytes = byte_size(dtype, shape);
  // Memory is promised freely and taken on first touch, so the machine's size is asked here.
  const std::uint64_t most = static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) *
                             static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  void* memory = nullptr;
  if (bytes && *bytes <= most)
    memory = std::aligned_alloc(kAlignment, (*bytes / kAlignment + 1) * kAlignment);
  if (memory == nullptr)
    throw Error(ErrorKind::kBadInput,
                fmt::format("a tensor of shape {} does not fit in memory", shape_text(shape)));
  return {dtype, std::move(shape), std::shared_ptr<void>(memory, std::free)};
}

std::int64_t HostTensor::elements() const noexcept {
  std::int64_t count = 1;
  for (const std::int64_t dim : shape) count *= dim;
  return count;
}

TensorView HostTensor::view() const {
  TensorView view;
  view.data = data.get();
  view.dtype = dtype;
  view.rank = static_cast<int>(shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    view.shape[i] = shape[i];
    view.strides[i] = stride;
    stride *= shape[i];
  }
  return view;
}

void store(HostTensor& tensor, std::int64_t index, double value) {
  const auto rounded = static_cast<float>(value);
  switch (tensor.dtype) {
    case DType::fp32: static_cast<float*>(tensor.data.get())[index] = rounded; break;
    case DType::bf16:
      static_cast<std::uint16_t*>(tensor.data.get())[index] = float_to_bf16(rounded);
      break;
    case DType::fp16:
      static_cast<std::uint16_t*>(tensor.data.get())[index] = float_to_fp16(rounded);
      break;
    case DType::int32:
    case DType::int64: break;  // not made from real numbers
  }
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ","));
}

Tensors read_safetensors(const std::filesystem::path& file) { return Reader(file).read(); }

void write_safetensors(const std::filesystem::path& file, const Tensors& tensors) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  std::size_t at = 0;
  for (const auto& [name, tensor] : tensors) {
    header[name] = {{"dtype", name_of(tensor.dtype)},
                    {"shape", tensor.shape},
                    {"data_offsets", {at, at + tensor.bytes()}}};
    at += tensor.bytes();
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');  // the data start at a multiple of 8

  std::ofstream stream(file, std::ios::binary | std::ios::trunc);
  const std::uint64_t length = text.size();
  stream.write(reinterpret_cast<const char*>(&length), sizeof length);
  stream.write(text.data(), static_cast<std::streamsize>(text.size()));
  for (const auto& [name, tensor] : tensors)
    stream.write(static_cast<const char*>(tensor.data.get()),
                 static_cast<std::streamsize>(tensor.bytes()));
  stream.close();
  if (!stream)
    throw Error(ErrorKind::kIo,
                fmt::format("cannot write '{}': {}", file.string(), std::strerror(errno)));
}

}  // namespace wyvern::cli
