"""The GGUF file that the llama.cpp engine serves: a given one, or a demo pair's target.

A pair's target is its packaged file dequantised, as for the torch engine: the float32 weights are
the same numbers, so both engines say the same but for rounding. ``bfloat16`` stores them rounded,
in half the memory, which is most of a forward's time.

``python -m cloud_verifier.engine.llama_prepare --pair smollm2`` prepares ahead of time and prints
the path.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from broker.cache import Progress, prepare_once, say
from broker.child import end_with_parent, run_step
from broker.errors import ConfigError, PipesdError
from broker.gguf_header import read_header
from broker.llama_library import convert, llama_library
from broker.pairs import PAIRS, Pair, check_source, find_pair, source_file

# llama.cpp's llama_ftype, and bytes of one weight.
_TYPES = {"float32": (0, 4), "bfloat16": (32, 2)}
_RECIPE = "1"
_LIMIT_S = 900.0


def resolve_gguf(
    target: str | None, pair: str | None = None, dtype: str = "float32", progress: Progress = say
) -> Path:
    """The GGUF file to serve: ``target``, or the target of ``pair`` in ``dtype``.

    Raises ConfigError when neither or both are given, a name is unknown or llama-cpp-python is
    missing; ModelError for a path that is missing, truncated or no GGUF.
    """
    if target and pair is not None:
        raise ConfigError("give --target or --pair, not both")
    llama_library()  # what is not installed is said before anything is prepared
    if pair is not None:
        return prepare_gguf(pair, dtype, progress)
    if not target:
        raise ConfigError("no target model; give --target FILE.gguf or --pair NAME")
    path = Path(target).expanduser()
    if path.is_dir() or (not path.exists() and path.suffix != ".gguf"):
        raise ConfigError(f"--engine llama serves a .gguf file, not {target}: give one")
    read_header(path)
    return path


def prepare_gguf(
    pair: str | Pair,
    dtype: str = "float32",
    progress: Progress = say,
    *,
    verify: bool = False,
) -> Path:
    """The GGUF of a demo pair's target, made on the first call (seconds) and cached.

    Raises ConfigError for an unknown pair or dtype, a missing package or an unwritable cache;
    ModelError when the source is damaged or llama.cpp fails.
    """
    pair = find_pair(pair) if isinstance(pair, str) else pair
    if dtype not in _TYPES:
        raise ConfigError(f"dtype {dtype} is unknown: choose one of {', '.join(_TYPES)}")
    file = f"{pair.name}-target-{dtype}.gguf"

    def build(directory: Path) -> None:
        source = source_file(pair, progress)
        check_source(pair, source)
        run_step(
            "cloud_verifier.engine.llama_prepare",
            ["--dequantise", dtype, str(source), str(directory / file)],
            f"dequantising {pair.file}",
            limit_s=_LIMIT_S,
        )
        read_header(directory / file)

    directory = prepare_once(
        f"target-{pair.name}-gguf-{dtype}-{pair.sha256[:8]}",
        build,
        progress,
        label=f"target {pair.name} for llama.cpp",
        about_s=pair.draft_s,
        needs_bytes=pair.target_bytes * _TYPES[dtype][1] // 4,
        inputs={"sha256": pair.sha256, "dtype": dtype, "recipe": _RECIPE},
        tools=("llama-cpp-python",),
        verify=verify,
    )
    return directory / file


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m cloud_verifier.engine.llama_prepare``: prepare a pair's GGUF, print its path."""
    parser = argparse.ArgumentParser(
        prog="cloud_verifier.engine.llama_prepare", description=main.__doc__
    )
    parser.add_argument("--pair", choices=tuple(PAIRS), default="smollm2")
    parser.add_argument("--dtype", choices=tuple(_TYPES), default="float32")
    parser.add_argument("--verify", action="store_true", help="compare the full hash of the file")
    parser.add_argument("--dequantise", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        if options.dequantise:
            end_with_parent()
            dtype, source, goal = options.dequantise
            convert(source, goal, _TYPES[dtype][0])
        else:
            print(prepare_gguf(options.pair, options.dtype, verify=options.verify))
    except PipesdError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
