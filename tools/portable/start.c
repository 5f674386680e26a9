// The start of a program for glibc before 2.34 too: there a program runs its own initializers,
// which the start files of a newer glibc leave to the C library.
#include <features.h>
#if __GLIBC_PREREQ(2, 34)
typedef void Initializer(int, char**, char**);
extern Initializer* __init_array_start[];
extern Initializer* __init_array_end[];
// NOLINTBEGIN(readability-identifier-naming): the C library's own names
extern void _init(void) __attribute__((visibility("hidden")));

static void initialize(int argc, char** argv, char** environment) {
  _init();
  for (Initializer** at = __init_array_start; at != __init_array_end; ++at)
    (*at)(argc, argv, environment);
}

typedef int Main(int, char**, char**);
extern int old_start(Main*, int, char**, Initializer*, void (*)(void), void (*)(void), void*);
__asm__(".symver old_start, __libc_start_main@GLIBC_2.2.5");

__attribute__((visibility("hidden"))) int __libc_start_main(Main* program, int argc, char** argv,
                                                            Initializer* init, void (*fini)(void),
                                                            void (*loader_fini)(void),
                                                            void* stack_end) {
  return old_start(program, argc, argv, init != 0 ? init : initialize, fini, loader_fini,
                   stack_end);
}
// NOLINTEND(readability-identifier-naming)
#endif
