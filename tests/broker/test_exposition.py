"""Telemetry as Prometheus text: what a parser reads back, what is left out, and how fast it is."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families as read

from broker.exposition import (
    CAUSES,
    FAMILIES,
    PREFIX,
    clean,
    join,
    label_value,
    render,
    sample,
)
from broker.figures import BUCKETS, BY_NAME, FIGURES, GAUGE, MAX_VALUE
from broker.telemetry import Histogram, Telemetry

TTFT = Histogram((0, 2, *[0] * (len(BUCKETS) - 2), 3), 400.5)
FULL = Telemetry(
    boot="b",
    sequence=3,
    figures={figure.number: 1.5 * place for place, figure in enumerate(FIGURES)},
    ttft=TTFT,
    tpt=TTFT,
    version="1.0",
    draft='a \\ back, a " quote and a\nline',
    policy="pipesd",
    machine="Raspberry Pi 5",
    energy_source="pmic",
)


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = {}
    for family in read(text):
        for one in family.samples:
            key = (one.name, frozenset(one.labels.items()))
            assert key not in found
            found[key] = one.value
    return found


def by_name(text: str) -> dict[str, float]:
    return {name: value for (name, labels), value in samples(text).items() if len(labels) == 1}


def test_a_parser_reads_every_figure_back_with_its_kind_and_help() -> None:
    text = join([render("dev-1", FULL).texts])
    read_back = {family.name: family for family in read(text)}
    for place, figure in enumerate(FIGURES):
        name = PREFIX + figure.name
        family = read_back[name.removesuffix("_total")]
        assert (family.type, family.documentation) == (figure.kind, figure.help)
        (one,) = family.samples
        assert (one.name, one.labels, one.value) == (name, {"device": "dev-1"}, 1.5 * place)
    assert len(read_back) == len(FAMILIES)
    (info,) = read_back["pipesd_device_info"].samples
    assert info.value == 1
    assert info.labels == {
        "device": "dev-1",
        "version": "1.0",
        "draft": FULL.draft,
        "policy": "pipesd",
        "machine": "Raspberry Pi 5",
        "energy_source": "pmic",
    }


def test_a_histogram_is_cumulative_and_ends_with_all() -> None:
    found = samples(join([render("d", FULL).texts]))
    buckets = [
        found["pipesd_device_ttft_seconds_bucket", frozenset({"device": "d", "le": le}.items())]
        for le in [*map(str, BUCKETS), "+Inf"]
    ]
    assert buckets == [0, *[2] * (len(BUCKETS) - 1), 5]
    only = frozenset({("device", "d")})
    assert found["pipesd_device_ttft_seconds_sum", only] == 400.5
    assert found["pipesd_device_ttft_seconds_count", only] == 5


def test_what_was_not_measured_is_absent_and_never_zero() -> None:
    text = join([render("d", Telemetry("b", 1, figures={54: -12.5})).texts])
    assert by_name(text) == {"pipesd_device_temperature_celsius": -12.5}
    assert "ttft" not in text
    assert "energy_joules" not in text


def test_broken_figures_are_left_out_and_counted() -> None:
    figures = {
        7: 10.0,
        4: math.nan,
        5: math.inf,
        6: -math.inf,
        8: -1.0,
        46: -0.5,
        9: 2 * MAX_VALUE,
        54: -2 * MAX_VALUE,
        9999: 1.0,
    }
    good, dropped = clean(figures)
    assert good == {7: 10.0}
    assert dropped == {"not_finite": 3, "negative": 2, "too_large_figure": 2, "unknown_figure": 1}
    rendered = render("d", Telemetry("b", 1, figures=figures))
    assert rendered.dropped == dropped
    assert by_name(join([rendered.texts])) == {"pipesd_device_committed_tokens_total": 10.0}


def test_devices_share_a_header_and_nothing_else() -> None:
    one = render("a", FULL)
    other = render("b", replace(FULL, figures={7: 4.0}))
    text = join([one.texts, other.texts])
    assert text.count("# TYPE pipesd_device_committed_tokens_total counter\n") == 1
    found = samples(text)
    name = "pipesd_device_committed_tokens_total"
    place = FIGURES.index(BY_NAME["committed_tokens_total"])
    assert found[name, frozenset({("device", "a")})] == 1.5 * place
    assert found[name, frozenset({("device", "b")})] == 4.0
    assert join([]) == ""


def test_a_sample_of_the_exporters_own() -> None:
    line = sample("pipesd_device_online", "dev-1", 1)
    assert samples(line) == {("pipesd_device_online", frozenset({("device", "dev-1")})): 1.0}


@given(st.text(max_size=40))
def test_any_text_can_be_a_label(text: str) -> None:
    line = f'x{{a="{label_value(text)}"}} 1\n'
    line.encode()
    (family,) = read(line)
    shown = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
    assert family.samples[0].labels == {"a": shown}


@given(
    st.dictionaries(
        st.integers(0, 10_000) | st.sampled_from([figure.number for figure in FIGURES]),
        st.floats() | st.integers(-(2**64), 2**64).map(float),
        max_size=64,
    )
)
def test_any_figures_leave_series_that_can_be(figures: dict[int, float]) -> None:
    rendered = render("d", Telemetry("b", 1, figures=figures))
    kinds = {PREFIX + figure.name: figure.kind for figure in FIGURES}
    found = by_name(join([rendered.texts]))
    for name, value in found.items():
        assert math.isfinite(value)
        assert value >= 0 or (kinds[name] == GAUGE and "celsius" in name)
    assert set(rendered.dropped) <= set(CAUSES)
    assert len(found) + sum(rendered.dropped.values()) == len(figures)


def test_a_thousand_devices_take_well_under_a_second() -> None:
    begin = time.perf_counter()
    texts = [render(f"device-{number}", FULL).texts for number in range(1000)]
    rendered = time.perf_counter()
    text = join(texts)
    joined = time.perf_counter()
    assert text.count("\n") > 90_000
    # A tenth of it where nothing else runs; a busy machine is no fault.
    assert joined - rendered < 0.5
    assert rendered - begin < 2.0
