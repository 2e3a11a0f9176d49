"""What a topic filter matches, against a slow and obvious model."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import LocalProtocolError
from broker.filters import MAX_TOPIC_BYTES, check_topic, matches, parse_filter
from broker.topics import OPEN_SHARED, VERIFIER_STATUS_ALL, open_topic, verifier_status_topic


@pytest.mark.parametrize(
    ("topic_filter", "topic", "expected"),
    [
        ("a/b", "a/b", True),
        ("a/b", "a/b/c", False),
        ("a/+", "a/b", True),
        ("a/+", "a", False),
        ("a/+", "a/", True),
        ("+", "/a", False),
        ("+/+", "/a", True),
        ("a/#", "a", True),
        ("a/#", "a/b/c", True),
        ("#", "a/b", True),
        ("#", "$SYS/x", False),
        ("+/x", "$SYS/x", False),
        ("$SYS/#", "$SYS/x", True),
        ("$share/g/a/+", "a/b", True),
        ("$share/g/a/+", "a/b/c", False),
        (OPEN_SHARED, open_topic("pi", "s1"), True),
        (OPEN_SHARED, "pipesd/1/pi/s1/down", False),
        (VERIFIER_STATUS_ALL, verifier_status_topic("v1"), True),
    ],
)
def test_examples(topic_filter: str, topic: str, expected: bool) -> None:
    assert matches(topic_filter, topic) is expected


LEVEL = st.text(alphabet="ab", max_size=2)


@settings(deadline=None)
@given(
    st.lists(st.one_of(LEVEL, st.just("+")), min_size=1, max_size=4),
    st.booleans(),
    st.lists(LEVEL, min_size=1, max_size=5),
)
def test_agrees_with_a_regular_expression(
    levels: list[str], open_end: bool, topic_levels: list[str]
) -> None:
    topic_filter = "/".join(levels) + ("/#" if open_end else "")
    topic = "/".join(topic_levels)
    if not topic_filter or not topic:
        return
    pattern = "/".join("[^/]*" if level == "+" else re.escape(level) for level in levels)
    expected = re.fullmatch(pattern + ("(/.*)?" if open_end else ""), topic) is not None
    assert matches(topic_filter, topic) is expected


def test_shared_filters_are_taken_apart() -> None:
    assert parse_filter("$share/g/a/b") == ("g", ("a", "b"))
    assert parse_filter("a/b") == (None, ("a", "b"))


@pytest.mark.parametrize(
    "topic_filter",
    ["", "a/#/b", "a#", "a+", "+a/b", "a/b\0", "$share/", "$share/g", "$share/g/", "$share/+/a"],
)
def test_broken_filters(topic_filter: str) -> None:
    with pytest.raises(LocalProtocolError):
        parse_filter(topic_filter)


def test_longest_topic() -> None:
    check_topic("a" * MAX_TOPIC_BYTES)
    check_topic("é" * (MAX_TOPIC_BYTES // 2))
    for topic in ("a" * (MAX_TOPIC_BYTES + 1), "é" * (MAX_TOPIC_BYTES // 2 + 1), "", "+", "a/#"):
        with pytest.raises(LocalProtocolError):
            check_topic(topic)
