#include <fmt/ranges.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tools/wyvern/command.hpp"
#include "tools/wyvern/describe.hpp"
#include "tools/wyvern/example.hpp"

namespace wyvern::cli {
namespace {

struct Flags {
  SelectionFlags selection;
  OptionFlags options;
  std::string seed = "0";
  std::optional<std::string> output;
};

int write(const Flags& flags, bool json) {
  const std::uint64_t seed = parse_seed(flags.seed);
  const Selection selection = select(flags.selection, flags.options);
  const std::string& file = require(flags.output, "--output", "the safetensors file to write");
  const Tensors tensors = make_example(selection, seed);
  write_safetensors(file, tensors);
  const std::vector<std::string> options = run_options(selection.problem);
  std::size_t bytes = 0;
  Json listed = Json::object();
  for (const auto& [name, tensor] : tensors) {
    bytes += tensor.bytes();
    listed[name] = {{"dtype", to_string(tensor.dtype)}, {"shape", tensor.shape}};
  }
  if (json)
    print_document({{"output", file},
                    {"seed", seed},
                    {"bytes", bytes},
                    {"problem", to_json(selection.problem)},
                    {"tensors", std::move(listed)},
                    {"options", options}});
  else {
    say("wrote {}: {}, {}", file, describe(selection.problem),
        bytes_text(static_cast<double>(bytes)));
    if (!options.empty())
      say("`wyvern run` computes this problem with {}", fmt::join(options, " "));
  }
  return kDone;
}

}  // namespace

void add_example(Command& command) {
  const auto flags = std::make_shared<Flags>();
  CLI::App& verb = command.verb("example", "write a random input of an operator",
                                [flags](bool json) { return write(*flags, json); });
  add_selection(verb, flags->selection);
  add_options(verb, flags->options);
  verb.add_option("--seed", flags->seed, "of the random numbers (default 0)");
  verb.add_option("-o,--output", flags->output, "safetensors file to write");
}

}  // namespace wyvern::cli
