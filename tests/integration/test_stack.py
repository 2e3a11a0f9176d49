"""The cloud stack of docker-compose.yml as plain processes: each service's own command line, with
names, ports and folders of this machine, and a fleet around it. Grafana aside: no package has it;
``tests/dashboards`` reads its files, and here each of its expressions is asked of Prometheus.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from cloud_verifier.engine.prepare import prepare_target
from edge_agent.prepare import prepare_draft
from tests.brokers import MOSQUITTO, free_port, require, wait_until
from tests.commands import Command, Result
from tests.dashboards.devices import ReportingFleet
from tests.dashboards.files import PROMETHEUS as FILES
from tests.dashboards.files import (
    ROOT,
    alerts,
    boards,
    expressions,
    filled,
    load,
    recorded,
    services,
)
from tests.dashboards.test_dashboards import METRIC
from tests.prometheus import PROMETHEUS, Prometheus

pytestmark = [pytest.mark.models, pytest.mark.slow]

PATIENCE = 90.0
DEVICES = 20
REAL = "pi-real"
WINDOW = "15s"
#: What a person does not change in the compose file, but a test has no time for.
IN_HASTE = {
    "PIPESD_INTERVAL": "0.5",
    "PIPESD_TRIALS": "2",
    "PIPESD_MIN_TOKENS": "20",
    "PIPESD_SAMPLER": "random",
    "PIPESD_WATTS": "10",
}
#: Expressions that have nothing to show in a fleet that is well: their panels say so in words.
EMPTY = {
    "pipesd-verifier: Evictions and refusals B": "no opening was refused",
    "pipesd-tuner: Why trials fail A": "no trial failed",
    "pipesd-tuner: Readings B": "no reading failed",
    "pipesd-tuner: Left out of readings A": "everything in the readings made sense",
    "pipesd-tuner: Storage and other events B": "nothing else happened",
}


class Running(Prometheus):
    """One that was started by somebody else."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"


@dataclass
class Stack:
    """The services by name, where they listen, and Prometheus to ask."""

    folder: Path
    ports: dict[str, int]
    commands: dict[str, Command] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)

    @property
    def broker(self) -> str:
        return f"mqtt://127.0.0.1:{self.ports['mosquitto']}"

    @property
    def prometheus(self) -> Running:
        return Running(self.ports["prometheus"])

    def here(self, words: list[str]) -> list[str]:
        """A command line of the compose file, for this machine."""
        replaced = {
            "mqtt://mosquitto:1883": self.broker,
            "http://prometheus:9090": f"http://127.0.0.1:{self.ports['prometheus']}",
            "--port=9108": f"--port={self.ports['exporter']}",
            "--metrics-port=9107": f"--metrics-port={self.ports['verifier']}",
            "--metrics-port=9109": f"--metrics-port={self.ports['tuner']}",
            "0.0.0.0": "127.0.0.1",
            "/etc/pipesd/mosquitto.conf": str(self.folder / "mosquitto.conf"),
            "/etc/prometheus/": f"{self.folder}/",
            "=/prometheus": f"={self.folder}/tsdb",
        }
        text = "\n".join(words)
        for name, value in replaced.items():
            text = text.replace(name, value)
        assert not re.search(r"\d+\.0\.0\.0|:9\d\d\d\b|mosquitto:|prometheus:", text), text
        return text.split("\n")


def write_mosquitto(stack: Stack) -> None:
    """As the compose file mounts it."""
    shipped, data = stack.folder / "shipped", stack.folder / "data"
    for folder in (shipped, data):
        folder.mkdir()
    text = (ROOT / "broker/mosquitto/mosquitto.conf").read_text(encoding="utf-8")
    listener = f"listener {stack.ports['mosquitto']} 127.0.0.1"
    (shipped / "mosquitto.conf").write_text(text.replace("listener 1883 0.0.0.0", listener))
    text = (ROOT / "deploy/docker/mosquitto.conf").read_text(encoding="utf-8")
    text = text.replace("/etc/pipesd/shipped", str(shipped)).replace("/mosquitto/data", str(data))
    user = "user root\n" if os.geteuid() == 0 else ""
    (stack.folder / "mosquitto.conf").write_text(user + text, encoding="utf-8")


