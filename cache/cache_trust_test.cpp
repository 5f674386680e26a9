// Code is run from the cache, so it is used only where nobody but this user and root can write it.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include <spawn.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cache/cache.hpp"
#include "cache/cache_testing.hpp"

namespace wyvern::testing {
namespace {

namespace fs = std::filesystem;

constexpr uid_t kNobody = 65534;

/// A directory with a cache of one artifact, inside another of this test's own.
class CacheTrust : public ::testing::Test {
 protected:
  void SetUp() override {
    const mode_t umask_before = ::umask(0);
    EXPECT_TRUE(QuietCache(directory_)->store_artifact(artifact(1)));
    ::umask(umask_before);
  }

  void expect_used() const {
    QuietCache cache(directory_);
    EXPECT_TRUE(cache->find_artifact(artifact(1).key));
    EXPECT_TRUE(cache->store_artifact(artifact(2)));
    EXPECT_EQ(cache->status(), "");
  }

  /// Nothing is found, stored, locked or touched, and one sentence with `reason` says so.
  void expect_refused(const std::string& reason) const {
    SCOPED_TRACE(reason);
    const std::string before = read_file(file_);
    std::vector<std::string> names = entries();
    QuietCache cache(directory_);
    EXPECT_FALSE(cache->find_artifact(artifact(1).key));
    EXPECT_FALSE(cache->store_artifact(artifact(2)));
    EXPECT_FALSE(cache->clear());
    const ArtifactClaim claim = cache->claim_artifact("key", kFar);
    EXPECT_FALSE(cache->claim_artifact("key", kFar).waited());
    EXPECT_NE(cache->status().find(reason), std::string::npos) << cache->status();
    EXPECT_NE(cache->status().find("nothing is cached"), std::string::npos) << cache->status();
    EXPECT_EQ(cache.told, 1);
    EXPECT_EQ(cache.said, cache->status());
    EXPECT_EQ(read_file(file_), before);
    EXPECT_EQ(entries(), names);
  }

  std::vector<std::string> entries() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(directory_)) names.push_back(entry.path());
    return names;
  }

  TempDirectory temp_;
  const fs::path directory_ = temp_.path() / "cache";
  const fs::path file_ = directory_ / "wyvern.db";
};

TEST_F(CacheTrust, ADirectoryThatOthersMayWriteIsRefused) {
  for (const mode_t mode : {0777u, 0770u, 0702u, 01777u}) {
    ASSERT_EQ(::chmod(directory_.c_str(), mode), 0);
    expect_refused("may be written by its group or by others");
  }
  for (const mode_t mode : {0755u, 0700u}) {
    ASSERT_EQ(::chmod(directory_.c_str(), mode), 0);
    expect_used();
  }
}

TEST_F(CacheTrust, AFileThatOthersMayWriteIsRefused) {
  for (const char* suffix : {"", "-journal", ".claims", ".repair"}) {
    const std::string path = file_.string() + suffix;
    if (!fs::exists(path)) write_file(path, "");
    for (const mode_t mode : {0666u, 0660u}) {
      ASSERT_EQ(::chmod(path.c_str(), mode), 0);
      expect_refused(path + " may be written by its group or by others");
    }
    ASSERT_EQ(::chmod(path.c_str(), 0644), 0);
    expect_used();
  }
}

TEST_F(CacheTrust, AnothersDirectoryOrFileIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a file away";
  for (const std::string& path :
       {directory_.string(), file_.string(), file_.string() + "-journal"}) {
    if (!fs::exists(path)) write_file(path, "");
    ASSERT_EQ(::chown(path.c_str(), kNobody, kNobody), 0);
    expect_refused(path + " belongs to another user (65534)");
    ASSERT_EQ(::chown(path.c_str(), 0, 0), 0);
  }
  ASSERT_EQ(::chmod((file_.string() + "-journal").c_str(), 0600), 0);
  expect_used();
}

/// Says for as long as it lives whose cache is trusted.
class TrustedOwner {
 public:
  explicit TrustedOwner(const char* user) { ::setenv("WYVERN_CACHE_OWNER", user, 1); }
  ~TrustedOwner() { ::unsetenv("WYVERN_CACHE_OWNER"); }
  TrustedOwner(const TrustedOwner&) = delete;
  TrustedOwner& operator=(const TrustedOwner&) = delete;
};

