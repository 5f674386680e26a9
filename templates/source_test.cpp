#include "templates/source.hpp"

#include <gtest/gtest.h>
#include <wyvern/sha256.hpp>

#include <set>
#include <string>

#include "templates/embedded.hpp"

namespace wyvern {
namespace {

TEST(Source, DigestsAreThoseOfTheEmbeddedTexts) {
  for (const detail::EmbeddedSource& source : detail::embedded_sources())
    EXPECT_EQ(source.sha256, sha256_hex(source.text)) << source.path;
}

/// The files that a specialized source begins, by its #line directives.
std::set<std::string> files_of(const std::string& text) {
  std::set<std::string> files;
  const std::string directive = "#line 1 \"";
  for (std::size_t at = text.find(directive); at != std::string::npos;
       at = text.find(directive, at + 1)) {
    const std::size_t name = at + directive.size();
    files.insert(text.substr(name, text.find('"', name) - name));
  }
  files.erase("specialization");
  return files;
}

/// A dialect for each kind of device; parameters do not matter here.
Dialect dialect_of(DeviceKind kind) {
  const auto none = [](const Template&) { return std::string(); };
  return kind == DeviceKind::cuda ? Dialect{"device/cuda/types.cuh", "wyvern::cuda", none}
                                  : Dialect{"device/cpu/types.hpp", "wyvern::cpu", none};
}

TEST(Source, IdentityNamesEveryFileAndEveryValueThatIsCompiled) {
  for (const Template& t : all_templates()) {
    Constants constants;
    constants.H = constants.HV = 2;
    constants.K = constants.V = 64;
    Config config;
    for (const Tunable& tunable : t.tunables) config.set(tunable.name, tunable.values.front());
    const Dialect dialect = dialect_of(t.device);
    const std::string identity = source_identity(t, constants, config, dialect);
    for (const std::string& file : files_of(specialize(t, constants, config, dialect)))
      EXPECT_NE(identity.find(file + ' ' + sha256_hex(source_text(file))), std::string::npos)
          << t.id() << " " << file;
    EXPECT_EQ(source_identity(t, constants, config, dialect), identity);
    for (const Tunable& tunable : t.tunables) {
      Config other = config;
      for (const Value& value : tunable.values)
        if (value != *config.find(tunable.name)) other.set(std::string(tunable.name), value);
      if (tunable.values.size() < 2) continue;
      EXPECT_EQ(source_identity(t, constants, other, dialect) == identity, tunable.at_launch)
          << t.id() << " " << tunable.name;
      EXPECT_EQ(t.compiled(other) == t.compiled(config), tunable.at_launch)
          << t.id() << " " << tunable.name;
    }
  }
}

}  // namespace
}  // namespace wyvern
