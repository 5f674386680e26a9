#include "compiler/cuda/nvrtc.hpp"

#include <gtest/gtest.h>
#include <wyvern/error.hpp>

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "compiler/cuda/nvrtc_file.hpp"

namespace wyvern::detail {
namespace {

/// Uses tensor cores, 2 KiB of shared memory and cp.async: what every portable template does.
constexpr const char* kSource = R"(
extern "C" __global__ void __launch_bounds__(128)
wyvern_kernel(const unsigned* in, float* out, int n) {
  __shared__ alignas(16) unsigned tile[512];
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(tile + 4 * threadIdx.x));
  float c[4] = {};
  for (int i = 0; i < n; ++i) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address),
                 "l"(in + (i * 128 + threadIdx.x) * 4));
    asm volatile("cp.async.wait_all;");
    __syncthreads();
    const unsigned* a = tile + (threadIdx.x & 31) * 4;
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[1]), "r"(a[0]));
    __syncthreads();
  }
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = c[i];
}
)";

void expect_has(const std::string& text, const std::string& piece) {
  EXPECT_NE(text.find(piece), std::string::npos) << "'" << piece << "' is not in: " << text;
}

class NvrtcTest : public testing::Test {
 protected:
  void SetUp() override {
    const std::string problem = compiler_problem(DeviceKind::cuda);
    if (!problem.empty()) GTEST_SKIP() << problem;
  }
};

class NvrtcArch : public NvrtcTest, public testing::WithParamInterface<const char*> {};

TEST_P(NvrtcArch, CompilesWithoutAGpu) {
  const Code code = compile_source(kSource, "probe", cuda_target(GetParam()));
  EXPECT_EQ(code.bytes.substr(0, 4),
            "\x7f"
            "ELF");
  expect_has(code.bytes, ".text.wyvern_kernel");
  EXPECT_GT(code.resources.registers, 8);
  EXPECT_LE(code.resources.registers, 255);
  EXPECT_GE(code.resources.shared_bytes, 2048);
  EXPECT_LT(code.resources.shared_bytes, 4096) << "more than the kernel declares";
  EXPECT_EQ(code.resources.spill_bytes, 0);
  EXPECT_EQ(code.resources.code_bytes, static_cast<std::int64_t>(code.bytes.size()));
  EXPECT_GT(code.compile_ms, 0);
}

INSTANTIATE_TEST_SUITE_P(, NvrtcArch,
                         testing::Values("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"),
                         [](const auto& arch) { return std::string(arch.param); });

TEST_F(NvrtcTest, ReadsSpillsAndStack) {
  // 512 threads leave 128 registers each, less than the 160 values alive at once.
  constexpr const char* kSpilling = R"(
extern "C" __global__ void __launch_bounds__(512) wyvern_kernel(float* x) {
  float v[160];
#pragma unroll
  for (int i = 0; i < 160; ++i) v[i] = x[i * 512 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 160; ++i) x[(159 - i) * 512 + threadIdx.x] = v[i] * v[(i * 7) % 160];
})";
  const Resources resources = compile_source(kSpilling, "probe", cuda_target("sm_80")).resources;
  EXPECT_LE(resources.registers, 128);
  EXPECT_GT(resources.spill_bytes, 0);
  EXPECT_GT(resources.stack_bytes, 0);
}

TEST(Ptxas, ReadsEveryFigure) {
  const Resources resources = parse_ptxas(
      "ptxas info    : 0 bytes gmem\n"
      "ptxas info    : Compiling entry function 'wyvern_kernel' for 'sm_90a'\n"
      "ptxas info    : Function properties for wyvern_kernel\n"
      "ptxas         .     256 bytes stack frame, 12 bytes spill stores, 30 bytes spill loads\n"
      "ptxas info    : Used 56 registers, used 1 barriers, 264 bytes cumulative stack size, "
      "1024 bytes smem, 400 bytes cmem[0]\n"
      "ptxas info    : Compile time = 57.888 ms\n");
  EXPECT_EQ(resources.registers, 56);
  EXPECT_EQ(resources.stack_bytes, 264);
  EXPECT_EQ(resources.spill_bytes, 42);
  EXPECT_EQ(resources.shared_bytes, 1024);
}

