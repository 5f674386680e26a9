#include "tools/wyvern/safetensors.hpp"

#include <wyvern/error.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "runtime/devices/cpu/memory.hpp"
#include "tools/wyvern/file.hpp"

namespace wyvern::cli {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

constexpr std::uint64_t kLongestHeader = 100'000'000;  // the limit of the format's own reader

constexpr std::array<std::pair<std::string_view, DType>, 8> kDTypeNames{
    {{"F32", DType::fp32},
     {"F16", DType::fp16},
     {"BF16", DType::bf16},
     {"I32", DType::int32},
     {"I64", DType::int64},
     {"BOOL", DType::boolean},
     {"F8_E4M3", DType::float8_e4m3},
     {"F8_E5M2", DType::float8_e5m2}}};

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
  std::optional<DType> dtype;  ///< none: another dtype, so the tensor is left out
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, end = 0;  ///< bytes after the header
};

/// Stops at values nested deeper than a header's can be, and finds a name that comes twice in one
/// object, where readers differ on which value they use.
class HeaderWatch final : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::optional<std::string> duplicate;        ///< a tensor's name that comes twice
  std::optional<std::string> inner_duplicate;  ///< another name that does
  bool too_deep = false;

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override { return begin(); }
  bool start_array(std::size_t) override { return begin(); }
  bool end_object() override { return end(); }
  bool end_array() override { return end(); }
  bool key(string_t& name) override {
    if (!names_.back().insert(name).second)
      (names_.size() == 1 ? duplicate : inner_duplicate) = name;
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const nlohmann::json::exception&) override {
    return false;
  }

 private:
  static constexpr std::size_t kDeepest = 8;

  bool begin() {
    names_.emplace_back();
    too_deep = names_.size() > kDeepest;
    return !too_deep;
  }
  bool end() {
    names_.pop_back();
    return true;
  }

  std::vector<std::set<std::string>> names_;  ///< of the objects and lists that have not ended
};

class Reader {
 public:
  Reader(const std::filesystem::path& file, const std::function<bool(std::string_view)>& is_used)
      : file_(file.string()), is_used_(is_used) {}

  Tensors read() {
    const std::vector<Entry> entries = read_header();
    check_layout(entries);
    Tensors tensors;
    for (const Entry& entry : entries) {
      if (!entry.dtype) continue;
      HostTensor tensor = HostTensor::make(*entry.dtype, entry.shape);
      file_.read(data_start_ + entry.begin, tensor.data.get(), tensor.bytes());
      tensors.emplace(entry.name, std::move(tensor));
    }
    return tensors;
  }

 private:
  [[noreturn]] void reject(const std::string& reason) const {
    throw Error(ErrorKind::kBadInput,
                fmt::format("'{}' is not a valid safetensors file: {}", file_.path(), reason));
  }

  std::vector<Entry> read_header() {
    if (file_.bytes() < 8)
      reject(fmt::format("it has {} bytes; the header's length alone takes 8", file_.bytes()));
    std::uint64_t length = 0;
    file_.read(0, &length, 8);
    if (length > kLongestHeader || length > file_.bytes() - 8)
      reject(
          fmt::format("its header claims {} bytes; the file has {} after the length, and the "
                      "limit is {}",
                      length, file_.bytes() - 8, kLongestHeader));
    std::string text(length, '\0');
    file_.read(8, text.data(), text.size());
    data_start_ = 8 + length;

    // First a pass that keeps nothing, for faults that the parsed header no longer shows. The
    // library's parser with a callback would do both at once, but goes over all tensors again after
    // each one.
    HeaderWatch watch;
    if (!nlohmann::json::sax_parse(text, &watch))
      reject(watch.too_deep ? "its header is nested deeper than the header of any"
                            : "its header is not a JSON object");
    if (watch.duplicate) reject(fmt::format("it holds the tensor '{}' twice", *watch.duplicate));
    if (watch.inner_duplicate)
      reject(fmt::format("an object of its header holds '{}' twice", *watch.inner_duplicate));
    const nlohmann::json header = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (!header.is_object()) reject("its header is not a JSON object");

    std::vector<Entry> entries;
    for (const auto& [name, value] : header.items())
      if (name != "__metadata__") entries.push_back(parse_entry(name, value));
    return entries;
  }

