"""Deaths and pauses at random moments, round by round: every text must come out exact.

    python -m benchmarks.chaos [--rounds 100] [--seed N] [--devices N] [--replicas N]
                               [--pair smollm2 --traces FILE] [--pause S] [--json]

In each round devices write texts over a real Mosquitto, and at a random moment one thing happens to
one process: it is killed (and another started), stopped for ``--pause`` seconds, or told to leave.
The round is over when all texts are done; then no living verifier may hold a session or a slot, nor
the broker a subscription, a connection or a retained message that was not there at the start.
Sessions that a verifier had to forget (their devices went on elsewhere while it was paused) are
counted.
Exit code 1 when a text is wrong or missing or something is left over.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks._lab import Crew, Lab, wait_for
from broker import load_text
from broker.command import raise_on_signals, run
from broker.errors import ConfigError, PipesdError, TransportError
from edge_agent.bench import fleet_texts
from edge_agent.bench.fleet_habits import Habits
from edge_agent.bench.fleet_stats import Tally
from edge_agent.bench.fleet_worker import WorkerPlan
from edge_agent.bench.traces import Trace, read_traces
from edge_agent.core.policies import find_policy

PROGRAM = "chaos"
FAULTS = (
    *("kill-replica", "kill-broker", "pause-replica", "pause-broker", "pause-devices"),
    "drain-replica",
)
#: Seconds until a round's texts must be done, beside the pause.
ROUND_S = 180.0
#: Seconds after which a verifier forgets a session whose device moved on while it was paused.
IDLE_S = 12.0
#: Seconds in which everything must have been given back.
QUIET_S = 30.0 + IDLE_S
#: Seconds until a verifier must have left after SIGTERM.
LEAVE_S = 20.0
#: Share of the time that the texts of a round take at least, within which its fault happens.
_WITHIN = 0.3
#: From so many rounds on one without a fault comes first, for comparison.
_COMPARED = 6
_LOSSES = ("reopens", "timeouts", "resyncs", "refusals", "stuck", "disconnects")


@dataclass(slots=True)
class Round:
    """What came of one round. Times in seconds; ``gap``: the longest between two commits."""

    number: int
    fault: str
    texts: int = 0
    gap: float = 0.0
    first: float = 0.0  # the longest wait for a first token
    seconds: float = 0.0
    forgotten: int = 0  # sessions that nobody closed
    struck: bool = False  # whether texts were being written when it happened
    losses: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


class Chaos:
    """The faults, and the rounds in which they happen."""

    def __init__(
        self, lab: Lab, crew: Crew, texts: Sequence[Trace], args: argparse.Namespace
    ) -> None:
        self._lab = lab
        self._crew = crew
        self._args = args
        self._draw = random.Random(args.seed)  # noqa: S311 (no secret)
        self._habits = Habits(
            texts=tuple(texts),
            policy=find_policy("pipesd"),
            vocab_hash=next(iter(lab.watcher.online().values())).vocab_hash,
            generations=args.texts,
            patience_s=ROUND_S,
        )
        self._base = lab.left.settled()
        self._forgotten: dict[int, int] = {}
        self._within_s = _WITHIN * args.texts * args.max_tokens * fleet_texts.GAMMA_S
        faults: dict[str, Callable[[], None]] = {
            "kill-replica": self._kill_replica,
            "kill-broker": self._kill_broker,
            "pause-replica": self._pause_replica,
            "pause-broker": self._pause_broker,
            "pause-devices": self._pause_devices,
            "drain-replica": self._drain_replica,
        }
        self.faults = {name: faults[name] for name in args.faults}

    def order(self) -> list[str]:
        """Which fault in which round: each as often as any other, in random order."""
        names: list[str] = []
        while len(names) < self._args.rounds:
            some = list(self.faults)
            self._draw.shuffle(some)
            names += some
        return names[: self._args.rounds]

    def play(self, number: int, fault: str | None) -> Round:
        """One round; without a fault for comparison. Raises PipesdError when it cannot go on."""
        args, crew = self._args, self._crew
        found = Round(number, fault or "nothing")
        names = [f"chaos-{device}" for device in range(args.devices)]
        begin = time.monotonic()
        starts = [begin + 0.02 * device for device in range(args.devices)]
        habits = Habits(**{**_fields(self._habits), "seed": args.seed + number})
        crew.begin(
            WorkerPlan(self._lab.settings, names, starts, habits, ROUND_S + 2.0 * args.pause)
        )
        if fault is not None:
            deadline = begin + ROUND_S
            while not crew.hear(0.05) and crew.latest.attached < max(1, args.devices // 2):
                if time.monotonic() > deadline:
                    raise TransportError("the devices found no verifier")
            crew.hear(self._draw.uniform(0.0, self._within_s))
            found.struck = crew.latest.tally is None
            self.faults[fault]()
        if not crew.hear(ROUND_S + 3.0 * args.pause + 30.0) or crew.latest.tally is None:
            raise TransportError(f"round {number} ({fault}) did not come to its end")
        self._judge(found, crew.latest.tally)
        found.seconds = time.monotonic() - begin
        return found

    def _judge(self, found: Round, tally: Tally) -> None:
        counts = tally.counts
        found.texts = counts["generations"]
        found.gap, found.first = tally.gaps.largest, tally.ttft.largest
        found.losses = {name: counts[name] for name in _LOSSES if counts[name]}
        expected = self._args.devices * self._args.texts
        for name in ("wrong", "misplaced", "contradictions", "incomplete", "cut_off"):
            if counts[name]:
                found.wrong.append(f"{counts[name]} {name}")
        if found.texts != expected:
            found.wrong.append(f"{found.texts} of {expected} texts are complete and exact")
            found.wrong += [f"{count} times: {why}" for why, count in tally.reasons.items()]
        self._lab.wait_online(600.0 if self._args.pair else 60.0)
        found.wrong += self._lab.sessions_left(QUIET_S)
        found.wrong += self._lab.left.wait_for(self._base, QUIET_S)
        forgotten = self._lab.forgotten()
        # A verifier that was replaced begins at none.
        found.forgotten = sum(
            max(0, count - self._forgotten.get(pid, 0)) for pid, count in forgotten.items()
        )
        self._forgotten = forgotten

    # -- faults ---------------------------------------------------------------------------------

    def _kill_replica(self) -> None:
        victim = self._draw.choice(self._lab.verifiers)
        victim.signal(signal.SIGKILL)
        wait_for(lambda: not victim.alive, LEAVE_S, f"the death of {victim.name}")
        victim.restart()

    def _kill_broker(self) -> None:
        self._lab.broker.kill()
        time.sleep(self._draw.uniform(0.0, 1.0))
        self._lab.broker.start()

    def _pause_replica(self) -> None:
        self._pause(self._draw.choice(self._lab.verifiers).signal)

    def _pause_broker(self) -> None:
        self._pause(self._lab.broker.signal)

    def _pause_devices(self) -> None:
        self._pause(self._crew.signal)

    def _pause(self, send: Callable[[int], None]) -> None:
        send(signal.SIGSTOP)
        try:
            time.sleep(self._args.pause)
        finally:
            send(signal.SIGCONT)

    def _drain_replica(self) -> None:
        victim = self._draw.choice(self._lab.verifiers)
        victim.signal(signal.SIGTERM)
        wait_for(lambda: not victim.alive, LEAVE_S, f"the leaving of {victim.name}")
        if victim.exit_code != 0:
            raise PipesdError(f"{victim.name} left with {victim.exit_code}: {victim.last_line}")
        victim.restart()


def _fields(habits: Habits) -> dict[str, Any]:
    return {name: getattr(habits, name) for name in type(habits).__dataclass_fields__}


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """By fault: rounds, the longest gap of all and of the median round, and what was counted."""
    found: dict[str, Any] = {}
    for fault in dict.fromkeys(one.fault for one in rounds):
        some = [one for one in rounds if one.fault == fault]
        found[fault] = {
            "rounds": len(some),
            "struck": sum(one.struck for one in some),
            "gap_s": round(max(one.gap for one in some), 3),
            "median_gap_s": round(statistics.median(one.gap for one in some), 3),
            "first_s": round(max(one.first for one in some), 3),
            "forgotten": sum(one.forgotten for one in some),
            **{name: sum(one.losses.get(name, 0) for one in some) for name in _LOSSES},
        }
    return found


def table(found: dict[str, Any]) -> list[str]:
    """The summary for a terminal."""
    lines = [
        f"{'fault':18} rounds  struck  longest gap  median gap  longest first  reopens  timeouts  "
        "forgotten"
    ]
    lines += [
        f"{fault:18} {one['rounds']:6}  {one['struck']:6}  {one['gap_s']:9.2f} s  "
        f"{one['median_gap_s']:8.2f} s  {one['first_s']:11.2f} s  {one['reopens']:7}  "
        f"{one['timeouts']:8}  {one['forgotten']:9}"
        for fault, one in found.items()
    ]
    return lines


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags. Raises ConfigError."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100, metavar="N", help="(100)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of faults and texts (0)")
    parser.add_argument("--devices", type=int, default=8, metavar="N", help="(8)")
    parser.add_argument("--texts", type=int, default=2, metavar="N", help="of a device a round (2)")
    parser.add_argument("--max-tokens", type=int, default=160, metavar="N", help="of a text (160)")
    parser.add_argument("--replicas", type=int, default=2, metavar="N", help="verifiers (2)")
    parser.add_argument("--pause", type=float, default=10.0, metavar="S", help="of a pause (10)")
    parser.add_argument(
        "--faults", default=",".join(FAULTS), metavar="A,B", help="which ones (all): %(default)s"
    )
    parser.add_argument("--pair", metavar="NAME", help="a real target instead of a scripted one")
    parser.add_argument("--traces", metavar="FILE", help="texts recorded with that pair, float32")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args(arguments)
    for name, low, high in (
        ("rounds", 1, 100_000),
        ("devices", 1, 500),
        ("texts", 1, 1_000),
        ("max_tokens", 1, 10_000),
        ("replicas", 1, 16),
        ("pause", 0.1, 60.0),
    ):
        if not low <= getattr(args, name) <= high:
            raise ConfigError(f"--{name.replace('_', '-')} is {low} to {high}")
    args.faults = [name.strip() for name in args.faults.split(",")]
    if unknown := [name for name in args.faults if name not in FAULTS]:
        raise ConfigError(f"--faults: no {unknown[0]!r}, there are {', '.join(FAULTS)}")
    if (args.pair is None) != (args.traces is None):
        raise ConfigError(
            "--pair needs texts that are known: record them with edge-agent bench --record and "
            "--dtype float32, and give them with --traces"
        )
    return args


def chaos(args: argparse.Namespace) -> int:
    """The command. Raises PipesdError."""
    texts = (
        read_traces(args.traces) if args.pair else fleet_texts.made_up(args.seed, args.max_tokens)
    )
    flags = ["--idle-ttl", str(IDLE_S)]
    if args.pair:
        flags += ["--pair", args.pair, "--dtype", "float32", "--threads", "1"]
    else:
        flags += ["--forward-ms", "10"]
    begin = time.monotonic()
    rounds: list[Round] = []
    with Lab(args.replicas, flags, args.pair) as lab:
        status = next(iter(lab.watcher.online().values()))
        fleet_texts.check_texts(texts, status.vocab_hash, status.context)
        assert args.pair or status.vocab_hash == load_text.VOCAB_HASH
        game = Chaos(lab, lab.crew(), texts, args)
        quiet = [None] if args.rounds >= _COMPARED else []
        for number, fault in enumerate([*quiet, *game.order()], 1 - len(quiet)):
            one = game.play(number, fault)
            rounds.append(one)
            losses = ", ".join(f"{name} {count}" for name, count in one.losses.items())
            print(
                f"{number:4} {one.fault:18} gap {one.gap:6.2f} s, first {one.first:6.2f} s, "
                f"{one.texts} texts in {one.seconds:5.1f} s{losses and '; ' + losses}"
                f"{f'; forgotten {one.forgotten}' if one.forgotten else ''}"
                + "".join(f"\n     WRONG: {what}" for what in one.wrong),
                file=sys.stderr,
                flush=True,
            )
    found = summary(rounds)
    bad = [one for one in rounds if one.wrong]
    worst = max(rounds, key=lambda one: one.gap)
    data = {
        "rounds": args.rounds,
        "texts": sum(one.texts for one in rounds),
        "bad_rounds": [asdict(one) for one in bad],
        "longest_gap_s": round(worst.gap, 3),
        "longest_gap_fault": worst.fault,
        "seconds": round(time.monotonic() - begin, 1),
        "settings": {name: value for name, value in vars(args).items() if name != "json"},
        "faults": found,
    }
    if args.json:
        print(json.dumps(data), flush=True)
    else:
        print("\n".join(table(found)))
        print(
            f"{data['texts']} texts, {len(bad)} bad rounds of {len(rounds)}; the longest gap was "
            f"{worst.gap:.2f} s ({worst.fault}); {data['seconds']:.0f} s in all",
            flush=True,
        )
    return 1 if bad else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 when a text was wrong or missing, or something was left over."""

    def work() -> int:
        logging.basicConfig(level=logging.ERROR)  # that connections die is the purpose
        raise_on_signals()
        return chaos(parse(sys.argv[1:] if arguments is None else arguments))

    return run(work, PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
