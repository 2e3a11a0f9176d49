"""``edge-agent bench``: its flags, and what they mean. Nothing heavy is imported here."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from broker import __version__
from broker.command import Stopped
from broker.errors import ConfigError
from broker.flags import add_sampling_flags, sampling_from
from broker.messages import VERIFY_EAGER, VERIFY_TRIGGERED
from edge_agent.bench.cells import Cell, Result, ResultsFile, Settings, order
from edge_agent.bench.contenders import (
    CONTENDERS,
    GROUPS,
    Constants,
    Contender,
    read_constants,
    select,
)
from edge_agent.bench.html import page
from edge_agent.bench.link import SCENARIOS, WIRE_IDS, WIRES, Scenario, find_scenario
from edge_agent.bench.prompts import BUILT_IN, BenchPrompt, check_names, read_prompts
from edge_agent.bench.report import Progress, as_json, failures, legend, table, texts_line
from edge_agent.bench.summary import compared, differences, summarise
from edge_agent.cpus import usable_cores

if TYPE_CHECKING:
    from edge_agent.llama_draft import LlamaDraftModel

LoadDraft = Callable[[argparse.Namespace, Callable[[str], None]], "LlamaDraftModel"]

MAX_TOKENS = 64
_FULL_SCENARIOS = ("wifi", "4g", "far", "slow-edge", "S1", "S2", "S3", "S4")
_FULL_PROMPTS = 8
_FULL_MINUTES = 60.0
_QUICK_SCENARIOS = ("wifi", "4g")
_QUICK_POLICIES = ("main",)
_QUICK_PROMPTS = 3
_QUICK_TOKENS = 32
_QUICK_MINUTES = 2.0
_MAX_CELLS = 200_000


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """All but those of the draft model and the common ones."""
    what = parser.add_argument_group("what is compared")
    what.add_argument(
        "--policies",
        metavar="NAMES",
        help=f"comma-separated: {', '.join(CONTENDERS)}, or groups: {', '.join(GROUPS)} (all)",
    )
    what.add_argument(
        "--scenarios",
        metavar="NAMES",
        help=f"comma-separated: {', '.join(SCENARIOS)} ({', '.join(_FULL_SCENARIOS)})",
    )
    what.add_argument(
        "--scenario-file", metavar="FILE", help="JSON list of scenarios of your own, run as well"
    )
    what.add_argument(
        "--wire",
        choices=WIRES,
        default=WIRE_IDS,
        help="ids: what is sent (default); full-probs: emulation, the uplink is charged as if each "
        "token carried the draft's whole distribution",
    )
    what.add_argument("--prompts", metavar="FILE", help='JSONL, {"prompt": T} a line (built in)')
    what.add_argument("--raw", action="store_true", help="continue the file's prompts as text")
    what.add_argument(
        "--prompt-count", type=int, metavar="N", help=f"only the first N prompts ({_FULL_PROMPTS})"
    )
    what.add_argument("--repeats", type=int, default=1, metavar="N", help="times each (1)")
    what.add_argument(
        "--constants", metavar="FILE", help="JSON: {policy: {scenario: {r1, r2, window, ...}}}"
    )
    what.add_argument(
        "--quick",
        action="store_true",
        help=f"{_QUICK_PROMPTS} prompts of {_QUICK_TOKENS} tokens, policies {_QUICK_POLICIES[0]}, "
        f"scenarios {', '.join(_QUICK_SCENARIOS)}, where nothing else is said",
    )
    add_sampling_flags(parser, max_tokens=MAX_TOKENS)
    models = parser.add_argument_group("target model and devices")
    models.add_argument("--target", metavar="M", help="directory, hub id or GGUF file")
    models.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="precision of the target; float32 (default): all texts must be equal",
    )
    models.add_argument("--target-threads", type=int, metavar="N", help="CPU threads of the target")
    models.add_argument(
        "--gamma-floor-ms", type=float, default=0.0, metavar="MS", help="emulate a slower device"
    )
    models.add_argument(
        "--forward-floor-ms", type=float, default=0.0, metavar="MS", help="emulate a slower target"
    )
    models.add_argument(
        "--verify",
        choices=(VERIFY_TRIGGERED, VERIFY_EAGER),
        default=VERIFY_TRIGGERED,
        help="as in generate",
    )
    models.add_argument(
        "--broker-kind",
        choices=("auto", "mosquitto", "embedded"),
        default="auto",
        help="auto (default): mosquitto where it is installed",
    )
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--out", metavar="PREFIX", help="write PREFIX.jsonl, .json and .html (pipesd-bench-TIME)"
    )
    run.add_argument("--resume", metavar="FILE", help="go on with that .jsonl, with the same flags")
    run.add_argument(
        "--report-only", action="store_true", help="with --resume: run nothing, write the reports"
    )
    run.add_argument(
        "--max-minutes",
        type=float,
        metavar="F",
        help=f"begin nothing after so long ({_FULL_MINUTES:g}; quick: {_QUICK_MINUTES:g})",
    )


def run_bench(args: argparse.Namespace, load_draft: LoadDraft) -> int:
    """The command. Raises PipesdError, and Stopped after having written what there is."""
    if args.report_only:
        if not args.resume:
            raise ConfigError("--report-only without --resume FILE: there is nothing to report")
        file = ResultsFile.resume(Path(args.resume), None)
        file.close()
        return _publish(args, file, _outputs(args))
    bench = _Bench(args)
    outputs = _outputs(args)
    environment = _environment()
    if args.resume:
        file = ResultsFile.resume(Path(args.resume), bench.settings)
    else:
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        file = ResultsFile.create(outputs["jsonl"], bench.settings, environment, started=started)
    try:
        complete = bench.run(file, load_draft)
    except Stopped:
        _publish(args, file, outputs)
        print(f"stopped: go on with the same flags and --resume {file.path}", file=sys.stderr)
        raise
    finally:
        file.close()
    code = _publish(args, file, outputs)
    if not complete:
        print(
            f"--max-minutes is over: go on with the same flags and --resume {file.path}",
            file=sys.stderr,
        )
    return code


class _Bench:
    """The flags, checked; raises ConfigError before anything is loaded."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        quick = args.quick
        self.contenders = select(_names(args.policies, _QUICK_POLICIES if quick else ("all",)))
        self.scenarios = _scenarios(args)
        self.prompts = _prompts(args)
        self.constants: Constants = {} if args.constants is None else read_constants(args.constants)
        if quick:
            args.max_tokens = min(args.max_tokens, _QUICK_TOKENS)
        self.sampling = sampling_from(args)
        self.limit_s = 60.0 * _limit_minutes(args)
        if not 1 <= args.repeats <= 1_000:
            raise ConfigError(f"--repeats {args.repeats} is outside 1 to 1000")
        if args.target_threads is not None and args.target_threads < 1:
            raise ConfigError(f"--target-threads {args.target_threads} is below 1: leave it out")
        if args.draft is None and args.target is None and args.pair is None:
            args.pair = "smollm2"
        if (args.pair is None) != (args.draft is not None and args.target is not None):
            raise ConfigError("give --draft and --target, or --pair, or none of them")
        for name in self.constants:
            for scenario in self.constants[name]:
                if scenario not in self.scenarios and scenario not in SCENARIOS:
                    raise ConfigError(f"--constants: unknown scenario {scenario!r} of {name}")
        cores = usable_cores()
        self.target_threads = args.target_threads or max(1, cores - 1)
        if args.threads is None:
            args.threads = max(1, cores - self.target_threads)
        self.broker = _broker_kind(args.broker_kind)
        self.cells = list(
            order(
                [one.name for one in self.contenders],
                list(self.scenarios),
                [prompt.name for prompt in self.prompts],
                args.repeats,
                args.seed,
            )
        )
        if len(self.cells) > _MAX_CELLS:
            raise ConfigError(f"{len(self.cells)} generations, above {_MAX_CELLS}: choose fewer")
        self.settings = self._settings()

    def _settings(self) -> Settings:
        args = self.args
        quant = f" {args.draft_quant}" if args.draft_quant else ""
        return Settings(
            draft=(args.pair or Path(args.draft).name) + quant,
            target=args.pair or args.target,
            dtype=args.dtype,
            broker=self.broker,
            draft_threads=args.threads,
            target_threads=self.target_threads,
            max_tokens=args.max_tokens,
            repeats=args.repeats,
            seed=args.seed,
            verify=args.verify,
            sampling=dataclasses.asdict(self.sampling),
            policies={one.name: self._constants(one) for one in self.contenders},
            scenarios={name: one.to_dict() for name, one in self.scenarios.items()},
            prompts={
                prompt.name: {"text": prompt.text, "chat": prompt.chat} for prompt in self.prompts
            },
        )

    def _constants(self, contender: Contender) -> dict[str, Any]:
        """Its policy by scenario, once where it is the same everywhere."""
        found = {
            name: dataclasses.asdict(contender.policy(self.constants, name))
            for name in self.scenarios
        }
        first = next(iter(found.values()))
        return {"all": first} if all(one == first for one in found.values()) else found

    def run(self, file: ResultsFile, load_draft: LoadDraft) -> bool:
        """Run what ``file`` lacks; whether nothing is left."""
        args = self.args
        if all(file.done(cell) for cell in self.cells):
            return True
        # Imported this late: they bring the MQTT client in.
        from edge_agent.bench.runner import Plan, Runner, run_all

        progress = Progress(len(self.cells))
        begin = time.monotonic()
        draft = load_draft(args, progress.note)
        try:
            prompts = {prompt.name: _encode(prompt, draft, args) for prompt in self.prompts}
            plan = Plan(
                {one.name: one for one in self.contenders},
                self.scenarios,
                prompts,
                self.constants,
                self.sampling,
                args.max_tokens,
                args.verify,
                args.seed,
                frozenset([self.prompts[0].name]),
            )
            target = ["--pair", args.pair] if args.pair else ["--target", args.target]
            with Runner(
                plan,
                draft,
                broker=self.broker,
                flags=[*target, "--dtype", args.dtype],
                threads=self.target_threads,
                note=progress.note,
            ) as runner:
                spent = time.monotonic() - begin
                progress.note(
                    f"draft {draft.name}, target {runner.target}, {len(self.cells)} generations, "
                    f"ready after {spent:.0f} s"
                )
                return run_all(runner, self.cells, file, limit_s=self.limit_s, report=progress.cell)
        finally:
            progress.end()
            draft.close()


