"""Topic filters: what is legal and what matches what (MQTT 5, clauses 4.7 and 4.8.2).

Both transports judge by these rules, so that a topic which the in-memory broker takes is one that
a real broker takes as well. A broken topic or filter is a bug of the caller: LocalProtocolError.
"""

from __future__ import annotations

from typing import NamedTuple

from broker.errors import LocalProtocolError

#: Longest topic or filter in bytes of UTF-8 (MQTT 5, 4.7.3).
MAX_TOPIC_BYTES = 65_535


class Filter(NamedTuple):
    """A filter taken apart. ``group``: the share group of ``$share/<group>/…``, else None."""

    group: str | None
    levels: tuple[str, ...]


def check_topic(topic: str) -> None:
    """Raise LocalProtocolError unless one may publish to ``topic`` (MQTT 5, 3.3.2.1)."""
    if not topic or "+" in topic or "#" in topic or "\0" in topic:
        raise LocalProtocolError(f"cannot publish to {topic[:120]!r}: empty or with a wildcard")
    if len(topic) > MAX_TOPIC_BYTES // 4 and len(topic.encode()) > MAX_TOPIC_BYTES:
        raise LocalProtocolError(f"topic {topic[:40]!r}… is longer than {MAX_TOPIC_BYTES} bytes")


def parse_filter(topic_filter: str) -> Filter:
    """Take a filter apart. Raises LocalProtocolError where a broker would refuse it."""
    group: str | None = None
    rest = topic_filter
    if topic_filter.startswith("$share/"):
        _, group, rest = [*topic_filter.split("/", 2), "", ""][:3]
        if not group or "+" in group or "#" in group:
            raise LocalProtocolError(f"filter {topic_filter[:120]!r} names no share group")
    levels = tuple(rest.split("/"))
    if not rest or "\0" in rest or len(topic_filter.encode()) > MAX_TOPIC_BYTES:
        raise LocalProtocolError(f"filter {topic_filter[:120]!r} is empty or too long")
    for place, level in enumerate(levels):
        if "#" in level and (level != "#" or place != len(levels) - 1):
            raise LocalProtocolError(f"filter {topic_filter[:120]!r}: # must stand alone, and last")
        if "+" in level and level != "+":
            raise LocalProtocolError(f"filter {topic_filter[:120]!r}: + must be a whole level")
    return Filter(group, levels)


def levels_match(levels: tuple[str, ...], topic: list[str]) -> bool:
    """Whether filter levels match the levels of a topic; see ``matches``."""
    if topic[0].startswith("$") and levels[0] in ("+", "#"):
        return False  # 4.7.2: wildcards in first place do not reach the broker's own topics
    for place, level in enumerate(levels):
        if level == "#":
            return True
        if place >= len(topic) or level not in ("+", topic[place]):
            return False
    return len(levels) == len(topic)


def matches(topic_filter: str, topic: str) -> bool:
    """Whether a message to ``topic`` goes to a subscriber of ``topic_filter``.

    A share group in front is left out of account: it decides who of the group gets the message,
    not which messages. Raises LocalProtocolError for a broken filter.
    """
    return levels_match(parse_filter(topic_filter).levels, topic.split("/"))
