#!/usr/bin/env bash
# sanitize.sh TOOL PROGRAM...: runs the programs' Gpu...Sanitize cases under a compute-sanitizer tool.
# Exit status 77, with the reason, where there is no GPU or no compute-sanitizer.
set -u
tool=$1
shift
export PATH="$PATH:/usr/local/cuda/bin"
if [ ! -e /dev/nvidiactl ]; then
  echo "skipped: no NVIDIA GPU on this machine"
  exit 77
fi
if ! command -v compute-sanitizer >/dev/null; then
  echo "skipped: compute-sanitizer is not on this machine; it comes with the CUDA toolkit"
  exit 77
fi
for program in "$@"; do
  compute-sanitizer --tool "$tool" --error-exitcode 1 "$program" --gtest_filter='Gpu*Sanitize*' ||
    exit 1
done
