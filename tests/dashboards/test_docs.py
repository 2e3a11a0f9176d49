"""Commands, flags, ports and files that docs/fleet.md and docs/runbook.md name."""

from __future__ import annotations

import argparse
import re
import shlex
from typing import Any

import pytest

import cloud_verifier.cli
import edge_agent.cli
from tests.dashboards import test_compose
from tests.dashboards.files import ROOT, boards, services

PAGES = [ROOT / "docs" / "fleet.md", ROOT / "docs" / "runbook.md"]
FLEET = PAGES[0].read_text(encoding="utf-8")
PARSERS: dict[str, Any] = {
    "cloud-verifier": cloud_verifier.cli.build_parser,
    "edge-agent": edge_agent.cli.build_parser,
}
#: Flags of others: docker, docker compose, mosquitto, prometheus, dashboards.build.
FOREIGN = {
    *("--detach", "--build", "--scale", "--profile", "--platform", "--build-arg", "--rm"),
    *("--network", "--volume", "--config", "--datasource", "--out"),
}


def lines() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", FLEET, re.S)
    text = "\n".join(blocks).replace("\\\n", " ")
    return [line for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("line", [line for line in lines() if line.split()[0] in PARSERS])
def test_a_command_of_the_page_is_one_that_exists(line: str) -> None:
    words = shlex.split(line, comments=True)
    PARSERS[words[0]]().parse_args(words[1:])


def test_the_agents_image_gets_a_command_that_exists() -> None:
    (line,) = [line for line in lines() if "pipesd-agent " in line and "docker run" in line]
    words = shlex.split(line)
    arguments = words[len(words) - words[::-1].index("pipesd-agent") :]
    edge_agent.cli.build_parser().parse_args(arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_flags_that_a_page_names_exist(page: Any) -> None:
    known = set(FOREIGN)
    for build in PARSERS.values():
        todo = [build()]
        while todo:
            for action in todo.pop()._actions:
                known.update(action.option_strings)
                if isinstance(action, argparse._SubParsersAction):
                    todo += action.choices.values()
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", page.read_text(encoding="utf-8")))
    assert named
    assert named <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_a_page_names_exist(page: Any) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    named = re.findall(r"(?:deploy|dashboards|broker)/[\w./*-]+\.(?:Dockerfile|yml|conf)", text)
    assert links
    assert [link for link in links if not (page.parent / link).exists()] == []
    assert [name for name in named if not list(ROOT.glob(name))] == []


def test_services_ports_and_volumes_are_those_of_the_compose_file() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", FLEET, re.M)
    assert {name for name, _, _ in rows} == services().keys() - {"postgres"}
    for name, port, keeps in rows:
        service: Any = services()[name]
        published = [entry.split(":")[1] for entry in service.get("ports", [])]
        assert re.findall(r"^\d+", port) == published
        kept = [v.split(":")[0] for v in service.get("volumes", []) if not v.startswith((".", "/"))]
        assert re.findall(r"`([\w-]+-(?:data|cache))`", keeps) == kept


def test_dashboards_of_the_page_are_those_that_are_built() -> None:
    titles = {board["title"] for board in boards().values()}
    assert set(re.findall(r"^\| (PipeSD \w+) \|", FLEET, re.M)) == titles


def test_the_runbook_names_panels_that_exist() -> None:
    text = PAGES[1].read_text(encoding="utf-8")
    panels = {panel["title"] for board in boards().values() for panel in board["panels"]}
    headings = {title.strip() for title in re.findall(r"^## (.+)$", text, re.M)}
    quoted = {" ".join(name.split()) for name in re.findall(r"(?<!\*)\*([A-Z][^*]+)\*(?!\*)", text)}
    assert quoted - panels - headings == {"Status, Targets"}  # of Prometheus itself


def test_the_page_says_what_was_never_run() -> None:
    assert test_compose.COMPOSE.is_file()
    assert "never" in FLEET.rpartition("## What was tried")[2]
