"""``edge-agent bench --tune``: each policy compared with the best constants found on other texts.

The texts are recorded with the pair that is compared, the constants tried on replays of them. Every
policy is granted as many candidates as any other in each scenario.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from broker.errors import ConfigError
from edge_agent.bench.contenders import Constants, check_constants
from edge_agent.bench.grids import MAX_BUDGET, constants_of, grid_of, with_constants
from edge_agent.bench.link import Scenario
from edge_agent.bench.prompts import TUNING, BenchPrompt, read_prompts
from edge_agent.cpus import usable_cores

if TYPE_CHECKING:
    from edge_agent.bench.recording import Report
    from edge_agent.bench.traces import Trace
    from edge_agent.bench.tuning import Row

GRID = "grid"
WAYS = (GRID,)
#: Candidates for each policy in each scenario, and built-in prompts to try them on.
BUDGET = 48
QUICK_PROMPTS = 4


@dataclass(frozen=True, slots=True)
class Wish:
    """What ``--tune`` asks for: ``budget`` candidates each, tried on ``prompts``."""

    budget: int
    prompts: tuple[BenchPrompt, ...]


def wish_of(args: argparse.Namespace, compared: Sequence[BenchPrompt]) -> Wish | None:
    """The flags; ``compared``: the prompts of the comparison. None: nothing is tuned.

    Raises ConfigError.
    """
    if args.tune is None:
        for flag in ("tune_budget", "tune_prompts"):
            if getattr(args, flag) is not None:
                name = flag.replace("_", "-")
                raise ConfigError(f"--{name} without --tune {GRID}: there is nothing to tune")
        return None
    budget = BUDGET if args.tune_budget is None else args.tune_budget
    if not 1 <= budget <= MAX_BUDGET:
        raise ConfigError(f"--tune-budget {budget} is outside 1 to {MAX_BUDGET}")
    taken = {_plain(prompt) for prompt in compared}
    if args.tune_prompts is not None:
        prompts = read_prompts(args.tune_prompts, chat=not args.raw, flag="--tune-prompts")
        for prompt in prompts:
            if _plain(prompt) in taken:
                raise ConfigError(
                    f"--tune-prompts {args.tune_prompts}: {prompt.name!r} is also compared: "
                    "tune on other prompts than those that are measured"
                )
    else:
        prompts = tuple(prompt for prompt in TUNING if _plain(prompt) not in taken)
        prompts = prompts[: QUICK_PROMPTS if args.quick else None]
        if not prompts:
            raise ConfigError("all built-in tuning prompts are compared: give --tune-prompts FILE")
    return Wish(budget, prompts)


def _plain(prompt: BenchPrompt) -> str:
    return " ".join(prompt.text.split())


def to_tune(
    policies: Iterable[str], scenarios: Iterable[str], known: Constants
) -> list[tuple[str, str]]:
    """Pairs of policy and scenario that have constants to find and are not in ``known``."""
    return [
        (policy, scenario)
        for policy in policies
        if grid_of(policy)
        for scenario in scenarios
        if scenario not in known.get(policy, {})
    ]


def find_constants(
    traces: Sequence[Trace],
    policies: Sequence[str],
    scenarios: Sequence[Scenario],
    known: Constants,
    *,
    wish: Wish,
    verify: str,
    seed: int = 0,
    processes: int | None = None,
    report: Report | None = None,
) -> tuple[dict[str, dict[str, dict[str, float]]], dict[str, Any]]:
    """The constants, those of ``known`` among them, and an account of the search for the reports.

    ``processes``: as many as there are cores if None. Raises PipesdError.
    """
    from edge_agent.bench.tuning import tune

    pairs = to_tune(policies, [scenario.name for scenario in scenarios], known)
    begin = time.monotonic()
    found = tune(
        traces,
        list(dict.fromkeys(policy for policy, _ in pairs)),
        # A replay has no broker that could be lost.
        [
            dataclasses.replace(one, link=dataclasses.replace(one.link, cuts=()))
            for one in scenarios
        ],
        verify=verify,
        processes=usable_cores() if processes is None else processes,
        budget=wish.budget,
        known=known,
        seed=seed,
        progress=None if report is None else _with_time_left(report, begin),
    )
    constants = {
        policy: {scenario: dict(values) for scenario, values in by_scenario.items()}
        for policy, by_scenario in known.items()
    }
    for policy, by_scenario in found.best.items():
        constants.setdefault(policy, {}).update(by_scenario)
    account: dict[str, Any] = {
        "way": GRID,
        "budget": wish.budget,
        "prompts": [prompt.name for prompt in wish.prompts],
        "tokens": sum(len(trace.tokens) for trace in traces),
        "found": _account(found.rows),
    }
    return constants, account


def _account(rows: Iterable[Row]) -> dict[str, Any]:
    """By policy and scenario: candidates tried, the best's constants and replayed TPT."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.policy, row.scenario), []).append(row)
    found: dict[str, Any] = {}
    for (policy, scenario), own in groups.items():
        best = min(own, key=lambda row: row.tpt_s)
        known = constants_of(with_constants(policy, scenario, best.constants))
        found.setdefault(policy, {})[scenario] = {
            "tried": len(own),
            "replayed_tpt_ms": round(best.tpt_s * 1000.0, 3),
            "constants": {name: known[name] for name in grid_of(policy)},
        }
    return found