def write_prometheus(stack: Stack) -> None:
    """Its folder, with other addresses, every second, and the verifier by file."""
    shutil.copytree(FILES / "rules", stack.folder / "rules")
    config = load(FILES / "prometheus.yml")
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    for job in config["scrape_configs"]:
        job.pop("dns_sd_configs", None)
        for entry in job.get("static_configs", []):
            (target,) = entry["targets"]
            name = target.partition(":")[0].replace("localhost", "prometheus")
            entry["targets"] = [f"127.0.0.1:{stack.ports[name]}"]
        for entry in job.get("file_sd_configs", []):
            entry["refresh_interval"] = "1s"
    (stack.folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    targets = stack.folder / "targets"
    targets.mkdir()
    for name in ("verifier", "device"):
        text = yaml.safe_dump([{"targets": [f"127.0.0.1:{stack.ports[name]}"]}])
        (targets / f"{name}s.yml").write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Everything started, the agent of a real device at work, and twenty that report."""
    require("mosquitto", MOSQUITTO is not None)
    require("prometheus", PROMETHEUS is not None)
    target = prepare_target("smollm2")
    prepare_draft("smollm2")
    folder = tmp_path_factory.mktemp("stack")
    names = ("mosquitto", "verifier", "exporter", "tuner", "prometheus", "device")
    made = Stack(folder, {name: free_port() for name in names})
    found = services(
        {
            "GRAFANA_ADMIN_PASSWORD": "secret",
            "PIPESD_TARGET": str(target),
            "PIPESD_VERIFIER_CPUS": "1",
            "PIPESD_TUNER_STORAGE": f"sqlite:///{folder}/tuner.db",
        }
    )
    write_mosquitto(made)
    write_prometheus(made)
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"id": "rivers", "prompt": "Name three rivers."}\n', encoding="utf-8")
    with contextlib.ExitStack() as exits:
        for name, program in (("mosquitto", MOSQUITTO), ("prometheus", PROMETHEUS)):
            words = made.here(found[name]["command"])
            if name == "mosquitto":
                words = words[1:]
            else:
                words.append(f"--web.listen-address=127.0.0.1:{made.ports['prometheus']}")
            log = exits.enter_context((folder / f"{name}.log").open("wb"))
            process = subprocess.Popen([str(program), *words], stdout=log, stderr=log, cwd=folder)
            exits.callback(process.wait, 20)
            exits.callback(process.kill)
        for name in ("verifier", "exporter", "tuner"):
            words = made.here(found[name]["command"])
            command = Command("cloud-verifier", *words, env=IN_HASTE)
            made.commands[name] = exits.enter_context(command)
        exits.enter_context(ReportingFleet(made.broker, DEVICES))
        agent = Command(
            "edge-agent",
            *("generate", "--broker", made.broker, "--device-id", REAL, "--pair", "smollm2"),
            *("--prompts", str(prompts), "--repeat", "0", "--max-tokens", "12", "--threads", "1"),
            *("--telemetry-interval", "0.5", "--state-file", "none", "--json"),
            *("--metrics-port", str(made.ports["device"])),
            env={"PIPESD_TIMEOUT": str(PATIENCE)},
        )
        made.commands["device"] = exits.enter_context(agent)
        made.commands["verifier"].until(lambda: "serves" in made.commands["verifier"].out, PATIENCE)
        agent.until(lambda: agent.out.count("\n") >= 2, PATIENCE)
        yield made
        for command in reversed(made.commands.values()):
            command.signal(signal.SIGTERM)
        results = {name: command.wait(30.0) for name, command in made.commands.items()}
        ends_well(results)


def ends_well(results: dict[str, Result]) -> None:
    for name, result in results.items():
        assert result.code == 0, f"{name}: {result.err[-2000:]}"
        assert "Traceback" not in result.err, name


def eventually(condition: Any, what: str, timeout: float = PATIENCE) -> None:
    """``condition`` holds in time; asked a few times a second, for each asking costs."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.3)


def test_every_service_of_the_compose_file_runs_here() -> None:
    assert services().keys() == {
        *("mosquitto", "verifier", "exporter", "tuner", "prometheus"),
        "grafana",  # its files are read by tests/dashboards
        "postgres",  # of a profile: nothing runs it unless it is asked for
    }


def test_prometheus_finds_every_target(stack: Stack) -> None:
    wanted = {
        *("pipesd-exporter", "pipesd-tuner", "pipesd-verifier", "pipesd-device", "prometheus")
    }

    def up() -> bool:
        found = stack.prometheus.values("up", "job")
        return found.keys() == wanted and set(found.values()) == {1.0}

    eventually(up, "targets that are down")


def test_a_generation_shows_up(stack: Stack) -> None:
    """What the device wrote, the device, the exporter and the verifier all tell Prometheus."""
    ask = stack.prometheus.values
    name = "pipesd_device_committed_tokens_total"

    def told() -> bool:
        return {"pipesd-exporter", "pipesd-device"} == {
            job for job, value in ask(f'{name}{{device="{REAL}"}}', "job").items() if value >= 24
        }

    eventually(told, "no tokens of the device")
    verified = "sum(pipesd_verifier_committed_tokens_total) >= 24"
    eventually(lambda: stack.prometheus.query(verified), "no tokens of the verifier")
    tpt = f'device:pipesd_tpt_seconds:rate5m{{device="{REAL}"}}'
    eventually(lambda: stack.prometheus.query(tpt), "no time per token")
    (seconds,) = stack.prometheus.query(tpt).values()
    summaries = [json.loads(line) for line in stack.commands["device"].out.splitlines()]
    slowest = max(summary["tpt_ms"] for summary in summaries) / 1000.0
    assert 0.001 < seconds < 3.0 * slowest
    identity = stack.prometheus.values("pipesd_verifier_build_info", "verifier")
    assert list(identity) == [re.sub(r"[^\w-]", "-", os.uname().nodename)[:64]]


@pytest.fixture(scope="module")
def answers(stack: Stack) -> dict[str, Any]:
    """What each panel's expression gives once all that can have data have."""
    asked = {
        where: filled(text, WINDOW, device=".*" if "device=~" in text else "dev-03")
        for where, text in expressions().items()
    }
    found: dict[str, Any] = {}

    def complete() -> bool:
        for where, text in asked.items():
            if not found.get(where):
                found[where] = stack.prometheus.query(text)
        return all(found[where] for where in asked.keys() - EMPTY.keys())

    wait_until(lambda: complete() or time.sleep(0.5), PATIENCE)
    return found


@pytest.mark.parametrize("where", sorted(expressions().keys() - EMPTY.keys()))
def test_a_panel_has_data(where: str, answers: dict[str, Any]) -> None:
    assert answers[where], f"{where}: {expressions()[where]}"


@pytest.mark.parametrize("where", sorted(EMPTY))
def test_a_panel_is_empty_for_want_of_trouble(
    where: str, stack: Stack, answers: dict[str, Any]
) -> None:
    """Without the filter that leaves out what never happened there is data."""
    text = filled(expressions()[where], WINDOW)
    assert text.endswith(" > 0")
    assert stack.prometheus.query(text.removesuffix(" > 0")), EMPTY[where]


def test_only_panels_that_exist_are_excused() -> None:
    assert EMPTY.keys() <= expressions().keys()


def test_variables_have_values(stack: Stack) -> None:
    for name, board in boards().items():
        for variable in board["templating"]["list"]:
            wanted = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"])
            assert wanted, name
            found = stack.prometheus.get(
                f"/api/v1/label/{wanted[2]}/values", **{"match[]": wanted[1]}
            )
            assert found, f"{name}: {variable['name']}"
            assert len(found) == (1 if wanted[2] == "verifier" else DEVICES + 1)


def test_rules_are_evaluated_without_errors(stack: Stack, answers: dict[str, Any]) -> None:
    groups = stack.prometheus.get("/api/v1/rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == alerts().keys() | recorded().keys()
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    for name in recorded():
        assert len(stack.prometheus.query(name)) == DEVICES + 1, name


@pytest.mark.parametrize("alert", sorted(alerts()))
def test_an_alert_looks_at_series_that_exist(
    alert: str, stack: Stack, answers: dict[str, Any]
) -> None:
    """It is silent because the fleet is well, not because it looks at nothing."""
    names = set(METRIC.findall(alerts()[alert]["expr"]))
    assert names or "up{" in alerts()[alert]["expr"]
    for name in names:
        assert stack.prometheus.query(f"count({name})"), name


def test_nothing_fires_in_a_fleet_that_is_well(stack: Stack, answers: dict[str, Any]) -> None:
    firing = [
        alert["labels"]
        for alert in stack.prometheus.get("/api/v1/alerts")["alerts"]
        if alert["state"] == "firing"
    ]
    assert firing == []
