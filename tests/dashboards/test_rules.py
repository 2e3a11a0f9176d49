"""Alert rules: complete, with a page of the runbook each, and tried by promtool both ways."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.brokers import require
from tests.dashboards.files import (
    PROMETHEUS,
    PROMTOOL,
    ROOT,
    RULE_TESTS,
    RULES,
    alerts,
    load,
    rules,
    services,
)

RUNBOOK = ROOT / "docs" / "runbook.md"


def promtool(*arguments: str) -> str:
    require("promtool", PROMTOOL is not None)
    done = subprocess.run(
        [str(PROMTOOL), *arguments], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


def headings() -> set[str]:
    """Anchors of the runbook, as GitHub makes them."""
    titles = re.findall(r"^##+ (.+)$", RUNBOOK.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_rules_are_clean() -> None:
    said = promtool("check", "rules", *map(str, RULES))
    assert len(RULES) == said.count("SUCCESS") == 3


def test_the_configuration_is_clean() -> None:
    said = promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))
    assert "3 rule files found" in said


@pytest.mark.parametrize("path", RULE_TESTS, ids=lambda path: path.stem)
def test_alerts_fire_where_they_should(path: Path) -> None:
    assert "SUCCESS" in promtool("test", "rules", str(path))


def test_every_alert_is_tried_firing_and_silent() -> None:
    firing: set[str] = set()
    silent: set[str] = set()
    for path in RULE_TESTS:
        for group in load(path)["tests"]:
            for check in group["alert_rule_test"]:
                (firing if check.get("exp_alerts") else silent).add(check["alertname"])
    assert firing == silent == alerts().keys()


@pytest.mark.parametrize("alert", sorted(alerts()))
def test_an_alert_says_what_is_wrong_and_where_to_read_on(alert: str) -> None:
    rule: Any = alerts()[alert]
    assert alert.startswith("Pipesd")
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook"}
    assert len(notes["description"]) > 40
    page, _, anchor = notes["runbook"].partition("#")
    assert ROOT / page == RUNBOOK
    assert anchor in headings()


def test_the_runbook_has_a_page_for_each_alert_and_no_other() -> None:
    anchors = {rule["annotations"]["runbook"].partition("#")[2] for rule in alerts().values()}
    text = RUNBOOK.read_text(encoding="utf-8")
    assert headings() == anchors
    for alert, rule in alerts().items():
        assert f"`{alert}`" in text, alert
        assert rule["labels"]["severity"] in text


def test_rules_have_names_of_their_own() -> None:
    names = [rule.get("alert") or rule["record"] for _, rule in rules()]
    assert len(set(names)) == len(names)


def test_prometheus_scrapes_what_the_services_serve() -> None:
    """Names and ports of the scrape configuration are those of docker-compose.yml."""
    config = load(PROMETHEUS / "prometheus.yml")
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    commands = {name: " ".join(one.get("command", [])) for name, one in services().items()}
    served = {
        "pipesd-exporter": ("exporter", r"--port=(\d+)"),
        "pipesd-tuner": ("tuner", r"--metrics-port=(\d+)"),
    }
    for job, (service, flag) in served.items():
        port = re.search(flag, commands[service])
        assert port
        assert jobs[job]["static_configs"] == [{"targets": [f"{service}:{port[1]}"]}]
    (found,) = jobs["pipesd-verifier"]["dns_sd_configs"]
    assert found["names"] == ["verifier"]
    assert f"--metrics-port={found['port']}" in commands["verifier"]
    for job in jobs.values():
        assert job["job_name"] == "prometheus" or job["sample_limit"] > 0
        for entry in job.get("file_sd_configs", []):
            for name in entry["files"]:
                assert load(PROMETHEUS / name) == []
