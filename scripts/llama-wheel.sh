#!/usr/bin/env bash
# Build the wheel of llama-cpp-python once: scripts/llama-wheel.sh PYTHON DIRECTORY
#
# The package index has it as source only. The wheel holds for any Python 3 on this kind of CPU, so
# it is kept in DIRECTORY and made again only for another version, CPU or CMAKE_ARGS. CMAKE_ARGS of
# the caller come last and win (-DGGML_CUDA=on builds for a GPU). Ends with 1 and a line that names
# the cause when it cannot be built; the whole output of the build is then in DIRECTORY/build.log.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=$1
mkdir -p "$2"
wheels=$(cd "$2" && pwd)
asked=${CMAKE_ARGS:-}
version=$(sed -n 's/^llama-cpp-python==\([^ ;]*\).*/\1/p' "$root/constraints/pins.txt")
key=$wheels/llama-cpp-python.key
log=$wheels/build.log

# Compiled with -march=native: a wheel from a CPU with other instructions would end in SIGILL.
features=$(grep -m1 -iE '^(flags|features)' /proc/cpuinfo 2>/dev/null | tr -s ' \t' '\n' | sort |
    cksum || true)
wanted="$version $(uname -sm) ${features% *} $asked"

have() { compgen -G "$1/llama_cpp_python-$version-*.whl" >/dev/null; }

if have "$wheels" && [ "$(cat "$key" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
rm -f "$key" "$wheels"/llama_cpp_python-*.whl

# What pip built here for another environment serves as well. A CI run builds its own: it has to
# show that the build works.
if [ -z "$asked" ] && [ "${CI:-}" != true ]; then
    cached=$("$python" -m pip cache list --format abspath llama_cpp_python 2>/dev/null |
        grep -F "llama_cpp_python-$version-" | head -n 1 || true)
    if [ -f "$cached" ]; then
        cp "$cached" "$wheels/"
        printf '%s\n' "$wanted" >"$key"
        echo "pipesd: llama-cpp-python $version was built here before, in pip's cache"
        exit 0
    fi
fi

for tool in "${CC:-cc}" "${CXX:-c++}"; do
    if ! command -v "${tool%% *}" >/dev/null; then
        echo "pipesd: no compiler ($tool) for llama-cpp-python:" \
            "install a C and C++ compiler (Debian: apt-get install build-essential)" >&2
        exit 1
    fi
done

echo "pipesd: building llama-cpp-python $version, once, about 2 minutes on two idle cores"
started=$SECONDS
place=$(mktemp -d "$wheels/.building.XXXXXX")
trap 'rm -rf "$place"' EXIT
cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$cores}
export CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF \
'-DCMAKE_PROJECT_llama_cpp_INCLUDE=$root/constraints/llama-only.cmake' $asked"

# A line at each fifth, from ninja's "[12/74]" or make's "[ 16%]".
progress() {
    local line built next=20
    while IFS= read -r line; do
        if [[ $line =~ \[([0-9]+)/([0-9]{2,})\] ]]; then
            built=$((100 * BASH_REMATCH[1] / BASH_REMATCH[2]))
        elif [[ $line =~ \[\ *([0-9]+)%\] ]]; then
            built=${BASH_REMATCH[1]}
        else
            continue
        fi
        if ((built >= next)); then
            next=$((built - built % 20))
            echo "pipesd:   $next % after $((SECONDS - started)) s"
            next=$((next + 20))
        fi
    done
}

# Without pip's cache: this wheel lacks what other projects may want of it (mtmd, for images).
if ! "$python" -m pip wheel -v --no-deps --no-cache-dir --no-binary llama-cpp-python \
    --wheel-dir "$place" "llama-cpp-python==$version" 2>&1 | tee "$log" | progress; then
    grep -E -A 2 'error:|CMake Error|FAILED:|ERROR:' "$log" | head -n 25 >&2 || true
    echo "pipesd: llama-cpp-python $version could not be built; the whole output is in $log" >&2
    exit 1
fi
mv "$place"/llama_cpp_python-*.whl "$wheels/"
printf '%s\n' "$wanted" >"$key"
echo "pipesd: llama-cpp-python built in $((SECONDS - started)) s"
