# What `tools/test --sanitize` does. Sourced by it, after tools/lib.sh.
# shellcheck shell=bash

# sanitize KIND CTEST ARGUMENTS: builds everything with the sanitizers of KIND, address or thread, and
# runs the tests in that build.
sanitize() {
  local kind=$1 own=$root/tests/sanitizers
  shift
  case $kind in
    address | thread) ;;
    *) say "tools/test: --sanitize is '$kind'; it must be address or thread" >&2; exit 2 ;;
  esac
  build=$root/build-$kind build_preset=sanitize-$kind log=$root/build-$kind/setup.log
  packages+=("${test_packages[@]}" "${clang_packages[@]}")
  set_up

  local symbolizer=/usr/lib/llvm-19/bin/llvm-symbolizer
  # A caller may ask for memory that no machine has, and gets an error. What a process leaves to its
  # end is freed by the end: a device is kept on purpose, and LLVM's plugin is never closed.
  export ASAN_OPTIONS=allocator_may_return_null=1:detect_leaks=0:external_symbolizer_path=$symbolizer
  export UBSAN_OPTIONS=print_stacktrace=1
  # Children of tests that fork with threads running go on and start threads of their own; the
  # threads that they have not inherited are no leak.
  export TSAN_OPTIONS=suppressions=$own/thread.supp:external_symbolizer_path=$symbolizer
  TSAN_OPTIONS+=:die_after_fork=0:report_thread_leaks=0
  TSAN_OPTIONS+=:second_deadlock_stack=1:allocator_may_return_null=1
  # Python itself has no sanitizer, and loads no library that needs one.
  run_tests --exclude-regex '^Gpu/|^gpu_|^python_' "$@"
}
