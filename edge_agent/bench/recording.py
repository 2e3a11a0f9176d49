"""Records a trace for each prompt: the target's text, the draft stepped along it, forward times.

``edge-agent bench --record`` takes text and forward times from the cells of the run; ``--tune``
has neither yet. What is missing is written by the target alone, or measured with fixed drafts, over
a link without emulation. Drafting is timed while nothing else runs.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from broker.messages import FINISH_STOP
from broker.sampling import Sampling
from edge_agent.bench.cells import Result
from edge_agent.bench.contenders import CONTENDERS
from edge_agent.bench.forward_table import ForwardTable
from edge_agent.bench.link import Scenario
from edge_agent.bench.traces import Trace, record
from edge_agent.bench.virtual_verifier import PREFILL_TOKENS
from edge_agent.core.policies import Policy, find_policy, vanilla
from edge_agent.core.trigger import Thresholds
from edge_agent.draft import DraftModel

#: Draft lengths whose forwards are measured where a run has too few different ones.
LENGTHS = (2, 4, 8, 16)
#: Forwards that make a number of tokens known, and numbers that make a table.
MIN_SAMPLES, MIN_SIZES = 3, 3
#: What the largest of them must reach, or the rest would be guessed from too little.
MIN_LARGEST = 9
#: Prompts over which the forwards of one draft length are looked for.
_TRIES = 3

#: Runs one generation: name and token ids of the prompt, and the policy (``Runner.alone``).
Alone = Callable[[str, tuple[int, ...], Policy], Result]
#: Hears the steps done, all of them, what the latest was, and the seconds left.
Report = Callable[[int, int, str, float | None], None]


@dataclass(frozen=True, slots=True)
class Pair:
    """Who wrote, and under which settings. ``max_tokens``: what the target was asked for."""

    draft: DraftModel
    target: str
    sampling: Sampling
    max_tokens: int


def texts_of(results: Iterable[Result]) -> dict[str, Result]:
    """By prompt a cell of repeat 0 with the target's text; of several the target's own."""
    found: dict[str, Result] = {}
    for result in results:
        if result.repeat or result.error is not None or not result.tokens or _local(result):
            continue
        if result.prompt not in found or _streamed(result):
            found[result.prompt] = result
    return found


def samples_of(
    results: Iterable[Result], scenarios: Mapping[str, Scenario], lengths: Mapping[str, int]
) -> list[tuple[int, float]]:
    """(tokens in the forward, seconds) of all forwards whose number of tokens is certain.

    ``scenarios``: those in which the target's forward has its least floor count; others, and those
    that are not named, do not. ``lengths``: of the prompts, in tokens, by name.
    """
    least = min((one.forward_floor_s for one in scenarios.values()), default=0.0)
    found: list[tuple[int, float]] = []
    for result in results:
        scenario = scenarios.get(result.scenario)
        if scenario is not None and scenario.forward_floor_s == least:
            found += _samples(result, lengths[result.prompt])
    return found


def _samples(result: Result, length: int) -> Iterator[tuple[int, float]]:
    """A forward takes the drafts that it judges and the committed token before them."""
    if result.error is not None or result.timeouts or result.resyncs or _local(result):
        return
    streamed = _streamed(result)
    for index, (judged, milliseconds) in enumerate(result.forward_samples):
        if index == 0:
            # It may hold the prompt, or what the prefill left of it; alone the target always
            # begins with all of it, if it fits one forward.
            if streamed and length <= PREFILL_TOKENS:
                yield length, milliseconds / 1000.0
        elif streamed or index < len(result.forward_samples) - 1:
            # The last one's drafts behind the end of the text are not counted as judged.
            yield judged + 1, milliseconds / 1000.0


def _local(result: Result) -> bool:
    return _base(result) == "local"


def _streamed(result: Result) -> bool:
    return _base(result) == "cloud"


def _base(result: Result) -> str:
    return CONTENDERS[result.policy].base if result.policy in CONTENDERS else result.policy


def enough(samples: Iterable[tuple[int, float]]) -> bool:
    """Whether they tell how the forward's time grows with its tokens, drafts being judged."""
    counts = Counter(tokens for tokens, _ in samples)
    sizes = [tokens for tokens, count in counts.items() if count >= MIN_SAMPLES]
    return len(sizes) >= MIN_SIZES and max(sizes) >= MIN_LARGEST