def _with_time_left(report: Report, begin: float) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        left = (time.monotonic() - begin) * (total - done) / done
        report(done, total, "constants tried", left)

    return progress


def constants_in(header: Mapping[str, Any], path: str) -> dict[str, dict[str, dict[str, float]]]:
    """The constants with which the tuned run of this results file was made.

    Raises ConfigError when it was not tuned, or holds no constants.
    """
    if not isinstance(header.get("tuning"), dict):
        raise ConfigError(f"--resume {path}: that run was not tuned: leave --tune out")
    settings = header["settings"]
    try:
        found = {
            policy: {
                scenario: _constants(by_scenario.get(scenario, by_scenario.get("all")))
                for scenario in settings["scenarios"]
            }
            for policy, by_scenario in settings["policies"].items()
            if grid_of(policy)
        }
    except (KeyError, TypeError, AttributeError):
        raise ConfigError(f"--resume {path} holds no constants: start anew") from None
    return check_constants(found, f"--resume {path}")


def _constants(policy: Mapping[str, Any]) -> dict[str, float]:
    limits = policy["thresholds"]
    return {
        **{name: limits[name] for name in ("r1", "r2", "window")},
        **{name: policy[name] for name in ("min_survival", "max_ahead", "ask_again")},
    }


def lines_of(header: Mapping[str, Any]) -> list[str]:
    """For the terminal: on what the policies of a run were tuned; nothing for one that was not."""
    tuning = header.get("tuning")
    if not isinstance(tuning, dict):
        return []
    tried = [
        one["tried"] for by_scenario in tuning["found"].values() for one in by_scenario.values()
    ]
    if not tried:
        return []
    few, many = min(tried), max(tried)
    count = f"{many}" if few == many else f"{few} to {many}"
    return [
        f"constants: of {count} candidates for each policy and scenario the best on "
        f"{len(tuning['prompts'])} other texts"
    ]


def rows_of(header: Mapping[str, Any], scenario: str) -> list[tuple[str, str, int, float]]:
    """For the reports: policy, constants, candidates tried, and the TPT replayed, in ms."""
    tuning = header.get("tuning")
    if not isinstance(tuning, dict):
        return []
    return [
        (
            policy,
            ", ".join(f"{name} {value:g}" for name, value in one["constants"].items()),
            one["tried"],
            one["replayed_tpt_ms"],
        )
        for policy, by_scenario in tuning["found"].items()
        if (one := by_scenario.get(scenario)) is not None
    ]
