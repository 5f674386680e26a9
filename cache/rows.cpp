#include "cache/rows.hpp"

#include <wyvern/sha256.hpp>

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <system_error>
#include <type_traits>

#include "runtime/base/json_text.hpp"

namespace wyvern {
namespace {

using nlohmann::json;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// JSON has neither NaN nor infinity: they are null and "inf", "-inf".
json number(double value) {
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return std::isnan(value) ? json(nullptr) : json(value);
}

double real(const json& value) {
  if (value.is_number()) return value.get<double>();
  if (value == "inf") return std::numeric_limits<double>::infinity();
  if (value == "-inf") return -std::numeric_limits<double>::infinity();
  return kNaN;
}

/// A stored JSON text as JSON, or as the text that it is.
json embedded(const std::string& text) {
  json value = parse_json(text);
  return value.is_discarded() ? json(text) : value;
}

// A row's members, each named once for both directions: `Io` writes them into a line or reads them.

class Writer {
 public:
  void text(const char* name, const std::string& value) {
    if (!value.empty()) line[name] = value;
  }
  void integer(const char* name, std::int64_t value) {
    if (value != 0) line[name] = value;
  }
  void real(const char* name, double value) {
    if (value != 0) line[name] = number(value);
  }
  void raw(const char* name, const std::string& value) {
    if (!value.empty()) line[name] = embedded(value);
  }
  template <class T>
  void list(const char* name, const std::vector<T>& values) {
    if (values.empty()) return;
    json& array = line[name] = json::array();
    for (const T value : values) {
      if constexpr (std::is_floating_point_v<T>)
        array.push_back(number(value));
      else
        array.push_back(value);
    }
  }
  json line = json::object();
};

class Reader {
 public:
  explicit Reader(const json& line) : line_(line) {}

  void text(const char* name, std::string& value) const {
    if (const json* found = find(name)) value = found->get<std::string>();
  }
  void integer(const char* name, std::int64_t& value) const {
    if (const json* found = find(name)) value = found->get<std::int64_t>();
  }
  void real(const char* name, double& value) const {
    if (const json* found = find(name)) value = wyvern::real(*found);
  }
  void raw(const char* name, std::string& value) const {
    if (const json* found = find(name))
      value = found->is_string() ? found->get<std::string>() : found->dump();
  }
  template <class T>
  void list(const char* name, std::vector<T>& values) const {
    const json* found = find(name);
    if (found == nullptr) return;
    values.clear();
    for (const json& value : *found) {
      if constexpr (std::is_floating_point_v<T>)
        values.push_back(wyvern::real(value));
      else
        values.push_back(value.get<T>());
    }
  }

