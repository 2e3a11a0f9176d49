"""What a device is told to work with: whose word counts for what, and what is refused."""

from __future__ import annotations

import logging
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.codec import encode
from broker.messages import Close
from broker.telemetry import DeviceConfig
from edge_agent.core.policies import POLICIES, edgellm, find_policy, pipesd
from edge_agent.core.trigger import Thresholds
from edge_agent.device_config import (
    ALL_TUNABLES,
    TUNABLES,
    RemoteConfig,
    policy_of,
    thresholds_of,
)
from edge_agent.generation import Request

GOOD = DeviceConfig(3, 0.2, 0.6)


def request(**changes: object) -> Request:
    return Request((1,), **{"tunable": ALL_TUNABLES, **changes})  # type: ignore[arg-type]


def raw(**changes: object) -> bytes:
    """A config with fields that its class would refuse."""
    kind, *values = msgpack.unpackb(encode(GOOD))
    names = ("version", "r1", "r2", "window", "policy", "schema")
    fields = dict(zip(names, values, strict=True)) | changes
    return msgpack.packb([kind, *fields.values()])


def test_a_config_sets_the_thresholds_of_the_default_policy() -> None:
    policy = policy_of(GOOD, request())
    assert policy == replace(pipesd(), thresholds=Thresholds(0.2, 0.6))
    assert policy_of(replace(GOOD, window=9), request()).thresholds == Thresholds(0.2, 0.6, 9)
    assert policy_of(None, request()) == pipesd()


def test_what_was_asked_for_by_hand_stays() -> None:
    own = Thresholds(0.9, 0.8, 7)
    config = replace(GOOD, window=9, policy="hsl")
    assert policy_of(config, Request((1,), thresholds=own)).thresholds == own
    kept = policy_of(replace(GOOD, window=9), request(thresholds=own, tunable={"r2"}))
    assert kept.thresholds == Thresholds(0.9, 0.6, 7)
    hsl = policy_of(config, request(thresholds=own, tunable=frozenset({"policy", "r2"})))
    assert (hsl.name, hsl.thresholds) == ("hsl", Thresholds(0.9, 0.6, 7))


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"pipesd"}))
def test_other_policies_keep_their_own_thresholds_unless_they_are_named(name: str) -> None:
    policy = find_policy(name)
    asked = request(policy=policy)
    assert policy_of(GOOD, asked) == policy
    if name != "local":
        named = policy_of(replace(GOOD, policy=name), asked)
        assert (named.name, named.thresholds.r1, named.thresholds.r2) == (name, 0.2, 0.6)


def test_a_named_policy_brings_its_own_window() -> None:
    policy = policy_of(replace(GOOD, policy="edgellm"), request())
    assert policy.thresholds == Thresholds(0.2, 0.6, edgellm().thresholds.window)
    assert policy.adapt_r1


def test_thresholds_for_one_policy_are_not_another_ones() -> None:
    """A generation runs by pipesd while a config comes that means hsl."""
    config = replace(GOOD, policy="hsl")
    assert thresholds_of(config, request(), pipesd()) == Thresholds()
    assert thresholds_of(config, request(), find_policy("hsl")).r2 == 0.6
    # Asked for by a flag, so that the policy stays; the config does not mean it.
    pinned = request(tunable=ALL_TUNABLES - {"policy"})
    assert policy_of(config, pinned) == pipesd()


@pytest.mark.parametrize(
    ("payload", "cause"),
    [
        (raw(r1=2.0), "fields"),
        (raw(r1=float("nan")), "fields"),
        (raw(r2=-0.1), "fields"),
        (raw(r2="0.5"), "fields"),
        (raw(window=513), "fields"),
        (raw(version=-1), "fields"),
        (raw(version=0), "version"),
        (raw(policy="best"), "policy"),
        (raw(policy="local"), "policy"),
        (raw(schema=2), "schema"),
        (raw(schema=0), "schema"),
        (encode(Close(1)), "unexpected_kind"),
        (encode(GOOD)[:-2], "msgpack"),
        (b"\x9f\xfd\x74\xf7\xdd\x74\xff\xfd\xbd", "msgpack"),
        (b"{}", "msgpack"),
    ],
)
def test_a_wrong_config_changes_nothing_and_is_counted(
    payload: bytes, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    remote = RemoteConfig()
    assert remote.take(encode(GOOD))
    with caplog.at_level(logging.WARNING):
        assert not remote.take(payload)
        assert not remote.take(payload)
    assert (remote.current, remote.version) == (GOOD, 3)
    assert remote.rejected == {cause: 2}
    assert len(caplog.records) == 1, "said once"
    assert "version 3 stays in force" in caplog.text


def test_the_same_config_again_is_no_change_and_an_empty_one_takes_it_back() -> None:
    remote = RemoteConfig()
    assert not remote.take(b"")
    assert remote.take(encode(GOOD))
    assert not remote.take(encode(GOOD))
    assert remote.take(encode(replace(GOOD, version=1))), "versions are not compared by size"
    assert remote.take(b"")
    assert (remote.current, remote.version) == (None, 0)
    assert not remote.rejected


@given(st.binary(max_size=64))
def test_no_payload_raises(payload: bytes) -> None:
    remote = RemoteConfig()
    remote.take(payload)
    assert remote.current is None or remote.current.version > 0


@given(
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.integers(0, 512),
    st.sampled_from(["", *sorted(set(POLICIES) - {"local"})]),
    st.sampled_from(sorted(POLICIES)),
    st.sets(st.sampled_from(TUNABLES)),
)
def test_any_config_leaves_a_policy_that_can_be(r1, r2, window, told, own, tunable) -> None:
    asked = request(policy=find_policy(own), tunable=frozenset(tunable))
    policy = policy_of(DeviceConfig(1, r1, r2, window, told), asked)
    assert policy.name in {own, told}
    for name in {"r1", "r2", "window"} - tunable:
        assert getattr(policy.thresholds, name) == getattr(asked.policy.thresholds, name)
    if "policy" not in tunable:
        assert policy.name == own
