// Preloaded into a command under attack: one of its calls fails, or all from one on.
//
//   FAULT=CLASS:N     the N-th call of this class fails (CLASS is a name of kClasses below)
//   FAULT=CLASS:N+    it and all that follow
//   FAULT_DEPTH=1     in the processes that the command starts and not in the command itself
//   FAULT_COUNTS=FILE each process adds lines to the file: how many processes stand above it, a
//                     class, and the number of its calls
//
// Calls count from main() on: what fails before it cannot be told by the program. Allocation also
// means LLVM's, whose plugin is therefore opened without RTLD_DEEPBIND.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <unistd.h>

enum Class {
  kMalloc,
  kOpen,
  kRead,
  kWrite,
  kMmap,
  kDlopen,
  kSpawn,
  kSync,
  kRename,
  kThread,
  kPipe,
  kCount
};
static const char* const kClasses[kCount] = {"malloc", "open", "read",   "write",  "mmap", "dlopen",
                                             "spawn",  "sync", "rename", "thread", "pipe"};

static int wanted = -1;  // the class; -1: none
static unsigned long fail_at;
static int lasting;
static atomic_ulong calls[kCount];
static atomic_int armed;
static const char* counts_file;
static int depth;

static int fails(enum Class kind, int error) {
  if (!atomic_load(&armed)) return 0;
  const unsigned long number = atomic_fetch_add(&calls[kind], 1) + 1;
  if ((int)kind != wanted || (lasting ? number < fail_at : number != fail_at)) return 0;
  errno = error;
  return 1;
}

// ---- Allocation: glibc's own names, since looking one up by dlsym() would allocate.

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

void* malloc(size_t bytes) { return fails(kMalloc, ENOMEM) ? NULL : __libc_malloc(bytes); }
void* calloc(size_t n, size_t bytes) {
  return fails(kMalloc, ENOMEM) ? NULL : __libc_calloc(n, bytes);
}
void* realloc(void* old, size_t bytes) {
  return fails(kMalloc, ENOMEM) ? NULL : __libc_realloc(old, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  return fails(kMalloc, ENOMEM) ? NULL : __libc_memalign(alignment, bytes);
}
void* memalign(size_t alignment, size_t bytes) { return aligned_alloc(alignment, bytes); }
int posix_memalign(void** to, size_t alignment, size_t bytes) {
  if (fails(kMalloc, ENOMEM)) return ENOMEM;
  *to = __libc_memalign(alignment, bytes);
  return *to == NULL ? ENOMEM : 0;
}

// ---- The rest

#define REAL(name)               \
  static __typeof__(&name) real; \
  if (real == NULL) *(void**)&real = dlsym(RTLD_NEXT, #name)

#define OPEN_MODE(flags)                                                \
  mode_t mode = 0;                                                      \
  if (((flags) & O_CREAT) != 0 || ((flags) & O_TMPFILE) == O_TMPFILE) { \
    va_list rest;                                                       \
    va_start(rest, flags);                                              \
    mode = va_arg(rest, mode_t);                                        \
    va_end(rest);                                                       \
  }

int open(const char* path, int flags, ...) {
  OPEN_MODE(flags)
  REAL(open);
  return fails(kOpen, EMFILE) ? -1 : real(path, flags, mode);
}
int open64(const char* path, int flags, ...) {
  OPEN_MODE(flags)
  REAL(open64);
  return fails(kOpen, EMFILE) ? -1 : real(path, flags, mode);
}
int openat(int folder, const char* path, int flags, ...) {
  OPEN_MODE(flags)
  REAL(openat);
  return fails(kOpen, EMFILE) ? -1 : real(folder, path, flags, mode);
}
FILE* fopen(const char* path, const char* mode) {
  REAL(fopen);
  return fails(kOpen, EMFILE) ? NULL : real(path, mode);
}
FILE* fopen64(const char* path, const char* mode) {
  REAL(fopen64);
  return fails(kOpen, EMFILE) ? NULL : real(path, mode);
}
int memfd_create(const char* name, unsigned flags) {
  REAL(memfd_create);
  return fails(kOpen, EMFILE) ? -1 : real(name, flags);
}

ssize_t read(int file, void* to, size_t bytes) {
  REAL(read);
  return fails(kRead, EIO) ? -1 : real(file, to, bytes);
}
ssize_t pread(int file, void* to, size_t bytes, off_t at) {
  REAL(pread);
  return fails(kRead, EIO) ? -1 : real(file, to, bytes, at);
}
ssize_t pread64(int file, void* to, size_t bytes, off64_t at) {
  REAL(pread64);
  return fails(kRead, EIO) ? -1 : real(file, to, bytes, at);
}

ssize_t write(int file, const void* from, size_t bytes) {
  REAL(write);
  return fails(kWrite, ENOSPC) ? -1 : real(file, from, bytes);
}
ssize_t pwrite(int file, const void* from, size_t bytes, off_t at) {
  REAL(pwrite);
  return fails(kWrite, ENOSPC) ? -1 : real(file, from, bytes, at);
}
ssize_t pwrite64(int file, const void* from, size_t bytes, off64_t at) {
  REAL(pwrite64);
  return fails(kWrite, ENOSPC) ? -1 : real(file, from, bytes, at);
}
// Part of a buffer is written before the disk is full; the C library's own streams end here.
size_t fwrite(const void* from, size_t bytes, size_t n, FILE* file) {
  REAL(fwrite);
  return fails(kWrite, ENOSPC) ? 0 : real(from, bytes, n, file);
}
int ftruncate64(int file, off64_t size) {
  REAL(ftruncate64);
  return fails(kWrite, ENOSPC) ? -1 : real(file, size);
}
int ftruncate(int file, off_t size) {
  REAL(ftruncate);
  return fails(kWrite, ENOSPC) ? -1 : real(file, size);
}

void* mmap(void* at, size_t bytes, int protection, int flags, int file, off_t offset) {
  REAL(mmap);
  return fails(kMmap, ENOMEM) ? MAP_FAILED : real(at, bytes, protection, flags, file, offset);
}
void* mmap64(void* at, size_t bytes, int protection, int flags, int file, off64_t offset) {
  REAL(mmap64);
  return fails(kMmap, ENOMEM) ? MAP_FAILED : real(at, bytes, protection, flags, file, offset);
}

void* dlopen(const char* path, int flags) {
  REAL(dlopen);
  // One that fails says why by dlerror(), so that a file that is no library is opened.
  return real(fails(kDlopen, 0) ? "/dev/null" : path, flags & ~RTLD_DEEPBIND);
}

int posix_spawn(pid_t* pid, const char* path, const posix_spawn_file_actions_t* actions,
                const posix_spawnattr_t* attributes, char* const* arguments, char* const* names) {
  REAL(posix_spawn);
  return fails(kSpawn, EAGAIN) ? EAGAIN : real(pid, path, actions, attributes, arguments, names);
}
int posix_spawnp(pid_t* pid, const char* path, const posix_spawn_file_actions_t* actions,
                 const posix_spawnattr_t* attributes, char* const* arguments, char* const* names) {
  REAL(posix_spawnp);
  return fails(kSpawn, EAGAIN) ? EAGAIN : real(pid, path, actions, attributes, arguments, names);
}
pid_t fork(void) {
  REAL(fork);
  return fails(kSpawn, EAGAIN) ? -1 : real();
}

int fsync(int file) {
  REAL(fsync);
  return fails(kSync, EIO) ? -1 : real(file);
}
int fdatasync(int file) {
  REAL(fdatasync);
  return fails(kSync, EIO) ? -1 : real(file);
}
int rename(const char* from, const char* to) {
  REAL(rename);
  return fails(kRename, EIO) ? -1 : real(from, to);
}
int link(const char* from, const char* to) {
  REAL(link);
  return fails(kRename, EIO) ? -1 : real(from, to);
}
int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*work)(void*),
                   void* argument) {
  REAL(pthread_create);
  return fails(kThread, EAGAIN) ? EAGAIN : real(thread, attributes, work, argument);
}
int pipe2(int ends[2], int flags) {
  REAL(pipe2);
  return fails(kPipe, EMFILE) ? -1 : real(ends, flags);
}
int socketpair(int domain, int type, int protocol, int ends[2]) {
  REAL(socketpair);
  return fails(kPipe, EMFILE) ? -1 : real(domain, type, protocol, ends);
}

