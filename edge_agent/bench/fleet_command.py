"""``edge-agent bench --fleet N``: many emulated devices against one verifier."""

from __future__ import annotations

import argparse
import json
import math
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from broker import load_text
from broker.command import Stopped
from broker.errors import ConfigError
from broker.flags import add_broker_flags, broker_settings, sampling_from
from broker.messages import VerifierStatus
from edge_agent.bench.choices import broker_kind
from edge_agent.bench.contenders import CONTENDERS, select
from edge_agent.bench.files import check_output
from edge_agent.bench.traces import Trace, read_traces
from edge_agent.core.policies import Policy
from edge_agent.core.trigger import Thresholds
from edge_agent.cpus import usable_cores
from edge_agent.device_flags import MAX_TELEMETRY_S, MIN_TELEMETRY_S

MAX_FLEET, MAX_PROCESSES = 10_000, 64
#: Descriptors of a process beside those of its devices: pipes, epoll, libraries.
_FILES_BESIDE = 64
#: Connections that the embedded broker takes.
_EMBEDDED_MOST = 1_900
_PIPESD = "pipesd"


def add_fleet_flags(parser: argparse.ArgumentParser) -> None:
    """Those of the load test; the rest are the bench's."""
    fleet = parser.add_argument_group(
        "load test",
        "many emulated devices at once; of the flags above those of target, sampling and output "
        "count",
    )
    fleet.add_argument(
        "--fleet", type=int, metavar="N", help="run N emulated devices instead of comparing"
    )
    fleet.add_argument(
        "--minutes", type=float, metavar="F", help="generate again and again for F minutes (1)"
    )
    fleet.add_argument(
        "--generations", type=int, metavar="G", help="texts of each device, instead of --minutes"
    )
    fleet.add_argument(
        "--think", type=float, default=0.0, metavar="S", help="mean pause between two texts (0)"
    )
    fleet.add_argument(
        "--ramp", type=float, metavar="S", help="seconds over which devices start (100 a second)"
    )
    fleet.add_argument(
        "--drain",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds that running texts may take after --minutes (60)",
    )
    fleet.add_argument(
        "--patience",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds of silence or refusals after which a text has failed (300)",
    )
    fleet.add_argument(
        "--policy", default="pipesd", metavar="NAME", help="what the devices follow (pipesd)"
    )
    fleet.add_argument(
        "--no-pipeline",
        action="store_true",
        help="devices that neither draft nor send ahead (bench: pipesd-no-pipeline) and yet "
        "follow what the fleet's tuner publishes: thresholds matter most to them",
    )
    fleet.add_argument(
        "--start-thresholds",
        metavar="R1,R2",
        help="what the devices begin with instead of the policy's own; a config from the fleet's "
        "tuner replaces them",
    )
    fleet.add_argument(
        "--telemetry-interval",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds between two messages with each device's figures; with them the devices "
        "follow what the fleet's tuner publishes. 0: neither (the default)",
    )
    fleet.add_argument(
        "--traces", metavar="FILE", help="recorded texts to replay; without: made-up ones"
    )
    fleet.add_argument(
        "--scripted-target",
        action="store_true",
        help="start a verifier without a model, which writes made-up texts (the default without "
        "--pair, --target or --broker)",
    )
    fleet.add_argument(
        "--forward-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="what a forward of the scripted target takes (0)",
    )
    fleet.add_argument(
        "--max-sessions", type=int, metavar="N", help="of the verifier that is started (--fleet)"
    )
    fleet.add_argument(
        "--metrics-url",
        metavar="URL",
        help="metrics page of the one verifier at --broker, which tells its batches",
    )
    fleet.add_argument(
        "--processes", type=int, metavar="P", help="processes for the devices (one per core)"
    )
    add_broker_flags(parser)