TEST_F(CacheTrust, ATrustedUsersCacheIsReadAndNeverWritten) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a file away";
  for (const fs::path& path : {directory_, file_, fs::path(file_.string() + "-journal")}) {
    if (!fs::exists(path)) write_file(path, "");
    ASSERT_EQ(::chown(path.c_str(), kNobody, kNobody), 0);
  }
  const std::string before = read_file(file_);
  const std::vector<std::string> names = entries();
  for (const char* user : {"65534", "nobody"}) {
    const TrustedOwner trusted(user);
    QuietCache cache(directory_);
    EXPECT_TRUE(cache->find_artifact(artifact(1).key));
    EXPECT_FALSE(cache->store_artifact(artifact(2)));
    EXPECT_FALSE(cache->clear());
    const ArtifactClaim claim = cache->claim_artifact("key", kFar);
    EXPECT_FALSE(cache->claim_artifact("key", kFar).waited());
    EXPECT_NE(cache->status().find("is read-only"), std::string::npos) << cache->status();
    EXPECT_EQ(read_file(file_), before);
    EXPECT_EQ(entries(), names);
  }
  {
    const TrustedOwner another("65533");
    expect_refused("belongs to another user (65534)");
    const TrustedOwner nobody_at_all("no such user");
    expect_refused("WYVERN_CACHE_OWNER is no such user, which is no user here");
  }
  // Trust in a user is not trust in those that the user lets write.
  const TrustedOwner trusted("65534");
  ASSERT_EQ(::chmod(directory_.c_str(), 0775), 0);
  expect_refused("may be written by its group or by others");
}

TEST_F(CacheTrust, SymbolicLinksAreNotFollowed) {
  const fs::path real = temp_.path() / "real";
  fs::rename(directory_, real);
  fs::create_directory_symlink(real, directory_);
  expect_refused("is a symbolic link");
  fs::remove(directory_);
  fs::rename(real, directory_);

  const fs::path elsewhere = temp_.path() / "elsewhere.db";
  fs::rename(file_, elsewhere);
  fs::create_symlink(elsewhere, file_);
  expect_refused("is a symbolic link");
  fs::remove(file_);
  fs::rename(elsewhere, file_);

  const fs::path nowhere = temp_.path() / "nowhere";
  for (const char* suffix : {"-journal", ".claims", ".repair"}) {
    fs::remove(file_.string() + suffix);
    fs::create_symlink(nowhere, file_.string() + suffix);
    expect_refused("is a symbolic link");
    fs::remove(file_.string() + suffix);
  }
  EXPECT_FALSE(fs::exists(nowhere));
  expect_used();
}

TEST_F(CacheTrust, ADirectoryAboveThatAnybodyMayChangeIsRefused) {
  ASSERT_EQ(::chmod(temp_.path().c_str(), 0777), 0);
  expect_refused("lies in " + temp_.path().string() + ", which anybody may write");
  expect_refused("chmod +t " + temp_.path().string());
  // With the sticky bit others cannot rename what is not theirs, as in /tmp.
  ASSERT_EQ(::chmod(temp_.path().c_str(), 01777), 0);
  expect_used();
}

TEST_F(CacheTrust, FilesThatACacheMakesAreItsOwnersAlone) {
  const mode_t umask_before = ::umask(0);
  {
    QuietCache cache(directory_);
    const ArtifactClaim claim = cache->claim_artifact("key", kFar);
    ASSERT_TRUE(cache->store_artifact(artifact(3)));
  }
  // Damage, so that the file is made anew.
  fs::resize_file(file_, fs::file_size(file_) / 2);
  QuietCache cache(directory_);
  EXPECT_TRUE(cache->store_artifact(artifact(4)));
  ::umask(umask_before);
  int files = 0;
  for (const auto& entry : fs::directory_iterator(directory_)) {
    struct stat info{};
    ASSERT_EQ(::stat(entry.path().c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777u, 0600u) << entry.path();
    ++files;
  }
  EXPECT_GE(files, 4);  // the new file, the damaged one, and those of both locks
}

/// Starts this program as `program`, which prints what its default directory is, and reads that.
std::string default_directory_in(const fs::path& program) {
  const std::string command =
      "WYVERN_CACHE_DIR=/data/wyvern " + program.string() + " --default-directory";
  FILE* output = ::popen(command.c_str(), "r");
  if (output == nullptr) return "it does not start";
  char line[256] = "";
  const char* got = std::fgets(line, sizeof line, output);
  ::pclose(output);
  return got != nullptr ? line : "it said nothing";
}

TEST(CacheEnvironment, IsNotBelievedByAProgramWithMoreRightsThanItsCaller) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a program another owner";
  // Not in memory, which is often mounted without such programs.
  std::string pattern = (fs::temp_directory_path() / "wyvern-setuid-XXXXXX").string();
  ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
  const fs::path program = fs::path(pattern) / "program";
  fs::copy_file("/proc/self/exe", program);
  ASSERT_EQ(::chmod(pattern.c_str(), 0755), 0);
  EXPECT_EQ(default_directory_in(program), "plain: /data/wyvern");
  ASSERT_EQ(::chown(program.c_str(), kNobody, kNobody), 0);
  ASSERT_EQ(::chmod(program.c_str(), 04755), 0);
  const std::string answer = default_directory_in(program);
  fs::remove_all(pattern);
  if (answer.rfind("plain", 0) == 0) GTEST_SKIP() << "the file system gives no rights to programs";
  EXPECT_EQ(answer, "secure: ");
}

}  // namespace
}  // namespace wyvern::testing

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "--default-directory") == 0) {
    std::printf("%s: %s", ::getauxval(AT_SECURE) != 0 ? "secure" : "plain",
                wyvern::Cache::default_directory().c_str());
    return 0;
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