class Recording:
    """Makes traces of ``prompts`` (token ids by name); ``texts`` and ``samples``: what is known.

    ``alone`` is called for what is not. ``pace``: median seconds to draft a token in the run, to
    which the recorded times are scaled; None: they stay. Raises PipesdError from ``traces``.
    """

    def __init__(
        self,
        pair: Pair,
        prompts: Mapping[str, tuple[int, ...]],
        alone: Alone,
        *,
        texts: Mapping[str, Result] | None = None,
        samples: Sequence[tuple[int, float]] = (),
        pace: float | None = None,
        report: Report | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pair = pair
        self._prompts = prompts
        self._alone = alone
        self._texts = dict(texts or {})
        self._samples = list(samples)
        self._pace = pace
        self._report = report
        self._clock = clock
        self._begin = 0.0
        self._done = 0
        self._total = 0

    def traces(self) -> Iterator[Trace]:
        """A trace for each prompt, in order."""
        self._begin = self._clock()
        missing = [name for name in self._prompts if name not in self._texts]
        measured = () if enough(self._samples) else LENGTHS
        streamed = [] if missing or any(map(_streamed, self._texts.values())) else [self._longest]
        # Drafting along a text takes about a tenth of writing it.
        self._total = 10 * (len(missing) + len(streamed) + len(measured)) + len(self._prompts)
        for name in missing:
            self._texts[name] = self._write(name, find_policy("cloud"))
        for name in streamed:
            self._write(name, find_policy("cloud"))
        for length in measured:
            self._measure(length)
        forward = ForwardTable.from_samples(self._samples)
        traces: list[Trace] = []
        for name, prompt in self._prompts.items():
            traces.append(self._draft_along(name, prompt, forward))
            self._step(1, f"drafted along {name}")
        yield from traces if self._pace is None else _paced(traces, self._pace)

    @property
    def _longest(self) -> str:
        return max(self._prompts, key=lambda name: len(self._prompts[name]))

    def _write(self, name: str, policy: Policy) -> Result:
        result = self._alone(name, self._prompts[name], policy)
        self._samples += _samples(result, len(self._prompts[name]))
        self._step(10, f"{policy.name} {name}")
        return result

    def _measure(self, length: int) -> None:
        """Forwards with drafts of ``length`` tokens, until there are enough or it gets long."""
        policy = replace(vanilla(), thresholds=Thresholds(0.0, 0.0, length))
        for count, name in enumerate(self._prompts):
            known = sum(tokens == length + 1 for tokens, _ in self._samples)
            if count == _TRIES or known >= MIN_SAMPLES:
                break
            result = self._alone(name, self._prompts[name], policy)
            self._samples += _samples(result, len(self._prompts[name]))
        self._step(10, f"forwards with drafts of {length}")

    def _draft_along(self, name: str, prompt: tuple[int, ...], forward: ForwardTable) -> Trace:
        pair, text = self._pair, self._texts[name]
        # A text may also end before the limit because the target's context is full.
        ended = text.finish == FINISH_STOP
        return record(
            pair.draft,
            prompt,
            text.tokens,
            pair.sampling,
            name=name,
            target=pair.target,
            forward=forward,
            max_tokens=pair.max_tokens if ended else len(text.tokens),
        )

    def _step(self, weight: int, what: str) -> None:
        self._done += weight
        if self._report is not None:
            spent = self._clock() - self._begin
            left = spent * (self._total - self._done) / self._done
            self._report(self._done, self._total, what, left)


def _paced(traces: Sequence[Trace], pace: float) -> Iterator[Trace]:
    """With drafting times whose median over all texts is ``pace`` seconds."""
    alone = statistics.median(seconds for trace in traces for seconds in trace.gammas)
    share = pace / alone if alone > 0.0 else 1.0
    for trace in traces:
        gammas = tuple(round(share * seconds, 7) for seconds in trace.gammas)
        yield replace(trace, gammas=gammas, prompt_seconds=round(share * trace.prompt_seconds, 7))
