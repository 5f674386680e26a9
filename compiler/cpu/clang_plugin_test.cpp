#include "compiler/cpu/clang_plugin.hpp"
#include "templates/source.hpp"

#include <gtest/gtest.h>
#include <wyvern/error.hpp>

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <csignal>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace wyvern::detail {
namespace {

using Kernel = void(void* const* arguments, const Extents* extents, const long* block,
                    void* scratch);

/// A shared object loaded from memory, as the runtime does it. The descriptor stays open while the
/// library is loaded: dlopen would take a second library under the same name for the first.
class Loaded {
 public:
  explicit Loaded(const std::string& bytes) : file_(memfd_create("kernel", MFD_CLOEXEC)) {
    EXPECT_EQ(write(file_, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
    const std::string path = "/proc/self/fd/" + std::to_string(file_);
    library_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    EXPECT_NE(library_, nullptr) << dlerror();
  }
  ~Loaded() {
    dlclose(library_);
    close(file_);
  }
  Loaded(const Loaded&) = delete;
  Loaded& operator=(const Loaded&) = delete;

  Kernel* kernel() const {
    return reinterpret_cast<Kernel*>(dlsym(library_, std::string(kEntryPoint).c_str()));
  }

 private:
  int file_;
  void* library_ = nullptr;
};

/// A kernel's body between the lines that every template has.
std::string source(const std::string& body, const std::string& before = "") {
  return "struct Extents { long B, T, N, NT, NS, S, first_slot, CP; float scale, gate_floor, "
         "lower_bound; long M, R, D; int H, HV; };\n" +
         before +
         "\nextern \"C\" void wyvern_kernel(void* const* a, const Extents* e, const long* block, "
         "void* scratch) {\n" +
         body + "\n}\n";
}

/// Names the error that compiling throws; fails when it throws none.
std::string error_of(const std::string& text, ErrorKind kind = ErrorKind::kCompile) {
  try {
    compile_source(text, "template probe.cpu with BT=64", host_target());
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind);
    return error.what();
  }
  ADD_FAILURE() << "it compiled";
  return {};
}

void expect_has(const std::string& text, const std::string& piece) {
  EXPECT_NE(text.find(piece), std::string::npos) << "'" << piece << "' is not in: " << text;
}

TEST(ClangPlugin, CompilesLoadsAndRuns) {
  const std::string text = source(R"(
    const float* x = (const float*)a[0];
    const float* y = (const float*)a[1];
    float* z = (float*)a[2];
    for (long i = 0; i < 37; ++i) {
      float sum = 0;
      for (long j = 0; j < 61; ++j) sum += x[i * 61 + j] * y[j];
      z[i] = sum * e->scale + block[0];
    }
    __builtin_memcpy(scratch, z, 37 * 4);)");
  const Code code = compile_source(text, "probe", host_target());
  EXPECT_GT(code.resources.code_bytes, 0);
  EXPECT_GT(code.compile_ms, 0);
  const Loaded loaded(code.bytes);
  ASSERT_NE(loaded.kernel(), nullptr);

  std::mt19937 random(std::random_device{}());
  std::uniform_real_distribution<float> uniform(-1.0F, 1.0F);
  std::vector<float> x(37 * 61);
  std::vector<float> y(61);
  for (float& value : x) value = uniform(random);
  for (float& value : y) value = uniform(random);
  std::vector<float> z(37 + 16, -77.0F);
  std::vector<float> scratch(37, std::numeric_limits<float>::quiet_NaN());
  Extents extents;
  extents.scale = 0.25F;
  void* arguments[] = {x.data(), y.data(), z.data()};
  const long block[] = {3, 0, 0};
  loaded.kernel()(arguments, &extents, block, scratch.data());
  for (std::size_t i = 0; i < 37; ++i) {
    double sum = 0;
    for (std::size_t j = 0; j < 61; ++j) sum += double{x[i * 61 + j]} * double{y[j]};
    EXPECT_NEAR(z[i], sum * 0.25 + 3, 1e-5);
    EXPECT_EQ(scratch[i], z[i]);
  }
  for (std::size_t i = 37; i < z.size(); ++i) EXPECT_EQ(z[i], -77.0F) << "past the output";
}

TEST(ClangPlugin, KeepsInfinitiesNaNsAndTheOrderOfSums) {
  const std::string text = source(R"(
    float* x = (float*)a[0];
    x[1] = x[0] - x[0];              // inf - inf
    x[2] = x[1] != x[1] ? 1 : 0;     // is NaN
    x[3] = __builtin_isinf(x[0]) ? 1 : 0;
    x[5] = (x[4] + 12582912.0f) - 12582912.0f;  // rounds to an integer)");
  const Loaded loaded(compile_source(text, "probe", host_target()).bytes);
  float x[] = {std::numeric_limits<float>::infinity(), 0, 0, 0, 2.75F, 0};
  void* arguments[] = {x};
  loaded.kernel()(arguments, nullptr, nullptr, nullptr);
  EXPECT_TRUE(std::isnan(x[1]));
  EXPECT_EQ(x[2], 1);
  EXPECT_EQ(x[3], 1);
  EXPECT_EQ(x[5], 3);
}

TEST(ClangPlugin, UsesTheWidestVectorsOfTheHost) {
  const std::string text = source(R"(
    float* x = (float*)a[0];
    const float* y = (const float*)a[1];
    for (long i = 0; i < 4096; ++i) x[i] = x[i] * 3 + y[i];)");
  const std::string assembly = compile_source(text, "probe", host_target(), Output::assembly).bytes;
  const int bits = host_target().limits.vector_bits;
#if defined(__x86_64__)
  expect_has(assembly, bits == 512 ? "%zmm" : bits == 256 ? "%ymm" : "%xmm");
  if (host_target().features.find("fma") != std::string::npos) expect_has(assembly, "vfmadd");
#else
  EXPECT_EQ(bits, 128);
  expect_has(assembly, "fmla");
#endif
}

TEST(ClangPlugin, EmitsEveryForm) {
  const std::string text = source("((float*)a[0])[0] = 1;");
  const auto form = [&text](Output output) {
    return compile_source(text, "probe", host_target(), output).bytes;
  };
  expect_has(form(Output::llvm_ir), "define");
  expect_has(form(Output::assembly), "wyvern_kernel:");
  const std::string object = form(Output::object);
  const std::string shared = form(Output::loadable);
  EXPECT_EQ(object.substr(0, 4),
            "\x7f"
            "ELF");
  EXPECT_EQ(object[16], 1) << "ET_REL";
  EXPECT_EQ(shared.substr(0, 4),
            "\x7f"
            "ELF");
  EXPECT_EQ(shared[16], 3) << "ET_DYN";
}

TEST(ClangPlugin, LargeObjectsComeBackWhole) {
  // More than a pipe holds.
  const std::string text = source("*(int*)a[0] = table[90000 + e->T];",
                                  "extern const int table[100000];\n"
                                  "const int table[100000] = {[90007] = 1234};");
  const Code code = compile_source(text, "probe", host_target());
  EXPECT_GT(code.bytes.size(), 400000U);
  const Loaded loaded(code.bytes);
  int result = 0;
  void* arguments[] = {&result};
  Extents extents;
  extents.T = 7;
  loaded.kernel()(arguments, &extents, nullptr, nullptr);
  EXPECT_EQ(result, 1234);
}

TEST(ClangPlugin, TheSameSourceGivesTheSameBytes) {
  const std::string text = source("for (int i = 0; i < e->T; ++i) ((float*)a[0])[i] *= 2;");
  EXPECT_EQ(compile_source(text, "probe", host_target()).bytes,
            compile_source(text, "probe", host_target()).bytes);
}

TEST(ClangPlugin, SyntaxErrorShowsLabelPlaceAndMessage) {
  const std::string message =
      error_of("#line 7 \"fwd_h/cpu.cpp\"\nextern \"C\" void f() { int 3x; }");
  expect_has(message, "template probe.cpu with BT=64");
  expect_has(message, "fwd_h/cpu.cpp:7:");
  expect_has(message, "error: ");
  expect_has(message, "int 3x;");
}

TEST(ClangPlugin, UndefinedSymbolsAreNamedWhenCompiling) {
  const std::string message = error_of(source("((float*)a[0])[0] = nowhere_to_be_found(1.0f);",
                                              "extern \"C\" float nowhere_to_be_found(float);"));
  expect_has(message, "undefined symbol: nowhere_to_be_found");
  expect_has(error_of(source("((float*)a[0])[0] = __builtin_expf(((float*)a[0])[1]);")), "expf");
}

TEST(ClangPlugin, MissingEntryPointIsAnError) {
  expect_has(error_of("void wyvern_kernel(int) {}"), "no function \"wyvern_kernel\"");
}

TEST(ClangPlugin, BackEndErrorDoesNotEndTheProcess) {
  expect_has(error_of(source("asm volatile(\"no_such_instruction\");")), "no_such_instruction");
}

TEST(ClangPlugin, IncludesDoNotReachTheFileSystem) {
  expect_has(error_of("#include <stddef.h>\n" + source("")), "'stddef.h' file not found");
  expect_has(error_of("#include \"/etc/passwd\"\n" + source("")), "file not found");
}

constexpr std::array kSignals{SIGINT, SIGTERM, SIGHUP, SIGSEGV, SIGABRT, SIGPIPE};

/// What the process does with each of these. A sanitizer handles some itself.
auto signal_handlers() {
  std::array<decltype(SIG_DFL), kSignals.size()> handlers{};
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    struct sigaction action{};
    handlers[i] = sigaction(kSignals[i], nullptr, &action) == 0 ? action.sa_handler : SIG_ERR;
  }
  return handlers;
}
const auto kHandlersAtStart = signal_handlers();  // before any test has loaded the plugin

TEST(ClangPlugin, LeavesSignalHandlersAlone) {
  compile_source(source(""), "probe", host_target());
  const auto handlers = signal_handlers();
  for (std::size_t i = 0; i < kSignals.size(); ++i)
    EXPECT_EQ(handlers[i], kHandlersAtStart[i]) << strsignal(kSignals[i]);
}

TEST(ClangPlugin, EightThreadsCompileAtOnce) {
  constexpr int kThreads = 8;
  std::vector<float> results(kThreads, -1.0F);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([i, &results] {
      for (int round = 0; round < 4; ++round) {
        const std::string text = source("*(float*)a[0] = N * 10 + " + std::to_string(round) + ";",
                                        "constexpr int N = " + std::to_string(i) + ";");
        const Loaded loaded(compile_source(text, "probe", host_target()).bytes);
        void* arguments[] = {&results[static_cast<std::size_t>(i)]};
        loaded.kernel()(arguments, nullptr, nullptr, nullptr);
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < kThreads; ++i)
    EXPECT_EQ(results[static_cast<std::size_t>(i)], static_cast<float>(i * 10 + 3));
}

TEST(ClangPlugin, AnotherProcessorIsRefused) {
  Target other = host_target();
  other.features = "none";
  try {
    compile_source(source(""), "probe", other);
    ADD_FAILURE() << "it compiled";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kBadInput);
    expect_has(error.what(), other.name());
  }
}

TEST(ClangPlugin, MissingPluginIsNamedWithTheFix) {
  const std::filesystem::path nowhere[] = {"/nowhere/libwyvern_llvm.so"};
  try {
    const ClangPlugin plugin(nowhere);
    ADD_FAILURE() << "it opened";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnavailable);
    expect_has(error.what(), "/nowhere/libwyvern_llvm.so");
    expect_has(error.what(), "WYVERN_CPU=ON");
  }
}

TEST(ClangPlugin, FileThatDoesNotLoadIsNamedWithTheFix) {
  const std::filesystem::path text[] = {"/proc/cpuinfo"};
  try {
    const ClangPlugin plugin(text);
    ADD_FAILURE() << "it opened";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnavailable);
    expect_has(error.what(), "/proc/cpuinfo");
    expect_has(error.what(), "libclang-cpp19");
  }
}

}  // namespace
}  // namespace wyvern::detail
