"""What a device keeps over a restart, whole or not at all (CASES 33)."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.telemetry import DeviceConfig
from edge_agent.core.pipeline import LinkCost
from edge_agent.core.sending import Estimates
from edge_agent.state import DeviceState, StateFile, as_json, default_path, from_json

STATE = DeviceState(
    DeviceConfig(7, 0.2, 0.6, 9, "edgellm"),
    Estimates(LinkCost(0.01, 0.02, 0.001), 0.008, 12, True, True, 0.05, 16),
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "below" / "state.json"
    file = StateFile(path, "d")
    assert file.load() == DeviceState()
    assert file.save(STATE)
    assert StateFile(path, "d").load() == STATE
    assert [name.name for name in path.parent.iterdir()] == ["state.json"]
    assert file.save(DeviceState(None, None))
    assert StateFile(path, "d").load() == DeviceState()


def test_a_file_cut_in_half_is_left_aside_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state.json"
    whole = as_json("d", STATE)
    for length in range(0, len(whole) - 1, 5):
        path.write_text(whole[:length])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert StateFile(path, "d").load() == DeviceState()
        (record,) = caplog.records
        assert str(path) in record.getMessage()
        assert "\n" not in record.getMessage()


def changed(**changes: object) -> str:
    data = json.loads(as_json("d", STATE))
    for name, value in changes.items():
        where, _, field = name.rpartition("__")
        (data[where] if where else data)[field] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    "text",
    [
        changed(schema=2),
        changed(schema=None),
        changed(device="other"),
        changed(config=[1, 2]),
        changed(config__r1=2.0),
        changed(config__r1="0.5"),
        changed(config__schema=2),
        changed(config__policy="nonsense"),
        changed(config__more=1),
        changed(estimates=3),
        changed(estimates__gamma=float("nan")),
        changed(estimates__gamma=-1.0),
        changed(estimates__gamma="fast"),
        changed(estimates__gamma=True),
        changed(estimates__window=0),
        changed(estimates__window=2.5),
        changed(estimates__window=10**9),
        changed(estimates__known=1),
        changed(estimates__link={"occupancy": 1e9}),
        changed(estimates__link={"occupancy": "1"}),
        changed(estimates__link=None),
        changed(estimates__forward=float("inf")),
        "[" * 100_000,
        "null",
        "\x00" * 100,
        " " * 70_000 + as_json("d", STATE),
    ],
)
def test_what_cannot_be_is_left_aside(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert StateFile(path, "d").load() == DeviceState()
    assert len(caplog.records) == 1


@given(st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.integers(),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(
        st.sampled_from(["schema", "device", "config", "estimates", "link", *asdict(STATE)]),
        below, max_size=4),
    max_leaves=12,
))  # fmt: skip
def test_any_json_is_a_state_or_a_value_error(data: object) -> None:
    if isinstance(data, dict):
        data |= {"schema": 1, "device": "d"}
    try:
        found = from_json("d", json.dumps(data))
    except ValueError:
        return
    assert from_json("d", as_json("d", found)) == found


def test_bytes_that_are_no_text_are_left_aside(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(b"\xff\xfe{}")
    assert StateFile(path, "d").load() == DeviceState()


def test_a_place_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    file = StateFile(tmp_path / "file" / "state.json", "d")
    with caplog.at_level(logging.WARNING):
        assert not file.save(STATE)
        assert not file.save(STATE)
    assert file.failures == 2
    assert len(caplog.records) == 1
    assert file.saved == DeviceState()


def test_a_crash_while_writing_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    file = StateFile(path, "d")
    file.save(STATE)

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    assert not file.save(DeviceState())
    assert [name.name for name in tmp_path.iterdir()] == ["state.json"]
    assert StateFile(path, "d").load() == STATE


def test_small_changes_are_not_worth_a_write() -> None:
    known = STATE.estimates
    assert known is not None
    assert not STATE.differs(STATE)
    assert not replace(STATE, estimates=replace(known, gamma=0.0085)).differs(STATE)
    assert replace(STATE, estimates=replace(known, gamma=0.012)).differs(STATE)
    assert replace(STATE, estimates=replace(known, known=False)).differs(STATE)
    assert replace(STATE, estimates=None).differs(STATE)
    assert replace(STATE, config=None).differs(STATE)


def test_each_device_has_a_file_of_its_own() -> None:
    assert default_path("a") != default_path("b")
    assert default_path("a").parent == default_path("b").parent
