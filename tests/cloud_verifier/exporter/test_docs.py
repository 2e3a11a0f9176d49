"""The page on metrics names what the exporter shows."""

from __future__ import annotations

import re

from cloud_verifier.exporter.figures import CAUSES, CHANNELS, PREFIX, Own, OwnFigures
from cloud_verifier.exporter.table import EXTRAS, VERIFIER_FAMILIES
from tests.commands import ROOT

PAGE = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## The exporter\n")[2].partition("\n## ")[0]


def test_every_series_of_its_own_is_named_and_no_other() -> None:
    text = OwnFigures(Own).text()
    shown = set(re.findall(rf"^# TYPE {PREFIX}(\w+)", text, re.MULTILINE))
    table = SECTION.partition("| own series")[2].partition("\n\n")[0]
    firsts = [line.split("|")[1] for line in table.splitlines()[2:]]
    named = {name for first in firsts for name in re.findall(r"`(\w+)`", first)}
    assert named - {"outcome"} == shown


def test_every_cause_channel_and_label_is_named() -> None:
    for word in (*CAUSES, *CHANNELS):
        assert f"`{word}`" in SECTION, word
    for family in (*EXTRAS, *VERIFIER_FAMILIES):
        name = family.name.removeprefix("pipesd_fleet_verifier")
        assert f"`{name}`" in SECTION or f"`{family.name}`" in SECTION, family.name