# -- from flags -----------------------------------------------------------------------------------


def _names(given: str | None, default: Sequence[str]) -> list[str]:
    if given is None:
        return list(default)
    return [name.strip() for name in given.split(",") if name.strip()]


def _scenarios(args: argparse.Namespace) -> dict[str, Scenario]:
    own = [] if args.scenario_file is None else _read_scenarios(args.scenario_file)
    default = () if own else _QUICK_SCENARIOS if args.quick else _FULL_SCENARIOS
    found = [find_scenario(name) for name in _names(args.scenarios, default)] + own
    if not found:
        raise ConfigError("no scenario to measure in: name some with --scenarios")
    check_names([scenario.name for scenario in found], "--scenarios")
    floors = {
        "gamma_floor_s": args.gamma_floor_ms / 1000.0,
        "forward_floor_s": args.forward_floor_ms / 1000.0,
    }
    for name, value in floors.items():
        if not 0.0 <= value <= 60.0:
            flag = name.replace("_s", "_ms").replace("_", "-")
            raise ConfigError(f"--{flag} {value * 1000.0:g} is outside 0 to 60000")
    return {
        scenario.name: dataclasses.replace(
            scenario,
            wire=args.wire if args.wire != WIRE_IDS else scenario.wire,
            gamma_floor_s=max(scenario.gamma_floor_s, floors["gamma_floor_s"]),
            forward_floor_s=max(scenario.forward_floor_s, floors["forward_floor_s"]),
        )
        for scenario in found
    }


