// Any bytes as a safetensors file: refused as bad input, or tensors that are written and read back
// bit by bit, and that are a legal problem of an operator or refused as bad input too.
#include <cstring>
#include <string>

#include "tests/fuzz/fuzz.hpp"
#include "tools/wyvern/operands.hpp"
#include "tools/wyvern/safetensors.hpp"

namespace wyvern::fuzz {
namespace {

using cli::Tensors;

bool same(const Tensors& a, const Tensors& b) {
  if (a.size() != b.size()) return false;
  auto other = b.begin();
  for (const auto& [name, tensor] : a) {
    const cli::HostTensor& twin = other->second;
    if (name != other->first || tensor.dtype != twin.dtype || tensor.shape != twin.shape ||
        std::memcmp(tensor.data.get(), twin.data.get(), tensor.bytes()) != 0)
      return false;
    ++other;
  }
  return true;
}

void check_round_trip(const Tensors& tensors) {
  static const Folder folder;
  const std::string path = folder.path() + "/written.safetensors";
  cli::write_safetensors(path, tensors);
  require(same(cli::read_safetensors(path), tensors), "what is written is what is read back");
}

void check_inference(const Tensors& tensors) {
  for (const std::string_view op : operators())
    for (const char* const pass : {"forward", "backward", "recurrent"})
      for (const char* const inplace : {"false", "true"}) {
        cli::OptionFlags options;
        options.set("pass", pass);
        options.set("inplace_state", inplace);
        Tensors inputs = tensors;
        cli::Selection selection;
        if (!accepts([&] { selection = cli::infer(std::string(op), inputs, options); })) continue;
        validate(selection.problem);
        require(problem_key(selection.problem).to_string().starts_with(op), "a problem has a key");
      }
}

}  // namespace
}  // namespace wyvern::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace wyvern;
  const fuzz::MemoryFile file(fuzz::text_of(data, size));
  cli::Tensors tensors;
  if (!fuzz::accepts([&] { tensors = cli::read_safetensors(file.path()); })) return 0;
  fuzz::check_round_trip(tensors);
  fuzz::check_inference(tensors);
  return 0;
}
