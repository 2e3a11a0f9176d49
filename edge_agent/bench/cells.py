"""What a benchmark runs and what comes out: settings, cells, results, and the file they go to.

A cell is one generation: a policy in a scenario, for one prompt, in one repeat. The results go to
a JSONL file as they come, so that an interrupted run can be resumed: first a line with the
settings, then a line per cell. Later lines of a cell stand for earlier ones.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from broker.errors import ConfigError
from edge_agent.bench.watch import Span
from edge_agent.core.sending import Learnt

VERSION = 1
#: Bytes of a results file that are read.
MAX_FILE = 1 << 30


class Cell(NamedTuple):
    """By names; ``repeat`` counts from 0."""

    policy: str
    scenario: str
    prompt: str
    repeat: int


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that results depend on, as plain values fit for JSON.

    ``prompts``: their texts by name. ``scenarios``: definitions by name. ``policies``: by name the
    constants per scenario name.
    """

    draft: str
    target: str
    dtype: str
    broker: str
    draft_threads: int
    target_threads: int
    max_tokens: int
    repeats: int
    seed: int
    verify: str
    sampling: dict[str, Any]
    policies: dict[str, Any]
    scenarios: dict[str, Any]
    prompts: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def difference(self, other: Mapping[str, Any]) -> str | None:
        """The first setting in which ``other`` differs, with both values; None: they are equal."""
        # As JSON has it: a tuple that comes back as a list is no difference.
        return _difference(json.loads(json.dumps(other)), json.loads(json.dumps(self.to_dict())))


def _difference(before: dict[str, Any], now: dict[str, Any], path: str = "") -> str | None:
    if before == now:
        return None
    if list(before) != list(now):
        what = path or "settings"
        return f"{what} were {', '.join(before) or 'none'} and are {', '.join(now) or 'none'}"
    name = next(name for name in now if before[name] != now[name])
    old, new = before[name], now[name]
    path = f"{path}: {name}" if path else name
    if isinstance(old, dict) and isinstance(new, dict):
        return _difference(old, new, path)
    return f"{path} was {_short(old)} and is {_short(new)}"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True, slots=True)
class Result:
    """One cell. Times in seconds from the request on, counts as in ``EdgeStats`` and ``Watch``.

    ``error``: why there is no text; the rest is what there was until then. ``ttft_s``: to the first
    committed token; ``total_s``: to the last. ``wire_up``, ``wire_down``: bytes of MQTT packets
    over the link, of anything while the cell ran; ``payload_*``: of this generation's messages.
    ``gamma_s``: median of drafting one token after the first. ``timeline``: only of some cells.
    ``planning_s``: spent on planning and estimating. ``learnt``: of the link, at the end.
    ``at_s``: when it began in the run. ``load``: the machine's load average then.
    """

    policy: str
    scenario: str
    prompt: str
    repeat: int
    error: str | None = None
    tokens: tuple[int, ...] = ()
    finish: str | None = None
    ttft_s: float = 0.0
    total_s: float = 0.0
    drafted: int = 0
    accepted: int = 0
    judged: int = 0
    rolled_back: int = 0
    forwards: int = 0
    target_tokens: int = 0
    timeouts: int = 0
    resyncs: int = 0
    draft_s: float = 0.0
    gamma_s: float = 0.0
    hold_s: float = 0.0
    forward_s: float = 0.0
    proactive: int = 0
    kept: int = 0
    dropped: int = 0
    payload_up: int = 0
    payload_down: int = 0
    messages_up: int = 0
    draft_payload: int = 0
    draft_messages: int = 0
    wire_up: int = 0
    wire_down: int = 0
    forward_samples: tuple[tuple[int, float], ...] = ()
    planning_s: float = 0.0
    learnt: Learnt | None = None
    at_s: float = 0.0
    load: float = 0.0
    timeline: tuple[Span, ...] = field(default=())

    @property
    def cell(self) -> Cell:
        return Cell(self.policy, self.scenario, self.prompt, self.repeat)

    @property
    def tpt_s(self) -> float:
        """Seconds per committed token, from the request on (the paper's TPT)."""
        return self.total_s / max(1, len(self.tokens))

    @property
    def text(self) -> tuple[tuple[int, ...], str | None]:
        """What must be the same under every policy that asks the target."""
        return self.tokens, self.finish

    def to_dict(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        data["timeline"] = [
            [span.lane, round(span.begin, 6), round(span.end, 6), span.count]
            for span in self.timeline
        ]
        if data["learnt"] is not None:
            data["learnt"] = _rounded(data["learnt"])
        return _rounded(data)

    @classmethod
    def from_dict(cls, data: Any) -> Result:
        """The inverse of ``to_dict``. Raises ValueError, TypeError or KeyError."""
        fields = {one.name: one for one in dataclasses.fields(cls)}
        values = {key: value for key, value in data.items() if key in fields}
        for key, value in values.items():
            if type(fields[key].default) in (int, float) and type(value) not in (int, float):
                raise ValueError(f"{key} {value!r} is no number")
        values["tokens"] = tuple(int(token) for token in values.get("tokens", ()))
        samples = values.get("forward_samples", ())
        values["forward_samples"] = tuple((int(n), float(ms)) for n, ms in samples)
        spans = values.get("timeline", ())
        values["timeline"] = tuple(
            Span(str(s[0]), float(s[1]), float(s[2]), int(s[3])) for s in spans
        )
        if (learnt := values.get("learnt")) is not None:
            values["learnt"] = Learnt(**learnt)
        return cls(**values)


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: round(value, 6) if isinstance(value, float) else value for key, value in values.items()
    }


