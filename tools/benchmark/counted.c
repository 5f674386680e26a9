/* See counted.hpp. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

/* glibc's own functions under names that nothing stands before. */
/* NOLINTBEGIN(readability-identifier-naming) */
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
/* NOLINTEND(readability-identifier-naming) */

/* initial-exec: a thread's first use of them must not itself allocate. */
#define PER_THREAD static __thread __attribute__((tls_model("initial-exec")))
PER_THREAD int64_t allocations;
PER_THREAD int64_t locks;

/* Seen by the program's libraries, whatever the build hides. */
#pragma GCC visibility push(default)

int64_t wyvern_counted_allocations(void) { return allocations; }
int64_t wyvern_counted_locks(void) { return locks; }

void* malloc(size_t bytes) {
  ++allocations;
  return __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) {
  ++allocations;
  return __libc_calloc(count, bytes);
}
void* realloc(void* old, size_t bytes) {
  ++allocations;
  return __libc_realloc(old, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  ++allocations;
  return __libc_memalign(alignment, bytes);
}
int posix_memalign(void** to, size_t alignment, size_t bytes) {
  ++allocations;
  *to = __libc_memalign(alignment, bytes);
  return *to == NULL ? ENOMEM : 0;
}

/* Threads may look the C library's function up more than once; they find the same. */
/* NOLINTBEGIN(bugprone-macro-parentheses) */
#define COUNTED_LOCK(name, type)                                \
  int name(type* which) {                                       \
    static int (*real)(type*);                                  \
    ++locks;                                                    \
    if (real == NULL) *(void**)&real = dlsym(RTLD_NEXT, #name); \
    return real(which);                                         \
  }
/* NOLINTEND(bugprone-macro-parentheses) */
COUNTED_LOCK(pthread_mutex_lock, pthread_mutex_t)
COUNTED_LOCK(pthread_mutex_trylock, pthread_mutex_t)
COUNTED_LOCK(pthread_rwlock_rdlock, pthread_rwlock_t)
COUNTED_LOCK(pthread_rwlock_wrlock, pthread_rwlock_t)
COUNTED_LOCK(pthread_spin_lock, pthread_spinlock_t)

#pragma GCC visibility pop
