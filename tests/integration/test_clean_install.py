"""The two halves installed apart, each into an environment that has nothing else.

A device must not need torch, a verifier must not need llama-cpp-python, and whoever asks one of
them for the other half's work is told what to install.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny_gguf
from tests.installs import ROOT, clean_environment, run, wheel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

#: Prints the installed distributions and, for each module of the packages named, why it failed.
PROBE = """
import importlib, importlib.metadata, json, pkgutil, sys
failed = {}
count = 0
for package in sys.argv[1:]:
    found = pkgutil.walk_packages([importlib.import_module(package).__path__[0]], package + ".")
    for name in [package, *(module.name for module in found)]:
        try:
            importlib.import_module(name)
            count += 1
        except BaseException as error:
            failed[name] = f"{type(error).__name__}: {error}"
names = [found.name.lower().replace("_", "-") for found in importlib.metadata.distributions()]
home = importlib.import_module("broker").__file__
print(json.dumps({"installed": names, "failed": failed, "count": count, "home": home}))
"""


class Installed:
    """A fresh virtual environment that holds ``pipesd[extra]`` and what that pulls in."""

    def __init__(self, folder: Path, built: Path, extra: str) -> None:
        self.bin = folder / "bin"
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        wheels = ROOT / ".wheels"
        if extra == "edge" and not any(wheels.glob("llama_cpp_python-*.whl")):
            # make keeps its wheel there; without make it is built now, which takes minutes.
            run(ROOT / "scripts/llama-wheel.sh", sys.executable, wheels, timeout=1500)
        run(
            *(sys.executable, "-m", "pip", "-qq", "--python", self.bin / "python", "install"),
            *("--no-compile", "--constraint", ROOT / "constraints/pins.txt"),
            *("--find-links", wheels, f"{built}[{extra}]"),
        )

    def probe(self, *packages: str) -> dict[str, object]:
        done = run(self.bin / "python", "-I", "-c", PROBE, *packages)
        report: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
        assert str(report["home"]).startswith(str(self.bin.parent))
        return report

    def refusal(self, *command: str) -> str:
        """The one line on stderr of a command that must end with 2, wrong configuration."""
        done = subprocess.run(
            [self.bin / command[0], *command[1:]],
            cwd="/",
            env=clean_environment(),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=120,
            check=False,
        )
        assert done.returncode == 2, done.stderr
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        return line


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory, built: Path) -> Installed:
    return Installed(tmp_path_factory.mktemp("edge") / "venv", built, "edge")


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory, built: Path) -> Installed:
    return Installed(tmp_path_factory.mktemp("cloud") / "venv", built, "cloud")


def test_device_installs_without_the_target_s_libraries(edge: Installed) -> None:
    report = edge.probe("broker", "edge_agent")
    assert report["failed"] == {}
    assert int(str(report["count"])) > 30
    installed = report["installed"]
    assert isinstance(installed, list)
    assert "llama-cpp-python" in installed
    assert not {"torch", "transformers", "accelerate", "safetensors", "gguf"} & set(installed)
    assert not [name for name in installed if name.startswith(("nvidia", "cuda"))]
    assert "usage: edge-agent" in run(edge.bin / "edge-agent", "--help").stdout
    assert "usage: fleet-broker" in run(edge.bin / "fleet-broker", "--help").stdout


def test_verifier_installs_without_llama_cpp(cloud: Installed) -> None:
    report = cloud.probe("broker", "cloud_verifier")
    assert report["failed"] == {}
    assert int(str(report["count"])) > 30
    installed = report["installed"]
    assert isinstance(installed, list)
    assert {"torch", "transformers"} <= set(installed)
    assert not {"llama-cpp-python", "diskcache", "iotcore"} & set(installed)
    assert "usage: cloud-verifier" in run(cloud.bin / "cloud-verifier", "--help").stdout


def test_device_asked_for_the_target_names_the_extra(edge: Installed, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    model = ("generate", "--target", str(tmp_path), "--prompt", "x")
    assert "pipesd[cloud]" in edge.refusal("cloud-verifier", *model)
    assert "pip install 'pipesd[" in edge.refusal("edge-agent", "demo", "--prompt", "x")


def test_verifier_asked_to_draft_names_the_extra(cloud: Installed, tmp_path: Path) -> None:
    draft = tiny_gguf.write(tmp_path / "draft.gguf")
    model = ("generate", "--draft", str(draft), "--prompt", "x", "--policy", "local")
    assert "pipesd[edge]" in cloud.refusal("edge-agent", *model)
    assert "pipesd[embedded]" in cloud.refusal("fleet-broker", "embedded", "--port", "0")
