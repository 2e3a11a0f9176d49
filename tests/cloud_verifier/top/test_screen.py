"""The live view on terminals of all sizes, with devices that would like to draw on them."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from cloud_verifier.top.screen import COLUMNS, columns_for, screen, show
from cloud_verifier.top.view import Readings, View
from tests.cloud_verifier.top.readings import counters, device, reading, replica


def drawn(view: View | None, width: int = 160, height: int | None = 40, trouble: str = "") -> str:
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=True, color_system=None, markup=False, highlight=False
    )
    console.print(screen(view, width, height, trouble))
    return out.getvalue()


def view(count: int = 3, **verifiers: object) -> View:
    devices = {f"pi-{number:03d}": device(**counters(10.0 + number)) for number in range(count)}
    return Readings().view(reading(verifiers=verifiers, **devices), "device")


def test_everything_is_there_when_there_is_room() -> None:
    text = drawn(view(3, v1=replica(), v2=replica(False)))
    for column in COLUMNS:
        assert column.title in text
    for word in ("pi-000", "pi-002", "100.0", "0.75", "0.500", "0.900", "pipesd", "1 s", "v1"):
        assert word in text, word
    assert "3 devices online, 3 with telemetry, 3 known" in text
    assert "replicas 1, sessions 3 of 8" in text
    assert "3 of 8  38 %" in text
    assert "more" not in text


@pytest.mark.parametrize("height", [5, 10, 24, 50])
@pytest.mark.parametrize("width", [10, 40, 80, 200])
def test_it_fits_the_terminal_and_says_what_is_left_out(width: int, height: int) -> None:
    text = drawn(view(100), width, height)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    shown = sum(line.startswith("pi-") for line in lines)
    assert shown == max(1, height - 10)
    assert f"and {100 - shown} more" in text or width < 20
    if width >= 80:
        assert len(lines) <= max(height, 11)


def test_replicas_are_bounded_too() -> None:
    many = {f"v{number:02d}": replica() for number in range(30)}
    text = drawn(view(50, **many), 120, 30)
    assert "and 22 more replicas" in text
    assert len(text.splitlines()) <= 30


@given(st.integers(1, 300))
def test_the_columns_that_fit_are_the_important_ones(width: int) -> None:
    chosen = columns_for(width)
    assert chosen[0] is COLUMNS[0]
    assert len(chosen) == 1 or sum(column.width + 2 for column in chosen) <= width
    left = [column.rank for column in COLUMNS if column not in chosen]
    assert min(left, default=99) >= max(column.rank for column in chosen)


@pytest.mark.parametrize(
    "word",
    ["[red]x[/red]", "[/]", "[link=file:///etc/passwd]x", ":smile:", "\x1b[2J", "a\nb\rc\x07"],
)
def test_what_devices_say_is_text(word: str) -> None:
    one = device(**counters(5.0)) | {"policy": word, "machine": word}
    whole = reading(verifiers={word: replica() | {"model": word}}, **{word: one})
    text = drawn(Readings().view(whole), 200)
    assert "\x1b" not in text
    assert "\x07" not in text
    shown = "".join(c if c.isprintable() else "?" for c in word)
    # As a device, as a replica and as a target; the policy is cut to its column.
    assert text.count(shown) >= 3, text
    assert len([line for line in text.splitlines() if "5.0" in line or shown in line]) == 2


@settings(max_examples=50)
@given(st.text(max_size=80), st.text(max_size=80))
def test_no_text_breaks_the_screen(name: str, policy: str) -> None:
    one = device(**counters(5.0)) | {"policy": policy}
    whole = reading(verifiers={name: replica()}, **{name: one})
    text = drawn(Readings().view(whole), 100, 24, trouble="")
    assert "\x1b" not in text
    assert len(text.splitlines()) == 8  # the first one is wrapped


def test_trouble_and_silence_are_said() -> None:
    assert "no exporter at x" in drawn(None, trouble="no exporter at x")
    assert "waiting" in drawn(None)
    assert "no device has been seen" in drawn(Readings().view(reading()))
    away = Readings().view({**reading(a=device()), "broker_connected": False})
    assert "the broker is away" in drawn(away)


def test_a_pipe_gets_every_row_and_column() -> None:
    out = io.StringIO()
    name = "x" * 64
    whole = reading(**{name: device()}, **{f"d{number}": device() for number in range(200)})
    show(Console(file=out, markup=False, highlight=False), Readings().view(whole))
    text = out.getvalue()
    assert name in text
    assert text.count("\nd") == 201  # and the head
    assert all(column.title in text for column in COLUMNS)
    assert "more" not in text