def order(
    policies: Sequence[str],
    scenarios: Sequence[str],
    prompts: Sequence[str],
    repeats: int,
    seed: int,
) -> Iterator[Cell]:
    """All cells, interleaved: what is compared runs close together in time.

    For each repeat and prompt, each scenario in turn; in it the policies in an order that is drawn
    anew, so that none always follows the same one.
    """
    draw = random.Random(seed)  # noqa: S311  (an order, repeatable on purpose)
    for repeat in range(repeats):
        for prompt in prompts:
            for scenario in scenarios:
                shuffled = list(policies)
                draw.shuffle(shuffled)
                for policy in shuffled:
                    yield Cell(policy, scenario, prompt, repeat)


class ResultsFile:
    """The JSONL file of a run, held open for appending. ``results``: by cell, the good and failed.

    Raises ConfigError where the file cannot be read or written, or is of another run.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], results: Sequence[Result]) -> None:
        self.path = path
        self.header = header
        self.results: dict[Cell, Result] = {result.cell: result for result in results}
        self._file = path.open("a", encoding="utf-8")

    @classmethod
    def create(
        cls,
        path: Path,
        settings: Settings,
        environment: Mapping[str, Any],
        *,
        started: str,
        tuning: Mapping[str, Any] | None = None,
    ) -> ResultsFile:
        """A new one, with ``settings`` as its first line; ``tuning``: how constants were found."""
        header = {
            "kind": "pipesd-bench",
            "version": VERSION,
            "started": started,
            "environment": dict(environment),
            "settings": settings.to_dict(),
        }
        if tuning is not None:
            header["tuning"] = dict(tuning)
        try:
            check_new(path)
            path.write_text(json.dumps(header) + "\n", encoding="utf-8")
            return cls(path, json.loads(json.dumps(header)), ())
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}: choose another") from None

    @classmethod
    def resume(cls, path: Path, settings: Settings | None) -> ResultsFile:
        """Go on with ``path``, whose settings must be ``settings`` (None: whatever they are)."""
        header, results, length = _read(path)
        _check_header(header, path)
        if settings is not None:
            difference = settings.difference(header["settings"])
            if difference is not None:
                raise ConfigError(
                    f"--resume {path}: {difference}: give the flags of that run, or start anew"
                )
        try:
            # A line that a killed run began is no result; the next one must not be glued to it.
            os.truncate(path, length)
            return cls(path, header, results)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}: copy it elsewhere") from None

    def add(self, result: Result) -> None:
        """Keep ``result``; it is on the disk when this returns. Raises ConfigError."""
        self.results[result.cell] = result
        try:
            self._file.write(json.dumps(result.to_dict()) + "\n")
            self._file.flush()
        except OSError as error:
            raise ConfigError(
                f"cannot write {self.path}: {error.strerror}: make room and --resume it"
            ) from None

    def done(self, cell: Cell) -> bool:
        """Whether ``cell`` has a result; failed ones are run again."""
        return cell in self.results and self.results[cell].error is None

    def close(self) -> None:
        try:
            self._file.close()
        except OSError:
            return  # said when it was written


def check_new(path: Path) -> None:
    """Raises ConfigError where ``path`` holds something already."""
    if path.exists() and path.stat().st_size:
        raise ConfigError(f"{path} exists: --resume it, or name another with --out")


def read_header(path: Path) -> dict[str, Any]:
    """The first line of a results file. Raises ConfigError."""
    return _read(path)[0]


def _check_header(header: Mapping[str, Any], path: Path) -> None:
    """Raises ConfigError where something is missing that the reports are made from."""
    settings, tuning = header["settings"], header.get("tuning", {"prompts": [], "found": {}})
    kinds = {**dict.fromkeys(("policies", "scenarios", "prompts"), dict), "repeats": int}
    whole = (
        isinstance(header.get("started"), str)
        and isinstance(header.get("environment"), dict)
        and all(one.name in settings for one in dataclasses.fields(Settings))
        and all(isinstance(settings[name], kind) for name, kind in kinds.items())
        and all(isinstance(one, dict) and "wire" in one for one in settings["scenarios"].values())
        and isinstance(tuning, dict)
        and isinstance(tuning.get("prompts"), list)
        and isinstance(tuning.get("found"), dict)
    )
    if not whole:
        raise ConfigError(f"--resume {path}: line 1 is broken: start anew")


def _read(path: Path) -> tuple[dict[str, Any], list[Result], int]:
    """Header, results, and the length in bytes of the lines that are whole."""
    try:
        if path.stat().st_size > MAX_FILE:
            raise ConfigError(f"--resume {path} is above {MAX_FILE} bytes: no results file")
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read --resume {path}: {error.strerror}") from None
    length = raw.rfind(b"\n") + 1
    lines = raw[:length].split(b"\n")[:-1]
    try:
        header = json.loads(lines[0])
        if header["kind"] != "pipesd-bench" or not isinstance(header["settings"], dict):
            raise ValueError
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        raise ConfigError(f"--resume {path} holds no results of edge-agent bench") from None
    if header.get("version") != VERSION:
        raise ConfigError(f"--resume {path} is of version {header.get('version')}: start anew")
    results = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            results.append(Result.from_dict(json.loads(line)))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            raise ConfigError(f"--resume {path}: line {number} is broken: remove it") from None
    return header, results, length
