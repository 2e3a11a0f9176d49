"""What a person sees of a benchmark: the table, the plots, the page."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from edge_agent.bench.html import page
from edge_agent.bench.report import (
    Progress,
    as_json,
    cells_of,
    duration,
    failures,
    load_line,
    remarks,
    table,
    texts_line,
)
from edge_agent.bench.summary import compared, differences, summarise
from edge_agent.bench.svg import Bar, bars, gantt, lost_drafts, nice_ticks, typical_round
from edge_agent.bench.watch import DRAFT, VERDICT, Span
from edge_agent.core.sending import Learnt
from tests.edge_agent.bench_results import TIMELINE, result, settings

RESULTS = [
    result("pipesd", timeline=TIMELINE),
    result("vanilla", total_s=1.5, timeline=TIMELINE),
    result("cloud", total_s=2.0, judged=0, accepted=0, kept=0, dropped=0),
    result("local", total_s=0.5, judged=0, forwards=0, messages_up=0, wire_up=0),
]
POLICIES = ["pipesd", "vanilla", "cloud", "local"]
ROWS = summarise(RESULTS, POLICIES, ["4g"])


def header(**values):
    return {
        "kind": "pipesd-bench",
        "version": 1,
        "started": "2030-01-01T00:00:00+00:00",
        "environment": {"cpu": "<b>fast</b>"},
        "settings": settings(**values).to_dict(),
    }


# ---- terminal -------------------------------------------------------------------------------


def test_the_table_has_a_line_for_each_policy_in_columns() -> None:
    lines = table(ROWS, {"4g": "4g [full-probs]"})
    assert lines[1].startswith("4g [full-probs]  (1 generations each, draft 10.0 ms a token")
    assert [line.split()[0] for line in lines[2:]] == ["policy", *POLICIES]
    assert len({len(line) for line in lines[3:]}) == 1
    texts = {row.policy: cells_of(row) for row in ROWS}
    assert texts["pipesd"]["tpt"] == "100.0"
    assert texts["pipesd"]["cloud"] == "2.00"
    assert texts["pipesd"]["best"] == "1.50"
    assert texts["vanilla"]["best"] == "best"
    assert texts["cloud"]["acceptance"] == texts["cloud"]["kept"] == "-"
    assert texts["local"]["best"] == texts["local"]["bytes"] == texts["local"]["forwards"] == "-"


def test_what_planning_took_and_the_cost_model_are_told() -> None:
    link = Learnt("pipelined", True, 0.065, 0.015, 0.0, 0.01, 0.04, 4, 1, 2, 8, 0)
    cells = [result("pipesd", planning_s=0.002, learnt=link), result("cloud")]
    assert remarks(summarise(cells, ["cloud", "pipesd"], ["4g"])) == [
        "planning and estimating: 0.20 % of the time at most",
        "link as pipesd measured it: 65.0 ms there and back, busy for 15.0 ms a message "
        "(pipelined cost model)",
    ]


def test_what_disturbed_a_measurement_is_said() -> None:
    calm = summarise([result("pipesd", load=2.0)], POLICIES, ["4g"])
    assert remarks(calm) == []
    assert load_line(calm, 2) is None
    assert load_line([], 2) is None
    disturbed = summarise(
        [
            result("pipesd", timeouts=3, load=9.0),
            result("cloud", load=9.0),
            result("cloud", prompt="b", error="gone"),
        ],
        POLICIES,
        ["4g"],
    )
    lines = table(disturbed, {})
    assert "requests repeated for want of a verdict in time: pipesd 3" in lines
    assert "failed, and left out for all: cloud 1" in lines
    assert "load 9.0 on 2 cores" in str(load_line(disturbed, 2))
    text = page(header(), disturbed, [], ["texts"], planned=3)
    assert "pipesd 3" in text
    assert "the machine was busy" in text


def test_equal_texts_are_said_and_differences_named() -> None:
    assert texts_line(0, [], "float32") == ["no texts to compare"]
    assert texts_line(compared(RESULTS), differences(RESULTS), "float32") == [
        "texts: the same in all 3 generations that asked the target"
    ]
    wrong = [result("pipesd"), *(result("cloud", f"s{i}", tokens=(7,)) for i in range(9))]
    lines = texts_line(compared(wrong), differences(wrong), "float32")
    assert lines[0] == "texts: 9 of 10 generations differ"
    assert lines[-1] == "  and 4 more"
    assert "near ties" in texts_line(10, differences(wrong), "bfloat16")[-1]


def test_failures_are_named() -> None:
    assert failures([*RESULTS, result("hsl", error="the broker ended")]) == [
        "failed: hsl in 4g, prompt a: the broker ended"
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1.0, "0 s"),
        (42.4, "42 s"),
        (95.0, "2 min"),
        (3_599.0, "1 h 00 min"),
        (9_000, "2 h 30 min"),
    ],
)
def test_durations_are_for_people(seconds, text) -> None:
    assert duration(seconds) == text


def test_progress_without_a_terminal_stays_short_but_tells_of_failures() -> None:
    stream = io.StringIO()
    progress = Progress(50, stream)
    for done in range(1, 50):
        progress.cell(done, result("pipesd"), 10.0)
    progress.cell(50, result("hsl", error="gone"), 0.0)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "[1/50] 4g pipesd a: 100.0 ms a token, about 10 s left"
    assert "4g hsl a failed: gone" in lines
    assert lines[-1].startswith("[50/50]")
    assert len(lines) == 3


# ---- plots ----------------------------------------------------------------------------------


@pytest.mark.parametrize("top", [0.003, 0.9, 1.0, 7.0, 99.0, 100.0, 12_345.0])
def test_ticks_are_round_and_end_near_the_top(top) -> None:
    ticks = nice_ticks(top)
    assert ticks[0] == 0.0
    assert 3 <= len(ticks) <= 6
    assert top * 0.6 <= ticks[-1] <= top * 1.001


def svg(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def test_bars_keep_to_their_scale_and_escape_names() -> None:
    drawn = svg(
        bars(
            "a <title>",
            [
                Bar("x & y", "system", 50.0, "50", 40.0, 60.0, (45.0, 55.0)),
                Bar("nothing", "baseline", None, "-"),
                Bar("zero", "baseline", 0.0, "0"),
            ],
            top=100.0,
        )
    )
    widths = [float(one.get("width", "0")) for one in drawn.iter("rect")]
    assert len(widths) == 2
    assert widths[1] == 0.0
    assert len(list(drawn.iter("circle"))) == 2
    assert len(list(drawn.iter("path"))) == 1
    names = [one.text for one in drawn.iter("text") if one.get("class") == "name"]
    assert names == ["x & y", "nothing", "zero"]
    svg(bars("empty", []))


def test_what_was_rolled_back_is_told_from_what_was_kept() -> None:
    drafts = [i for i, span in enumerate(TIMELINE) if span.lane == DRAFT]
    assert lost_drafts(TIMELINE) == {drafts[2]}


def test_the_typical_round_is_of_median_length() -> None:
    moments = [0.0, 0.5, 0.6, 0.75, 0.95, 1.0]
    spans = [Span(VERDICT, at, at) for at in moments]
    begin, end = typical_round(spans) or (0.0, 0.0)
    assert (begin, end) == (0.6, 0.75)
    assert typical_round(TIMELINE) is not None
    assert typical_round(spans[:1]) is None
    assert typical_round([]) is None


def test_the_picture_of_rounds_stays_within_itself() -> None:
    drawn = svg(gantt("rounds", {"pipesd": TIMELINE, "cloud": TIMELINE, "none": ()}))
    width, height = float(drawn.get("width", "0")), float(drawn.get("height", "0"))
    rects = list(drawn.iter("rect"))
    assert {one.get("class") for one in rects} >= {"draft", "forward"}
    for one in rects:
        assert float(one.get("x", "-1")) >= 0.0
        assert float(one.get("x", "0")) + float(one.get("width", "0")) <= width
        assert 0.0 <= float(one.get("y", "-1")) <= height
    names = [one.text for one in drawn.iter("text") if one.get("class") == "name"]
    assert names == ["pipesd", "cloud"]
    assert gantt("nothing", {"pipesd": ()}) == ""


# ---- page and JSON --------------------------------------------------------------------------


class Reader(HTMLParser):
    """Checks that tags nest, and collects what is asked for from elsewhere."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        if tag in ("script", "link", "img", "iframe"):
            self.outside.append(tag)
        self.outside += [value for name, value in attrs if name in ("src", "href")]

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def test_the_page_stands_alone_and_shows_every_policy() -> None:
    texts = texts_line(compared(RESULTS), differences(RESULTS), "float32")
    text = page(header(), ROWS, RESULTS, texts, planned=8)
    reader = read(text)
    assert reader.outside == []
    assert "url(" not in text
    words = " ".join(reader.text)
    for name in (*POLICIES, "4g", texts[0], "4 of 8 generations done", "<b>fast</b>"):
        assert name in words
    assert "<b>fast" not in text
    plots = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(plots) == 8
    for plot in plots:
        svg(plot)


def test_the_page_of_a_run_that_did_not_get_far() -> None:
    failed = [result("pipesd", error="the <broker> ended", tokens=())]
    text = page(header(), [], failed, texts_line(0, [], "float32"), planned=8)
    assert "the <broker> ended" in " ".join(read(text).text)


def test_json_has_everything_and_is_json() -> None:
    results = [*RESULTS, result("hsl", error="gone")]
    data = as_json(header(), ROWS, results, differences(results), planned=9)
    again = json.loads(json.dumps(data, allow_nan=False))
    assert (again["cells_planned"], again["cells_done"]) == (9, 4)
    assert len(again["cells"]) == 5
    assert again["summary"][0]["policy"] == "pipesd"
    assert again["summary"][0]["tpt_ms"] == pytest.approx(100.0)
    assert again["cells"][0]["timeline"][0] == ["draft", 0.0, 0.01, 1]
    assert again["settings"]["dtype"] == "float32"
    assert again["differences"] == []