// ---- The life of the process

static void count(void) {
  atomic_store(&armed, 0);
  if (counts_file == NULL) return;
  FILE* file = fopen(counts_file, "a");
  if (file == NULL) return;
  for (int kind = 0; kind < kCount; ++kind)
    fprintf(file, "%d %s %lu\n", depth, kClasses[kind], atomic_load(&calls[kind]));
  fclose(file);
}

__attribute__((constructor)) static void prepare(void) {
  const char* fault = getenv("FAULT");
  const char* own = getenv("FAULT_OWN_DEPTH");
  const char* aim = getenv("FAULT_DEPTH");
  counts_file = getenv("FAULT_COUNTS");
  depth = own != NULL ? atoi(own) : 0;
  char next[16];
  snprintf(next, sizeof next, "%d", depth + 1);
  setenv("FAULT_OWN_DEPTH", next, 1);
  if (fault == NULL || depth != (aim != NULL ? atoi(aim) : 0)) return;
  const char* colon = strchr(fault, ':');
  if (colon == NULL) return;
  for (int i = 0; i < kCount; ++i)
    if (strlen(kClasses[i]) == (size_t)(colon - fault) &&
        strncmp(fault, kClasses[i], (size_t)(colon - fault)) == 0)
      wanted = i;
  char* end = NULL;
  fail_at = strtoul(colon + 1, &end, 10);
  lasting = *end == '+';
}

static int (*real_main)(int, char**, char**);

static int counted_main(int argc, char** argv, char** names) {
  atexit(count);
  atomic_store(&armed, 1);
  return real_main(argc, argv, names);
}

int __libc_start_main(int (*)(int, char**, char**), int, char**, void (*)(void), void (*)(void),
                      void (*)(void), void*);
int __libc_start_main(int (*main)(int, char**, char**), int argc, char** argv, void (*init)(void),
                      void (*fini)(void), void (*rtld_fini)(void), void* stack_end) {
  REAL(__libc_start_main);
  real_main = main;
  return real(counted_main, argc, argv, init, fini, rtld_fini, stack_end);
}
