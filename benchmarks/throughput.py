"""What batching brings, and what everything but the target costs, with the real pair.

    python -m benchmarks.throughput [--dtype bfloat16] [--threads N] [--sessions 8,16] [--json]

The real core and the real engine, driven by recorded texts (recorded first where there are none)
with a virtual clock. ``at hand``: each session has its next draft, up to the trigger, when a
forward begins; the verifier alone is measured. ``in time``: devices draft on in their recorded
times, as shipped; half of them then draft while the other half is judged. Every second forward is
run twice, packed and its sessions one after the other, and beside it one plain forward of
transformers over as many tokens, so that a busy machine slows all alike. Then the whole system runs
over Mosquitto with the fleet load tool, and the verifier tells where its time went.

Marks: with drafts at hand packed at least 4 times the committed tokens per second of one after the
other; within 1.2 times the plain forward; at most 10 % of the verifier's time beside the forwards.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import _pair, _virtual
from benchmarks._plain import PlainModel
from benchmarks._progress import Progress
from broker.errors import ConfigError, PipesdError, TransportError
from broker.messages import VERIFY_TRIGGERED
from broker.mqtt_settings import MqttSettings
from cloud_verifier.core.verifier import Forward
from cloud_verifier.engine.target import Target
from cloud_verifier.runtime import works_of
from edge_agent.bench.fleet_station import FleetStation, Watcher
from edge_agent.bench.traces import Trace
from edge_agent.core.policies import SEND_HELD, pipesd
from edge_agent.cpus import usable_cores

SPEEDUP_MARK, PLAIN_MARK, BESIDE_MARK = 4.0, 1.2, 0.10
AT_HAND, IN_TIME, BOTH = "at hand", "in time", "both"
WARM_S = 2.0
CONTEXT = 512
FLEET, GENERATIONS = 16, 2
MOST_SESSIONS = 64
_EVERY = 2
#: Compared with a plain forward is one that asks after nearly all of its tokens, as that does.
_ASKED = 0.9
_FLEET_S = 900.0


class Turns:
    """An engine that runs every ``_EVERY``th forward packed, one by one, and beside a plain one.

    The clock of the fleet hears of the packed one alone. ``plain``: None to leave that out.
    """

    def __init__(self, target: Target, plain: PlainModel | None) -> None:
        self.packed_s = self.alone_s = 0.0
        self.beside_s = self.plain_s = 0.0  # packed and plain, where both ran
        self.works = self.differing = 0
        self._target = target
        self._plain = plain
        self._count = 0

    def run(self, forward: Forward) -> tuple[Sequence[Sequence[int]], float]:
        """See benchmarks._virtual.Engine."""
        works = works_of(forward)
        begin = time.perf_counter()
        choices = self._target.forward(works)
        packed = time.perf_counter() - begin
        self._count += 1
        if self._count % _EVERY:
            return choices, packed
        self.packed_s += packed
        begin = time.perf_counter()
        # Each slot is cut to what it kept and filled again with the same.
        alone = [self._target.forward([work])[0] for work in works]
        self.alone_s += time.perf_counter() - begin
        self.works += len(works)
        self.differing += sum(one != other for one, other in zip(choices, alone, strict=True))
        tokens = sum(len(work.tokens) for work in works)
        if self._plain is not None and sum(work.choices for work in works) >= _ASKED * tokens:
            self.plain_s += self._plain.seconds(tokens)
            self.beside_s += packed
        return choices, packed


def scene_of(texts: Sequence[Trace], sessions: int, drafts: str) -> _virtual.Scene:
    """``sessions`` that follow ``texts`` with ``drafts`` AT_HAND or IN_TIME."""
    if drafts == IN_TIME:
        return _virtual.Scene(texts, pipesd(), sessions)
    held = replace(pipesd(), proactive=False, sending=SEND_HELD, verify=VERIFY_TRIGGERED)
    return _virtual.Scene(_virtual.at_hand(texts), held, sessions, delay_s=0.0)


def batched(turns: Turns, scene: _virtual.Scene, seconds: float, what: str) -> dict[str, Any]:
    """The figures of ``seconds`` seconds of the virtual clock."""
    with Progress(what) as progress:
        seen = _virtual.run(
            scene,
            turns,
            warm_s=WARM_S,
            measured_s=seconds,
            exact=False,
            progress=progress.show,
        )
    if not turns.packed_s:
        raise ConfigError(f"--seconds {seconds:g}: not one forward: give more")
    speedup = turns.alone_s / turns.packed_s
    found = {
        "tokens_per_s": seen.tokens_per_s,
        "tokens_per_s_one_by_one": seen.tokens_per_s / speedup,
        "speedup": speedup,
        "plain": turns.beside_s / turns.plain_s if turns.plain_s else None,
        "tpt_ms": 1e3 * seen.tpt_s if seen.tally.tpt.count else None,
        "sessions_per_forward": seen.per_forward("batch_sessions"),
        "tokens_per_forward": seen.per_forward("batch_tokens"),
        "forward_ms": 1e3 * seen.per_forward("forward_seconds"),
        "committed_per_verdict": seen.per_verdict("committed"),
        "judged_per_verdict": seen.per_verdict("judged"),
    }
    rounded = {name: None if one is None else round(one, 3) for name, one in found.items()}
    return {
        **rounded,
        "texts_not_as_recorded": seen.tally.counts["wrong"],
        "works": turns.works,
        "works_not_as_alone": turns.differing,
    }


def whole_system(chosen: _pair.Chosen, traces: Path, devices: int) -> dict[str, Any]:
    """Where the verifier's time goes with a fleet over Mosquitto. Raises PipesdError."""
    threads = chosen.threads
    flags = ["--pair", chosen.pair, "--engine", chosen.engine, "--dtype", chosen.dtype]
    flags += ["--threads", str(threads)]
    flags += ["--max-sessions", str(devices), "--slots", str(devices)]
    module = "benchmarks._timed_verifier"
    note = _say
    with contextlib.ExitStack() as stack:
        station = stack.enter_context(FleetStation("mosquitto", module, flags, threads, note))
        watcher = Watcher(MqttSettings.from_url(station.url, "throughput"))
        stack.callback(watcher.stop)
        watcher.meet(station)
        fleet = _fleet(station.url, traces, devices)
        watcher.stop()
        station.stop()
    told = station.counters
    if told is None or "time" not in told:
        raise TransportError("the verifier told nothing: run it again")
    spent = told["time"]
    beside = spent["engine_beside_s"] + spent["network_s"]
    forwards = max(1, told["forwards"])
    return {
        "share_beside": round(beside / max(1e-9, beside + spent["forward_s"]), 4),
        "forward_ms": round(1e3 * spent["forward_s"] / forwards, 3),
        "engine_beside_ms": round(1e3 * spent["engine_beside_s"] / forwards, 3),
        "network_ms": round(1e3 * spent["network_s"] / forwards, 3),
        "stages_ms": {
            name.removeprefix("stage_").removesuffix("_s"): round(1e3 * one / forwards, 3)
            for name, one in spent.items()
            if name.startswith("stage_")
        },
        "sessions_per_forward": round(told["batch_sessions"] / forwards, 3),
        "tokens_per_forward": round(told["batch_tokens"] / forwards, 3),
        "tokens_per_s": fleet["tokens_per_s"],
        "tpt_ms": fleet["tpt_ms"]["p50"],
        "texts_not_as_recorded": fleet["wrong"],
    }


