"""What is shipped under dashboards/ and in docker-compose.yml, read for the tests."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "dashboards"
GRAFANA = FOLDER / "grafana"
PROMETHEUS = FOLDER / "prometheus"
RULES = sorted((PROMETHEUS / "rules").glob("*.yml"))
RULE_TESTS = sorted((PROMETHEUS / "tests").glob("*.yml"))
COMPOSE = ROOT / "docker-compose.yml"
PROMTOOL = shutil.which("promtool")
#: ``${NAME}``, ``${NAME:-default}``, ``${NAME:?why}``.
_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def boards() -> dict[str, Any]:
    """The committed dashboards by file name."""
    return {path.name: json.loads(path.read_text("utf-8")) for path in GRAFANA.glob("*.json")}


def panels(board: Any) -> list[Any]:
    """Without rows, which show nothing."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def expressions() -> dict[str, str]:
    """Every expression of every panel, by dashboard, panel and query."""
    found: dict[str, str] = {}
    for name, board in boards().items():
        for panel in panels(board):
            for target in panel["targets"]:
                key = f"{name.removesuffix('.json')}: {panel['title']} {target['refId']}"
                assert key not in found, f"two panels are called so: {key}"
                found[key] = target["expr"]
    return found


def rules() -> Iterator[tuple[str, Any]]:
    """Every rule, with the name of its file."""
    for path in RULES:
        for group in load(path)["groups"]:
            for rule in group["rules"]:
                yield path.name, rule


def alerts() -> dict[str, Any]:
    return {rule["alert"]: rule for _, rule in rules() if "alert" in rule}


def recorded() -> dict[str, str]:
    return {rule["record"]: rule["expr"] for _, rule in rules() if "record" in rule}


def filled(expression: str, window: str = "1m", **chosen: str) -> str:
    """As Grafana sends it: with values for its variables, ``.*`` where none is given."""
    expression = expression.replace("$__rate_interval", window)
    for name in ("device", "verifier"):
        expression = expression.replace(f"${name}", chosen.get(name, ".*"))
    assert "$" not in expression, f"a variable that nobody fills: {expression}"
    return expression


def services(environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Of docker-compose.yml, with its defaults filled in, and values for what must be set."""
    environment = {"GRAFANA_ADMIN_PASSWORD": "secret", **(environment or {})}

    def fill(match: re.Match[str]) -> str:
        name, kind, rest = match[1], match[2], match[3] or ""
        if name in environment:
            return environment[name]
        assert kind == "-", f"{name} has no default: {rest}"
        return rest

    text = _VARIABLE.sub(fill, COMPOSE.read_text(encoding="utf-8")).replace("$$", "$")
    found: dict[str, Any] = yaml.safe_load(text)["services"]
    return found


def variables() -> set[str]:
    """Names that docker-compose.yml takes from its environment."""
    return {match[1] for match in _VARIABLE.finditer(COMPOSE.read_text(encoding="utf-8"))}
