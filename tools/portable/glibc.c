// What GCC's and glibc's static parts and headers of this machine ask of a newer C library
// than 2.28, for what goes into wheels (portable.cmake): each function is hidden and calls the
// version of it that glibc 2.28 has. Threads and dlopen were libraries of their own there, which
// portable.cmake links.
#ifndef __x86_64__
#error "the versions named here are those of x86-64"
#endif
#define _GNU_SOURCE
#include <features.h>
#if __GLIBC_PREREQ(2, 34)  // an older one has the old functions under their own names
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>

#define HIDDEN __attribute__((visibility("hidden")))

// OLD(result, name, version, (parameters), (arguments)): name() calls the version of that name.
#define OLD(result, name, version, parameters, arguments)     \
  extern result old_##name parameters;                        \
  __asm__(".symver old_" #name ", " #name "@GLIBC_" version); \
  HIDDEN result name parameters { return old_##name arguments; }

// The C library's own names.
// NOLINTBEGIN(readability-identifier-naming)
int __pthread_key_create(pthread_key_t*, void (*)(void*));
double exp(double);
double exp2(double);
double log(double);
double log2(double);
double pow(double, double);

OLD(double, exp, "2.2.5", (double x), (x))
OLD(double, exp2, "2.2.5", (double x), (x))
OLD(double, log, "2.2.5", (double x), (x))
OLD(double, log2, "2.2.5", (double x), (x))
OLD(double, pow, "2.2.5", (double x, double y), (x, y))

OLD(void*, dlopen, "2.2.5", (const char* file, int mode), (file, mode))
OLD(void*, dlsym, "2.2.5", (void* handle, const char* name), (handle, name))
OLD(int, dlclose, "2.2.5", (void* handle), (handle))
OLD(char*, dlerror, "2.2.5", (void), ())
OLD(int, dladdr, "2.2.5", (const void* address, Dl_info* info), (address, info))
OLD(int, dladdr1, "2.3.3", (const void* address, Dl_info* info, void** extra, int flags),
    (address, info, extra, flags))

OLD(int, pthread_create, "2.2.5",
    (pthread_t * thread, const pthread_attr_t* attributes, void* (*start)(void*), void* argument),
    (thread, attributes, start, argument))
OLD(int, pthread_join, "2.2.5", (pthread_t thread, void** result), (thread, result))
OLD(int, pthread_detach, "2.2.5", (pthread_t thread), (thread))
OLD(int, pthread_once, "2.2.5", (pthread_once_t * once, void (*start)(void)), (once, start))
OLD(int, pthread_attr_setstacksize, "2.2.5", (pthread_attr_t * attributes, size_t size),
    (attributes, size))
OLD(int, pthread_getname_np, "2.12", (pthread_t thread, char* name, size_t size),
    (thread, name, size))
OLD(int, pthread_setname_np, "2.12", (pthread_t thread, const char* name), (thread, name))
OLD(int, pthread_sigmask, "2.2.5", (int how, const sigset_t* set, sigset_t* old), (how, set, old))
OLD(int, pthread_mutex_trylock, "2.2.5", (pthread_mutex_t * mutex), (mutex))
OLD(int, pthread_mutexattr_init, "2.2.5", (pthread_mutexattr_t * attributes), (attributes))
OLD(int, pthread_mutexattr_destroy, "2.2.5", (pthread_mutexattr_t * attributes), (attributes))
OLD(int, pthread_mutexattr_settype, "2.2.5", (pthread_mutexattr_t * attributes, int type),
    (attributes, type))
OLD(int, pthread_rwlock_rdlock, "2.2.5", (pthread_rwlock_t * lock), (lock))
OLD(int, pthread_rwlock_wrlock, "2.2.5", (pthread_rwlock_t * lock), (lock))
OLD(int, pthread_rwlock_unlock, "2.2.5", (pthread_rwlock_t * lock), (lock))
OLD(int, pthread_key_create, "2.2.5", (pthread_key_t * key, void (*destroy)(void*)), (key, destroy))
OLD(int, __pthread_key_create, "2.2.5", (pthread_key_t * key, void (*destroy)(void*)),
    (key, destroy))
OLD(int, pthread_key_delete, "2.2.5", (pthread_key_t key), (key))
OLD(void*, pthread_getspecific, "2.2.5", (pthread_key_t key), (key))
OLD(int, pthread_setspecific, "2.2.5", (pthread_key_t key, const void* value), (key, value))

// glibc 2.30 has it. Before, a wait until a time of another clock than the condition's is a wait
// until that time by the condition's clock: callers look at their own clock when it ends.
HIDDEN int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                                  clockid_t clock, const struct timespec* until) {
  typedef int Wait(pthread_cond_t*, pthread_mutex_t*, clockid_t, const struct timespec*);
  static Wait* found;
  static int is_looked_for;
  if (!__atomic_load_n(&is_looked_for, __ATOMIC_ACQUIRE)) {
    __atomic_store_n(&found, (Wait*)dlsym(RTLD_DEFAULT, "pthread_cond_clockwait"),
                     __ATOMIC_RELAXED);
    __atomic_store_n(&is_looked_for, 1, __ATOMIC_RELEASE);
  }
  Wait* const wait = __atomic_load_n(&found, __ATOMIC_RELAXED);
  if (wait != NULL) return wait(condition, mutex, clock, until);
  struct timespec now, real;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &real);
  real.tv_sec += until->tv_sec - now.tv_sec;
  real.tv_nsec += until->tv_nsec - now.tv_nsec;
  if (real.tv_nsec < 0) {
    real.tv_nsec += 1000000000;
    --real.tv_sec;
  } else if (real.tv_nsec >= 1000000000) {
    real.tv_nsec -= 1000000000;
    ++real.tv_sec;
  }
  return pthread_cond_timedwait(condition, mutex, &real);
}

