"""From the results of cells to the figures that are compared. Pure arithmetic."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_agent.bench.cells import Cell, Result
from edge_agent.bench.contenders import BASELINE, CONTENDERS

#: Writes another text by design, so it is not compared with the others.
_OTHER_TEXT = "local"


@dataclass(frozen=True, slots=True)
class Row:
    """One policy in one scenario. Milliseconds; per token: per committed token.

    ``pairs``: cells (prompt and repeat) that the figures are of, the same ones for every policy of
    the scenario. ``tpt_ms``, ``tpt_low_ms``, ``tpt_high_ms``: median and quartiles over prompts of
    the median over repeats. ``after_first_ms``: median per token after the first, so without the
    prompt's cost. ``acceptance``, ``kept``: shares, None where there was nothing to accept or keep.
    ``draft_length``: tokens judged per verdict. ``gamma_ms``, ``forward_ms``: medians.
    ``planning_share``: of the time, for planning and estimating. ``link_model``: the cost model
    that most of its sessions ended with, ``alpha_ms`` and ``occupancy_ms`` the medians of those;
    None where none measured the link.
    ``timeouts``: requests repeated because no verdict came in time. ``load``: the machine's.
    ``speedup_cloud``, ``speedup_baseline``: the other's TPT over this one's, median over the same
    cells; above 1 is faster. ``baseline``: the best one.
    """

    scenario: str
    policy: str
    pairs: int
    failed: int
    tokens: int
    tpt_ms: float
    tpt_low_ms: float
    tpt_high_ms: float
    tpt_prompts_ms: tuple[float, ...]
    after_first_ms: float
    ttft_ms: float
    acceptance: float | None
    draft_length: float
    forwards_per_token: float
    drafted_per_token: float
    payload_up_per_token: float
    draft_payload_per_token: float
    wire_up_per_token: float
    messages_up_per_token: float
    kept: float | None
    gamma_ms: float | None
    forward_ms: float | None
    timeouts: int
    load: float
    planning_share: float = 0.0
    link_model: str | None = None
    alpha_ms: float | None = None
    occupancy_ms: float | None = None
    speedup_cloud: float | None = None
    speedup_baseline: float | None = None
    baseline: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Difference:
    """Two cells of one prompt and repeat whose texts differ from token ``position`` on."""

    one: Cell
    other: Cell
    position: int

    def __str__(self) -> str:
        pair = f"{_name(self.one)} and {_name(self.other)}"
        return f"prompt {self.one.prompt}: {pair} differ from token {self.position} on"


def _name(cell: Cell) -> str:
    return f"{cell.policy} in {cell.scenario}"


def differences(results: Iterable[Result]) -> list[Difference]:
    """Cells whose text is not that of the first of their prompt and repeat."""
    first: dict[tuple[str, int], Result] = {}
    found = []
    for result in results:
        if result.error is not None or result.policy == _OTHER_TEXT:
            continue
        known = first.setdefault((result.prompt, result.repeat), result)
        if known.text != result.text:
            common = zip(known.tokens, result.tokens, strict=False)
            shorter = min(len(known.tokens), len(result.tokens))
            at = next((i for i, (a, b) in enumerate(common) if a != b), shorter)
            found.append(Difference(known.cell, result.cell, at))
    return found


def compared(results: Iterable[Result]) -> int:
    """Cells whose texts were compared."""
    return sum(result.error is None and result.policy != _OTHER_TEXT for result in results)


def summarise(
    results: Sequence[Result], policies: Sequence[str], scenarios: Sequence[str]
) -> list[Row]:
    """A row for each policy and scenario with a result, in that order within the scenario."""
    rows: list[Row] = []
    for scenario in scenarios:
        good: dict[str, dict[tuple[str, int], Result]] = defaultdict(dict)
        failed: dict[str, int] = defaultdict(int)
        for result in results:
            if result.scenario != scenario:
                continue
            if result.error is None and result.tokens:
                good[result.policy][result.prompt, result.repeat] = result
            else:
                failed[result.policy] += 1
        present = [policy for policy in policies if good[policy]]
        # Medians over different prompts would compare prompts: only those that all have.
        shared = set.intersection(*(set(good[policy]) for policy in present)) if present else set()
        paired = {
            policy: {
                pair: result
                for pair, result in good[policy].items()
                if not shared or pair in shared
            }
            for policy in present
        }
        baseline = _best(paired)
        for policy in present:
            row = _row(scenario, policy, paired[policy], failed[policy])
            cloud = _speedup(paired[policy], paired.get("cloud"))
            ahead = None
            if baseline is not None and policy != _OTHER_TEXT:
                ahead = _speedup(paired[policy], paired[baseline])
            rows.append(
                dataclasses.replace(
                    row, speedup_cloud=cloud, speedup_baseline=ahead, baseline=baseline
                )
            )
    return rows


def _tpt_by_prompt(cells: Mapping[tuple[str, int], Result]) -> list[float]:
    by_prompt: dict[str, list[float]] = defaultdict(list)
    for (prompt, _), result in cells.items():
        by_prompt[prompt].append(result.tpt_s * 1000.0)
    return [statistics.median(times) for times in by_prompt.values()]


def _best(paired: Mapping[str, Mapping[tuple[str, int], Result]]) -> str | None:
    """The quickest baseline."""
    times = {
        policy: statistics.median(_tpt_by_prompt(cells))
        for policy, cells in paired.items()
        if policy in CONTENDERS and CONTENDERS[policy].group == BASELINE
    }
    return min(times, key=lambda policy: times[policy], default=None)


def _speedup(
    mine: Mapping[tuple[str, int], Result], other: Mapping[tuple[str, int], Result] | None
) -> float | None:
    ratios = [
        other[pair].tpt_s / result.tpt_s
        for pair, result in mine.items()
        if other is not None and pair in other and result.tpt_s > 0.0
    ]
    return statistics.median(ratios) if ratios else None


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third, by linear interpolation; of one value: that value twice."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _row(scenario: str, policy: str, cells: Mapping[tuple[str, int], Result], failed: int) -> Row:
    """Without what compares it with others."""
    results = list(cells.values())
    tpt = _tpt_by_prompt(cells)
    low, high = quartiles(tpt)
    tokens = sum(len(one.tokens) for one in results)
    forwards = sum(one.forwards for one in results)
    judged = sum(one.judged for one in results)
    drafted = sum(one.drafted for one in results)
    decided = sum(one.kept + one.dropped for one in results)
    longer = [one for one in results if len(one.tokens) > 1]
    gammas = [one.gamma_s for one in results if one.gamma_s > 0.0]
    times = [ms for one in results for _, ms in one.forward_samples]
    links = [one.learnt for one in results if one.learnt is not None and one.learnt.known]
    model = statistics.mode(link.model for link in links) if links else None
    links = [link for link in links if link.model == model]
    return Row(
        scenario=scenario,
        policy=policy,
        pairs=len(results),
        failed=failed,
        tokens=tokens,
        tpt_ms=statistics.median(tpt),
        tpt_low_ms=low,
        tpt_high_ms=high,
        tpt_prompts_ms=tuple(tpt),
        after_first_ms=statistics.median(
            [(one.total_s - one.ttft_s) * 1000.0 / (len(one.tokens) - 1) for one in longer] or [0.0]
        ),
        ttft_ms=statistics.median(one.ttft_s * 1000.0 for one in results),
        acceptance=sum(one.accepted for one in results) / judged if judged else None,
        draft_length=judged / forwards if forwards else 0.0,
        forwards_per_token=forwards / tokens,
        drafted_per_token=drafted / tokens,
        payload_up_per_token=sum(one.payload_up for one in results) / tokens,
        draft_payload_per_token=sum(one.draft_payload for one in results) / tokens,
        wire_up_per_token=sum(one.wire_up for one in results) / tokens,
        messages_up_per_token=sum(one.messages_up for one in results) / tokens,
        kept=sum(one.kept for one in results) / decided if decided else None,
        gamma_ms=1000.0 * statistics.median(gammas) if gammas else None,
        forward_ms=statistics.median(times) if times else None,
        timeouts=sum(one.timeouts for one in results),
        load=statistics.median(one.load for one in results),
        planning_share=sum(one.planning_s for one in results)
        / max(sum(one.total_s for one in results), 1e-9),
        link_model=model,
        alpha_ms=1000.0 * statistics.median(link.alpha for link in links) if links else None,
        occupancy_ms=(
            1000.0 * statistics.median(link.occupancy for link in links) if links else None
        ),
    )
