"""Who may import whom (docs: one package on the device, one in the cloud, one between them).

Read from the source, so that an import inside a function counts too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("broker", "edge_agent", "cloud_verifier")
MODULES = sorted(
    path.relative_to(ROOT).as_posix()
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
)

#: Who alone may import what is heavy or bound to one implementation.
ONLY = {
    "paho": ("broker/mqtt.py",),
    "iotcore": ("broker/embedded_child.py",),
    "llama_cpp": ("broker/llama_library.py",),
    "torch": ("cloud_verifier/engine/torch_*.py", "cloud_verifier/engine/prepare.py"),
    "transformers": ("cloud_verifier/engine/torch_*.py", "cloud_verifier/engine/prepare.py"),
    "safetensors": ("cloud_verifier/engine/torch_*.py", "cloud_verifier/engine/prepare.py"),
}
#: Modules whose answers depend on their arguments alone.
PURE = (
    "broker/codec.py",
    "broker/errors.py",
    "broker/figures.py",
    "broker/filters.py",
    "broker/messages.py",
    "broker/noise.py",
    "broker/sampling.py",
    "broker/telemetry.py",
    "broker/topics.py",
    "cloud_verifier/core/*.py",
    "cloud_verifier/tuner/core/*.py",
    "cloud_verifier/exporter/device.py",
    "cloud_verifier/exporter/report.py",
    "cloud_verifier/exporter/table.py",
    "edge_agent/core/*.py",
)
IMPURE = {
    "asyncio", "concurrent", "datetime", "llama_cpp", "logging", "multiprocessing", "os", "paho",
    "queue", "random", "secrets", "selectors", "socket", "subprocess", "sys", "threading", "time",
    "torch", "transformers", "uuid",
}  # fmt: skip
#: Libraries that nothing loads before a model or a broker is really wanted.
HEAVY = ("torch", "transformers", "llama_cpp", "paho", "iotcore")


def imports(path: str) -> Iterator[str]:
    """Full names of the modules that a file imports anywhere in it."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who imports whom"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def file_of(module: str) -> str | None:
    """The project's file of a module, if it is one."""
    for candidate in (module.replace(".", "/") + ".py", module.replace(".", "/") + "/__init__.py"):
        if module.split(".", maxsplit=1)[0] in PACKAGES and candidate in MODULES:
            return candidate
    return None


def is_one_of(path: str, patterns: tuple[str, ...]) -> bool:
    return any(Path(path).match(pattern) for pattern in patterns)


def test_there_is_something_to_read() -> None:
    assert len(MODULES) > 30
    for patterns in (*ONLY.values(), PURE):
        for pattern in patterns:
            assert any(is_one_of(path, (pattern,)) for path in MODULES), pattern


@pytest.mark.parametrize("path", MODULES)
def test_edge_and_cloud_know_only_what_lies_between_them(path) -> None:
    own = path.split("/")[0]
    allowed = {own, "broker"}
    for name in imports(path):
        package = name.split(".")[0]
        assert package not in PACKAGES or package in allowed, f"{path} imports {name}"
        assert package not in ("tests", "benchmarks"), f"{path} imports {name}"


@pytest.mark.parametrize("path", MODULES)
def test_implementations_stay_behind_their_port(path) -> None:
    for name in imports(path):
        homes = ONLY.get(name.split(".")[0])
        assert homes is None or is_one_of(path, homes), f"{path} imports {name}"


@pytest.mark.parametrize("path", [path for path in MODULES if is_one_of(path, PURE)])
def test_pure_modules_import_nothing_impure(path) -> None:
    """Nor through other modules of the project."""
    seen: set[str] = set()
    todo = [path]
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        for name in imports(current):
            assert name.split(".")[0] not in IMPURE, f"{path}: {current} imports {name}"
            if (found := file_of(name)) is not None:
                todo.append(found)


@pytest.mark.parametrize(
    ("package", "modules"),
    [
        ("broker", ["codec", "messages", "topics", "sampling", "memory", "flags", "settings"]),
        ("edge_agent", ["runtime", "cli", "wire", "scripted_draft", "text"]),
        ("cloud_verifier", ["runtime", "cli", "wire", "engine.target", "reference"]),
    ],
)
def test_nothing_heavy_is_loaded_before_it_is_wanted(package, modules) -> None:
    names = ", ".join(f"{package}.{module}" for module in modules)
    others = [other for other in PACKAGES if other not in (package, "broker")]
    code = f"import sys, {names}; print(*[m for m in {[*HEAVY, *others]} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