// The names under which glibc had these before 2.33, and has them still.
enum { kStatVersion = 1, kMknodVersion = 0 };
extern int __xstat(int, const char*, struct stat*);
extern int __lxstat(int, const char*, struct stat*);
extern int __fxstat(int, int, struct stat*);
extern int __fxstatat(int, int, const char*, struct stat*, int);
extern int __xmknod(int, const char*, mode_t, dev_t*);
_Static_assert(sizeof(struct stat) == sizeof(struct stat64), "files are of 64 bits either way");
HIDDEN int stat(const char* path, struct stat* to) { return __xstat(kStatVersion, path, to); }
HIDDEN int lstat(const char* path, struct stat* to) { return __lxstat(kStatVersion, path, to); }
HIDDEN int fstat(int file, struct stat* to) { return __fxstat(kStatVersion, file, to); }
HIDDEN int fstatat(int folder, const char* path, struct stat* to, int flags) {
  return __fxstatat(kStatVersion, folder, path, to, flags);
}
HIDDEN int stat64(const char* path, struct stat64* to) { return stat(path, (struct stat*)to); }
HIDDEN int lstat64(const char* path, struct stat64* to) { return lstat(path, (struct stat*)to); }
HIDDEN int fstat64(int file, struct stat64* to) { return fstat(file, (struct stat*)to); }
HIDDEN int mknod(const char* path, mode_t mode, dev_t device) {
  return __xmknod(kMknodVersion, path, mode, &device);
}

// Whether atomic operations can be left out: never.
HIDDEN char __libc_single_threaded = 0;

HIDDEN uint32_t arc4random(void) {
  uint32_t value = 0;
  while (getrandom(&value, sizeof value, 0) != (ssize_t)sizeof value && errno == EINTR) {
  }
  return value;
}

// LLVM asks how much memory is used. Beyond 2 GiB the old function's numbers wrap.
extern struct mallinfo old_mallinfo(void) __asm__("mallinfo");
HIDDEN struct mallinfo2 mallinfo2(void) {
  const struct mallinfo from = old_mallinfo();
  const struct mallinfo2 to = {.arena = (unsigned)from.arena,
                               .ordblks = (unsigned)from.ordblks,
                               .smblks = (unsigned)from.smblks,
                               .hblks = (unsigned)from.hblks,
                               .hblkhd = (unsigned)from.hblkhd,
                               .usmblks = (unsigned)from.usmblks,
                               .fsmblks = (unsigned)from.fsmblks,
                               .uordblks = (unsigned)from.uordblks,
                               .fordblks = (unsigned)from.fordblks,
                               .keepcost = (unsigned)from.keepcost};
  return to;
}
// NOLINTEND(readability-identifier-naming)
#endif
