"""Sessions without end on one verifier: whatever becomes of them, nothing may be left over.

    python -m benchmarks.churn [--sessions 10000] [--devices N] [--seed N] [--json]

Devices open one short session after another over a real Mosquitto. Half of the sessions are hung up
at a random moment: while they are being opened, just opened, in the middle of the text. The others
are written to their end. From time to time a whole process of devices is killed, and its devices
come back under their names. At the end no living session, slot, subscription, connection or
retained message may be left, and the memory of verifier and broker must be as large as half-way.
Exit code 1 when it is not so, or a text was wrong.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks._lab import Lab, resident
from broker import load_text
from broker.command import raise_on_signals, run
from broker.errors import ConfigError, TransportError
from edge_agent.bench import fleet_texts
from edge_agent.bench.fleet_habits import Habits
from edge_agent.bench.fleet_stats import Tally
from edge_agent.bench.fleet_worker import WorkerPlan
from edge_agent.core.policies import find_policy

PROGRAM = "churn"
#: Share of the sessions that are hung up, and the seconds in which that happens: a text of
#: _TOKENS takes about as long.
HANG_UP, HANG_UP_S = 0.5, 0.1
_TOKENS = 8
#: Seconds after which the verifier forgets a device that vanished.
IDLE_S = 5.0
#: Processes of devices; the first is never killed.
_CREWS = 2
#: What memory may grow by in the second half: allocators do not return every page.
_GROWTH, _GROWTH_BYTES = 0.03, 2 << 20
_SAMPLE_S = 0.5
#: Seconds without a new session after which it does not go on.
_STALL_S = 60.0
_QUIET_S = 30.0


class Churn:
    """The crews of one lab, and what is known of them."""

    def __init__(self, lab: Lab, args: argparse.Namespace) -> None:
        self.tally = Tally()
        self.vanished = 0  # devices of processes that were killed
        self.sessions = 0
        self._lab = lab
        self._args = args
        self._draw = random.Random(args.seed)  # noqa: S311 (no secret)
        self._base = lab.left.settled()
        self._crews = [lab.crew() for _ in range(_CREWS)]
        self._memory: list[tuple[int, int, int]] = []  # sessions, verifier and broker in bytes
        self._plans = 0
        self._kills = 0

    def _begin(self, place: int) -> None:
        args = self._args
        self._plans += 1
        habits = Habits(
            texts=tuple(fleet_texts.made_up(args.seed, _TOKENS)),
            policy=find_policy("pipesd"),
            vocab_hash=load_text.VOCAB_HASH,
            hang_up=HANG_UP,
            hang_up_s=HANG_UP_S,
            seed=args.seed + self._plans,
        )
        names = [f"churn-{number}" for number in range(place, args.devices, _CREWS)]
        now = time.monotonic()
        starts = [now + 0.01 * number for number in range(len(names))]
        self._crews[place].begin(WorkerPlan(self._lab.settings, names, starts, habits))

    def run(self) -> list[str]:
        """Until enough sessions were opened; what is wrong then. Raises PipesdError."""
        for place in range(_CREWS):
            self._begin(place)
        moved_at = time.monotonic()
        verifier = self._lab.verifiers[0]
        shown = 0
        while self.sessions < self._args.sessions:
            for crew in self._crews:
                crew.hear(_SAMPLE_S / _CREWS)
            opened = int(verifier.counters()["opens"])
            if opened > self.sessions:
                moved_at = time.monotonic()
            elif time.monotonic() - moved_at > _STALL_S:
                raise TransportError(f"no new session for {_STALL_S:.0f} s")
            self.sessions = opened
            pids = verifier.pid, self._lab.broker.pid
            self._memory.append((opened, resident(pids[0]), resident(pids[1])))
            due = (self._kills + 1) * self._args.sessions / (self._args.kills + 1)
            if self._kills < self._args.kills and opened >= due:
                self._kill_some()
            if opened - shown >= self._args.sessions // 10:
                shown = opened
                _, ours, theirs = self._memory[-1]
                print(
                    f"{opened} sessions, verifier {ours / 1e6:.1f} MB, broker {theirs / 1e6:.1f} "
                    f"MB, {self.vanished} devices vanished",
                    file=sys.stderr,
                    flush=True,
                )
        return self._end()

    def _kill_some(self) -> None:
        self._kills += 1
        place = self._draw.randrange(1, _CREWS)
        self._crews[place].kill()
        self.vanished += len(range(place, self._args.devices, _CREWS))
        self._crews[place] = self._lab.crew()
        self._begin(place)

    def _end(self) -> list[str]:
        devices = self._args.devices
        # Those that vanished come back, so that they take their places and statuses away.
        deadline = time.monotonic() + _QUIET_S
        while sum(crew.latest.connected for crew in self._crews) < devices:
            for crew in self._crews:
                crew.hear(_SAMPLE_S / _CREWS)
            if time.monotonic() > deadline:
                raise TransportError("the devices that vanished did not come back")
        for crew in self._crews:
            crew.halt()
        for crew in self._crews:
            if not crew.hear(60.0) or crew.latest.tally is None:
                raise TransportError("the devices did not come to their end")
            self.tally.merge(crew.latest.tally)
        wrong = self._lab.sessions_left(_QUIET_S + IDLE_S)
        wrong += self._lab.left.wait_for(self._base, _QUIET_S)
        counts = self.tally.counts
        for name in ("wrong", "misplaced", "contradictions", "incomplete"):
            if counts[name]:
                wrong.append(f"{counts[name]} {name}: {dict(self.tally.reasons)}")
        counters = self._lab.verifiers[0].counters()
        for name in ("publish_failures", "core_faults", "forward_failures"):
            if counters[name]:
                wrong.append(f"{counters[name]} {name} on the verifier")
        for which, name in ((1, "verifier"), (2, "broker")):
            half, end = self.memory(which)
            if end > half * (1 + _GROWTH) + _GROWTH_BYTES:
                wrong.append(f"the {name} grew from {half / 1e6:.1f} to {end / 1e6:.1f} MB")
        return wrong

    def memory(self, which: int) -> tuple[float, float]:
        """Bytes of the verifier (1) or broker (2) just after half of the sessions and at the end.

        Medians of a quarter each, so that one sample says nothing.
        """
        total = self._args.sessions
        third = [one[which] for one in self._memory if total // 2 <= one[0] < 3 * total // 4]
        last = [one[which] for one in self._memory if one[0] >= 3 * total // 4]
        end = statistics.median(last) if last else 0.0
        return (statistics.median(third) if third else end), end


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags. Raises ConfigError."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__.partition("\n")[0])
    parser.add_argument("--sessions", type=int, default=10_000, metavar="N", help="(10000)")
    parser.add_argument("--devices", type=int, default=32, metavar="N", help="at a time (32)")
    parser.add_argument("--kills", type=int, default=8, metavar="N", help="of device processes (8)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of everything drawn (0)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args(arguments)
    for name, low, high in (
        ("sessions", 10, 100_000_000),
        ("devices", _CREWS, 500),
        ("kills", 0, 1_000),
    ):
        if not low <= getattr(args, name) <= high:
            raise ConfigError(f"--{name} is {low} to {high}")
    return args


def churn(args: argparse.Namespace) -> int:
    """The command. Raises PipesdError."""
    begin = time.monotonic()
    # Room for the sessions of vanished devices until they are forgotten.
    flags = ["--max-sessions", str(8 * args.devices), "--idle-ttl", str(IDLE_S)]
    with Lab(1, flags) as lab:
        game = Churn(lab, args)
        wrong = game.run()
        counters = lab.verifiers[0].counters()
        counts = game.tally.counts
        memory = {name: game.memory(which) for which, name in ((1, "verifier"), (2, "broker"))}
    seconds = time.monotonic() - begin
    data: dict[str, Any] = {
        "sessions": counters["opens"],
        "wrong": wrong,
        "written": counts["generations"],
        "hung_up": counts["hung_up"],
        "cut_off": counts["cut_off"],
        "vanished_devices": game.vanished,
        "closed": counters["closed"],
        "expired": counters["expired"],
        "sessions_left": counters["sessions_left"],
        "slots_left": counters["slots_left"],
        "memory_bytes": memory,
        "seconds": round(seconds, 1),
    }
    if args.json:
        print(json.dumps(data), flush=True)
    else:
        print(
            f"{data['sessions']} sessions in {seconds:.0f} s, {data['closed']} closed, "
            f"{data['expired']} forgotten; of the devices that lived {data['written']} texts "
            f"written, {data['hung_up']} hung up; {game.vanished} devices vanished"
        )
        for name, (half, end) in memory.items():
            print(f"memory of the {name}: {half / 1e6:.1f} MB half-way, {end / 1e6:.1f} at the end")
        print("\n".join(f"WRONG: {what}" for what in wrong) or "nothing left over", flush=True)
    return 1 if wrong else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 when something was left over, memory grew, or a text was wrong."""

    def work() -> int:
        logging.basicConfig(level=logging.ERROR)  # that connections die is the purpose
        raise_on_signals()
        return churn(parse(sys.argv[1:] if arguments is None else arguments))

    return run(work, PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