def _fleet(url: str, traces: Path, devices: int) -> dict[str, Any]:
    """Run the fleet load tool; what it tells. Wrong texts fail it, which the caller reports."""
    command = [sys.executable, "-m", "edge_agent.cli", "bench", "--fleet", str(devices)]
    command += ["--broker", url, "--traces", str(traces), "--generations", str(GENERATIONS)]
    command += ["--ramp", "1", "--json"]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=False, timeout=_FLEET_S
        )
        found = json.loads(done.stdout)
    except (ValueError, subprocess.TimeoutExpired):
        raise TransportError("the fleet told nothing: see its lines above") from None
    assert isinstance(found, dict)
    return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _lines(rows: Sequence[dict[str, Any]], system: dict[str, Any] | None) -> list[str]:
    found = []
    for row in rows:
        mark = ""
        if row["drafts"] == AT_HAND:
            mark = f" (mark {SPEEDUP_MARK:g}: {_met(row['speedup'] >= SPEEDUP_MARK)})"
        plain = ""
        if row["plain"] is not None:
            met = _met(row["plain"] <= PLAIN_MARK)
            plain = f", {row['plain']:.2f} of a plain forward (mark {PLAIN_MARK:g}: {met})"
        found += [
            f"{row['sessions']} sessions, drafts {row['drafts']}: {row['tokens_per_s']:.0f} tokens "
            f"a second, {row['tokens_per_s_one_by_one']:.0f} one by one: "
            f"{row['speedup']:.2f} times{mark}",
            f"  forwards of {row['sessions_per_forward']:.1f} sessions and "
            f"{row['tokens_per_forward']:.1f} tokens in {row['forward_ms']:.0f} ms{plain}",
            f"  {row['judged_per_verdict']:.1f} drafts judged and "
            f"{row['committed_per_verdict']:.1f} tokens committed by a verdict; "
            f"{row['works_not_as_alone']} of {row['works']} chose otherwise than alone",
        ]
    if system is not None:
        stages = ", ".join(f"{name} {one:.2f}" for name, one in system["stages_ms"].items())
        share = system["share_beside"]
        found += [
            f"whole system, {FLEET} devices: {100 * share:.1f} % of the verifier's time beside the "
            f"forwards (mark {100 * BESIDE_MARK:g} %: {_met(share <= BESIDE_MARK)})",
            f"  for each forward of {system['forward_ms']:.0f} ms: processor time "
            f"{system['engine_beside_ms']:.2f} ms of its thread beside it, "
            f"{system['network_ms']:.2f} ms of the network's; stages in ms: {stages}",
            f"  {system['tokens_per_s']:.0f} tokens a second, TPT {system['tpt_ms'] or 0:.1f} ms",
        ]
    return found


