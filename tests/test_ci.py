"""``.ci/run``: what it installs, and that it reaches ``make test`` whatever the machine lacks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.brokers import require

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / ".ci" / "run"
SCRIPTS = sorted([SCRIPT, *(ROOT / "scripts").glob("*.sh")])
#: The Debian package of each program that tests look for.
PACKAGE_OF = {
    "docker-compose": "docker-compose",
    "mosquitto": "mosquitto",
    "mosquitto_passwd": "mosquitto",
    "openssl": "openssl",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "shellcheck": "shellcheck",
}


def packages() -> list[str]:
    found = re.search(r"^packages=\((.*?)\)", SCRIPT.read_text(encoding="utf-8"), re.M | re.S)
    assert found
    return re.sub(r"#.*", "", found[1]).split()


def looked_for() -> set[str]:
    """Programs that a test or a helper of tests searches for by name."""
    names: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        if path != Path(__file__):
            text = path.read_text(encoding="utf-8")
            names.update(re.findall(r"""which\(\s*["']([\w.-]+)["']""", text))
    return names


def test_every_program_that_tests_look_for_comes_with_a_package_of_the_list() -> None:
    names = looked_for()
    assert {"mosquitto", "openssl"} <= names
    unknown = names - PACKAGE_OF.keys()
    assert not unknown, f"name their packages here and in .ci/run: {unknown}"
    assert {PACKAGE_OF[name] for name in names} <= set(packages())


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_clean(path: Path) -> None:
    require("shellcheck", shutil.which("shellcheck") is not None)
    done = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


class Machine:
    """A PATH whose dpkg-query, apt-get, id and make only note what they were asked."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.log = folder / "calls"
        self.log.touch()
        for name in ("bash", "dirname", "grep"):
            real = shutil.which(name)
            assert real
            (self.bin / name).symlink_to(real)
        self.stub("make", 'echo "make $* CI=$CI" >>"$LOG"')
        self.stub("id", "echo 0")
        self.stub("dpkg-query", 'echo "dpkg-query: no packages found" >&2; exit 1')
        self.stub("apt-get", 'echo "apt-get $* $DEBIAN_FRONTEND" >>"$LOG"')

    def stub(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/usr/bin/env bash\n{body}\n", encoding="utf-8")
        path.chmod(0o755)

    def run(self) -> tuple[str, list[str]]:
        """What it said, and the calls that were noted; it must end with what make ends with."""
        environment = {"PATH": str(self.bin), "LOG": str(self.log), "HOME": os.devnull}
        bash = str(self.bin / "bash")
        done = subprocess.run(
            [bash, str(SCRIPT)],
            env=environment,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, self.log.read_text(encoding="utf-8").splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


MAKE = "make test ARGS=-rs --durations=10 CI=true"


def test_a_bare_machine_gets_every_package_once(machine: Machine) -> None:
    said, calls = machine.run()
    assert calls == [
        "apt-get update -qq noninteractive",
        f"apt-get install -qq -y --no-install-recommends {' '.join(packages())} noninteractive",
        MAKE,
    ]
    assert f"ci: installing {' '.join(packages())}" in said


def test_only_what_is_missing_is_installed(machine: Machine) -> None:
    machine.stub(
        "dpkg-query",
        'case "${@: -1}" in prometheus) exit 1 ;; openssl) echo "deinstall ok config-files" ;;'
        ' *) echo "install ok installed" ;; esac',
    )
    _, calls = machine.run()
    install = "apt-get install -qq -y --no-install-recommends openssl prometheus noninteractive"
    assert calls[1:] == [install, MAKE]


def test_a_machine_that_has_everything_installs_nothing(machine: Machine) -> None:
    machine.stub("dpkg-query", 'echo "install ok installed"')
    said, calls = machine.run()
    assert calls == [MAKE]
    assert "ci: all Debian packages are there" in said


def test_apt_that_fails_is_said_and_the_tests_run(machine: Machine) -> None:
    machine.stub("apt-get", 'echo "apt-get $1" >>"$LOG"; exit 100')
    said, calls = machine.run()
    installs = ["apt-get install"] * (1 + len(packages()))
    assert calls == ["apt-get update", *installs, MAKE]
    assert "apt-get update failed" in said
    assert all(f"ci: going on without {name}" in said for name in packages())


def test_a_package_that_the_release_lacks_keeps_no_other_out(machine: Machine) -> None:
    machine.stub(
        "apt-get",
        '[[ $* != *docker-compose* ]] || exit 100; echo "${@: -1}" >>"$LOG"',
    )
    said, calls = machine.run()
    assert calls[1:-1] == [n for n in packages() if n != "docker-compose"]
    assert calls[-1] == MAKE
    assert [line for line in said.splitlines() if "without" in line] == [
        "ci: going on without docker-compose"
    ]


def test_without_root_the_tests_run(machine: Machine) -> None:
    machine.stub("id", "echo 1000")
    said, calls = machine.run()
    assert calls == [MAKE]
    assert f"ci: not root; going on without: {' '.join(packages())}" in said


def test_without_apt_get_the_tests_run(machine: Machine) -> None:
    (machine.bin / "apt-get").unlink()
    (machine.bin / "dpkg-query").unlink()
    said, calls = machine.run()
    assert calls == [MAKE]
    assert "ci: no apt-get here; going on without: " in said
