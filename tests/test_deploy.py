"""Manifests under deploy/ and the commands of docs/scaling.md, against the real flags and files."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import cloud_verifier.cli
import edge_agent.cli
from broker.topics import check_id

ROOT = Path(__file__).resolve().parents[1]
MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
POD = "verifier-7d9f8c6b5-x2x9q"
PARSERS = {
    "cloud-verifier": cloud_verifier.cli.build_parser,
    "edge-agent": edge_agent.cli.build_parser,
}
#: Of torchrun, and whether a value follows as a word of its own.
TORCHRUN = {"--standalone": False, "--nproc-per-node": True}


def documents(path: Path) -> list[dict[str, Any]]:
    return [entry for entry in yaml.safe_load_all(path.read_text(encoding="utf-8")) if entry]


def workloads() -> list[Any]:
    found = []
    for path in MANIFESTS:
        for entry in documents(path):
            if entry["kind"] in ("Deployment", "StatefulSet"):
                found.append(pytest.param(entry, id=f"{path.stem}-{entry['metadata']['name']}"))
    return found


def ranks_and_command(words: list[str]) -> tuple[int, list[str]]:
    """How many processes a command line starts, and the line without its launcher."""
    if words[0] != "torchrun":
        return 1, words
    rest, ranks = words[1:], 1
    while rest[0] != "-m":
        name, _, value = rest.pop(0).partition("=")
        if TORCHRUN[name] and not value:
            value = rest.pop(0)
        if name == "--nproc-per-node":
            ranks = int(value)
    assert rest[1] == "cloud_verifier.cli"
    return ranks, ["cloud-verifier", *rest[2:]]


def parsed(words: list[str]) -> tuple[int, argparse.Namespace]:
    """As ``ranks_and_command``, through the real parser, which must take it."""
    ranks, command = ranks_and_command(words)
    args = PARSERS[command[0]]().parse_args(command[1:])
    assert getattr(args, "tensor_parallel", False) == (ranks > 1)
    return ranks, args


def commands_of(page: Path) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip()]


@pytest.mark.parametrize("line", commands_of(ROOT / "docs" / "scaling.md"))
def test_a_command_of_the_page_is_one_that_exists(line: str) -> None:
    parsed(shlex.split(line))


def test_flags_that_the_page_names_exist() -> None:
    text = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    known = {"--replicas"} | set(TORCHRUN)  # of kubectl and torchrun
    for build in PARSERS.values():
        todo = [build()]
        while todo:
            parser = todo.pop()
            for action in parser._actions:
                known.update(action.option_strings)
                if isinstance(action, argparse._SubParsersAction):
                    todo += action.choices.values()
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= known


def test_files_that_the_page_names_exist() -> None:
    page = ROOT / "docs" / "scaling.md"
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if not (page.parent / link).exists()]
    assert missing == []
    assert len(links) >= 3


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_is_yaml_with_kinds_and_names(path: Path) -> None:
    entries = documents(path)
    assert entries
    for entry in entries:
        assert entry["apiVersion"]
        assert entry["kind"]
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", entry["metadata"]["name"])


@pytest.mark.parametrize("entry", workloads())
def test_a_workload_finds_its_pods_and_volumes(entry: dict[str, Any]) -> None:
    spec = entry["spec"]
    pod = spec["template"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in pod["containers"]:
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == volumes
        assert "memory" in container["resources"]["limits"]
        assert container["readinessProbe"]


@pytest.mark.parametrize("name", ["verifier", "verifier-gpu"])
def test_a_verifiers_command_is_one_that_exists(name: str) -> None:
    entry = documents(ROOT / "deploy" / "kubernetes" / f"{name}.yaml")[0]
    pod = entry["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    words = [word.replace("$(POD_NAME)", POD) for word in container["command"] + container["args"]]
    assert not [word for word in words if "$(" in word]
    ranks, args = parsed(words)
    assert args.command == "serve"
    assert check_id("--id", args.id) == POD
    assert container["env"][0]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    assert args.max_sessions >= args.slots
    # Five seconds for a forward, five for the network; torchrun kills after thirty.
    assert pod["terminationGracePeriodSeconds"] > (30 if ranks > 1 else 10)
    gpus = container["resources"]["limits"].get("nvidia.com/gpu", 0)
    assert (args.device, gpus) == (("cuda", ranks) if name == "verifier-gpu" else ("cpu", 0))
    places = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert any(args.target.startswith(f"{place}/") for place in places)
    # Both brokers' Services are named on the page; this one is that of mosquitto.yaml.
    services = [
        one["metadata"]["name"]
        for one in documents(ROOT / "deploy" / "kubernetes" / "mosquitto.yaml")
        if one["kind"] == "Service"
    ]
    assert args.broker == f"mqtt://{services[0]}:1883"
    assert "livenessProbe" not in container


def test_mosquitto_has_the_shipped_configuration() -> None:
    entries = documents(ROOT / "deploy" / "kubernetes" / "mosquitto.yaml")
    (config,) = (entry for entry in entries if entry["kind"] == "ConfigMap")
    shipped = (ROOT / "broker" / "mosquitto" / "mosquitto.conf").read_text(encoding="utf-8")
    assert config["data"]["mosquitto.conf"].rstrip() == shipped.rstrip()
    (broker,) = (entry for entry in entries if entry["kind"] == "StatefulSet")
    assert broker["spec"]["replicas"] == 1  # a second one would be another broker


def test_emqx_takes_a_packet_of_the_largest_payload() -> None:
    (entry,) = documents(ROOT / "deploy" / "kubernetes" / "emqx.yaml")
    config = entry["spec"]["config"]["data"]
    assert re.search(r"shared_subscription_strategy = (random|round_robin_per_group)\n", config)
    assert "max_packet_size = 2MB" in config


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="needs /proc/net/tcp (Linux)")
def test_the_readiness_probe_sees_a_connection_and_no_listener() -> None:
    entry = documents(ROOT / "deploy" / "kubernetes" / "verifier.yaml")[0]
    (container,) = entry["spec"]["template"]["spec"]["containers"]
    probe = container["readinessProbe"]["exec"]["command"]
    assert f":{1883:04X} 01 " in probe

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        here = [word.replace(f"{1883:04X}", f"{port:04X}") for word in probe]
        assert subprocess.run(here, check=False).returncode != 0
        with socket.create_connection(("127.0.0.1", port)):
            assert subprocess.run(here, check=False).returncode == 0
