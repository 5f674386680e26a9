# Writes OUTPUT: the text of every file of SOURCES and a call of every folder's contract().
# A string literal may be limited to 64 KiB, so a text is split into adjacent raw literals; their
# suffix spares the compiler counting characters, for which Clang has a limit.
string(REPLACE "," ";" sources "${SOURCES}")
string(REPLACE "," ";" contracts "${CONTRACTS}")
set(declarations "")
set(calls "")
foreach(contract ${contracts})
  get_filename_component(path ${contract} DIRECTORY)
  get_filename_component(folder ${path} NAME)
  string(APPEND declarations "namespace ${folder} { std::vector<Template> contract(); }\n")
  string(APPEND calls "  add(all, \"${path}/\", ${folder}::contract());\n")
endforeach()
set(entries "")
foreach(source ${sources})
  file(READ ${ROOT}/${source} text)
  string(LENGTH "${text}" length)
  set(literals "")
  set(start 0)
  while(start LESS length)
    string(SUBSTRING "${text}" ${start} 8000 piece)
    string(APPEND literals "R\"wyvern(${piece})wyvern\"sv\n")
    math(EXPR start "${start} + 8000")
  endwhile()
  file(SHA256 ${ROOT}/${source} digest)
  string(APPEND entries "    {\"${source}\",\n${literals},\n\"${digest}\"},\n")
endforeach()
file(WRITE ${OUTPUT}
"// Generated from templates/ by embed.cmake.
#include \"templates/embedded.hpp\"

#include <array>

namespace wyvern {
${declarations}
namespace detail {

std::span<const EmbeddedSource> embedded_sources() {
  using namespace std::string_view_literals;
  static constexpr auto kSources = std::to_array<EmbeddedSource>({
${entries}  });
  return kSources;
}

namespace {
/// A contract names its sources as they are called in its folder.
void add(std::vector<Template>& all, std::string_view folder, std::vector<Template> contract) {
  for (Template& t : contract) {
    t.source.insert(0, folder);
    all.push_back(std::move(t));
  }
}
}  // namespace

std::vector<Template> collect_templates() {
  std::vector<Template> all;
${calls}  return all;
}

}  // namespace detail
}  // namespace wyvern
")
