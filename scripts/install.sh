#!/usr/bin/env bash
# Put the project and all it needs into a virtual environment: scripts/install.sh VENV WHEELS
#
# Every step may be repeated, and what is there already is left alone. Environment:
#   PYTHON       interpreter of a new environment, 3.10 or newer (python3)
#   TORCH_INDEX  package index to take torch from instead of the configured ones
#   CMAKE_ARGS   build flags of llama-cpp-python, see llama-wheel.sh
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
wheels=$2
started=$SECONDS

say() { echo "pipesd: $*"; }
die() {
    echo "pipesd: $*" >&2
    exit 1
}

recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

if ! recent "$venv/bin/python"; then
    base=${PYTHON:-}
    if [ -z "$base" ]; then
        for name in python3 python3.13 python3.12 python3.11 python3.10; do
            if recent "$name"; then
                base=$name
                break
            fi
        done
        [ -n "$base" ] || die "Python 3.10 or newer is needed: install it, or make PYTHON=its path"
    fi
    recent "$base" || die "PYTHON=$base does not run as Python 3.10 or newer"
    say "creating $venv with $("$base" -V)"
    if ! output=$("$base" -m venv --clear "$venv" 2>&1); then
        rm -rf "$venv"
        die "$base -m venv failed (Debian: apt-get install python3-venv): ${output##*$'\n'}"
    fi
fi
python=$venv/bin/python

# -qq leaves errors only: pip's warnings about extra indexes that lack a package help nobody here.
install() { "$python" -m pip install -qq --disable-pip-version-check --no-compile "$@"; }

scripts/llama-wheel.sh "$python" "$wheels"

version=$(sed -n 's/^torch==\([^ ;]*\).*/\1/p' constraints/pins.txt)
installed=$("$python" -c 'from importlib.metadata import version; print(version("torch"))' \
    2>/dev/null || true)
if [ "${installed%%+*}" != "$version" ]; then
    say "installing torch $version"
    if [ -n "${TORCH_INDEX:-}" ]; then
        install --index-url "$TORCH_INDEX" "torch==$version" ||
            die "torch $version could not be installed from TORCH_INDEX"
    elif ! install "torch==$version+cpu" 2>/dev/null; then
        if [ "$(uname -sm)" = "Linux x86_64" ]; then
            say "pip finds no CPU build of torch $version for $("$python" -V): the default one is" \
                "several GB, for CUDA; make TORCH_INDEX=<index of CPU builds> avoids that"
        fi
        install "torch==$version" || die "torch $version could not be installed"
    fi
fi

say "installing the other packages, about a minute"
install --constraint constraints/pins.txt --find-links "$wheels" --editable '.[dev]' ||
    die "the installation failed; mend what pip says above and run make again"
say "installed in $((SECONDS - started)) s"
