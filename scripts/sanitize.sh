#!/usr/bin/env bash
# Builds the CPU module and tests/random_calls with sanitizers, and makes random calls with them: of the
# kernels under those of addresses, undefined behaviour and threads, from Python under the first two.
#
#   scripts/sanitize.sh FOLDER PYTHON NATIVE PYTHON_CALLS SEED
#
# FOLDER is for the builds, and is kept: another run compiles only what has changed. PYTHON, a path, has
# JAX and the packages of jaxops[test]. NATIVE and PYTHON_CALLS are numbers of calls of each operator,
# SEED is any text, and decides which.
set -euo pipefail

if (($# != 5)); then
  sed -n '5s/^# *//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
mkdir -p "$1"
folder=$(realpath "$1")
python=$2 native=$3 python_calls=$4 seed=$5
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export JAXOPS_CUDA=off

# Installs the module, and leaves `random_calls` in the folder of its build.
JAXOPS_SANITIZE=address,undefined "$python" -m pip install -q --no-deps --upgrade \
  --target "$folder/site" -Cbuild-dir="$folder/address" -Cinstall.strip=false .
nm -D "$folder"/site/jaxops/_cpu*.so | grep __asan_init >/dev/null || {
  echo "sanitize.sh: the module has no sanitizer" >&2
  exit 1
}
"$folder/address/cpu/random_calls" --cases "$native" --seed "$seed"

# Python would import the package from the sources, and that one has no checks. XLA gives each operand
# and result of a call memory of its own, of which the sanitizer knows the ends; it finds the C++
# library only where that is loaded before Python, too.
cp -r tests pyproject.toml "$folder/site"
(
  cd "$folder/site"
  export PYTHONPATH=. ASAN_OPTIONS=detect_leaks=0
  LD_PRELOAD="$(c++ -print-file-name=libasan.so) $(c++ -print-file-name=libstdc++.so.6)"
  export LD_PRELOAD
  "$python" -c "import os, jaxops._cpu as m; assert os.path.samefile(m.__file__, 'jaxops/' + os.path.basename(m.__file__)), m.__file__"
  "$python" -m pytest -n 2 \
    tests/test_cpu_handlers.py tests/test_random_calls.py --cases "$python_calls" --choice "$seed"
)

# Threads: the program alone, because JAX and XLA have no such checks.
PATH=$(dirname "$python"):$PATH
export PATH JAXOPS_SANITIZE=thread
build_threads() {
  cmake -S . -B "$folder/thread" -DPython_EXECUTABLE="$python" &&
    cmake --build "$folder/thread" --target random_calls --parallel "$(nproc)"
}
build_threads >"$folder/thread.log" 2>&1 || {
  cat "$folder/thread.log" >&2
  exit 1
}
"$folder/thread/cpu/random_calls" --cases "$native" --seed "$seed"
