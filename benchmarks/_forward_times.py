"""What a forward of an engine costs by its sessions and tokens: measured, and as a table."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from broker.sampling import Sampling
from cloud_verifier.engine.target import Target, Work
from edge_agent.bench.forward_table import ForwardTable

#: Tokens that each session has before.
PAST = 96
#: (sessions, tokens of each): those of one session tell the cost of tokens, the rest of sessions.
ALONE = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
BESIDE = ((2, 1), (2, 4), (4, 1), (4, 4), (8, 1), (8, 4), (8, 8), (16, 1), (16, 4), (16, 8))
MOST_SESSIONS = max(sessions for sessions, _ in BESIDE)


@dataclass(frozen=True, slots=True)
class ForwardTimes:
    """Seconds of a forward: what its tokens cost one session, and so much for each session more.

    ``off``: median of |table / measured - 1| over the forwards of several sessions.
    """

    alone: ForwardTable
    per_session: float
    off: float

    def seconds(self, sessions: int, tokens: int) -> float:
        """Of a forward of ``sessions`` and ``tokens`` of all together."""
        return self.alone.seconds(tokens) + self.per_session * max(0, sessions - 1)


def measure(
    target: Target, rounds: int, progress: Callable[[float], object] | None = None
) -> ForwardTimes:
    """Time all sizes in turns, so that a busy machine slows all alike; medians.

    ``target`` needs MOST_SESSIONS slots and a context of PAST tokens and the largest size.
    """
    draw = random.Random(1)  # noqa: S311 (any text will do)
    size = PAST + max(ALONE)
    texts = [
        tuple(draw.randrange(target.vocab_size) for _ in range(size)) for _ in range(MOST_SESSIONS)
    ]
    for slot, text in enumerate(texts):
        target.forward([Work(slot, 0, text[:PAST], 0, 0, Sampling())])
    cases = [(1, tokens) for tokens in ALONE] + list(BESIDE)
    times: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    for turn in range(-1, rounds):  # one to warm up
        for number, (sessions, each) in enumerate(cases):
            if progress is not None:
                progress((turn + 1 + number / len(cases)) / (rounds + 1))
            took = _once(target, texts[:sessions], each)
            if turn >= 0:
                times[sessions, each].append(took)
    return table_of({case: statistics.median(found) for case, found in times.items()})


def _once(target: Target, texts: Sequence[tuple[int, ...]], each: int) -> float:
    # A long piece of one session is a prefill, which asks for one choice.
    choices = each if each <= 16 else 1
    batch = [
        Work(slot, PAST, text[PAST : PAST + each], choices, 0, Sampling())
        for slot, text in enumerate(texts)
    ]
    begin = time.perf_counter()
    target.forward(batch)
    return time.perf_counter() - begin


def table_of(seconds: dict[tuple[int, int], float]) -> ForwardTimes:
    """From the seconds of each (sessions, tokens of each)."""
    alone = ForwardTable.from_samples(
        (each, took) for (sessions, each), took in seconds.items() if sessions == 1
    )
    rest = [(n, n * each, took) for (n, each), took in seconds.items() if n > 1]
    extra = [max(0.0, (took - alone.seconds(total)) / (n - 1)) for n, total, took in rest]
    per_session = statistics.median(extra)
    table = ForwardTimes(alone, per_session, 0.0)
    off = statistics.median(abs(table.seconds(n, total) / took - 1.0) for n, total, took in rest)
    return ForwardTimes(alone, per_session, off)