  Entry parse_entry(const std::string& name, const nlohmann::json& value) const {
    Entry entry{.name = name, .dtype = {}, .shape = {}};
    if (!value.is_object() || !value.contains("dtype") || !value.contains("shape") ||
        !value.contains("data_offsets"))
      reject(fmt::format("tensor '{}' needs dtype, shape and data_offsets", name));
    const auto& dtype = value["dtype"];
    const auto known = std::find_if(kDTypeNames.begin(), kDTypeNames.end(), [&](const auto& pair) {
      return dtype.is_string() && dtype.get_ref<const std::string&>() == pair.first;
    });
    if (known != kDTypeNames.end())
      entry.dtype = known->second;
    else if (!dtype.is_string() || is_used_(name))
      reject(
          fmt::format("the dtype of tensor '{}' is {}; it must be one of F32, F16, BF16, I32, I64",
                      name, printable(dtype)));

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
    const auto bytes = byte_size(entry.dtype.value_or(DType::fp32), entry.shape);
    if (!bytes || entry.end < entry.begin || (entry.dtype && entry.end - entry.begin != *bytes))
      reject(fmt::format("tensor '{}' of {} {} does not fill its bytes {} to {}", name,
                         printable(dtype), shape_text(entry.shape), entry.begin, entry.end));
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
    if (at != file_.bytes() - data_start_)
      reject(fmt::format("its tensors take {} bytes, but {} follow the header", at,
                         file_.bytes() - data_start_));
  }

  InputFile file_;
  const std::function<bool(std::string_view)>& is_used_;
  std::uint64_t data_start_ = 0;
};

}  // namespace

HostTensor HostTensor::make(DType dtype, std::vector<std::int64_t> shape) {
  constexpr std::uint64_t kAlignment = 64;
  // Linux overcommits, and touching pages may run out of memory, so the memory of all tensors is
  // checked before the first is read.
  static const std::uint64_t most = available_memory();
  static std::atomic<std::uint64_t> taken{0};
  const std::optional<std::uint64_t> bytes = byte_size(dtype, shape);
  void* memory = nullptr;
  if (bytes && *bytes <= most && taken + *bytes <= most)
    memory = std::aligned_alloc(kAlignment, (*bytes / kAlignment + 1) * kAlignment);
  if (memory == nullptr)
    throw Error(ErrorKind::kBadInput,
                fmt::format("a tensor of shape {} does not fit in memory", shape_text(shape)));
  taken += *bytes;
  const auto give_back = [bytes = *bytes](void* pointer) {
    std::free(pointer);
    taken -= bytes;
  };
  return {dtype, std::move(shape), std::shared_ptr<void>(memory, give_back)};
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
    case DType::float8_e4m3:
      static_cast<std::uint8_t*>(tensor.data.get())[index] = float_to_e4m3(rounded);
      break;
    case DType::float8_e5m2:
      static_cast<std::uint8_t*>(tensor.data.get())[index] = float_to_e5m2(rounded);
      break;
    case DType::int32:
    case DType::int64:
    case DType::boolean: break;  // not made from real numbers
  }
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ","));
}

Tensors read_safetensors(const std::filesystem::path& file,
                         const std::function<bool(std::string_view)>& is_used) {
  return Reader(file, is_used).read();
}

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

  const std::uint64_t length = text.size();
  std::vector<std::string_view> pieces{{reinterpret_cast<const char*>(&length), sizeof length},
                                       text};
  for (const auto& [name, tensor] : tensors)
    pieces.emplace_back(static_cast<const char*>(tensor.data.get()), tensor.bytes());
  write_file(file.string(), pieces);
}

}  // namespace wyvern::cli