def _met(met: bool) -> str:
    return "met" if met else "MISSED"


def _all_met(rows: Sequence[dict[str, Any]], system: dict[str, Any] | None, dtype: str) -> bool:
    return (
        all(row["speedup"] >= SPEEDUP_MARK for row in rows if row["drafts"] == AT_HAND)
        and all(row["plain"] is None or row["plain"] <= PLAIN_MARK for row in rows)
        and (system is None or system["share_beside"] <= BESIDE_MARK)
        and (dtype != "float32" or not any(row["works_not_as_alone"] for row in rows))
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.throughput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pair", choices=("smollm2", "gemma3"), default="smollm2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--engine", choices=_pair.ENGINES, default="torch")
    parser.add_argument("--threads", type=int, help="of the target (all cores)")
    parser.add_argument(
        "--sessions",
        default="8,16",
        metavar="N,...",
        help="numbers of sessions, '' for none (8,16)",
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of the verifier's time (10)")
    parser.add_argument("--drafts", choices=(AT_HAND, IN_TIME, BOTH), default=BOTH)
    parser.add_argument(
        "--traces", metavar="FILE", help="texts; recorded into it if there are none"
    )
    parser.add_argument("--skip-system", action="store_true", help="without the whole system")
    parser.add_argument("--json", action="store_true")
    return parser


def measure(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """A row for each number of sessions and kind of drafts, and the whole system's figures.

    Raises PipesdError.
    """
    sizes = numbers("--sessions", args.sessions)
    chosen = _pair.Chosen(args.pair, args.engine, args.dtype, args.threads or usable_cores())
    texts, path = _pair.texts_of(args.pair, args.dtype, args.traces)
    rows: list[dict[str, Any]] = []
    if sizes:
        target = _pair.load_target(chosen, max(sizes), CONTEXT)
        plain = PlainModel(args.pair, args.dtype) if args.engine == "torch" else None
        for drafts in (AT_HAND, IN_TIME) if args.drafts == BOTH else (args.drafts,):
            for sessions in sizes:
                memory = target.block_tokens, target.total_blocks
                scene = replace(scene_of(texts, sessions, drafts), context=CONTEXT, memory=memory)
                what = f"{sessions} sessions, drafts {drafts}"
                row = batched(Turns(target, plain), scene, args.seconds, what)
                rows.append({"sessions": sessions, "drafts": drafts, **row})
        target.close()
        del plain, target
    system = None if args.skip_system else whole_system(chosen, path, FLEET)
    return rows, system


def numbers(name: str, text: str) -> list[int]:
    """Numbers of sessions from a flag. Raises ConfigError."""
    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = [0]
    if not all(1 <= one <= MOST_SESSIONS for one in found):
        raise ConfigError(f"{name} {text!r}: give numbers from 1 to {MOST_SESSIONS}, like 8,16")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        rows, system = measure(args)
    except PipesdError as error:
        print(f"throughput: {error}", file=sys.stderr)
        return error.exit_code
    if args.json:
        print(json.dumps({"sessions": rows, "system": system}))
    else:
        print("\n".join(_lines(rows, system)))
    return 0 if _all_met(rows, system, args.dtype) else 1


if __name__ == "__main__":
    sys.exit(main())