def _read_scenarios(path: str) -> list[Scenario]:
    try:
        data: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise ConfigError(f"cannot read --scenario-file {path}: {cause}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--scenario-file {path} is no JSON: {error}") from None
    if not isinstance(data, list) or not 1 <= len(data) <= 100:
        raise ConfigError(f"--scenario-file {path} is no list of 1 to 100 scenarios: mend it")
    try:
        return [Scenario.from_dict(one) for one in data]
    except ConfigError as error:
        raise ConfigError(f"--scenario-file {path}: {error}") from None


def _prompts(args: argparse.Namespace) -> tuple[BenchPrompt, ...]:
    count = args.prompt_count
    if count is not None and count < 1:
        raise ConfigError(f"--prompt-count {count} is below 1: leave it out for the default")
    if args.prompts is None and args.raw:
        raise ConfigError("--raw goes with --prompts: the built-in prompts know what they are")
    every = BUILT_IN if args.prompts is None else read_prompts(args.prompts, chat=not args.raw)
    return every[: count or (_QUICK_PROMPTS if args.quick else _FULL_PROMPTS)]


def _limit_minutes(args: argparse.Namespace) -> float:
    minutes = args.max_minutes
    if minutes is None:
        return _QUICK_MINUTES if args.quick else _FULL_MINUTES
    if not 0.0 < minutes < math.inf:
        raise ConfigError(f"--max-minutes {minutes:g} is not above 0: leave it out")
    return float(minutes)


