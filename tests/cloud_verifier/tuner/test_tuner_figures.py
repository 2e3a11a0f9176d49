"""The tuner's own series, and that the documentation names each of them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families

from cloud_verifier.tuner.core.device import PHASES
from cloud_verifier.tuner.figures import PREFIX, TunerFigures
from tests.cloud_verifier.tuner.world import Device, World, bowl

DOCS = Path(__file__).resolve().parents[3] / "docs" / "tuning.md"


def scraped(world: World) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Samples by name and labels."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(TunerFigures(world.tuner).text()):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def world_of(*devices: Device) -> World:
    world = World(*devices)
    world.tuner.configs = SimpleNamespace(
        publish=world.publish, publishes=7, rejected=2, connected=True
    )
    return world


def test_a_search_as_it_is_scraped() -> None:
    idle = Device("idle", bowl(0.2, 0.5))
    idle.working = False
    world = world_of(Device("a", bowl(0.2, 0.5)), idle)
    world.until(world.settled)
    world.away = "timeout"
    world.run(10)
    found = scraped(world)
    assert found["pipesd_tuner_trials_total"][("state", "complete"),] == 16
    assert found["pipesd_tuner_searches_total"][()] == 1
    assert found["pipesd_tuner_source_errors_total"][("cause", "timeout"),] == 2
    assert found["pipesd_tuner_config_publishes_total"][()] == 7
    assert found["pipesd_tuner_configs_unreadable_total"][()] == 2
    phases = found["pipesd_tuner_devices"]
    assert {dict(labels)["phase"] for labels in phases} == set(PHASES)
    assert phases[("phase", "settled"),] == phases[("phase", "waiting"),] == 1
    best = world.core.devices["a"].best
    assert best is not None
    assert found["pipesd_tuner_device_best_tpt_seconds"] == {(("device", "a"),): best.tpt}
    assert found["pipesd_tuner_device_best_r2_ratio"] == {(("device", "a"),): best.pair.r2}
    first = found["pipesd_tuner_device_first_tpt_seconds"][("device", "a"),]
    assert first == world.studies.told["a", 1][0].tpt
    # A device that was never measured has no figures that would be made up.
    assert found["pipesd_tuner_device_campaign"][("device", "idle"),] == 1


def test_every_series_is_documented() -> None:
    world = world_of(Device("a", bowl(0.2, 0.5)))
    world.until(world.settled)
    table = DOCS.read_text(encoding="utf-8").partition("## Metrics")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    own = {name.removeprefix(PREFIX) for name in scraped(world) if name.startswith(PREFIX)}
    assert own == named
    for name in ("trial_failures_total", "source_errors_total", "drifts_total", "devices"):
        for labels in scraped(world)[PREFIX + name]:
            assert f"`{labels[0][1]}`" in table, labels