class FleetChoices:
    """The flags, checked. Raises ConfigError, before anything is started."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        _between("--fleet", args.fleet, 1, MAX_FLEET)
        given = [one for one in (args.pair, args.target) if one is not None]
        if len(given) > 1:
            raise ConfigError("give --pair or --target, not both")
        if args.broker and (given or args.scripted_target):
            raise ConfigError("with --broker the verifier runs already: leave the target out")
        if given and args.scripted_target:
            raise ConfigError("--scripted-target stands alone: leave --pair and --target out")
        if args.metrics_url is not None and not args.broker:
            raise ConfigError("--metrics-url is of a verifier that runs already: give --broker too")
        self.real = bool(given)
        if self.real and args.traces is None:
            raise ConfigError(
                "against a real target the texts must be known: record some with bench --policies "
                "cloud --scenarios loopback --record FILE and give them with --traces FILE"
            )
        self.policy = _policy(args.policy)
        if args.no_pipeline:
            if self.policy.name != _PIPESD:
                raise ConfigError(f"--no-pipeline is of --policy {_PIPESD}: leave one of them out")
            # Under the name of the whole, since a config for thresholds means that.
            self.policy = replace(_policy(f"{_PIPESD}-no-pipeline"), name=_PIPESD)
        if args.start_thresholds is not None:
            self.policy = replace(
                self.policy, thresholds=_thresholds(args.start_thresholds, self.policy.thresholds)
            )
        sampling_from(args)
        if args.minutes is None and args.generations is None:
            args.minutes = 1.0
        if args.minutes is not None and not 0.0 < args.minutes <= 10_000.0:
            raise ConfigError(f"--minutes {args.minutes:g} is outside 0 to 10000")
        if args.generations is not None:
            _between("--generations", args.generations, 1, 1_000_000)
        self.ramp_s = args.fleet / 100.0 if args.ramp is None else args.ramp
        for name, value, top in (
            ("--think", args.think, 3_600.0),
            ("--ramp", self.ramp_s, 3_600.0),
            ("--drain", args.drain, 86_400.0),
            ("--forward-ms", args.forward_ms, 60_000.0),
            ("--telemetry-interval", args.telemetry_interval, MAX_TELEMETRY_S),
        ):
            if not 0.0 <= value <= top:
                raise ConfigError(f"{name} {value:g} is outside 0 to {top:g}")
        if 0.0 < args.telemetry_interval < MIN_TELEMETRY_S:
            raise ConfigError(
                f"--telemetry-interval {args.telemetry_interval:g} is below {MIN_TELEMETRY_S:g} "
                "seconds: 0 turns it off"
            )
        if not 0.0 < args.patience <= 86_400.0:
            raise ConfigError(f"--patience {args.patience:g} is outside 0 to 86400 seconds")
        self.max_sessions = args.fleet if args.max_sessions is None else args.max_sessions
        _between("--max-sessions", self.max_sessions, 1, 100_000)
        self.processes = min(args.fleet, args.processes or usable_cores())
        _between("--processes", self.processes, 1, MAX_PROCESSES)
        if args.target_threads is not None:
            _between("--target-threads", args.target_threads, 1, 1_024)
        self.broker = "" if args.broker else broker_kind(args.broker_kind)
        if self.broker == "embedded" and args.fleet > _EMBEDDED_MOST:
            raise ConfigError(
                f"the embedded broker takes {_EMBEDDED_MOST} devices: install mosquitto for more"
            )
        self.out = None if args.out is None else Path(f"{args.out}.json")
        if self.out is not None:
            check_output(self.out)
        self.recorded = [] if args.traces is None else read_traces(args.traces)

    def module_flags(self) -> list[str]:
        """Of the verifier that is started."""
        args = self.args
        flags = ["--max-sessions", str(self.max_sessions)]
        if not self.real:
            return [*flags, "--forward-ms", repr(args.forward_ms)]
        flags += ["--pair", args.pair] if args.pair else ["--target", args.target]
        flags += ["--dtype", args.dtype, "--threads", str(self.threads)]
        if args.forward_floor_ms > 0.0:
            flags += ["--forward-floor-ms", repr(args.forward_floor_ms)]
        return flags

    @property
    def threads(self) -> int:
        """Of the target."""
        return int(self.args.target_threads or max(1, usable_cores() - 1))

    def texts(self, status: VerifierStatus) -> tuple[list[Trace], str]:
        """What is written on that verifier, and a line that says what it is. Raises ConfigError."""
        from edge_agent.bench import fleet_texts

        args = self.args
        if status.vocab_hash != load_text.VOCAB_HASH:
            texts = self.recorded
            if not texts:
                raise ConfigError(
                    "a verifier with a real target runs there: give texts that were recorded with "
                    "its models (--traces)"
                )
            said = f"{len(texts)} recorded in {Path(args.traces).name}, replayed as they are"
        elif self.recorded:
            texts = [
                fleet_texts.on_scripted_target(trace, number)
                for number, trace in enumerate(self.recorded)
            ]
            said = (
                f"made up for a scripted target, {len(texts)} with the agreement, confidences and "
                f"times recorded in {Path(args.traces).name}"
            )
        else:
            texts = fleet_texts.made_up(args.seed, args.max_tokens)
            said = (
                f"{len(texts)} made up by seed {args.seed}, {args.max_tokens} tokens at most, "
                f"agreement {fleet_texts.AGREEMENT:g}, {fleet_texts.GAMMA_S * 1e3:g} ms to draft a "
                "token: no model speaks here"
            )
        fleet_texts.check_texts(texts, status.vocab_hash, status.context)
        return texts, said


def _between(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} {value} is outside {low} to {high}")


def _policy(name: str) -> Policy:
    contenders = select([name])
    if len(contenders) != 1 or contenders[0].policy({}, "").local:
        names = ", ".join(one for one in CONTENDERS if one != "local")
        raise ConfigError(f"--policy {name!r} is no policy of a fleet: use one of {names}")
    return contenders[0].policy({}, "")


def _thresholds(flag: str, own: Thresholds) -> Thresholds:
    try:
        r1, r2 = map(float, flag.split(","))
    except ValueError:
        raise ConfigError(
            f"--start-thresholds {flag!r} is no R1,R2: give two numbers from 0 to 1"
        ) from None
    return replace(own, r1=r1, r2=r2)


def run_fleet(args: argparse.Namespace) -> int:
    """The command. Raises PipesdError, and Stopped after having shown what there is."""
    # Imported this late: they bring the MQTT client in.
    from edge_agent.bench.fleet_metrics import counted, read_counters
    from edge_agent.bench.fleet_report import FleetProgress, as_json, lines
    from edge_agent.bench.fleet_run import FleetPlan, FleetRun
    from edge_agent.bench.fleet_station import (
        BROKER_WORDS,
        REAL,
        SCRIPTED,
        VERIFIER_WORDS,
        FleetStation,
        Watcher,
    )
    from edge_agent.bench.fleet_usage import Usage, raise_file_limit, usage_of

    chosen = FleetChoices(args)
    # With --broker the broker's own limit is not ours to know.
    share = -(-args.fleet // chosen.processes) if args.broker else args.fleet
    raise_file_limit(share + _FILES_BESIDE, f"--fleet {args.fleet}")
    progress = FleetProgress(args.fleet)
    with ExitStack() as stack:
        station: FleetStation | None = None
        if not args.broker:
            module = REAL if chosen.real else SCRIPTED
            station = stack.enter_context(
                FleetStation(
                    chosen.broker, module, chosen.module_flags(), chosen.threads, progress.note
                )
            )
            args.broker = station.url
        settings = broker_settings(args, "fleet", None)
        watcher = Watcher(settings)
        stack.callback(watcher.stop)
        status = watcher.meet(station)
        texts, said = chosen.texts(status)
        plan = FleetPlan(
            settings,
            args.fleet,
            chosen.processes,
            _habits(chosen, texts, status),
            args.minutes,
            chosen.ramp_s,
            args.drain,
        )
        known: dict[str, Any] = {
            "devices": args.fleet,
            "processes": chosen.processes,
            "policy": chosen.policy.name + ("-no-pipeline" if args.no_pipeline else ""),
            "verifier": status.model,
            "forward_ms": args.forward_ms if station is not None and not chosen.real else None,
            "max_sessions": status.max_sessions,
            "broker": chosen.broker or settings.url,
            "texts": said,
            "minutes": args.minutes,
            "generations": args.generations,
            "think_s": args.think,
            "ramp_s": chosen.ramp_s,
            "seed": args.seed,
            "verify": args.verify,
        }
        metrics_url = (args.metrics_url or "") if station is None else station.metrics_url
        counted_before = read_counters(metrics_url)
        before = usage_of(VERIFIER_WORDS), usage_of(BROKER_WORDS)
        outcome = FleetRun(plan, progress.show).run()
        progress.end()
        counters: dict[str, Any] | None = counted(counted_before, read_counters(metrics_url))
        usage: dict[str, Usage | None] = {}
        for name, words, then in (
            ("verifier", VERIFIER_WORDS, before[0]),
            ("broker", BROKER_WORDS, before[1]),
        ):
            used = usage_of(words)
            if used is not None and then is not None:
                used = Usage(used.cpu_s - then.cpu_s, used.peak_bytes)
            usage[name] = used
        usage["fleet"] = Usage(outcome.cpu_s, outcome.peak_bytes)
        if station is not None:
            watcher.stop()
            station.stop()
    if station is not None and station.counters is not None:
        counters = station.counters
    data = as_json(outcome, known, counters=counters, usage=usage)
    if chosen.out is not None:
        try:
            chosen.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {chosen.out}: {error.strerror}") from None
    print(json.dumps(data) if args.json else "\n".join(lines(data)), flush=True)
    if outcome.stopped:
        print("stopped: this is what there was so far", file=sys.stderr)
        raise Stopped
    return 1 if data["wrong"] or data["incomplete"] else 0


def _habits(chosen: FleetChoices, texts: list[Trace], status: VerifierStatus) -> Any:
    from edge_agent.bench.fleet_habits import Habits

    args = chosen.args
    return Habits(
        texts=tuple(texts),
        policy=chosen.policy,
        vocab_hash=status.vocab_hash,
        verify=args.verify,
        think_s=args.think,
        generations=args.generations,
        until=math.inf,
        patience_s=args.patience,
        seed=args.seed,
        telemetry_s=args.telemetry_interval,
    )