TEST(Ptxas, FindsSerializedProducts) {
  const std::string line =
      "ptxas info    : (C7517) warpgroup.wait is injected in around line 98 by compiler to allow "
      "use of registers defined by GMMA in function 'wyvern_kernel'";
  const std::string others = "ptxas info    : 0 bytes gmem\n";
  EXPECT_EQ(find_serialization(others + line + "\n" + others), line);
  EXPECT_EQ(find_serialization(line), line);
  EXPECT_EQ(find_serialization(others + "ptxas info    : (C7520) something else\n"), "");
}

TEST_F(NvrtcTest, EmitsPtx) {
  const std::string ptx =
      compile_source(kSource, "probe", cuda_target("sm_90a"), Output::ptx).bytes;
  expect_has(ptx, ".target sm_90a");
  expect_has(ptx, ".entry wyvern_kernel");
}

TEST_F(NvrtcTest, TheSameSourceGivesTheSameBytes) {
  const Target target = cuda_target("sm_90a");
  EXPECT_EQ(compile_source(kSource, "probe", target).bytes,
            compile_source(kSource, "probe", target).bytes);
}

TEST_F(NvrtcTest, SyntaxErrorShowsLabelPlaceAndMessage) {
  try {
    compile_source("#line 7 \"fwd_h/portable.cu\"\nextern \"C\" __global__ void f() { int 3x; }",
                   "template fwd_h.portable with BT=64", cuda_target("sm_80"));
    ADD_FAILURE() << "it compiled";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kCompile);
    expect_has(error.what(), "template fwd_h.portable with BT=64");
    expect_has(error.what(), "fwd_h/portable.cu(7): error");
    expect_has(error.what(), "int 3x;");
  }
}

TEST_F(NvrtcTest, AssemblerErrorIsACompileError) {
  EXPECT_THROW(compile_source("extern \"C\" __global__ void wyvern_kernel() "
                              "{ asm volatile(\"no.such.instruction;\"); }",
                              "probe", cuda_target("sm_80")),
               Error);
}

TEST_F(NvrtcTest, ArchitectureBeyondThisNvrtcIsNamed) {
  Target old = cuda_target("sm_80");
  old.arch = "sm_35";
  try {
    compile_source(kSource, "probe", old);
    ADD_FAILURE() << "it compiled";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnavailable);
    expect_has(error.what(), "sm_35");
    expect_has(error.what(), "sm_80");
  }
}

TEST(Nvrtc, MissingLibraryIsNamedWithTheFix) {
  constexpr const char* kNames[] = {"libnvrtc-nowhere.so.1", "/nowhere/libnvrtc.so"};
  try {
    const Nvrtc nvrtc(kNames);
    ADD_FAILURE() << "it opened";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnavailable);
    expect_has(error.what(), "libnvrtc-nowhere.so.1, /nowhere/libnvrtc.so");
    expect_has(error.what(), "pip install nvidia-cuda-nvrtc");
  }
}

TEST(Nvrtc, LibraryThatIsNotNvrtcIsRefused) {
  constexpr const char* kNames[] = {"libc.so.6"};
  EXPECT_THROW(Nvrtc{kNames}, Error);
}

/// A file of a library that says nothing but its build ID.
void write_library(const std::filesystem::path& path, const std::string& id) {
  struct {
    ElfW(Ehdr) header {};
    ElfW(Phdr) other{}, notes {};
    ElfW(Nhdr) first{}, second {};
  } file;
  const std::string name("GNU", 4), abi = name + std::string(16, 'a');
  std::memcpy(file.header.e_ident, ELFMAG, SELFMAG);
  file.header.e_phoff = sizeof file.header;
  file.header.e_phnum = 2;
  file.other.p_type = PT_LOAD;
  file.notes.p_type = PT_NOTE;
  file.notes.p_offset = sizeof file.header + 2 * sizeof file.notes;
  file.first = {4, 16, NT_GNU_ABI_TAG};
  file.second = {4, static_cast<ElfW(Word)>(id.size()), NT_GNU_BUILD_ID};
  file.notes.p_filesz = 2 * sizeof file.first + abi.size() + name.size() + id.size();
  const auto bytes = [](const auto& of) {
    return std::string(reinterpret_cast<const char*>(&of), sizeof of);
  };
  std::ofstream(path, std::ios::binary)
      << bytes(file.header) << bytes(file.other) << bytes(file.notes) << bytes(file.first) << abi
      << bytes(file.second) << name << id;
}

