"""``edge-agent bench``: its flags, and what they mean. Nothing heavy is imported here."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from broker import __version__
from broker.command import Stopped
from broker.errors import ConfigError
from broker.flags import add_sampling_flags
from broker.messages import VERIFY_EAGER, VERIFY_TRIGGERED
from edge_agent.bench import choices
from edge_agent.bench.cells import Cell, Result, ResultsFile
from edge_agent.bench.choices import Choices, encode
from edge_agent.bench.contenders import CONTENDERS, GROUPS
from edge_agent.bench.html import page
from edge_agent.bench.link import SCENARIOS, WIRE_IDS, WIRES
from edge_agent.bench.report import (
    Progress,
    as_json,
    failures,
    legend,
    load_line,
    table,
    texts_line,
)
from edge_agent.bench.summary import compared, differences, summarise
from edge_agent.cpus import usable_cores

if TYPE_CHECKING:
    from edge_agent.llama_draft import LlamaDraftModel

LoadDraft = Callable[[argparse.Namespace, Callable[[str], None]], "LlamaDraftModel"]


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
        help=f"comma-separated: {', '.join(SCENARIOS)} ({', '.join(choices.FULL_SCENARIOS)})",
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
        "--prompt-count",
        type=int,
        metavar="N",
        help=f"only the first N prompts ({choices.FULL_PROMPTS})",
    )
    what.add_argument("--repeats", type=int, default=1, metavar="N", help="times each (1)")
    what.add_argument(
        "--constants", metavar="FILE", help="JSON: {policy: {scenario: {r1, r2, window, ...}}}"
    )
    what.add_argument(
        "--quick",
        action="store_true",
        help=f"{choices.QUICK_PROMPTS} prompts of {choices.QUICK_TOKENS} tokens, policies "
        f"{', '.join(choices.QUICK_POLICIES)}, scenarios {', '.join(choices.QUICK_SCENARIOS)}, "
        "where nothing else is said",
    )
    add_sampling_flags(parser, max_tokens=choices.MAX_TOKENS)
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
        "--timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds of silence after which a generation has failed (30)",
    )
    run.add_argument(
        "--max-minutes",
        type=float,
        metavar="F",
        help=f"begin nothing after so long ({choices.FULL_MINUTES:g}; "
        f"quick: {choices.QUICK_MINUTES:g})",
    )


def run_bench(args: argparse.Namespace, load_draft: LoadDraft) -> int:
    """The command. Raises PipesdError, and Stopped after having written what there is."""
    if args.report_only:
        if not args.resume:
            raise ConfigError("--report-only without --resume FILE: there is nothing to report")
        file = ResultsFile.resume(Path(args.resume), None)
        file.close()
        return _publish(args, file, _outputs(args))
    chosen = Choices(args)
    outputs = _outputs(args)
    environment = _environment()
    if args.resume:
        file = ResultsFile.resume(Path(args.resume), chosen.settings)
    else:
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        file = ResultsFile.create(outputs["jsonl"], chosen.settings, environment, started=started)
    try:
        complete = _run(chosen, file, load_draft)
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


def _run(chosen: Choices, file: ResultsFile, load_draft: LoadDraft) -> bool:
    """Run what ``file`` lacks; whether nothing is left."""
    args = chosen.args
    if all(file.done(cell) for cell in chosen.cells):
        return True
    # Imported this late: they bring the MQTT client in.
    from edge_agent.bench.runner import Plan, Runner, run_all

    progress = Progress(len(chosen.cells))
    begin = time.monotonic()
    draft = load_draft(args, progress.note)
    try:
        prompts = {prompt.name: encode(prompt, draft, args) for prompt in chosen.prompts}
        plan = Plan(
            {one.name: one for one in chosen.contenders},
            chosen.scenarios,
            prompts,
            chosen.constants,
            chosen.sampling,
            args.max_tokens,
            args.verify,
            args.seed,
            frozenset([chosen.prompts[0].name]),
            args.timeout,
        )
        target = ["--pair", args.pair] if args.pair else ["--target", args.target]
        with Runner(
            plan,
            draft,
            broker=chosen.broker,
            flags=[*target, "--dtype", args.dtype],
            threads=chosen.target_threads,
            note=progress.note,
        ) as runner:
            spent = time.monotonic() - begin
            progress.note(
                f"draft {draft.name}, target {runner.target}, {len(chosen.cells)} generations, "
                f"ready after {spent:.0f} s"
            )
            return run_all(runner, chosen.cells, file, limit_s=chosen.limit_s, report=progress.cell)
    finally:
        progress.end()
        draft.close()


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
        busy = load_line(rows, file.header["environment"].get("cores", 1))
        for line in (*table(rows, labels), *legend(), *texts, *([busy] if busy else [])):
            print(line)
        print(f"{outputs['html']}, {outputs['json']}, {file.path}", flush=True)
    broken = failures(results)
    for line in broken:
        print(line, file=sys.stderr)
    return 1 if broken or (found and settings["dtype"] == "float32") else 0