 private:
  const json* find(const char* name) const {
    const auto at = line_.find(name);
    return at == line_.end() ? nullptr : &*at;
  }
  const json& line_;
};

template <class Io, class Row>
void setting_members(Io& io, Row& row) {
  io.integer("B", row.B);
  io.integer("T", row.T);
  io.integer("N", row.N);
  io.list("lengths", row.lengths);
  io.text("host", row.host);
  io.text("unit", row.unit);
  io.real("clock_mhz", row.clock_mhz);
  io.real("memory_clock_mhz", row.memory_clock_mhz);
  io.real("power_limit_w", row.power_limit_w);
  io.text("regime", row.regime);
}

template <class Io, class Row>
void more_of_measurement(Io& io, Row& row) {
  setting_members(io, row.setting);
  io.list("clocks_mhz", row.clocks_mhz);
}

template <class Io, class Row>
void more_of_winner(Io& io, Row& row) {
  setting_members(io, row.setting);
  io.raw("problem", row.problem);
  io.list("samples_us", row.samples_us);
  io.list("default_samples_us", row.default_samples_us);
  io.list("clocks_mhz", row.clocks_mhz);
}

template <class Io, class Row>
void measurement_members(Io& io, Row& row) {
  io.text("device", row.device);
  io.text("problem", row.problem);
  io.text("template", row.template_id);
  io.text("config", row.config);
  io.text("artifact", row.artifact_key);
  io.text("driver", row.driver);
  io.text("status", row.status);
  io.text("detail", row.detail);
  io.list("samples_us", row.samples_us);
  io.real("median_us", row.median_us);
  io.real("error", row.error);
  io.text("created", row.created);
  more_of_measurement(io, row);
}

template <class Io, class Row>
void winner_members(Io& io, Row& row) {
  io.text("device", row.device);
  io.text("family", row.family);
  io.integer("tokens", row.tokens);
  io.integer("sequences", row.sequences);
  io.raw("plan", row.plan);
  io.real("median_us", row.median_us);
  io.real("default_us", row.default_us);
  io.real("ratio", row.ratio);
  io.real("floor_us", row.floor_us);
  io.text("driver", row.driver);
  io.integer("round", row.round);
  io.text("created", row.created);
  more_of_winner(io, row);
}

std::string text_of(const json& line) {
  return line.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string finished(json line, const char* kind) {
  line["row"] = kind;
  return text_of(line);
}

/// A column's JSON object; an empty one where the text is empty or no object.
json object_of(const std::string& text) {
  if (text == "{}") return json::object();
  json parsed = parse_json(text);
  return parsed.is_object() ? parsed : json::object();
}

/// Requires a member without which a row is useless.
void require(bool said, std::string_view what, std::string& problem) {
  if (!said && problem.empty()) problem = fmt::format("it has no {}", what);
}

}  // namespace

std::string to_line(const MeasurementRow& row) {
  Writer writer;
  measurement_members(writer, row);
  return finished(std::move(writer.line), "measurement");
}

std::string to_line(const WinnerRow& row) {
  Writer writer;
  winner_members(writer, row);
  return finished(std::move(writer.line), "winner");
}

std::optional<TextRow> from_line(std::string_view line, std::string& problem) {
  problem.clear();
  if (is_too_deep(line)) {
    problem = fmt::format("its lists and objects are nested more than {} deep", kDeepestJson);
    return {};
  }
  const json parsed = json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object()) {
    problem = "it is no JSON object";
    return {};
  }
  try {
    const Reader reader(parsed);
    const std::string kind = parsed.value("row", "");
    if (kind == "measurement") {
      MeasurementRow row;
      measurement_members(reader, row);
      require(!row.device.empty(), "device", problem);
      require(!row.problem.empty(), "problem", problem);
      require(!row.template_id.empty(), "template", problem);
      require(!row.status.empty(), "status", problem);
      if (problem.empty()) return row;
    } else if (kind == "winner") {
      WinnerRow row;
      winner_members(reader, row);
      require(!row.device.empty(), "device", problem);
      require(!row.family.empty(), "family", problem);
      require(embedded(row.plan).is_array(), "plan", problem);
      require(row.round >= 0 && row.round <= kMostRounds,
              fmt::format("round from 0 to {}", kMostRounds), problem);
      if (problem.empty()) return row;
    } else {
      problem = fmt::format("its row is '{}' and neither winner nor measurement", kind);
    }
  } catch (const json::exception& error) {
    problem = fmt::format("a member has another type than it must ({})", error.what());
  }
  return {};
}

std::string digest_of(const MeasurementRow& row) { return sha256_hex(to_line(row)); }
std::string digest_of(const WinnerRow& row) { return sha256_hex(to_line(row)); }

double paired_ratio(const WinnerRow& row) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < std::min(row.samples_us.size(), row.default_samples_us.size()); ++i)
    if (row.samples_us[i] > 0 && row.default_samples_us[i] > 0)
      ratios.push_back(row.samples_us[i] / row.default_samples_us[i]);
  if (ratios.empty()) return 0;
  std::sort(ratios.begin(), ratios.end());
  const std::size_t middle = ratios.size() / 2;
  return ratios.size() % 2 == 1 ? ratios[middle] : (ratios[middle - 1] + ratios[middle]) / 2;
}

double rank_of(const WinnerRow& row) {
  if (row.ratio > 0) return row.ratio;
  return row.median_us > 0 && row.default_us > 0 ? row.median_us / row.default_us : 1;
}

std::string samples_text(const MeasurementRow& row) {
  json list = json::array();
  for (const double sample : row.samples_us) list.push_back(number(sample));
  return list.dump();
}

std::string more_text(const MeasurementRow& row) {
  Writer writer;
  more_of_measurement(writer, row);
  return text_of(writer.line);
}

std::string more_text(const WinnerRow& row) {
  Writer writer;
  more_of_winner(writer, row);
  return text_of(writer.line);
}

