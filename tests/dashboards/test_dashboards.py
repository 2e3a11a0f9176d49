"""The committed dashboards: what the code gives, complete, and about metrics that exist."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards import build
from dashboards.model import COLUMNS, DATASOURCE_UID, Dashboard, Panel
from tests.brokers import require
from tests.dashboards.files import (
    FOLDER,
    GRAFANA,
    PROMETHEUS,
    PROMTOOL,
    boards,
    expressions,
    filled,
    load,
    panels,
    recorded,
    rules,
    services,
)
from tests.dashboards.metrics import known_metrics

#: Metrics as expressions name them, and recorded ones.
METRIC = re.compile(r"(?<![\w:\"/])((?:device:)?pipesd_[a-z0-9_:]+)(?![\w:])(?!\s*=~?\")")


def every_datasource(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        for name, value in node.items():
            if name == "datasource":
                yield value
            else:
                yield from every_datasource(value)
    elif isinstance(node, list):
        for item in node:
            yield from every_datasource(item)


def test_the_committed_files_are_what_the_code_gives() -> None:
    assert build.main(["--check"]) == 0
    assert {path.name for path in GRAFANA.glob("*.json")} == set(build.render())
    for name, text in build.render().items():
        assert (GRAFANA / name).read_text(encoding="utf-8") == text


def test_check_tells_what_is_stale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build.main(["--out", str(tmp_path)]) == 0
    assert build.main(["--out", str(tmp_path), "--check"]) == 0
    (tmp_path / "pipesd-fleet.json").write_text("{}")
    (tmp_path / "pipesd-verifier.json").unlink()
    assert build.main(["--out", str(tmp_path), "--check"]) == 1
    said = capsys.readouterr().out
    assert "pipesd-fleet.json" in said
    assert "pipesd-verifier.json" in said
    assert "pipesd-device.json" not in said
    (tmp_path / "file").touch()
    assert build.main(["--out", str(tmp_path / "file")]) == 2


def test_another_grafana_gets_its_own_data_source(tmp_path: Path) -> None:
    build.main(["--out", str(tmp_path), "--datasource", "P1809F7CD0C75ACF3"])
    for path in tmp_path.glob("*.json"):
        for source in every_datasource(json.loads(path.read_text("utf-8"))):
            assert source == {"type": "prometheus", "uid": "P1809F7CD0C75ACF3"}


def test_a_fresh_grafana_finds_the_data_source_of_every_panel() -> None:
    """(38) By a fixed uid, which the provisioned data source has."""
    (source,) = load(GRAFANA / "provisioning/datasources/prometheus.yaml")["datasources"]
    assert (source["uid"], source["type"]) == (DATASOURCE_UID, "prometheus")
    for name, board in boards().items():
        assert "__inputs" not in board, name
        found = list(every_datasource(board))
        for panel in panels(board):
            assert panel["datasource"] in found
            assert len(list(every_datasource(panel))) == 1 + len(panel["targets"])
        assert all(one == {"type": "prometheus", "uid": DATASOURCE_UID} for one in found), name
        for variable in board["templating"]["list"]:
            assert variable["datasource"]["uid"] == DATASOURCE_UID


def test_the_data_source_and_the_dashboards_are_where_compose_puts_them() -> None:
    (source,) = load(GRAFANA / "provisioning/datasources/prometheus.yaml")["datasources"]
    grafana = services()["grafana"]
    mounts = dict(volume.split(":")[1::-1] for volume in grafana["volumes"])
    assert mounts["/etc/grafana/provisioning"] == "./dashboards/grafana/provisioning"
    (provider,) = load(GRAFANA / "provisioning/dashboards/pipesd.yaml")["providers"]
    assert mounts[provider["options"]["path"]] == "./dashboards/grafana"
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.startswith(provider["options"]["path"])
    assert (GRAFANA / Path(home).name).is_file()
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in services()
    scrapes = load(PROMETHEUS / "prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scrapes


def every_panel() -> list[Any]:
    return [
        pytest.param(board, panel, id=f"{board.uid}-{panel.title}".replace(" ", "-"))
        for board in build.dashboards()
        for panel in board.panels()
    ]


@pytest.mark.parametrize(("board", "panel"), every_panel())
def test_a_panel_says_its_unit_what_it_shows_and_why_it_may_be_empty(
    board: Dashboard, panel: Panel
) -> None:
    (made,) = [one for one in panels(boards()[f"{board.uid}.json"]) if one["title"] == panel.title]
    assert made["fieldConfig"]["defaults"]["unit"]
    assert len(made["description"]) > 20
    assert made["description"].endswith(".")
    assert len(made["fieldConfig"]["defaults"]["noValue"]) > 10
    assert made["targets"]
    for target in made["targets"]:
        assert target["expr"]
        assert target["instant"] != target["range"]
    if panel.kind == "table" and not panel.labels:
        assert len(panel.columns) == len(panel.queries)
        assert all(column.unit for column in panel.columns)


@pytest.mark.parametrize("name", sorted(build.render()))
def test_panels_have_numbers_of_their_own_and_do_not_overlap(name: str) -> None:
    board = boards()[name]
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(set(numbers)) == len(numbers)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS
        cells = {
            (place["x"] + across, place["y"] + down)
            for across in range(place["w"])
            for down in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_dashboards_have_uids_of_their_own_and_the_variables_that_they_use() -> None:
    found = boards()
    assert len({board["uid"] for board in found.values()}) == len(found) == 4
    for name, board in found.items():
        text = json.dumps([panel["targets"] for panel in panels(board)])
        used = set(re.findall(r"\$(\w+)", text)) - {"__rate_interval"}
        assert used == {variable["name"] for variable in board["templating"]["list"]}, name
    assert "device" in json.dumps(found["pipesd-device.json"]["templating"])
    assert "verifier" in json.dumps(found["pipesd-verifier.json"]["templating"])


def test_links_lead_to_dashboards_that_exist() -> None:
    uids = {board["uid"] for board in boards().values()}
    links = re.findall(r"/d/([\w-]+)", json.dumps(boards()))
    assert links
    assert set(links) <= uids


def test_every_metric_of_panels_rules_and_variables_exists() -> None:
    known = known_metrics() | recorded().keys()
    texts = {**expressions(), **{str(rule): rule["expr"] for _, rule in rules()}}
    for name, board in boards().items():
        for variable in board["templating"]["list"]:
            texts[f"{name}: variable {variable['name']}"] = variable["definition"]
    seen: set[str] = set()
    for where, text in texts.items():
        names = set(METRIC.findall(text))
        assert names or "up{" in text, f"{where}: {text}"
        assert names <= known, f"{where}: {names - known}"
        seen |= names
    assert len(seen) > 80


def test_every_expression_is_promql(tmp_path: Path) -> None:
    require("promtool", PROMTOOL is not None)
    groups = [
        {"record": "panel:expression:parsed", "expr": filled(text), "labels": {"panel": where}}
        for where, text in expressions().items()
    ]
    assert len(groups) > 100
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": groups}]}))
    done = subprocess.run(
        [str(PROMTOOL), "check", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"{len(groups)} rules found" in done.stdout


def test_nothing_else_lies_beside_them() -> None:
    """What Grafana reads from the folder is what was built."""
    assert {path.name for path in FOLDER.rglob("*.json")} == set(build.render())
