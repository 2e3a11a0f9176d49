"""Topic names: what is built can be parsed, what cannot be in a topic is refused early."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import ConfigError, RemoteProtocolError
from broker.filters import matches
from broker.topics import (
    OPEN_SHARED,
    VERIFIER_STATUS_ALL,
    SessionTopic,
    check_device_id,
    check_id,
    down_filter,
    down_topic,
    open_topic,
    parse_session_topic,
    parse_verifier_status_topic,
    status_topic,
    up_filter,
    up_topic,
    verifier_status_topic,
)

ids = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
devices = ids.filter(lambda text: not text.startswith("_"))
BAD_IDS = [
    "", "pi+1/#", "a/b", "a+", "#", "$share", "a b", "é", "a\n", "a" * 65, "a.b", "²", None, 5,
]  # fmt: skip


@pytest.mark.parametrize("value", BAD_IDS)
def test_ids_that_cannot_be_part_of_a_topic(value) -> None:
    """Case 11: refused when configured, naming what and which value."""
    for check in (lambda: check_id("--id", value), lambda: check_device_id(value, "--id")):
        with pytest.raises(ConfigError) as caught:
            check()
        assert str(caught.value).startswith(f"--id {value!r} cannot")
        assert "\n" not in str(caught.value)
        assert caught.value.exit_code == 2


def test_a_device_id_leaves_the_systems_names_alone() -> None:
    assert check_id("--id", "_x") == "_x"
    with pytest.raises(ConfigError, match="begins with _"):
        check_device_id("_verifiers")


@given(devices, ids, ids)
def test_topics_come_back(device, session, verifier) -> None:
    assert check_device_id(device) == device
    assert parse_session_topic(open_topic(device, session)) == SessionTopic(
        device, session, "open", None
    )
    assert parse_session_topic(up_topic(device, session, verifier)) == SessionTopic(
        device, session, "up", verifier
    )
    assert parse_session_topic(down_topic(device, session)) == SessionTopic(
        device, session, "down", None
    )
    assert parse_verifier_status_topic(verifier_status_topic(verifier)) == verifier


@given(devices, ids, ids)
def test_subscriptions_reach_what_they_are_for(device, session, verifier) -> None:
    shared = OPEN_SHARED.split("/", 2)[2]
    assert matches(shared, open_topic(device, session))
    assert matches(up_filter(verifier), up_topic(device, session, verifier))
    assert matches(down_filter(device), down_topic(device, session))
    assert matches(VERIFIER_STATUS_ALL, verifier_status_topic(verifier))
    for topic in (down_topic(device, session), status_topic(device)):
        assert not matches(shared, topic)
        assert not matches(up_filter(verifier), topic)
        assert not matches(VERIFIER_STATUS_ALL, topic)
    assert not matches(down_filter(device), open_topic(device, session))


@given(devices, ids, ids)
def test_a_device_stays_below_its_own_name(device, session, verifier) -> None:
    """So that a pattern of the broker can confine it."""
    for topic in (
        open_topic(device, session),
        up_topic(device, session, verifier),
        status_topic(device),
    ):
        assert topic.startswith(f"pipesd/1/{device}/")


@pytest.mark.parametrize(
    "topic",
    [
        "",
        "pipesd/1/d/s",
        "pipesd/1/d/s/open/x",
        "pipesd/1/d/s/up",
        "pipesd/1/d/s/down/x",
        "pipesd/1/d/s/sideways",
        "pipesd/2/d/s/open",
        "other/1/d/s/open",
        "pipesd/1//s/open",
        "pipesd/1/d//open",
        "pipesd/1/d/s/up/",
        "pipesd/1/_verifiers/s/open",
        "pipesd/1/_d/s/down",
        "pipesd/1/d/s s/open",
        "pipesd/1/" + "d" * 65 + "/s/open",
        "pipesd/1/d/s/up/v/x",
        "/pipesd/1/d/s/open",
    ],
)
def test_other_topics_are_counted_as_such(topic) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        parse_session_topic(topic)
    assert caught.value.cause == "topic"
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "topic",
    [
        "pipesd/1/_verifiers/v/status/x",
        "pipesd/1/_verifiers//status",
        "pipesd/1/_verifiers/v/load",
        "pipesd/1/d/v/status",
        "pipesd/1/_verifiers/a b/status",
        "pipesd/1/d/status",
    ],
)
def test_other_status_topics(topic) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        parse_verifier_status_topic(topic)
    assert caught.value.cause == "topic"


@given(st.text(max_size=60))
def test_any_text_is_a_topic_or_an_error(topic) -> None:
    for parse in (parse_session_topic, parse_verifier_status_topic):
        try:
            parsed = parse(topic)
        except RemoteProtocolError:
            continue
        assert parsed
