"""How well a replay of what a run recorded gives back what the run measured.

A replay knows the text, the draft's choices, and what drafting, forwards and messages cost on
average. Where it comes close to the run, what it says of other links and constants can be believed.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from edge_agent.bench.cells import Result
from edge_agent.bench.contenders import Constants, Contender
from edge_agent.bench.link import Scenario
from edge_agent.bench.replay import replay_all
from edge_agent.bench.traces import Trace

#: How far from the run a replay may be, as a share of its TPT.
MARK = 0.10


@dataclass(frozen=True, slots=True)
class Beside:
    """One policy in one scenario: TPT measured and replayed, median ms over the same ``texts``.

    ``ratio``: replayed over measured, the median over texts.
    """

    scenario: str
    policy: str
    texts: int
    real_ms: float
    replayed_ms: float
    ratio: float

    @property
    def close(self) -> bool:
        """Whether it is within MARK."""
        return abs(self.ratio - 1.0) <= MARK


def drafting_pace(results: Iterable[Result], scenarios: Mapping[str, Scenario]) -> float | None:
    """Median seconds of drafting a token in the run, where no floor was set; None: unknown.

    Beside a target that shares its memory a draft is slower than while it is recorded alone.
    """
    paces = [
        result.gamma_s
        for result in results
        if result.gamma_s > 0.0
        and result.error is None
        and result.scenario in scenarios
        and not scenarios[result.scenario].gamma_floor_s
    ]
    return statistics.median(paces) if paces else None


def beside(
    results: Iterable[Result],
    traces: Sequence[Trace],
    contenders: Iterable[Contender],
    scenarios: Mapping[str, Scenario],
    constants: Constants,
    *,
    verify: str,
) -> list[Beside]:
    """Replay every policy of the run in every scenario; links with cuts are left out.

    ``traces``: by the names of the run's prompts. ``verify``: the run's.
    """
    measured: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        if result.error is None and result.tokens:
            key = result.scenario, result.policy
            measured[key][result.prompt].append(1e3 * result.tpt_s)
    rows: list[Beside] = []
    for scenario in scenarios.values():
        for one in contenders:
            known = measured.get((scenario.name, one.name), {})
            texts = [trace for trace in traces if trace.name in known]
            if not texts or scenario.link.cuts:
                continue
            policy = one.policy(constants, scenario.name)
            replayed = replay_all(texts, policy, scenario, verify=verify)
            real = [statistics.median(known[trace.name]) for trace in texts]
            again = [1e3 * result.tpt_s for result in replayed]
            rows.append(
                Beside(
                    scenario.name,
                    one.name,
                    len(texts),
                    statistics.median(real),
                    statistics.median(again),
                    statistics.median(b / a for a, b in zip(real, again, strict=True)),
                )
            )
    return rows


def lines_of(rows: Sequence[Beside]) -> list[str]:
    """A table, and how many are within MARK."""
    if not rows:
        return []
    width = max(len(row.policy) for row in rows)
    place = max(len(row.scenario) for row in rows)
    lines = ["", "replayed beside measured, median TPT in ms"]
    lines += [
        f"{row.scenario:{place}}  {row.policy:{width}}  {row.real_ms:7.1f} measured  "
        f"{row.replayed_ms:7.1f} replayed  x {row.ratio:.2f}"
        for row in rows
    ]
    close = sum(row.close for row in rows)
    lines.append(f"within {100 * MARK:.0f} %: {close} of {len(rows)}")
    return lines
