// What goes wrong around a cache: other processes, kills, forks, full and read-only disks, locks.
// Other processes are this program started anew with "--role", never a bare fork of a test.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <sched.h>
#include <spawn.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cache/cache.hpp"
#include "cache/cache_testing.hpp"
#include "cache/care.hpp"
#include "cache/database.hpp"
#include "cache/schema.hpp"

namespace wyvern::testing {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

/// How often this thread has gone to sleep of itself.
long times_asleep() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nvcsw;
}

pid_t start(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"cache_fault_test", "--role"});
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  pid_t pid = 0;
  EXPECT_EQ(::posix_spawn(&pid, "/proc/self/exe", nullptr, nullptr, argv.data(), environ), 0);
  return pid;
}

/// The exit status, or -signal.
int finish(pid_t pid) {
  int status = 0;
  EXPECT_EQ(::waitpid(pid, &status, 0), pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

int run(std::vector<std::string> arguments) { return finish(start(std::move(arguments))); }

std::string integrity(const std::filesystem::path& file) {
  Database database(file, Database::Mode::read_only);
  Query query(database, "PRAGMA integrity_check");
  return query.step() ? query.text(0) : "no answer";
}

// ---- The roles: what the other processes do. 0 is success.

constexpr std::uint64_t kEach = 30;

int role_write(const std::string& directory, std::uint64_t first) {
  QuietCache cache(directory);
  int failures = 0;
  for (std::uint64_t i = first; i < first + kEach; ++i) {
    failures += !cache->store_artifact(artifact(i));
    failures += !cache->store_measurement(measurement(i));
    failures += !cache->store_winner(winner(static_cast<std::int64_t>(i) + 1, 1));
    const auto found = cache->find_artifact(artifact(i).key);
    failures += !found || found->code != artifact(i).code;
  }
  if (failures != 0) std::fprintf(stderr, "%s\n", cache->status().c_str());
  return failures == 0 && cache.told == 0 ? 0 : 1;
}

/// As role_write, on a damaged file: 10 when this process was the one that repaired it.
int role_write_damaged(const std::string& directory, std::uint64_t first) {
  QuietCache cache(directory);
  int failures = 0;
  for (std::uint64_t i = first; i < first + kEach; ++i) {
    failures += !cache->store_artifact(artifact(i));
  }
  if (failures != 0) std::fprintf(stderr, "%s\n", cache->status().c_str());
  return failures != 0 ? 1 : cache.told == 1 ? 10 : 0;
}

constexpr std::size_t kForeverBytes = 6000;  ///< of each artifact of the next role

int role_write_forever(const std::string& directory, std::uint64_t first) {
  Cache cache(directory);
  for (std::uint64_t i = first;; ++i) cache.store_artifact(artifact(i, kForeverBytes));
}

constexpr uid_t kNobody = 65534;

/// Lets the mode bits bind when the tests run as root.
bool become_nobody() {
  return ::geteuid() != 0 || (::setgid(kNobody) == 0 && ::setuid(kNobody) == 0);
}

int role_read_only(const std::string& directory, const std::string& expectation) {
  if (!become_nobody()) return 77;
  QuietCache cache(directory);
  const bool found = cache->find_artifact(artifact(1).key).has_value();
  const bool stored = cache->store_artifact(artifact(2));
  if (found != (expectation == "found") || stored) return 1;
  if (cache->status().empty() || cache.told != 1 || cache.said != cache->status()) return 2;
  return cache->find_artifact(artifact(2).key) ? 3 : 0;
}

/// Limits the size of files this process may write, which is how a full disk looks from here.
void limit_files(rlim_t bytes) {
  rlimit limit{};
  ::getrlimit(RLIMIT_FSIZE, &limit);
  limit.rlim_cur = bytes;
  ::setrlimit(RLIMIT_FSIZE, &limit);
}

/// `blocked`: as a caller that has blocked the signal of too large a file, which must stay so.
/// Otherwise the signal has its default action, which is to kill.
int role_full(const std::string& directory, bool blocked) {
  sigset_t signal;
  sigemptyset(&signal);
  sigaddset(&signal, SIGXFSZ);
  if (blocked) ::pthread_sigmask(SIG_BLOCK, &signal, nullptr);
  QuietCache cache(directory);
  if (!cache->store_artifact(artifact(1)) || !cache->status().empty()) return 1;
  limit_files(100000);
  if (cache->store_artifact(artifact(2, 200000))) return 2;
  if (cache->status().find("there is no space") == std::string::npos || cache.told != 1) return 3;
  sigset_t after;
  if (::sigpending(&after) != 0 || sigismember(&after, SIGXFSZ) == 1) return 9;
  if (::pthread_sigmask(SIG_BLOCK, nullptr, &after) != 0) return 10;
  if ((sigismember(&after, SIGXFSZ) == 1) != blocked) return 11;
  const auto found = cache->find_artifact(artifact(1).key);
  if (!found || found->code != artifact(1).code) return 4;
  if (cache->status().empty()) return 5;  // a look-up does not prove that there is space again
  if (!cache->store_artifact(artifact(3))) return 6;  // a small one still fits
  limit_files(RLIM_INFINITY);
  if (!cache->store_artifact(artifact(2, 200000)) || !cache->status().empty()) return 7;
  return cache.told == 1 && cache->find_artifact(artifact(2, 200000).key) ? 0 : 8;
}

/// Mounts a small disk on the directory that this process alone sees.
bool mount_disk(const std::string& directory) {
  return ::unshare(CLONE_NEWNS) == 0 &&
         ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         ::mount("wyvern", directory.c_str(), "tmpfs", 0, "size=4m,mode=0700") == 0;
}

/// Writes files until the disk has not a byte left.
void fill_disk(const std::filesystem::path& directory, const std::string& name) {
  std::ofstream out(directory / name, std::ios::binary);
  for (const std::string page(4096, 'F'); out.write(page.data(), 4096).flush();) continue;
}

/// Makes room on a disk that has none: a small one that is full, or for a journal of all that goes.
int role_full_care(const std::string& directory, bool mounted) {
  if (mounted && !mount_disk(directory)) return 77;
  QuietCache cache(directory);
  const auto bytes = [&] {
    return static_cast<std::int64_t>(std::filesystem::file_size(cache->file()));
  };
  const auto end_room = [&](const char* name) {
    if (mounted)
      fill_disk(directory, name);
    else
      limit_files(static_cast<rlim_t>(bytes()));
  };
  for (std::uint64_t i = 0; i < 20; ++i)
    if (!cache->store_artifact(artifact(i, 20000))) return 1;
  if (!cache->store_measurement(measurement(1))) return 2;
  end_room("first");
  if (cache->store_artifact(artifact(99, 200000))) return 3;
  const Collection some = collect(cache.cache, bytes() / 2);
  if (some.bytes != bytes() || some.bytes > some.bytes_before / 2) return 4;
  if (some.deleted < 10 || some.deleted > 12 || !cache->status().empty()) return 5;
  if (cache->stats().artifacts != 20 - some.deleted || cache->stats().measurements != 1) return 6;
  if (!verify_rows(cache.cache).damage.empty()) return 7;
  end_room("second");
  if (!cache->clear() || bytes() > some.bytes / 2 || !cache->status().empty()) return 8;
  return cache->stats().artifacts == 0 && cache.told == 1 ? 0 : 9;
}

int role(int argc, char** argv) {
  const std::string name = argv[2];
  const std::string directory = argv[3];
  const std::string last = argc > 4 ? argv[4] : "0";
  if (name == "write") return role_write(directory, std::stoull(last));
  if (name == "write-damaged") return role_write_damaged(directory, std::stoull(last));
  if (name == "write-forever") return role_write_forever(directory, std::stoull(last));
  if (name == "read-only") return role_read_only(directory, last);
  if (name == "full-care") return role_full_care(directory, last == "mounted");
  if (name == "full") return role_full(directory, last == "blocked");
  return 99;
}

// ---- Many processes

void expect_all_written(const std::filesystem::path& directory, std::uint64_t processes) {
  QuietCache cache(directory);
  for (std::uint64_t i = 0; i < processes * kEach; ++i) {
    const auto found = cache->find_artifact(artifact(i).key);
    ASSERT_TRUE(found) << i;
    EXPECT_EQ(found->code, artifact(i).code);
    const MeasurementRow m = measurement(i);
    const auto measured = cache->find_measurement(m.device, m.problem, m.template_id, m.config);
    ASSERT_TRUE(measured) << i;
    EXPECT_EQ(measured->samples_us, m.samples_us);
    EXPECT_TRUE(cache->find_winner(m.device, "gdn", static_cast<std::int64_t>(i) + 1, 1)) << i;
  }
  EXPECT_EQ(cache->status(), "");
}

TEST(CacheProcesses, SixteenAtOnceLoseNothing) {
  const TempDirectory temp;
  constexpr std::uint64_t kProcesses = 16;
  std::vector<pid_t> pids;
  for (std::uint64_t i = 0; i < kProcesses; ++i) {
    pids.push_back(start({"write", (temp.path() / "new").string(), std::to_string(i * kEach)}));
  }
  for (const pid_t pid : pids) EXPECT_EQ(finish(pid), 0);
  expect_all_written(temp.path() / "new", kProcesses);
  EXPECT_EQ(integrity(temp.path() / "new" / "wyvern.db"), "ok");
}

TEST(CacheProcesses, ManyWhoMeetDamageRepairItOnce) {
  const TempDirectory temp;
  for (std::uint64_t i = 0; i < 40; ++i) {
    ASSERT_TRUE(QuietCache(temp.path())->store_artifact(artifact(i)));
  }
  std::filesystem::resize_file(temp.file(), std::filesystem::file_size(temp.file()) / 2);
  std::vector<pid_t> pids;
  for (std::uint64_t i = 0; i < 8; ++i) {
    pids.push_back(
        start({"write-damaged", temp.path().string(), std::to_string(1000 + i * kEach)}));
  }
  int menders = 0;
  for (const pid_t pid : pids) {
    const int result = finish(pid);
    EXPECT_TRUE(result == 0 || result == 10) << result;
    menders += result == 10;
  }
  EXPECT_EQ(menders, 1);
  QuietCache cache(temp.path());
  for (std::uint64_t i = 0; i < 8 * kEach; ++i) {
    EXPECT_TRUE(cache->find_artifact(artifact(1000 + i).key)) << i;
  }
  EXPECT_TRUE(cache->find_artifact(artifact(0).key));
  EXPECT_EQ(integrity(temp.file()), "ok");
}

/// Until another process has stored the artifact.
void wait_for(const std::string& key, const std::filesystem::path& directory) {
  QuietCache cache(directory);
  while (!cache->find_artifact(key)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

TEST(CacheProcesses, KilledWritersLeaveASoundFile) {
  const TempDirectory temp;
  std::set<std::string> seen;
  std::mt19937 random(std::random_device{}());
  for (std::uint64_t round = 0; round < 25; ++round) {
    const std::uint64_t first = round * 10000;
    const pid_t pid = start({"write-forever", temp.path().string(), std::to_string(first)});
    // At any moment; every other time at one when it has surely begun to write.
    if (round % 2 == 1) wait_for(artifact(first, kForeverBytes).key, temp.path());
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 30000));
    ::kill(pid, SIGKILL);
    EXPECT_EQ(finish(pid), -SIGKILL);
    QuietCache cache(temp.path());
    std::set<std::string> now;
    for (const ArtifactRow& row : cache->list_artifacts()) {
      now.insert(row.key);
      const auto found = cache->find_artifact(row.key);
      ASSERT_TRUE(found);
      EXPECT_EQ(sha256_hex(found->code), row.key);
    }
    EXPECT_TRUE(std::includes(now.begin(), now.end(), seen.begin(), seen.end()));
    EXPECT_EQ(cache->status(), "");
    EXPECT_EQ(cache.told, 0);
    seen = std::move(now);
  }
  EXPECT_GE(seen.size(), 12u);
  EXPECT_EQ(integrity(temp.file()), "ok");
}

TEST(CacheProcesses, ALockHeldTooLongIsWaitedForOnce) {
  const TempDirectory temp;
  QuietCache cache(temp.path());
  ASSERT_TRUE(cache->store_artifact(artifact(1)));
  Database holder(temp.file(), Database::Mode::read_write);
  holder.execute("BEGIN EXCLUSIVE");

  const auto begin = Clock::now();
  const long awake = times_asleep();
  EXPECT_FALSE(cache->store_artifact(artifact(2)));
  EXPECT_GE(Clock::now() - begin, 4s);
  const long first_wait = times_asleep() - awake;
  EXPECT_NE(cache->status().find("locked"), std::string::npos);
  EXPECT_EQ(cache.told, 1);

  // Not by the clock, which runs on while a loaded machine does other things: the thread sleeps
  // again and again where it waits long.
  const long before = times_asleep();
  EXPECT_FALSE(cache->store_artifact(artifact(2)));
  EXPECT_FALSE(cache->find_artifact(artifact(1).key));
  EXPECT_LT(times_asleep() - before, first_wait / 4);

  holder.execute("ROLLBACK");
  EXPECT_TRUE(cache->find_artifact(artifact(1).key));
  EXPECT_TRUE(cache->store_artifact(artifact(2)));
  EXPECT_EQ(cache->status(), "");
  EXPECT_EQ(cache.told, 1);
}

TEST(CacheProcesses, ALockThatOthersWorkUnderIsWaitedForLonger) {
  const TempDirectory temp;
  QuietCache cache(temp.path());
  Database holder(temp.file(), Database::Mode::read_write);
  holder.execute("BEGIN EXCLUSIVE");
  std::thread release([&] {
    for (int i = 0; i < 14; ++i) {
      std::this_thread::sleep_for(500ms);
      std::filesystem::last_write_time(temp.file(), std::filesystem::file_time_type::clock::now());
    }
    holder.execute("ROLLBACK");
  });
  const auto begin = Clock::now();
  EXPECT_TRUE(cache->store_artifact(artifact(1)));
  EXPECT_GT(Clock::now() - begin, 6s);
  release.join();
  EXPECT_EQ(cache->status(), "");
}

TEST(CacheProcesses, AShortLockIsWaitedFor) {
  const TempDirectory temp;
  QuietCache cache(temp.path());
  Database holder(temp.file(), Database::Mode::read_write);
  holder.execute("BEGIN IMMEDIATE");
  std::thread release([&] {
    std::this_thread::sleep_for(300ms);
    holder.execute("ROLLBACK");
  });
  EXPECT_TRUE(cache->store_artifact(artifact(1)));
  release.join();
  EXPECT_EQ(cache->status(), "");
}

// ---- fork()

int child_result(const std::function<int()>& work) {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(work());
  return finish(pid);
}

TEST(CacheFork, ChildOpensItsOwnConnection) {
  const TempDirectory temp;
  QuietCache cache(temp.path());
  ASSERT_TRUE(cache->store_artifact(artifact(1)));
  EXPECT_EQ(child_result([&] {
              if (!cache->find_artifact(artifact(1).key)) return 1;
              if (!cache->store_artifact(artifact(2))) return 2;
              return cache->status().empty() && cache.told == 0 ? 0 : 3;
            }),
            0);
  EXPECT_TRUE(cache->find_artifact(artifact(2).key));
  EXPECT_TRUE(cache->store_artifact(artifact(3)));
  EXPECT_EQ(child_result([&] { return cache->find_artifact(artifact(3).key) ? 0 : 1; }), 0);
}

TEST(CacheFork, ChildOfAProcessWhoseThreadsAreWriting) {
  const TempDirectory temp;
  QuietCache cache(temp.path());
  ASSERT_TRUE(cache->store_artifact(artifact(1)));
  std::atomic<bool> stop = false;
  std::atomic<int> failures = 0;
  std::thread writer([&] {
    for (std::uint64_t i = 1000; !stop; ++i) failures += !cache->store_artifact(artifact(i, 20000));
  });
  for (std::uint64_t i = 0; i < 20; ++i) {
    EXPECT_EQ(child_result([&] {
                ::alarm(60);  // a child that inherits a held mutex would wait for ever
                if (!cache->find_artifact(artifact(1).key)) return 1;
                return cache->store_artifact(artifact(100 + i)) ? 0 : 2;
              }),
              0);
  }
  stop = true;
  writer.join();
  EXPECT_EQ(failures, 0);
  for (std::uint64_t i = 0; i < 20; ++i) EXPECT_TRUE(cache->find_artifact(artifact(100 + i).key));
  EXPECT_EQ(integrity(temp.file()), "ok");
}

TEST(CacheFork, ChildWhoseThreadsForkWhileOthersUseWhatItInherited) {
  const TempDirectory temp;
  ASSERT_TRUE(QuietCache(temp.path())->store_artifact(artifact(1)));
  for (int round = 0; round < 40; ++round) {
    std::vector<std::unique_ptr<QuietCache>> caches;
    for (int i = 0; i < 20; ++i) caches.push_back(std::make_unique<QuietCache>(temp.path()));
    EXPECT_EQ(child_result([&] {
                ::alarm(60);
                std::atomic<bool> done = false;
                int found = 0;
                std::thread user([&] {
                  for (const auto& cache : caches)
                    found += (*cache)->find_artifact(artifact(1).key).has_value();
                  done = true;
                });
                int failures = 0;
                do failures += child_result([] { return 0; }) != 0;
                while (!done);
                user.join();
                return failures == 0 && found == 20 ? 0 : 1;
              }),
              0);
  }
}

// ---- Disks and directories

TEST(CacheDisk, FullDiskCostsTheRowAndNoMore) {
  const TempDirectory temp;
  EXPECT_EQ(run({"full", temp.path().string()}), 0);
  EXPECT_EQ(integrity(temp.file()), "ok");
  const TempDirectory other;
  EXPECT_EQ(run({"full", other.path().string(), "blocked"}), 0);
}

TEST(CacheDisk, FullDiskCanBeFreed) {
  const TempDirectory temp;
  EXPECT_EQ(run({"full-care", temp.path().string()}), 0);
  EXPECT_EQ(integrity(temp.file()), "ok");
  const TempDirectory other;
  const int code = run({"full-care", other.path().string(), "mounted"});
  if (code == 77) GTEST_SKIP() << "no mounts of its own for a test";
  EXPECT_EQ(code, 0);
}

TEST(CacheDisk, ReadOnlyDirectoryStillAnswers) {
  const TempDirectory temp;
  const auto directory = temp.path() / "cache";
  {
    QuietCache cache(directory);
    ASSERT_TRUE(cache->store_artifact(artifact(1)));
  }
  const std::string before = read_file(directory / "wyvern.db");
  ::chmod(temp.path().c_str(), 0755);
  // Of its own first, whose mode bits bind, then root's.
  const bool is_root = ::geteuid() == 0;
  if (is_root) {
    for (const auto& path : {directory, directory / "wyvern.db"}) {
      ASSERT_EQ(::chown(path.c_str(), kNobody, kNobody), 0);
    }
  }
  ::chmod(directory.c_str(), 0555);
  const int directory_only = run({"read-only", directory.string(), "found"});
  ::chmod((directory / "wyvern.db").c_str(), 0444);
  ::chmod(directory.c_str(), 0700);
  const int file_only = run({"read-only", directory.string(), "found"});
  if (is_root) {
    for (const auto& path : {directory, directory / "wyvern.db"}) {
      ASSERT_EQ(::chown(path.c_str(), 0, 0), 0);
    }
    ::chmod(directory.c_str(), 0755);
    EXPECT_EQ(run({"read-only", directory.string(), "found"}), 0);
  }
  if (directory_only == 77) GTEST_SKIP() << "root that may not become another user";
  EXPECT_EQ(directory_only, 0);
  EXPECT_EQ(file_only, 0);
  EXPECT_EQ(read_file(directory / "wyvern.db"), before);
}

TEST(CacheDisk, DirectoryThatCannotBeCreatedOrEntered) {
  const TempDirectory temp;
  ::chmod(temp.path().c_str(), 0555);
  const auto locked = temp.path() / "locked";
  ASSERT_EQ(::mkdir(locked.c_str(), 0), 0);
  const int no_directory = run({"read-only", (temp.path() / "cache").string(), "missing"});
  const int no_entry = run({"read-only", locked.string(), "missing"});
  ::chmod(temp.path().c_str(), 0700);
  if (no_directory == 77) GTEST_SKIP() << "root that may not become another user";
  EXPECT_EQ(no_directory, 0);
  EXPECT_EQ(no_entry, 0);
}

TEST(CacheDisk, FileWhereTheDirectoryShouldBe) {
  const TempDirectory temp;
  write_file(temp.path() / "file", "not a directory");
  for (const char* below : {"file", "file/cache", "file/a/b"}) {
    QuietCache cache(temp.path() / below);
    EXPECT_FALSE(cache->store_artifact(artifact(1)));
    EXPECT_FALSE(cache->find_artifact(artifact(1).key));
    EXPECT_FALSE(cache->clear());
    EXPECT_EQ(cache->stats().artifacts, 0);
    EXPECT_TRUE(cache->list_winners().empty());
    EXPECT_NE(cache->status(), "") << below;
    EXPECT_EQ(cache.told, 1) << below;
  }
  EXPECT_EQ(read_file(temp.path() / "file"), "not a directory");
}

TEST(CacheDisk, APathTooLongForTheSystemIsRefusedAsAWhole) {
  const TempDirectory temp;
  std::string path = temp.path().string();
  for (int i = 0; i < 10000; ++i) path += "/a";
  QuietCache cache(path);
  EXPECT_FALSE(cache->store_artifact(artifact(1)));
  EXPECT_NE(cache.said.find("cannot be created (File name too long)"), std::string::npos);
  EXPECT_TRUE(std::filesystem::is_empty(temp.path()));  // not even the first of its directories
}

TEST(CacheDisk, DeletedWhileOpenIsCreatedAgain) {
  const TempDirectory temp;
  const auto directory = temp.path() / "cache";
  QuietCache cache(directory);
  ASSERT_TRUE(cache->store_artifact(artifact(1)));
  std::filesystem::remove_all(directory);
  EXPECT_TRUE(cache->store_artifact(artifact(2)));
  QuietCache other(directory);
  EXPECT_TRUE(other->find_artifact(artifact(2).key));
  EXPECT_EQ(cache.told, 0);
}

}  // namespace
}  // namespace wyvern::testing

int main(int argc, char** argv) {
  if (argc > 3 && std::strcmp(argv[1], "--role") == 0) return wyvern::testing::role(argc, argv);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
