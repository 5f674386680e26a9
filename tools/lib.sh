# What tools/quickstart and tools/test share: packages, configuring, building. Sourced by bash.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build="$root/build"
build_preset=default
log="$build/setup.log"
configure_options=()

# Everything the build needs; run-time needs follow from it.
packages=(
  g++ cmake ninja-build python3
  libfmt-dev nlohmann-json3-dev libsqlite3-dev zlib1g-dev libcli11-dev libjs-chart.js
  llvm-19-dev libclang-19-dev libclang-cpp19-dev clang-19 liblld-19-dev
  libbenchmark-dev
)
# What the tests need beside.
test_packages=(libgtest-dev clang-format-19 clang-tidy-19 git)
# What fuzz targets and sanitizers need beside; llvm-19 has the symbolizer of their reports.
clang_packages=(clang-19 libclang-rt-19-dev llvm-19)

say() { printf '%s\n' "$*"; }
fail() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 3; }

# Runs a command with its output in the log; shows the log's end only when it fails.
quietly() {
  local what=$1
  shift
  if ! "$@" >>"$log" 2>&1; then
    tail -n 30 "$log" >&2
    fail "$what failed; its whole output is in $log"
  fi
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

install_packages() {
  local missing=() package
  command -v dpkg-query >/dev/null ||
    fail "this machine has no dpkg; install the equivalents of: ${packages[*]}, then use CMake as README.md shows"
  for package in "${packages[@]}"; do
    case $(dpkg-query -W -f='${db:Status-Abbrev}' "$package" 2>/dev/null) in
      ii*) ;;
      *) missing+=("$package") ;;
    esac
  done
  [ ${#missing[@]} = 0 ] && return
  if [ "$(id -u)" != 0 ] && ! command -v sudo >/dev/null; then
    fail "packages are missing and neither root nor sudo is at hand; as root run: apt-get install --no-install-recommends ${missing[*]}"
  fi
  say "installing packages: ${missing[*]}"
  quietly "apt-get update" as_root apt-get -qq update
  quietly "apt-get install" as_root env DEBIAN_FRONTEND=noninteractive \
    apt-get -qq install --yes --no-install-recommends "${missing[@]}"
}

# Whether NVRTC is where the program looks for it.
has_nvrtc() {
  local file
  ldconfig -p 2>/dev/null | grep -q 'libnvrtc\.so\.1[23]' && return 0
  for file in /usr/local/cuda/lib64/libnvrtc.so.1[23]; do [ -e "$file" ] && return 0; done
  return 1
}

explain_nvrtc() {
  has_nvrtc && return
  say "no NVRTC here, so CUDA kernels cannot be compiled; going on with the CPU"
  say "(to get it: the package cuda-nvrtc-13-0 of NVIDIA's repository, https://developer.nvidia.com/cuda-downloads,"
  say " or 'pip install nvidia-cuda-nvrtc' with its lib folder in LD_LIBRARY_PATH)"
}

# Builds what is given, else everything, as $build_preset and $configure_options say.
configure_and_build() {
  quietly "configuring" cmake --preset "$build_preset" -S "$root" "${configure_options[@]}"
  build_configured "$@"
}

# Builds what is given, else everything, into $build.
build_configured() {
  local targets=()
  [ $# = 0 ] || targets=(--target "$@")
  # On a terminal ninja keeps one line up to date; elsewhere its lines go to the log.
  if [ -t 1 ]; then
    NINJA_STATUS='building [%f/%t, %w] ' cmake --build "$build" "${targets[@]}" || fail "the build failed"
  else
    quietly "the build" cmake --build "$build" "${targets[@]}"
  fi
}

# What is built needs no tests: they are not configured, unless they are already.
without_tests() {
  grep -qs '^WYVERN_TESTS:BOOL=ON$' "$build/CMakeCache.txt" || configure_options=(-DWYVERN_TESTS=OFF)
}

# set_up [TARGET...]: installs, configures and builds.
set_up() {
  mkdir -p "$build"
  : >"$log"
  install_packages
  explain_nvrtc
  [ -x "$build/bin/wyvern" ] || say "building into ${build##*/}/ (some minutes the first time)"
  configure_and_build "$@"
}

# Whether a Python has what the Python tests need.
has_torch() {
  "$1" -c 'import torch, pytest; v = torch.__version__.split(".")
assert (int(v[0]), int(v[1])) >= (2, 10)' >>"$log" 2>&1
}

# The Python tests' interpreter, by name in WYVERN_TEST_PYTHON: the one that is there where it has
# PyTorch, else one in build/pyenv, made here. Where that fails the tests say that they are skipped.
set_up_python() {
  local own="$build/pyenv/bin/python" cpu=https://download.pytorch.org/whl/cpu
  if [ -n "${WYVERN_TEST_PYTHON:-}" ]; then return; fi
  if has_torch python3; then
    WYVERN_TEST_PYTHON=$(command -v python3)
  elif [ -x "$own" ] && has_torch "$own"; then
    WYVERN_TEST_PYTHON=$own
  else
    say "installing PyTorch for the Python tests into build/pyenv (a minute or two, 1 to 4 GB)"
    # Debian's Python makes environments only with this package.
    python3 -c 'import ensurepip' >>"$log" 2>&1 ||
      as_root apt-get -qq install --yes --no-install-recommends python3-venv >>"$log" 2>&1 || true
    if python3 -m venv "$build/pyenv" >>"$log" 2>&1 &&
      "$own" -m pip install --quiet numpy pytest >>"$log" 2>&1 &&
      { "$own" -m pip install --quiet --retries 1 torch --index-url "$cpu" >>"$log" 2>&1 ||
        "$own" -m pip install --quiet torch >>"$log" 2>&1; } && has_torch "$own"; then
      WYVERN_TEST_PYTHON=$own
    else
      say "PyTorch cannot be installed, so the tests named python_* are skipped, all but one; $log says why"
      return
    fi
  fi
  [ "$WYVERN_TEST_PYTHON" != "$own" ] || set_up_peers "$own"
  export WYVERN_TEST_PYTHON
}

# What the tests of wyvern.fla, wyvern.transformers and wyvern.megatron need beside PyTorch, in the environment of a
# Python of ours. If it cannot be installed they are skipped and say so.
set_up_peers() {
  local peers=(flash-linear-attention==0.6.0 transformers==5.23.0 megatron-core==0.16.1) missing=() peer
  for peer in "${peers[@]}"; do
    "$1" -c 'import sys; from importlib.metadata import version
name, wanted = sys.argv[1].split("=="); assert version(name) == wanted' "$peer" >>"$log" 2>&1 ||
      missing+=("$peer")
  done
  [ ${#missing[@]} = 0 ] && return
  say "installing ${missing[*]} into build/pyenv (a minute, 200 MB)"
  # The extra asks for Triton, which PyTorch for CPUs comes without.
  for peer in "${missing[@]}"; do
    "$1" -m pip install --quiet --retries 1 "${peer/#flash-linear-attention/flash-linear-attention[cpu]}" \
      >>"$log" 2>&1 ||
      say "$peer cannot be installed, so the tests of what calls it are skipped; $log says why"
  done
}
