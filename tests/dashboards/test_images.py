"""Recipes of the images, as far as they can be judged without building them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from broker.settings import read_toml
from tests.dashboards.files import ROOT

RECIPES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
#: Which extra each image installs, and which half of the system must not be in it.
HALVES = {"agent": ("edge", "cloud_verifier"), "verifier": ("cloud", "edge_agent")}
HALVES["fleet"] = ("fleet", "edge_agent")


def instructions(path: Path) -> list[tuple[str, str]]:
    """Names and arguments, without comments, continued lines joined."""
    text = re.sub(r"(?m)^#.*\n", "", path.read_text(encoding="utf-8")).replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def allowed() -> set[str]:
    """What .dockerignore lets into the context."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert lines[1] == "*"
    return {line[1:] for line in lines if line.startswith("!")}


def project() -> dict[str, Any]:
    table: dict[str, Any] = read_toml(str(ROOT / "pyproject.toml"))["project"]
    return table


def test_there_is_one_for_each_part() -> None:
    assert {path.stem for path in RECIPES} == HALVES.keys()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_an_image_is_small_pinned_and_without_root(path: Path) -> None:
    steps = instructions(path)
    bases = [argument for name, argument in steps if name == "FROM"]
    assert len(bases) == 2, "what builds stays behind"
    for base in bases:
        assert re.match(r"python:3\.\d+-slim-\w+( AS builder)?$", base)
    assert bases[0].split()[0] == bases[1].split()[0], "the environment is bound to its Python"
    names = [name for name, _ in steps]
    assert names.index("USER") < names.index("ENTRYPOINT") == len(names) - 1
    assert ("USER", "10001:10001") in steps
    assert ("COPY", "--from=builder /opt/pipesd /opt/pipesd") in steps


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_an_image_holds_its_half_at_the_tested_versions(path: Path) -> None:
    extra, foreign = HALVES[path.stem]
    steps = instructions(path)
    copied: set[str] = set()
    for name, argument in steps:
        if name == "COPY" and "--from" not in argument:
            copied.update(argument.split()[:-1])
    assert all((ROOT / source).exists() for source in copied)
    assert copied <= allowed()
    assert foreign not in copied
    assert {"broker", "constraints", "pyproject.toml", "README.md", "LICENSE"} <= copied
    installs = [argument for name, argument in steps if name == "RUN" and "/src[" in argument]
    assert len(installs) == 1
    assert f'"/src[{extra}]"' in installs[0]
    assert extra in project()["optional-dependencies"]
    assert "--constraint /src/constraints/pins.txt" in installs[0]
    ((_, entry),) = [step for step in steps if step[0] == "ENTRYPOINT"]
    command = re.fullmatch(r'\["([\w-]+)"\]', entry)
    assert command
    assert project()["scripts"][command[1]].split(".")[0] in copied


def test_the_context_holds_no_secrets_and_no_models() -> None:
    assert not allowed() & {".env", ".git", "models", "tests", "docs", ".venv"}


def test_an_agent_runs_on_other_machines_than_the_one_that_built_it() -> None:
    text = (ROOT / "deploy/docker/agent.Dockerfile").read_text(encoding="utf-8")
    assert '-DGGML_NATIVE=OFF"' in text
    script = (ROOT / "scripts/llama-wheel.sh").read_text(encoding="utf-8")
    # What is asked comes last, and wins.
    assert re.search(r"-DGGML_NATIVE=ON .*\n?.*\$asked\"", script)
