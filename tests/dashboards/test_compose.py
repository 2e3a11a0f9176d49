"""docker-compose.yml: valid, bounded, closed to other hosts, and commands that exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import cloud_verifier.cli
from broker.flags import HOSTNAME
from tests.brokers import MosquittoBroker, require
from tests.dashboards.files import COMPOSE, ROOT, load, services, variables

DOCKER_COMPOSE = shutil.which("docker-compose")
EXAMPLE = ROOT / ".env.example"
OURS = ("verifier", "exporter", "tuner")
NAMES = sorted(services())


def compose(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    require("docker-compose", DOCKER_COMPOSE is not None)
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        [str(DOCKER_COMPOSE), "--env-file", str(EXAMPLE), "--file", str(COMPOSE), *arguments],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_docker_compose_takes_it() -> None:
    done = compose("config", GRAFANA_ADMIN_PASSWORD="secret")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    taken = yaml.safe_load(done.stdout)["services"]
    # A profile's services are left out unless they are asked for, by versions that know profiles.
    assert taken.keys() | {"postgres"} == set(NAMES)
    for name, service in taken.items():
        assert service["mem_limit"], name


def test_nothing_starts_without_a_password_for_grafana() -> None:
    for environment in ({}, {"GRAFANA_ADMIN_PASSWORD": ""}):
        done = compose("config", "--quiet", **environment)
        assert done.returncode != 0
        assert "GRAFANA_ADMIN_PASSWORD" in done.stderr
        assert ".env.example" in done.stderr


def test_the_example_names_every_variable_and_its_default() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    named = dict(re.findall(r"^#? ?([A-Z_]+)=(.*)$", text, re.M))
    assert named.keys() == variables()
    assert named["GRAFANA_ADMIN_PASSWORD"] == ""
    for name, default in re.findall(r"\$\{(\w+):-([^}]+)\}", COMPOSE.read_text("utf-8")):
        if name != "PIPESD_TUNER_STORAGE":
            assert named[name] == default, name
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert ".env" in ignored


@pytest.mark.parametrize("name", NAMES)
def test_a_service_is_bounded_and_cannot_harm_its_host(name: str) -> None:
    service: Any = services()[name]
    assert service["restart"] == "unless-stopped"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["pids_limit"] <= 256
    assert service["mem_limit"]
    assert service["cpus"]
    assert set(service["logging"]["options"]) == {"max-size", "max-file"}
    assert "privileged" not in service
    assert service["healthcheck"]["test"][0] == "CMD"
    for entry in service.get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", entry), f"{name} is open to other hosts"


@pytest.mark.parametrize("name", NAMES)
def test_an_image_is_of_one_version_and_not_run_by_root(name: str) -> None:
    service: Any = services()[name]
    if "build" in service:
        recipe = ROOT / service["build"]["context"] / service["build"]["dockerfile"]
        users = re.findall(r"^USER (.+)$", recipe.read_text(encoding="utf-8"), re.M)
        assert users == ["10001:10001"]
    else:
        assert re.search(r":v?\d+\.\d+", service["image"])
        assert service["user"].partition(":")[0] not in ("", "0", "root")


@pytest.mark.parametrize("name", NAMES)
def test_what_a_service_mounts_is_there(name: str) -> None:
    volumes = load(COMPOSE)["volumes"].keys()
    for volume in services()[name].get("volumes", []):
        source, target, *mode = volume.split(":")
        assert target.startswith("/")
        if source.startswith("."):
            assert mode == ["ro"], volume
            assert (ROOT / source).exists() or source == "./models", volume
        else:
            assert source in volumes, volume


def test_services_wait_for_services_that_exist() -> None:
    found = services()
    for service in found.values():
        for other, how in service.get("depends_on", {}).items():
            assert "healthcheck" in found[other]
            assert how == {"condition": "service_healthy"}


@pytest.mark.parametrize("name", OURS)
def test_a_command_is_one_that_exists(name: str) -> None:
    service: Any = services()[name]
    args = cloud_verifier.cli.build_parser().parse_args(service["command"])
    assert args.broker == "mqtt://mosquitto:1883"
    ports = " ".join(service["healthcheck"]["test"])
    port = args.port if name == "exporter" else args.metrics_port
    bind = args.bind if name == "exporter" else args.metrics_bind
    assert f"http://127.0.0.1:{port}/" in ports
    assert bind == "0.0.0.0"
    if "ports" in service:
        assert service["ports"] == [f"127.0.0.1:{port}:{port}"]
    if name in ("verifier", "tuner"):
        assert args.id == HOSTNAME, "two of them need ids of their own"
    if name == "verifier":
        assert "container_name" not in service, "one name is one container"
        assert "ports" not in service, "and one port"
        assert args.target.startswith("/models/")
        assert args.threads == service["cpus"], "threads beyond its cores wait for each other"


def test_retained_messages_outlive_the_broker(tmp_path: Path) -> None:
    """The configuration of the compose file, on the shipped one, and a disk."""
    shipped, data = tmp_path / "shipped", tmp_path / "data"
    shipped.mkdir()
    data.mkdir(mode=0o777)
    data.chmod(0o777)
    config = (ROOT / "deploy/docker/mosquitto.conf").read_text(encoding="utf-8")
    mounts = dict(v.split(":")[1::-1] for v in services()["mosquitto"]["volumes"])
    assert mounts["/etc/pipesd/shipped/mosquitto.conf"] == "./broker/mosquitto/mosquitto.conf"
    assert mounts["/etc/pipesd/mosquitto.conf"] == "./deploy/docker/mosquitto.conf"
    assert mounts["/mosquitto/data"] == "mosquitto-data"
    text = (ROOT / "broker/mosquitto/mosquitto.conf").read_text(encoding="utf-8")
    broker = MosquittoBroker(tmp_path)
    text, count = re.subn(r"(?m)^listener 1883 0\.0\.0\.0$", f"listener {broker.port}", text)
    assert count == 1
    (shipped / "mosquitto.conf").write_text(text, encoding="utf-8")
    user = "user root\n" if os.geteuid() == 0 else ""
    here = config.replace("/etc/pipesd/shipped", str(shipped))
    here = here.replace("/mosquitto/data/", f"{data}/")
    broker = MosquittoBroker(tmp_path, port=broker.port, config=user + here)
    topic = ("-h", "127.0.0.1", "-p", str(broker.port), "-t", "pipesd/1/pi/config")
    with broker:
        subprocess.run(["mosquitto_pub", *topic, "-r", "-q", "1", "-m", "kept"], check=True)
    with broker:
        done = subprocess.run(
            ["mosquitto_sub", *topic, "-C", "1", "-W", "10"],
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout.strip() == "kept"