def _broker_kind(kind: str) -> str:
    from edge_agent.bench.mosquitto import find_mosquitto

    installed = find_mosquitto() is not None
    if kind == "mosquitto" and not installed:
        raise ConfigError("mosquitto is not installed: install it, or --broker-kind embedded")
    if kind == "auto":
        return "mosquitto" if installed else "embedded"
    return kind


def _encode(
    prompt: BenchPrompt, draft: LlamaDraftModel, args: argparse.Namespace
) -> tuple[int, ...]:
    text = draft.text
    if prompt.chat and text.has_chat_template:
        tokens = tuple(text.encode_chat([{"role": "user", "content": prompt.text}]))
    else:
        tokens = tuple(text.encode_prompt(prompt.text))
    if len(tokens) + args.max_tokens > draft.context:
        raise ConfigError(
            f"prompt {prompt.name} has {len(tokens)} tokens; with {args.max_tokens} more it is "
            f"longer than the draft's context of {draft.context}: shorten it, or --draft-context"
        )
    return tokens


# -- what comes out -------------------------------------------------------------------------------


def _outputs(args: argparse.Namespace) -> dict[str, Path]:
    """Where the reports go, which can be written. Raises ConfigError."""
    if args.resume and not args.out:
        prefix = args.resume.removesuffix(".jsonl")
    else:
        prefix = args.out or time.strftime("pipesd-bench-%Y%m%d-%H%M%S")
    found = {kind: Path(f"{prefix}.{kind}") for kind in ("jsonl", "json", "html")}
    for kind in ("json", "html"):
        path = found[kind]
        existed = path.exists()
        try:
            with path.open("a"):
                pass
            if not existed:
                path.unlink()
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}: choose --out") from None
    return found


def _environment() -> dict[str, Any]:
    """What the machine and the versions are; figures of other machines do not compare."""
    versions = {}
    for name in ("llama-cpp-python", "paho-mqtt", "numpy", "torch", "transformers"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "pipesd": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": usable_cores(),
        "load": round(os.getloadavg()[0], 2),
        "versions": versions,
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _publish(args: argparse.Namespace, file: ResultsFile, outputs: Mapping[str, Path]) -> int:
    """Write the reports and show the table; the exit code."""
    settings = file.header["settings"]
    planned = [
        Cell(policy, scenario, prompt, repeat)
        for policy in settings["policies"]
        for scenario in settings["scenarios"]
        for prompt in settings["prompts"]
        for repeat in range(settings["repeats"])
    ]
    # In the order of the plan, which is not that of the run.
    results: list[Result] = [file.results[cell] for cell in planned if cell in file.results]
    rows = summarise(results, list(settings["policies"]), list(settings["scenarios"]))
    found = differences(results)
    texts = texts_line(compared(results), found, settings["dtype"])
    data = as_json(file.header, rows, results, found, planned=len(planned))
    html = page(file.header, rows, results, texts, planned=len(planned))
    for kind, content in (("json", json.dumps(data, indent=1)), ("html", html)):
        try:
            outputs[kind].write_text(content, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {outputs[kind]}: {error.strerror}") from None
    if args.json:
        print(json.dumps({key: value for key, value in data.items() if key != "cells"}))
    else:
        labels = {
            name: name if one["wire"] == WIRE_IDS else f"{name} [{one['wire']}]"
            for name, one in settings["scenarios"].items()
        }
        for line in (*table(rows, labels), *legend(), *texts):
            print(line)
        print(f"{outputs['html']}, {outputs['json']}, {file.path}", flush=True)
    broken = failures(results)
    for line in broken:
        print(line, file=sys.stderr)
    return 1 if broken or (found and settings["dtype"] == "float32") else 0
