#!/usr/bin/env bash
# Verifies jaxops on this machine, which needs no network: build, all tests, random calls, check, the CPU
# kernels under sanitizers, and where there is a GPU compute-sanitizer and the benchmark. All stages run
# even where one fails; a table at the end says how each went.
#
#   scripts/verify.sh                       # without a GPU
#   scripts/verify.sh BENCHMARK.json        # with one; the benchmark's results are kept in the file
#   STAGES="build test" scripts/verify.sh   # some of: build test random check sanitize_cpu sanitize bench
#
# CASES is the number of random calls of each operator, 400 by default; with 5300 they are 100,000.
# sanitize_cpu makes 25 times as many calls of the kernels with each of its builds, and a 20th as many
# from Python.
# CHOICE, by default the date, decides which.
#
# python3 must already have JAX, with CUDA support where there is a GPU, the packages of jaxops[test],
# and those that the build needs (scikit-build-core, nanobind and a C++ toolchain with CMake, and nvcc
# where there is a GPU). PYTHON names another Python.
set -uo pipefail

known="build test random check sanitize_cpu sanitize bench"
stages=${STAGES:-$known}
tools=(memcheck racecheck synccheck initcheck)

for stage in $stages; do
  if [[ " $known " != *" $stage "* ]]; then
    echo "verify.sh: STAGES has '$stage'; there are: $known" >&2
    exit 2
  fi
done
benchmark_file=""
if [[ -n ${1:-} ]]; then
  benchmark_file=$(realpath -m -- "$1")
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
# The program itself, not a script that starts it: compute-sanitizer watches what it starts.
python=$("${PYTHON:-python3}" -c "import sys; print(sys.executable)") || exit 2

platforms=cpu
if "$python" -c 'import jax; jax.devices("cuda")' 2>/dev/null; then
  platforms=cpu,cuda
fi
has_gpu() { [[ $platforms == cpu,cuda ]]; }
if ! has_gpu && [[ -n $benchmark_file || " ${STAGES:-} " =~ " "(sanitize|bench)" " ]]; then
  echo "verify.sh: sanitize and bench need a GPU, and JAX has none here" >&2
  exit 2
fi
if has_gpu && [[ " $stages " == *" bench "* && -z $benchmark_file ]]; then
  echo "verify.sh: name the file for the benchmark's results as the first argument" >&2
  exit 2
fi

# The workers of the tests share the GPU.
export XLA_PYTHON_CLIENT_PREALLOCATE=false

names=() seconds=() results=()
failed=0

stage() { # NAME COMMAND...
  local name=$1 start=$SECONDS code=0
  shift
  printf '\n=== %s  %s: %s\n' "$(date +%H:%M:%S)" "$name" "$*"
  "$@" || code=$?
  names+=("$name") seconds+=($((SECONDS - start)))
  if ((code)); then
    results+=("FAILED, exit code $code")
    failed=1
  else
    results+=("passed")
  fi
}

selected() {
  [[ " $stages " == *" $1 "* ]]
}

# Whether a stage that needs a GPU is selected; without one the table says that it did not run.
selected_on_gpu() {
  selected "$1" || return
  has_gpu && return
  names+=("$1") seconds+=(0) results+=("NOT RUN, no GPU")
  return 1
}

cores=$(nproc)
workers=$((cores < 8 ? cores : 8))
choice=${CHOICE:-$(date +%F)}

random_calls() {
  "$python" -m pytest -n "$workers" -q tests/test_random_calls.py \
    --cases "${CASES:-400}" --choice "$choice"
}

if selected build; then
  if has_gpu; then export JAXOPS_CUDA=on; fi
  stage build env CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}" \
    "$python" -m pip install --no-build-isolation --no-deps .
fi
if selected test; then
  stage test env "JAXOPS_REQUIRE_PLATFORMS=$platforms" "$python" -m pytest -n "$workers" \
    --dist loadgroup -q tests
fi
if selected random; then
  stage random random_calls
fi
if selected check; then
  stage check "$python" -m jaxops check --platform "${platforms##*,}"
fi
if selected sanitize_cpu; then
  builds=$(mktemp -d)
  stage sanitize_cpu scripts/sanitize.sh "$builds" "$python" $((25 * ${CASES:-400})) \
    $(((${CASES:-400} + 19) / 20)) "$choice"
  rm -rf "$builds"
fi
if selected_on_gpu sanitize; then
  for tool in "${tools[@]}"; do
    # Every buffer its own allocation, so that the sanitizer sees where it ends; and launches one by
    # one rather than as a graph, so that a report names its kernel. Only this process: the tool takes
    # down some that XLA starts to compile. Without the trials by which XLA chooses its own kernels:
    # their comparisons read what nobody has written. initcheck does not see all that bulk copies
    # write, and would miss it in results that the host copies; what kernels read it checks.
    options=()
    if [[ $tool == initcheck ]]; then
      options=(--check-api-memory-access no)
    fi
    stage "$tool" env XLA_PYTHON_CLIENT_ALLOCATOR=platform \
      XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0" \
      compute-sanitizer --tool "$tool" "${options[@]}" --error-exitcode 1 \
      --target-processes application-only \
      "$python" scripts/exercise_kernels.py
  done
fi
if selected_on_gpu bench; then
  stage bench env -u XLA_PYTHON_CLIENT_PREALLOCATE \
    "$python" -m jaxops bench --platform cuda --json "$benchmark_file"
fi

printf '\n%-12s %8s  %s\n' stage seconds result
for i in "${!names[@]}"; do
  printf '%-12s %8d  %s\n' "${names[i]}" "${seconds[i]}" "${results[i]}"
done
exit "$failed"
