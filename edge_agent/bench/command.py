"""``edge-agent bench``: what its flags set going. Nothing heavy is imported here."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from datetime import datetime, timezone
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from broker import __version__
from broker.command import Stopped
from broker.errors import ConfigError
from edge_agent.bench.cells import Cell, Result, ResultsFile, check_new, read_header
from edge_agent.bench.choices import Choices
from edge_agent.bench.fidelity import beside, drafting_pace
from edge_agent.bench.fidelity import lines_of as lines_of_replays
from edge_agent.bench.files import check_output, check_writable, replace_file, write_json
from edge_agent.bench.flags import add_bench_flags
from edge_agent.bench.html import page
from edge_agent.bench.link import WIRE_IDS
from edge_agent.bench.machines import LoadDraft, Machines
from edge_agent.bench.recording import Recording, samples_of, texts_of
from edge_agent.bench.report import (
    Progress,
    as_json,
    failures,
    legend,
    load_line,
    table,
    texts_line,
)
from edge_agent.bench.schedule import run_all
from edge_agent.bench.summary import compared, differences, summarise
from edge_agent.bench.traces import write_traces
from edge_agent.bench.tuned import constants_in, find_constants, lines_of
from edge_agent.cpus import usable_cores

__all__ = ["add_bench_flags", "run_bench"]


def run_bench(args: argparse.Namespace, load_draft: LoadDraft) -> int:
    """The command. Raises PipesdError, and Stopped after having written what there is."""
    if args.report_only:
        if not args.resume:
            raise ConfigError("--report-only without --resume FILE: there is nothing to report")
        if args.record is not None:
            raise ConfigError("--report-only with --record: recording needs the models: leave one")
        file = ResultsFile.resume(Path(args.resume), None)
        file.close()
        return _publish(args, file, _outputs(args))
    chosen = Choices(args)
    outputs = _outputs(args)
    if args.record is not None:
        taken = [*outputs.values(), *([Path(args.resume)] if args.resume else [])]
        if Path(args.record).resolve() in [path.resolve() for path in taken]:
            raise ConfigError(f"--record {args.record} is a file of the results: name another")
        check_writable(args.record)
    known = None
    if args.resume:
        known = _resume(chosen)
    elif chosen.tunes:
        check_new(outputs["jsonl"])
        check_writable(outputs["jsonl"])
        check_writable(outputs["constants.json"])
    else:
        known = _create(chosen, outputs)
    progress = Progress(len(chosen.cells))
    with Machines(chosen, load_draft, progress.note) as machines:
        file = known or _create(chosen, outputs, _tune(chosen, machines, progress, outputs))
        with closing(file):
            try:
                complete = _run(chosen, file, machines, progress)
            except Stopped:
                _publish(args, file, outputs)
                _how_to_go_on("stopped", file)
                raise
            code = _publish(args, file, outputs)
            if args.record is not None:
                _record(chosen, file, machines, progress, complete=complete)
    if not complete:
        _how_to_go_on("--max-minutes is over", file)
    return code


def _how_to_go_on(why: str, file: ResultsFile) -> None:
    print(f"{why}: go on with the same flags and --resume {file.path}", file=sys.stderr)


def _create(
    chosen: Choices, outputs: Mapping[str, Path], tuning: Mapping[str, Any] | None = None
) -> ResultsFile:
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return ResultsFile.create(
        outputs["jsonl"], chosen.settings, _environment(), started=started, tuning=tuning
    )


def _resume(chosen: Choices) -> ResultsFile:
    """The file of ``--resume``; what was tuned for it counts, and is not tuned again."""
    path = Path(chosen.args.resume)
    if chosen.tunes:
        constants = constants_in(read_header(path), str(path))
        for policy, by_scenario in chosen.constants.items():
            constants.setdefault(policy, {}).update(
                {scenario: dict(values) for scenario, values in by_scenario.items()}
            )
        chosen.use(constants)
    return ResultsFile.resume(path, chosen.settings)


def _tune(
    chosen: Choices, machines: Machines, progress: Progress, outputs: Mapping[str, Path]
) -> dict[str, Any]:
    """Find constants and use them; an account for the results' header."""
    wish = chosen.tune
    assert wish is not None
    try:
        prompts = machines.encode(wish.prompts)
        runner = machines.runner
        progress.note(f"tuning: texts to record first: {len(prompts)}")
        recording = Recording(machines.pair, prompts, machines.alone, report=progress.step)
        constants, account = find_constants(
            list(recording.traces()),
            [one.name for one in chosen.contenders],
            list(chosen.scenarios.values()),
            chosen.constants,
            wish=wish,
            verify=chosen.args.verify,
            seed=chosen.args.seed,
            report=progress.step,
        )
    except Stopped:
        progress.end()
        print("stopped while tuning: nothing was compared", file=sys.stderr)
        raise
    finally:
        progress.end()
    write_json(outputs["constants.json"], constants)
    progress.note(f"constants: {outputs['constants.json']}")
    chosen.use(constants)
    runner.use(constants)
    return account