void read_samples(const std::string& text, MeasurementRow& row) {
  if (text == "[]") return;
  const json list = parse_json(text);
  if (!list.is_array()) return;
  for (const json& sample : list) row.samples_us.push_back(real(sample));
}

void read_more(const std::string& text, MeasurementRow& row) {
  const json more = object_of(text);
  MeasurementRow read = row;
  try {
    const Reader reader(more);
    more_of_measurement(reader, read);
    row = std::move(read);
  } catch (const json::exception&) {  // the row as it is
  }
}

void read_more(const std::string& text, WinnerRow& row) {
  const json more = object_of(text);
  WinnerRow read = row;
  try {
    const Reader reader(more);
    more_of_winner(reader, read);
    row = std::move(read);
  } catch (const json::exception&) {  // the row as it is
  }
}

DeviceParts device_parts(std::string_view key) {
  constexpr std::string_view kThreads = " threads", kBefore = ", ";
  const std::size_t before = key.rfind(kBefore);
  if (before == key.npos || !key.ends_with(kThreads)) return {key, 0};
  const std::string_view digits = key.substr(before + kBefore.size());
  std::int64_t threads = 0;
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size() - kThreads.size(), threads);
  if (error != std::errc() || std::string_view(end, kThreads.size()) != kThreads || threads < 1)
    return {key, 0};
  return {key.substr(0, before), threads};
}

namespace {

/// The compute capability of a GPU that is sold under this name: "NVIDIA GH200 480GB"; 0: unknown.
int capability_of(std::string_view name) {
  struct Named {
    std::string_view word;
    int capability;
  };
  static constexpr Named kGpus[] = {
      {"A100", 80}, {"A800", 80},  {"H100", 90},  {"H200", 90},  {"H800", 90},
      {"H20", 90},  {"GH200", 90}, {"B100", 100}, {"B200", 100}, {"GB200", 100},
      {"L4", 89},   {"L40", 89},   {"L40S", 89},
  };
  for (std::size_t at = 0; at < name.size();) {
    const std::size_t end = std::min(name.find_first_of(" -", at), name.size());
    for (const Named& gpu : kGpus)
      if (name.substr(at, end - at) == gpu.word) return gpu.capability;
    at = end + 1;
  }
  return 0;
}

/// The number before `unit` in a device's key; 0: there is none.
double number_before(std::string_view key, std::string_view unit) {
  const std::size_t end = key.find(unit);
  if (end == key.npos) return 0;
  const std::size_t start = key.find_last_not_of("0123456789", end - 1);
  double number = 0;
  std::from_chars(key.data() + (start == key.npos ? 0 : start + 1), key.data() + end, number);
  return number;
}

}  // namespace

std::optional<double> devices_apart(std::string_view key, std::string_view other) {
  const auto name = [](std::string_view text) { return text.substr(0, text.find(',')); };
  const int capability = capability_of(name(key));
  if (capability == 0 || capability != capability_of(name(other))) return {};
  const auto doublings = [](double a, double b) {
    return a > 0 && b > 0 ? std::abs(std::log2(a / b)) : 1.0;
  };
  const auto memory_speed = [](std::string_view text) {
    text.remove_prefix(std::min(text.find("memory "), text.size()));
    return number_before(text, " MHz") * number_before(text, " bit");
  };
  return doublings(number_before(key, " SMs"), number_before(other, " SMs")) +
         doublings(memory_speed(key), memory_speed(other));
}

std::string device_text(std::string_view key) {
  const DeviceParts parts = device_parts(key);
  return parts.threads == 1 ? fmt::format("{}, 1 thread", parts.model) : std::string(key);
}

double extents_apart(std::int64_t tokens, std::int64_t sequences, std::int64_t other_tokens,
                     std::int64_t other_sequences) {
  const auto log = [](std::int64_t n) {
    return std::log2(static_cast<double>(std::max<std::int64_t>(n, 1)));
  };
  return std::abs(log(tokens) - log(other_tokens)) +
         std::abs(log(sequences) - log(other_sequences));
}

std::string timestamp() {
  const auto now =
      std::chrono::time_point_cast<std::chrono::milliseconds>(std::chrono::system_clock::now());
  const auto second = std::chrono::floor<std::chrono::seconds>(now);
  return fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:03}Z",
                     fmt::gmtime(std::chrono::system_clock::to_time_t(second)),
                     (now - second).count());
}

}  // namespace wyvern
