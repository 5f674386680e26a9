# What `tools/test --fuzz` does. Sourced by it, after tools/lib.sh.
# shellcheck shell=bash

# "90s", "10m", "1h" or a number of seconds, as seconds.
seconds_of() {
  [[ $1 =~ ^([1-9][0-9]{0,6})([smh]?)$ ]] || return 1
  case ${BASH_REMATCH[2]} in
    m) echo $((BASH_REMATCH[1] * 60)) ;;
    h) echo $((BASH_REMATCH[1] * 3600)) ;;
    *) echo "${BASH_REMATCH[1]}" ;;
  esac
}

# fuzz_one SECONDS TARGET: runs a target; says what it did, and how to run again what it found.
fuzz_one() {
  local seconds=$1 target=$2 given=$root/tests/fuzz status=0
  local learnt=$build/corpus/$target findings=$build/findings report=$build/findings/$target.log
  local options=(-max_total_time="$seconds" -timeout=20 -rss_limit_mb=4096 -max_len=65536
                 -close_fd_mask=3 -print_final_stats=1 -artifact_prefix="$findings/$target-")
  [ ! -e "$given/$target.dict" ] || options+=(-dict="$given/$target.dict")
  mkdir -p "$learnt"
  "$build/bin/fuzz_$target" "${options[@]}" "$learnt" "$build/tests/fuzz/corpus/$target" \
    >"$report" 2>&1 || status=$?
  say "$target: $(sed -n 's/^stat::number_of_executed_units: //p' "$report") runs in $seconds s"
  [ "$status" = 0 ] && return
  tail -n 40 "$report"
  say "$target FAILED; its whole output is in $report; to run an input again:"
  say "  $build/bin/fuzz_$target $findings/$target-..."
  return 1
}

# fuzz DURATION [TARGET...]: as many targets at a time as there are processors, for DURATION in all.
fuzz() {
  local seconds targets=() target share status=0 jobs
  seconds=$(seconds_of "$1") || { say "tools/test: --fuzz is '$1'; it must be a time such as 60s, 10m or 1h" >&2; exit 2; }
  shift
  for target in "$root"/tests/fuzz/*_fuzz.cpp; do
    target=${target##*/}
    targets+=("${target%_fuzz.cpp}")
  done
  for target in "$@"; do
    [[ " ${targets[*]} " == *" $target "* ]] ||
      { say "tools/test: there is no fuzz target '$target'; they are ${targets[*]}" >&2; exit 2; }
  done
  [ $# = 0 ] || targets=("$@")

  build=$root/build-fuzz build_preset=fuzz log=$root/build-fuzz/setup.log
  mkdir -p "$build/findings"
  : >"$log"
  packages+=("${clang_packages[@]}")
  install_packages
  say "building the fuzz targets into build-fuzz/ (some minutes the first time)"
  quietly "configuring" cmake --preset "$build_preset" -S "$root"
  build_configured fuzz

  # Where reports get their names of functions and lines from.
  export ASAN_SYMBOLIZER_PATH=/usr/lib/llvm-19/bin/llvm-symbolizer
  export UBSAN_OPTIONS=print_stacktrace=1
  jobs=$(nproc)
  [ "$jobs" -le ${#targets[@]} ] || jobs=${#targets[@]}
  share=$(((seconds * jobs + ${#targets[@]} - 1) / ${#targets[@]}))
  say "running ${targets[*]}, $share s each, $jobs at a time"
  local running=0
  for target in "${targets[@]}"; do
    if [ "$running" = "$jobs" ]; then
      wait -n || status=1
      running=$((running - 1))
    fi
    fuzz_one "$share" "$target" &
    running=$((running + 1))
  done
  while [ "$running" -gt 0 ]; do
    wait -n || status=1
    running=$((running - 1))
  done
  return "$status"
}
