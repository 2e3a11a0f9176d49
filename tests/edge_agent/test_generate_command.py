"""A device that works on: how often, with which pauses, what ends it; and its flags."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from broker.errors import ConfigError, PipesdError, Refused, TransportError
from broker.settings import parse
from edge_agent.bench.prompts import BenchPrompt
from edge_agent.cli import build_parser, request_from
from edge_agent.core.trigger import Thresholds
from edge_agent.device_config import ALL_TUNABLES
from edge_agent.device_flags import check_device_flags, check_work_flags, upkeep_from
from edge_agent.generate_command import LAST_PAUSE_S, write_all

PROMPTS = (BenchPrompt("one", "1"), BenchPrompt("two", "2"))


class EnoughError(Exception):
    """Ends a loop that would not end."""


class Work:
    """Writes, or fails as it is told; ``slept`` are the pauses."""

    def __init__(self, *outcomes: PipesdError | None, most: int = 100) -> None:
        self.outcomes = list(outcomes)
        self.written: list[str | None] = []
        self.slept: list[float] = []
        self.notes: list[str] = []
        self.hopeless = False
        self._most = most

    def write(self, prompt: BenchPrompt | None) -> None:
        if len(self.written) >= self._most:
            raise EnoughError
        self.written.append(None if prompt is None else prompt.name)
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if outcome is not None:
            raise outcome

    def run(self, prompts=PROMPTS, repeat: int = 1, pause_s: float = 0.0) -> int:
        return write_all(
            self.write,
            prompts,
            repeat=repeat,
            pause_s=pause_s,
            note=self.notes.append,
            hopeless=lambda: self.hopeless,
            sleep=self.slept.append,
        )


def test_prompts_are_written_in_turn_with_pauses_between() -> None:
    work = Work()
    assert work.run(repeat=2, pause_s=3.0) == 0
    assert work.written == ["one", "two"] * 2
    assert work.slept == [3.0] * 3


def test_without_a_file_the_one_prompt_is_repeated() -> None:
    work = Work()
    assert work.run(None, repeat=3) == 0
    assert (work.written, work.slept) == ([None] * 3, [])


def test_for_ever_is_for_ever() -> None:
    work = Work(most=7)
    with pytest.raises(EnoughError):
        work.run(repeat=0)
    assert work.written == [*["one", "two"] * 3, "one"]


def test_once_an_error_ends_it() -> None:
    work = Work(None, TransportError("away"))
    with pytest.raises(TransportError):
        work.run()
    assert work.written == ["one", "two"]


def test_a_failure_is_said_and_the_next_one_tried_after_a_growing_pause() -> None:
    away = [TransportError("the cloud\nis away") for _ in range(9)]
    work = Work(*away, None, TransportError("again"))
    assert work.run(repeat=6, pause_s=0.25) == 3
    assert work.written == ["one", "two"] * 6
    assert work.notes[0] == "failed (one): the cloud is away"
    assert len(work.notes) == 10
    waits = [pause for pause in work.slept if pause != 0.25]
    assert waits[:3] == [0.75, 1.75, 3.75]
    assert max(waits) == LAST_PAUSE_S - 0.25
    assert waits[-1] == 0.75, "it succeeded in between"


def test_a_verifier_that_says_when_is_taken_at_its_word() -> None:
    work = Work(Refused("full", "busy", 7.0), Refused("full", "busy", 1e9))
    assert work.run(repeat=2) == 4
    assert work.slept == [7.0, LAST_PAUSE_S]


def test_a_connection_that_is_given_up_ends_even_a_device_that_works_for_ever() -> None:
    work = Work(None, TransportError("bad password"))
    work.hopeless = True
    with pytest.raises(TransportError):
        work.run(repeat=0)


# ---- flags ----------------------------------------------------------------------------------


def arguments(*flags: str, environ: dict[str, str] | None = None):
    words = ["generate", "--broker", "mqtt://localhost", "--pair", "smollm2", *flags]
    return parse(build_parser(), words, program="edge-agent", environ=environ or {})


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--telemetry-interval=-1"], "0 turns it off"),
        (["--telemetry-interval=0.01"], "0 turns it off"),
        (["--telemetry-interval=nan"], "0 turns it off"),
        (["--telemetry-interval=1e9"], "0 turns it off"),
        (["--metrics-port=70000"], "outside"),
        (["--metrics-port=-1"], "outside"),
        (["--state-file="], "none"),
        (["--watts=0"], "--watts"),
        (["--watts=nan"], "--watts"),
    ],
)
def test_wrong_flags_of_a_device(flags: list[str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        check_device_flags(arguments("--prompt", "x", *flags))


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ([], "--prompt"),
        (["--prompt", "x", "--prompts", "f"], "stands alone"),
        (["--messages", "x", "--prompts", "f"], "stands alone"),
        (["--prompt", "x", "--repeat=-1"], "for ever"),
        (["--prompt", "x", "--pause=-1"], "--pause"),
        (["--prompt", "x", "--pause=inf"], "--pause"),
    ],
)
def test_wrong_flags_of_its_work(flags: list[str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        check_work_flags(arguments(*flags))


def test_defaults_of_a_device() -> None:
    args = arguments("--prompts", "f")
    check_device_flags(args)
    check_work_flags(args)
    upkeep = upkeep_from(args, "pi-7")
    assert upkeep.telemetry_s == 5.0
    assert upkeep.sampler is not None
    assert upkeep.state is not None
    assert upkeep.state.name == "device-pi-7.json"
    off = upkeep_from(arguments("--telemetry-interval=0", "--state-file=none"), "pi-7")
    assert (off.telemetry_s, off.state, off.sampler) == (0.0, None, None)


@pytest.mark.parametrize(
    ("flags", "environ", "left"),
    [
        ([], {}, ALL_TUNABLES),
        (["--r1", "0.35"], {}, {"r2", "window", "policy"}),
        (["--r2", "0.5", "--window", "8"], {}, {"r1", "policy"}),
        (["--policy", "pipesd"], {}, {"r1", "r2", "window"}),
        ([], {"PIPESD_R1": "0.2", "PIPESD_POLICY": "hsl"}, {"r2", "window"}),
    ],
)
def test_what_is_said_by_hand_is_not_the_tuners(
    flags: list[str], environ: dict[str, str], left: Callable[[], set[str]]
) -> None:
    request = request_from(arguments("--prompt", "x", *flags, environ=environ), (1,))
    assert request.tunable == left


def test_flags_become_thresholds_as_before() -> None:
    request = request_from(arguments("--prompt", "x", "--r2", "0.5"), (1,))
    assert (request.policy.name, request.thresholds) == ("pipesd", Thresholds(r2=0.5))
