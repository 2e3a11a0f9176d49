"""What is written in a benchmark: built-in prompts of many kinds, or those of a JSONL file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.errors import ConfigError

MAX_PROMPTS = 10_000
MAX_CHARACTERS = 100_000
#: Bytes of a file of prompts.
MAX_FILE = 64 << 20


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """``chat``: a user message, where the model has a chat template; else text to continue."""

    name: str
    text: str
    chat: bool = True


#: For comparing. What is measured on these must not be tuned on them: ``TUNING`` is for that.
BUILT_IN = (
    BenchPrompt("tides", "Explain why there are two high tides a day and not one."),
    BenchPrompt("primes", "Write a Python function that returns all primes below n."),
    BenchPrompt(
        "eggs",
        "A farm has 24 hens. Each lays 5 eggs a week. Eggs are sold in boxes of 6 for 3 coins a "
        "box. How much does the farm earn in a week? Think step by step.",
    ),
    BenchPrompt("letter", "Write a polite letter that asks a neighbour to trim a hedge."),
    BenchPrompt(
        "median",
        'def median(values):\n    """Return the median of a list of numbers.\n\n'
        "    >>> median([3, 1, 2])\n    2\n    >>> median([4, 1, 3, 2])\n    2.5\n"
        '    """\n',
        chat=False,
    ),
    BenchPrompt("bread", "List the steps of baking a simple loaf of bread, numbered."),
    BenchPrompt(
        "harbour",
        "The harbour town had three clocks, and no two of them ever agreed. The oldest hung over "
        "the fish market, where",
        chat=False,
    ),
    BenchPrompt("compare", "Compare trains and buses for travelling between two small towns."),
    BenchPrompt(
        "rows",
        "planet,moons,day in hours\nMercury,0,4223\nVenus,0,2802\nEarth,1,24\nMars,",
        chat=False,
    ),
    BenchPrompt("summary", "Summarise the water cycle for a ten-year-old in one paragraph."),
    BenchPrompt("sql", "Write an SQL query that finds the three customers who spent the most."),
    BenchPrompt(
        "trip",
        "A cyclist rides 18 km in 1.5 hours, rests half an hour and rides 10 km in 40 minutes. "
        "What is the average speed of the whole trip?",
    ),
)

#: For choosing constants; of the same kinds, and none of them above.
TUNING = (
    BenchPrompt("rainbow", "Explain how a rainbow comes about."),
    BenchPrompt("words", "Write a Python function that counts the words of a text."),
    BenchPrompt(
        "apples",
        "Nina picks 15 apples an hour for 4 hours and gives a third of them away. How many are "
        "left? Think step by step.",
    ),
    BenchPrompt("invitation", "Write an invitation to a garden party for the whole street."),
    BenchPrompt(
        "vowels",
        'def count_vowels(text):\n    """Return how many vowels a text has.\n\n'
        '    >>> count_vowels("orange")\n    3\n    """\n',
        chat=False,
    ),
    BenchPrompt("tent", "List the steps of putting up a tent, numbered."),
    BenchPrompt(
        "forester",
        "Every evening the forester counted the trees that were left, and every evening the "
        "number was",
        chat=False,
    ),
    BenchPrompt("pets", "Compare cats and dogs as pets for a small flat."),
    BenchPrompt(
        "rivers",
        "river,length in km,mouth\nDanube,2850,Black Sea\nRhine,1233,North Sea\nSeine,",
        chat=False,
    ),
    BenchPrompt("volcano", "Describe how a volcano erupts in one paragraph for children."),
)


def read_prompts(
    path: str, *, chat: bool = True, flag: str = "--prompts"
) -> tuple[BenchPrompt, ...]:
    """A JSONL file, ``{"prompt": TEXT}`` a line; optional: ``id`` (a name), ``chat`` (a boolean).

    ``chat``: what holds for lines that do not say. ``flag``: the one that named the file. Empty
    lines are skipped. Raises ConfigError naming the flag, the file and the line.
    """
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_FILE + 1)
        if len(raw) > MAX_FILE:
            raise ConfigError(f"{flag} {path} is above {MAX_FILE >> 20} MiB: split the file")
        lines = raw.decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise ConfigError(f"cannot read {flag} {path}: {cause}") from None
    found = [
        _read_line(line, f"{flag} {path}, line {number}", f"line {number}", chat)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not found:
        raise ConfigError(f'{flag} {path} holds no prompt: write {{"prompt": "..."}} a line')
    if len(found) > MAX_PROMPTS:
        raise ConfigError(f"{flag} {path}: {len(found)} of them, above {MAX_PROMPTS}: use fewer")
    check_names([prompt.name for prompt in found], f"{flag} {path}")
    return tuple(found)


def _read_line(line: str, where: str, name: str, chat: bool) -> BenchPrompt:
    try:
        data: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is no JSON: {error}") from None
    text = data.get("prompt") if isinstance(data, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f'{where} has no text as "prompt": mend that line')
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where} has half of a surrogate pair: mend that line") from None
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{where}: {len(text)} characters, above {MAX_CHARACTERS}: shorten it")
    name = str(data.get("id", name))
    chat = data.get("chat", chat)
    if not isinstance(chat, bool):
        raise ConfigError(f'{where}: "chat" {chat!r} is neither true nor false')
    return BenchPrompt(name[:64], text, chat)


def check_names(names: Sequence[str], what: str) -> None:
    """Raises ConfigError that begins with ``what`` when one comes twice."""
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ConfigError(f"{what}: {twice[0]!r} comes twice: name each once")