class NvrtcFileTest : public testing::Test {
 protected:
  NvrtcFileTest() {
    // Its children are processes of their own, where nothing is open.
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    for (const auto& folder : folders_) std::filesystem::create_directories(folder);
  }
  ~NvrtcFileTest() override { std::filesystem::remove_all(root_); }
  /// Whether the test's process has NVRTC open.
  static bool is_open() {
    return std::ranges::any_of(kNvrtcNames, [](const char* name) {
      return dlopen(name, RTLD_LAZY | RTLD_NOLOAD) != nullptr;
    });
  }

  const std::filesystem::path root_ = std::filesystem::path(testing::TempDir()) /
                                      testing::UnitTest::GetInstance()->current_test_info()->name();
  const std::vector<std::filesystem::path> folders_{root_ / "none", root_ / "a", root_ / "b"};
};

TEST_F(NvrtcFileTest, BuildIdIsReadFromTheFile) {
  const auto path = folders_[1] / "library.so";
  EXPECT_EQ(build_id(path), "") << "no file";
  write_library(path, "\x01\xab\x7f\xfe");
  EXPECT_EQ(build_id(path), "01ab7ffe");
  for (std::uintmax_t size = std::filesystem::file_size(path); size-- > 0;) {
    std::filesystem::resize_file(path, size);
    EXPECT_EQ(build_id(path), "") << "cut off after " << size << " bytes";
  }
  EXPECT_EQ(build_id(folders_[1]), "") << "a folder";
}

TEST_F(NvrtcFileTest, TheFirstOfTheFoldersIsFoundAndAReplacedOneIsAnother) {
  EXPECT_EXIT(
      {
        write_library(folders_[2] / kNvrtcNames[0], "\x02");
        EXPECT_EQ(find_nvrtc(folders_)->build_id, "02");
        write_library(folders_[1] / kNvrtcNames[0], "\x01");
        const std::optional<NvrtcFile> found = find_nvrtc(folders_);
        EXPECT_EQ(found->path, folders_[1] / kNvrtcNames[0]);
        EXPECT_EQ(found->major, 13);
        EXPECT_EQ(found->build_id, "01");
        write_library(folders_[1] / kNvrtcNames[0], "\x03");
        EXPECT_EQ(find_nvrtc(folders_)->build_id, "03");
        std::exit(HasFailure() ? 1 : 0);
      },
      testing::ExitedWithCode(0), "");
}

TEST_F(NvrtcFileTest, KeysAreOfTheLibraryOnTheLoadersPath) {
  EXPECT_EXIT(
      {
        write_library(folders_[1] / kNvrtcNames[0], "\x07\x08");
        setenv("LD_LIBRARY_PATH", folders_[1].c_str(), 1);
        EXPECT_EQ(Nvrtc::identity().build, "NVRTC of build 0708");
        EXPECT_EQ(Nvrtc::identity().major, 13);
        std::exit(HasFailure() ? 1 : 0);
      },
      testing::ExitedWithCode(0), "");
}

TEST_F(NvrtcFileTest, KeysAreTheSameBeforeTheLibraryIsOpenAndAfter) {
  EXPECT_EXIT(
      {
        const std::optional<NvrtcFile>& file = nvrtc_file();
        const bool told = file && !file->build_id.empty();
        if (!told && !compiler_problem(DeviceKind::cuda).empty()) std::exit(0);
        const auto key = [] {
          return source_key(cuda_backend(), kSource, {}, cuda_target("sm_90a"));
        };
        const std::string before = key();
        EXPECT_EQ(is_open(), !told);
        EXPECT_NE(before, "");
        Nvrtc::instance();
        EXPECT_EQ(key(), before);
        std::exit(HasFailure() ? 1 : 0);
      },
      testing::ExitedWithCode(0), "");
}

TEST_F(NvrtcTest, EightThreadsCompileAtOnce) {
  constexpr std::size_t kThreads = 8;
  std::vector<Code> codes(kThreads);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < kThreads; ++i)
    threads.emplace_back([i, &codes] {
      const std::string text =
          "extern \"C\" __global__ void wyvern_kernel(float* x) { __shared__ "
          "float s[" +
          std::to_string(1024 + 256 * i) +
          "]; s[threadIdx.x] = x[0]; __syncthreads(); x[1] = s[0]; }";
      codes[i] = compile_source(text, "probe", cuda_target(i % 2 == 0 ? "sm_80" : "sm_89"));
    });
  for (std::thread& thread : threads) thread.join();
  for (std::size_t i = 0; i < kThreads; ++i)
    EXPECT_EQ(codes[i].resources.shared_bytes, static_cast<std::int64_t>(4096 + 1024 * i));
}

}  // namespace
}  // namespace wyvern::detail
