"""What a package user gets, and what a checkout may hold."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import broker
from broker.settings import read_toml
from tests.installs import PACKAGES, ROOT, run, wheel

BIN = Path(sys.executable).parent
COMMANDS = {
    "edge-agent": {"demo", "generate"},
    "cloud-verifier": {"serve", "generate"},
    "fleet-broker": {"embedded"},
}
LARGEST_BYTES = 900_000
#: Joined here, so that this file holds none of what it forbids.
FOREIGN_PATHS = ["/".join(["", name, ""]) for name in ("root", "work")] + [f"{ROOT}/"]
REGISTRIES = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("files", "pythonhosted"),
        ("deb", "debian"),
        ("registry", "npmjs"),
        ("download", "pytorch"),
    )
]


def project() -> dict[str, Any]:
    table: dict[str, Any] = read_toml(str(ROOT / "pyproject.toml"))["project"]
    return table


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel(tmp_path_factory.getbasetemp())


def tracked() -> list[str]:
    """Paths that git tracks, or that the next commit could add."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so there is no list of tracked files")
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for path in listing.stdout.split("\0") if path and (ROOT / path).is_file()]


def help_of(*command: str) -> str:
    return run(BIN / command[0], *command[1:], "--help", timeout=60).stdout


def subcommands(text: str) -> set[str]:
    """Names that argparse lists under its positional arguments."""
    section = re.search(r"^positional arguments:\n((?:  .*\n)*)", text, re.MULTILINE)
    return set(re.findall(r"^    ([a-z][\w-]*)", section[1], re.MULTILINE)) if section else set()


def test_scripts_are_those_of_the_design() -> None:
    assert project()["scripts"].keys() == COMMANDS.keys()
    installed = importlib.metadata.entry_points(group="console_scripts")
    for name, target in project()["scripts"].items():
        assert (BIN / name).is_file()
        (found,) = installed.select(name=name)
        assert found.value == target


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_and_subcommand(command: str) -> None:
    overview = help_of(command)
    names = subcommands(overview)
    assert names >= COMMANDS[command]
    for name in sorted(names):
        assert f"usage: {command} {name}" in help_of(command, name)


def test_versions_agree() -> None:
    assert project()["version"] == broker.__version__ == importlib.metadata.version("pipesd")
    assert help_version("edge-agent") == f"edge-agent {broker.__version__}"
    assert help_version("cloud-verifier") == f"cloud-verifier {broker.__version__}"


def help_version(command: str) -> str:
    return run(BIN / command, "--version", timeout=60).stdout.strip()


def test_wheel_holds_every_source_file_and_nothing_else(built: Path) -> None:
    names = {name for name in zipfile.ZipFile(built).namelist() if ".dist-info/" not in name}
    modules = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    assert modules <= names
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert {name.split("/")[0] for name in names} == set(PACKAGES)
    assert not [name for name in names if "__pycache__" in name or "test" in name]


def test_wheel_holds_the_broker_configuration(built: Path) -> None:
    shipped = {path.name for path in (ROOT / "broker/mosquitto").iterdir() if path.is_file()}
    assert "mosquitto.conf" in shipped
    archive = zipfile.ZipFile(built)
    for name in shipped:
        inside = archive.read(f"broker/mosquitto/{name}")
        assert inside == (ROOT / "broker/mosquitto" / name).read_bytes()


def test_wheel_declares_licence_and_python(built: Path) -> None:
    archive = zipfile.ZipFile(built)
    folder = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = archive.read(folder).decode()
    assert "License-Expression: Apache-2.0\n" in metadata
    assert "Requires-Python: >=3.10\n" in metadata
    text = (ROOT / "LICENSE").read_bytes()
    assert archive.read(folder.replace("METADATA", "licenses/LICENSE")) == text
    assert text.decode().split()[:4] == ["Apache", "License", "Version", "2.0,"]


def requirements() -> Iterator[Requirement]:
    """All direct dependencies of pyproject.toml but the project's own extras."""
    lists = [project()["dependencies"], *project()["optional-dependencies"].values()]
    for requirement in map(Requirement, (text for texts in lists for text in texts)):
        if requirement.name != "pipesd":
            yield requirement


def pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints/pins.txt").read_text(encoding="utf-8").splitlines()
    parsed = map(Requirement, (line for line in lines if line and not line.startswith("#")))
    return {pin.name: pin for pin in parsed}


def test_pins_are_exactly_the_direct_dependencies_and_in_their_ranges() -> None:
    pinned = pins()
    assert {requirement.name for requirement in requirements()} == pinned.keys()
    for requirement in requirements():
        (exact,) = pinned[requirement.name].specifier
        assert exact.operator == "=="
        assert requirement.specifier.contains(exact.version), f"{requirement}: {exact}"


def test_no_tracked_file_is_large() -> None:
    sizes = {path: (ROOT / path).stat().st_size for path in tracked()}
    assert len(sizes) > 50
    assert {path: size for path, size in sizes.items() if size > LARGEST_BYTES} == {}


def test_no_machine_paths_or_registry_hosts_in_tracked_files() -> None:
    found = []
    for path in tracked():
        text = (ROOT / path).read_bytes().decode("utf-8", errors="replace")
        for host in REGISTRIES:
            if host in text:
                found.append(f"{path}: {host}")
        for prefix in FOREIGN_PATHS:
            # A path begins where no word, dot or variable comes before its first slash.
            if re.search(rf"(?<![\w.)}}$-]){re.escape(prefix)}", text):
                found.append(f"{path}: {prefix}")
    assert found == []
