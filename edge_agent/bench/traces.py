"""What a draft and a target said about the same text, and how long they took: recorded runs.

A trace file is JSONL, one prompt a line, each line complete in itself, so files may be joined.
``edge_agent.bench.replay`` runs policies on it without models.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from broker.errors import ConfigError
from broker.messages import MAX_POSITION, MAX_PROMPT, MAX_TOKEN
from broker.sampling import Sampling
from edge_agent.bench.forward_table import MAX_SECONDS, ForwardTable
from edge_agent.draft import DraftModel

#: The version of the format that is written, and the only one that is read.
VERSION = 1
#: Bytes of one line, and traces in one file.
MAX_LINE, MAX_TRACES = 8 << 20, 10_000
_KEY = "pipesd_trace"


@dataclass(frozen=True, slots=True)
class Trace:
    """One prompt. Times in seconds; the sequences below have one entry per position.

    ``tokens``: the target's text. It ends with one of ``eos_ids``, or at ``max_tokens``.
    ``drafted``: the draft's choice after the target's text up to there. ``confidences``: its plain
    probability of it. ``second_right``: whether the draft's second choice is the target's token;
    None where no second choice was recorded or there was none. ``gammas``: seconds to draft it.

    ``prompt_seconds``: for the draft to evaluate the prompt. ``forward``: the target's forwards.

    Raises ConfigError.
    """

    name: str
    draft: str
    target: str
    sampling: Sampling
    vocab_size: int
    eos_ids: frozenset[int]
    max_tokens: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    drafted: tuple[int, ...]
    confidences: tuple[float, ...]
    second_right: tuple[bool | None, ...]
    gammas: tuple[float, ...]
    prompt_seconds: float
    forward: ForwardTable

    def __post_init__(self) -> None:
        for what in ("name", "draft", "target"):
            text = getattr(self, what)
            if not isinstance(text, str) or len(text) > 200:
                raise ConfigError(f"{what} is no text of at most 200 characters")
        _whole("vocab_size", self.vocab_size, 1, MAX_TOKEN + 1)
        _whole("max_tokens", self.max_tokens, 1, MAX_POSITION)
        size = len(self.tokens)
        if not 1 <= len(self.prompt) <= MAX_PROMPT or not 1 <= size <= MAX_PROMPT:
            raise ConfigError(f"prompt and tokens need 1 to {MAX_PROMPT} tokens each")
        for ids in (self.prompt, self.tokens, self.drafted, sorted(self.eos_ids)):
            for token in ids:
                _whole("token", token, 0, self.vocab_size - 1)
        for what in ("drafted", "confidences", "second_right", "gammas"):
            if len(getattr(self, what)) != size:
                raise ConfigError(
                    f"{what} has {len(getattr(self, what))} entries for {size} tokens"
                )
        for value in self.confidences:
            _real("confidence", value, 1.0)
        for value in (*self.gammas, self.prompt_seconds):
            _real("draft time", value, MAX_SECONDS)
        if not all(right is None or type(right) is bool for right in self.second_right):
            raise ConfigError("second_right holds true, false and null only")
        if any(token in self.eos_ids for token in self.tokens[:-1]):
            raise ConfigError("the text goes on after its end")
        if self.tokens[-1] not in self.eos_ids and size != self.max_tokens:
            raise ConfigError(f"{size} tokens end neither the text nor at {self.max_tokens}")
        if size > self.max_tokens:
            raise ConfigError(f"{size} tokens where at most {self.max_tokens} were wanted")

    @property
    def agrees(self) -> tuple[bool, ...]:
        """Per position, whether draft and target choose alike after the same text."""
        return tuple(map(int.__eq__, self.drafted, self.tokens))

    @property
    def agreement(self) -> float:
        """The share of positions at which they do."""
        return sum(self.agrees) / len(self.tokens)

    @property
    def prompt_gamma(self) -> float:
        """Seconds for the draft per token of a longer piece."""
        return self.prompt_seconds / len(self.prompt)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        data = asdict(self)
        data["eos_ids"] = sorted(self.eos_ids)
        data["forward"] = [list(entry) for entry in self.forward.entries]
        return {_KEY: VERSION, **data}

    @classmethod
    def from_dict(cls, data: object) -> Trace:
        """The inverse of ``to_dict``; unknown keys are ignored. Raises ConfigError."""
        if not isinstance(data, dict) or _KEY not in data:
            raise ConfigError(f"no trace: an object with the key {_KEY} is wanted")
        if data[_KEY] != VERSION:
            raise ConfigError(f"a trace of version {data[_KEY]!r}: this program reads {VERSION}")
        names = cls.__dataclass_fields__
        values = {name: data[name] for name in names if name in data}
        for name in names:
            if name not in values:
                raise ConfigError(f"a trace without {name}: record it again")
        try:
            values["sampling"] = Sampling(**values["sampling"])
            values["eos_ids"] = frozenset(values["eos_ids"])
            values["forward"] = ForwardTable(tuple((t, s) for t, s in values["forward"]))
            for name in ("prompt", "tokens", "drafted", "confidences", "second_right", "gammas"):
                values[name] = tuple(values[name])
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"a trace with a wrong field: {error}") from None


def _whole(what: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"{what} {value!r} is no whole number from {low} to {high}")


def _real(what: str, value: object, high: float) -> None:
    # NaN fails the comparison.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= high:
        raise ConfigError(f"{what} {value!r} is no number from 0 to {high:g}")


# -- files --------------------------------------------------------------------------------------


def write_traces(path: str | Path, traces: Iterable[Trace]) -> int:
    """Write a file of ``traces``; how many. Raises ConfigError when it cannot be written."""
    count = 0
    try:
        with Path(path).open("w", encoding="utf-8") as file:
            for trace in traces:
                file.write(json.dumps(trace.to_dict(), separators=(",", ":")) + "\n")
                count += 1
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): give another") from None
    return count


def read_traces(path: str | Path) -> list[Trace]:
    """The traces of a file, at least one. Raises ConfigError, naming the line that is wrong."""
    traces: list[Trace] = []
    try:
        with Path(path).open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE + 1):
                number += 1
                if len(line) > MAX_LINE:
                    raise ConfigError(f"{path} line {number}: above {MAX_LINE} bytes")
                if not line.strip():
                    continue
                if len(traces) >= MAX_TRACES:
                    raise ConfigError(f"{path}: more than {MAX_TRACES} traces: split the file")
                traces.append(_read_line(line, f"{path} line {number}"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): check the path") from None
    if not traces:
        raise ConfigError(f"{path} holds no trace: record some with edge-agent bench --record")
    return traces


def _read_line(line: bytes, where: str) -> Trace:
    try:
        return Trace.from_dict(json.loads(line))
    except (ValueError, RecursionError):
        raise ConfigError(f"{where}: no JSON: record it again") from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def reference_tokens(output: str) -> tuple[int, ...]:
    """The target's tokens in what ``cloud-verifier generate --json`` printed.

    Raises ConfigError for anything else.
    """
    try:
        tokens = json.loads(output)["token_ids"]
        if tokens and all(type(token) is int for token in tokens):
            return tuple(tokens)
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise ConfigError("no reference text: give what cloud-verifier generate --json prints")


# -- recording ----------------------------------------------------------------------------------


def record(
    model: DraftModel,
    prompt: Sequence[int],
    tokens: Sequence[int],
    sampling: Sampling,
    *,
    name: str,
    target: str,
    forward: ForwardTable,
    max_tokens: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Trace:
    """Step the draft ``model`` along ``tokens``, which the target ``target`` wrote.

    ``max_tokens``: what the target was asked for, None: as many as it wrote. ``clock``: seconds;
    a thread's processor time tells more than the time of day where others use the machine.
    Raises ModelError when the draft fails or its context is too short, ConfigError for a text that
    is none.
    """
    draft = model.open()
    # Only some drafts can say what their second choice would be; the port does not ask for it.
    ranked: Callable[[int, Sampling, int], Sequence[int]] | None = getattr(draft, "ranked", None)
    drafted: list[int] = []
    confidences: list[float] = []
    second_right: list[bool | None] = []
    gammas: list[float] = []
    try:
        begin = clock()
        draft.eval(prompt)
        prompt_seconds = clock() - begin
        for position, token in enumerate(tokens):
            begin = clock()
            if position:
                draft.eval(tokens[position - 1 : position])
            proposal = draft.propose(position, sampling)
            gammas.append(max(0.0, clock() - begin))
            drafted.append(proposal.token)
            confidences.append(min(1.0, max(0.0, float(proposal.confidence))))
            choices = () if ranked is None else ranked(position, sampling, 2)
            second_right.append(choices[1] == token if len(choices) > 1 else None)
    finally:
        draft.close()
    if len(gammas) > 1:
        gammas[0] = statistics.median(gammas[1:])  # the prompt's evaluation stood in for its own
    return Trace(
        name=name,
        draft=model.name,
        target=target,
        sampling=sampling,
        vocab_size=model.vocab_size,
        eos_ids=model.eos_ids,
        max_tokens=max_tokens or max(len(tokens), 1),
        prompt=tuple(prompt),
        tokens=tuple(tokens),
        drafted=tuple(drafted),
        confidences=tuple(round(value, 6) for value in confidences),
        second_right=tuple(second_right),
        gammas=tuple(round(value, 7) for value in gammas),
        prompt_seconds=round(max(0.0, prompt_seconds), 7),
        forward=forward,
    )
