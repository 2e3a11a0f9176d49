"""The draft's model file: a given GGUF, or a demo pair's, requantised once into the cache.

``python -m edge_agent.prepare --pair smollm2`` prepares ahead of time and prints the path.
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
from broker.llama_library import convert
from broker.pairs import (
    PAIRS,
    SOURCE_QUANT,
    Pair,
    check_quant,
    check_source,
    find_pair,
    source_file,
)

# llama.cpp's llama_ftype of each draft quantisation.
_FTYPES = {"q2_k": 10, "q3_k_m": 12}
_RECIPE = "1"
_LIMIT_S = 900.0


def resolve_draft(
    draft: str | None, pair: str | None = None, quant: str | None = None, progress: Progress = say
) -> Path:
    """The GGUF file to draft with: the file ``draft``, or the draft of ``pair``.

    ``quant``: the pair's draft quantisation, None for the pair's default. Raises ConfigError when
    neither or both are given, a name is unknown or a package is missing; ModelError when the file
    is missing, truncated or no GGUF.
    """
    if draft and pair is not None:
        raise ConfigError("give --draft or --pair, not both")
    if pair is not None:
        return prepare_draft(pair, quant, progress)
    if not draft:
        raise ConfigError("no draft model; give --draft FILE.gguf or --pair NAME")
    path = Path(draft).expanduser()
    read_header(path)
    return path


def prepare_draft(
    pair: str | Pair, quant: str | None = None, progress: Progress = say, *, verify: bool = False
) -> Path:
    """The draft's GGUF of a demo pair, made on the first call (seconds) and cached.

    Raises ConfigError for an unknown pair or quantisation, a missing package or an unwritable
    cache; ModelError when the source is damaged or llama.cpp fails.
    """
    pair = find_pair(pair) if isinstance(pair, str) else pair
    quant = check_quant(quant or pair.default_quant)
    if quant == SOURCE_QUANT:
        return source_file(pair, progress)
    file = f"{pair.name}-draft-{quant}.gguf"

    def build(directory: Path) -> None:
        source = source_file(pair, progress)
        check_source(pair, source)
        run_step(
            "edge_agent.prepare",
            ["--requantise", quant, str(source), str(directory / file)],
            f"requantising {pair.file} to {quant}",
            limit_s=_LIMIT_S,
        )
        read_header(directory / file)

    directory = prepare_once(
        f"draft-{pair.name}-{quant}-{pair.sha256[:8]}",
        build,
        progress,
        label=f"draft {pair.name} {quant}",
        about_s=pair.draft_s,
        needs_bytes=pair.size,
        inputs={"sha256": pair.sha256, "quant": quant, "recipe": _RECIPE},
        tools=("llama-cpp-python",),
        verify=verify,
    )
    return directory / file


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m edge_agent.prepare``: prepare a pair's draft and print its path."""
    parser = argparse.ArgumentParser(prog="edge_agent.prepare", description=main.__doc__)
    parser.add_argument("--pair", choices=tuple(PAIRS), default="smollm2")
    parser.add_argument("--quant", default=None, help="q2_k, q3_k_m or source")
    parser.add_argument("--verify", action="store_true", help="compare the full hash of the file")
    parser.add_argument("--requantise", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        if options.requantise:
            end_with_parent()
            quant, source, goal = options.requantise
            convert(source, goal, _FTYPES[quant])
        else:
            print(prepare_draft(options.pair, options.quant, verify=options.verify))
    except PipesdError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
