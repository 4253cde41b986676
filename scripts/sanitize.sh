#!/usr/bin/env bash
# Builds the CPU module and tests/random_calls with sanitizers, and makes random calls with them: of the
# kernels under those of addresses, undefined behaviour and threads, from Python under the first two.
#
#   scripts/sanitize.sh FOLDER PYTHON NATIVE PYTHON_CALLS SEED
#
# FOLDER is for the builds, and is kept: another run compiles only what has changed. PYTHON has JAX, the
# packages of jaxops[test], and scikit-build-core, nanobind and CMake. NATIVE and PYTHON_CALLS are numbers
# of calls of each operator, SEED is any text, and decides which. The build for threads has the kernels
# of every x86-64 processor, the other one those of this machine.
set -euo pipefail

if (($# != 5)); then
  sed -n '5s/^# *//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
# The link of a virtual environment is kept: behind it is a Python without its packages.
python=$(realpath -s -- "$(command -v -- "$2")")
mkdir -p "$1"
folder=$(realpath -- "$1")
native=$3 python_calls=$4 seed=$5
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export JAXOPS_CUDA=off ASAN_OPTIONS=detect_leaks=0 TSAN_OPTIONS=halt_on_error=1

# Installs the module, and leaves `random_calls` in the folder of its build.
JAXOPS_SANITIZE=address,undefined "$python" -m pip install -q --no-build-isolation --no-deps --upgrade \
  --target "$folder/site" -Cbuild-dir="$folder/address" -Cinstall.strip=false .
"$folder/address/cpu/random_calls" --cases "$native" --seed "$seed"

# Python would import the package from the sources, and that one has no checks. XLA gives each operand
# and result of a call memory of its own, of which the sanitizer knows the ends; it finds the C++
# library only where that is loaded before Python, too.
rm -rf "$folder/site/tests"
cp -r tests pyproject.toml "$folder/site"
preload=
for library in libasan.so libstdc++.so.6; do
  found=$("${CXX:-c++}" -print-file-name="$library")
  [[ $found == */* ]] || {
    echo "sanitize.sh: ${CXX:-c++} has no $library; name GCC in CXX" >&2
    exit 1
  }
  preload="$preload $found"
done
(
  cd "$folder/site"
  export PYTHONPATH=.
  env LD_PRELOAD="$preload" "$python" -c "
import pathlib
import jaxops._cpu
module = pathlib.Path(jaxops._cpu.__file__)
assert module.parent.samefile('jaxops') and b'__asan_init' in module.read_bytes(), module"
  env LD_PRELOAD="$preload" "$python" -m pytest -n 2 tests/test_cpu_handlers.py \
    tests/test_random_calls.py --cases "$python_calls" --choice "$seed"
)

# Threads: the program alone, because JAX and XLA have no such checks.
cmake=$(dirname "$python")/cmake
[[ -x $cmake ]] || cmake=cmake
build_threads() {
  "$cmake" -S . -B "$folder/thread" -DPython_EXECUTABLE="$python" &&
    "$cmake" --build "$folder/thread" --target random_calls --parallel "$(nproc)"
}
export JAXOPS_SANITIZE=thread JAXOPS_CPU_ISAS=baseline
build_threads >"$folder/thread.log" 2>&1 || {
  cat "$folder/thread.log" >&2
  exit 1
}
"$folder/thread/cpu/random_calls" --cases "$native" --seed "$seed"