def _run(chosen: Choices, file: ResultsFile, machines: Machines, progress: Progress) -> bool:
    """Run what ``file`` lacks; whether nothing is left."""
    if all(file.done(cell) for cell in chosen.cells):
        return True
    try:
        return run_all(
            machines.runner, chosen.cells, file, limit_s=chosen.limit_s, report=progress.cell
        )
    finally:
        progress.end()


def _record(
    chosen: Choices,
    file: ResultsFile,
    machines: Machines,
    progress: Progress,
    *,
    complete: bool,
) -> None:
    """Write the file of ``--record``; of a run that is not ``complete``, what it has texts of."""
    path, results = chosen.args.record, list(file.results.values())
    texts = texts_of(results)
    prompts = {name: ids for name, ids in machines.prompts.items() if complete or name in texts}
    if not prompts:
        progress.note("nothing is recorded: no generation has ended")
        return
    try:
        progress.note(f"texts to record: {len(prompts)}")
        recording = Recording(
            machines.pair,
            prompts,
            machines.alone,
            texts=texts,
            samples=samples_of(
                results,
                chosen.scenarios,
                {name: len(ids) for name, ids in machines.prompts.items()},
            ),
            pace=drafting_pace(results, chosen.scenarios),
            report=progress.step,
        )
        traces = list(recording.traces())
        replace_file(path, lambda part: write_traces(part, traces))
        rows = beside(
            results,
            traces,
            chosen.contenders,
            chosen.scenarios,
            chosen.constants,
            verify=chosen.args.verify,
        )
    except Stopped:
        progress.end()
        _how_to_go_on("stopped while recording", file)
        raise
    finally:
        progress.end()
    progress.note(f"recorded: {path}")
    # Standard output is for one object.
    into = sys.stderr if chosen.args.json else sys.stdout
    for line in lines_of_replays(rows):
        print(line, file=into)


# -- what comes out -------------------------------------------------------------------------------


def _outputs(args: argparse.Namespace) -> dict[str, Path]:
    """Where the reports go, which can be written. Raises ConfigError."""
    if args.resume and not args.out:
        prefix = args.resume.removesuffix(".jsonl")
    else:
        prefix = args.out or time.strftime("pipesd-bench-%Y%m%d-%H%M%S")
    kinds = ("jsonl", "json", "html", "constants.json")
    found = {kind: Path(f"{prefix}.{kind}") for kind in kinds}
    for kind in ("json", "html"):
        check_output(found[kind])
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
        replace_file(outputs[kind], partial(Path.write_text, data=content, encoding="utf-8"))
    if args.json:
        print(json.dumps({key: value for key, value in data.items() if key != "cells"}))
    else:
        labels = {
            name: name if one["wire"] == WIRE_IDS else f"{name} [{one['wire']}]"
            for name, one in settings["scenarios"].items()
        }
        busy = load_line(rows, file.header["environment"].get("cores", 1))
        tuned = lines_of(file.header)
        for line in (*table(rows, labels), *legend(), *tuned, *texts, *([busy] if busy else [])):
            print(line)
        print(f"{outputs['html']}, {outputs['json']}, {file.path}", flush=True)
    broken = failures(results)
    for line in broken:
        print(line, file=sys.stderr)
    return 1 if broken or (found and settings["dtype"] == "float32") else 0
