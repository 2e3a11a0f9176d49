"""The command ``python -m edge_agent.bench.replay``: policies by scenarios on recorded texts."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from broker.command import run
from broker.errors import ConfigError
from broker.settings import Parser, parse
from edge_agent.bench.contenders import (
    CONTENDERS,
    GROUPS,
    Constants,
    Contender,
    read_constants,
    select,
)
from edge_agent.bench.link import SCENARIOS, WIRES, Scenario, find_scenario
from edge_agent.bench.replay import replay_all
from edge_agent.bench.replay_result import Result
from edge_agent.bench.traces import Trace, read_traces
from edge_agent.core.config import DEFAULT_VERIFY, VERIFY_CHOICES

PROGRAM = "replay"
#: Scenarios without a name given: those on this system's own wire that differ most.
DEFAULT_SCENARIOS = ("wifi", "4g", "far", "slow-edge")


def names(text: str) -> tuple[str, ...]:
    """The names of a list with commas. Raises ConfigError for an empty one."""
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise ConfigError("an empty list of names: give some, with commas between")
    return found


def add_selection_flags(parser: argparse.ArgumentParser, policies: Sequence[str]) -> None:
    """What to run on which traces."""
    parser.add_argument("traces", nargs="+", metavar="TRACES", help="files of recorded texts")
    parser.add_argument(
        "--policies",
        default=",".join(policies),
        metavar="LIST",
        help=f"of {', '.join((*CONTENDERS, *GROUPS))} ({','.join(policies)})",
    )
    parser.add_argument(
        "--scenarios",
        default=",".join(DEFAULT_SCENARIOS),
        metavar="LIST",
        help=f"of {', '.join(SCENARIOS)} ({','.join(DEFAULT_SCENARIOS)})",
    )
    parser.add_argument(
        "--verify",
        choices=VERIFY_CHOICES,
        default=DEFAULT_VERIFY,
        help=f"how the verifier serves policies that do not say it themselves ({DEFAULT_VERIFY})",
    )
    parser.add_argument(
        "--wire",
        choices=WIRES,
        help="ids: what is sent; full-probs: emulation, the uplink is charged as if each token "
        "carried the draft's whole distribution (the scenario's own: ids)",
    )


def selected_scenarios(args: argparse.Namespace) -> list[Scenario]:
    """On the wire that is asked for. Raises ConfigError."""
    found = [find_scenario(name) for name in names(args.scenarios)]
    return found if args.wire is None else [one.with_wire(args.wire) for one in found]


def selected_traces(files: Sequence[str]) -> list[Trace]:
    """Raises ConfigError."""
    return [trace for file in files for trace in read_traces(file)]


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROGRAM,
        description="Compare policies on recorded texts, without models, by a virtual clock.",
        allow_abbrev=False,
    )
    add_selection_flags(parser, ("main",))
    parser.add_argument(
        "--constants", metavar="FILE", help="constants by policy and scenario, from the tuning"
    )
    parser.add_argument("--json", action="store_true", help="a JSON object a line, no table")
    return parser


def row(results: Sequence[Result]) -> str:
    """One line of the table: medians over the texts, and totals per token."""
    tokens = sum(result.tokens for result in results)
    judged = sum(result.judged for result in results)
    proactive = sum(result.proactive for result in results)
    kept = sum(result.proactive_kept for result in results)
    accepted = sum(result.accepted for result in results)
    return (
        f"{1e3 * statistics.median(result.tpt_s for result in results):8.1f}"
        f"{1e3 * statistics.median(result.pace_s for result in results):8.1f}"
        f"{1e3 * statistics.median(result.ttft_s for result in results):7.0f}"
        f"{sum(result.forwards for result in results) / tokens:8.3f}"
        f"{sum(result.drafted for result in results) / tokens:8.2f}"
        f"{_share(accepted, judged):>9}"
        f"{_share(kept, proactive):>7}"
        f"{sum(result.bytes_up for result in results) / tokens:8.1f}"
        f"{sum(result.messages_up for result in results) / tokens:8.2f}"
    )


HEADER = (
    f"{'TPT':>8}{'pace':>8}{'TTFT':>7}{'fwd/tok':>8}{'drafted':>8}"
    f"{'accepted':>9}{'kept':>7}{'bytes':>8}{'messages':>9}"
)
LEGEND = (
    "TPT, pace (without the first token), TTFT: median ms over the texts. Per committed token: "
    "forwards, drafted tokens, bytes and messages up. accepted: of the judged; kept: of the tokens "
    "drafted while a verdict was awaited."
)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2f}" if whole else "-"


def replay_command(args: argparse.Namespace) -> int:
    """Print the table."""
    contenders = select(names(args.policies))
    scenarios = selected_scenarios(args)
    constants = read_constants(args.constants) if args.constants else {}
    traces = selected_traces(args.traces)
    if args.json:
        for scenario, one, results in _replays(contenders, scenarios, constants, traces, args):
            print(json.dumps(as_dict(scenario, one, results)), flush=True)
        return 0
    print(f"{len(traces)} texts, {sum(len(trace.tokens) for trace in traces)} tokens. {LEGEND}")
    print(f"{'scenario':11}{'policy':21}{HEADER}")
    for scenario, one, results in _replays(contenders, scenarios, constants, traces, args):
        print(f"{scenario.label:11}{one.name:21}{row(results)}", flush=True)
    return 0


def _replays(
    contenders: Sequence[Contender],
    scenarios: Sequence[Scenario],
    constants: Constants,
    traces: Sequence[Trace],
    args: argparse.Namespace,
) -> Iterator[tuple[Scenario, Contender, list[Result]]]:
    for scenario in scenarios:
        for one in contenders:
            policy = one.policy(constants, scenario.name)
            yield scenario, one, replay_all(traces, policy, scenario, verify=args.verify)


def as_dict(scenario: Scenario, one: Contender, results: Sequence[Result]) -> dict[str, Any]:
    """One row for ``--json``: totals, and ``tpt_ms`` per text in milliseconds."""
    totals = ("tokens", "forwards", "drafted", "judged", "accepted", "proactive", "proactive_kept")
    return {
        "scenario": scenario.name,
        "wire": scenario.wire,
        "policy": one.name,
        "tpt_ms": [round(1e3 * result.tpt_s, 3) for result in results],
        "seconds": round(sum(result.seconds for result in results), 6),
        **{name: sum(getattr(result, name) for result in results) for name in totals},
        "bytes_up": sum(result.bytes_up for result in results),
        "messages_up": sum(result.messages_up for result in results),
        "forward_s": round(sum(result.forward_s for result in results), 6),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run(lambda: replay_command(parse(build_parser(), argv, program=PROGRAM)), PROGRAM)
