"""The cases of broken systems, over a real broker, through the runtimes of both sides."""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from broker.errors import TransportError
from broker.messages import VERIFY_TRIGGERED
from broker.transport import ConnectionState
from edge_agent.core.policies import POLICIES, find_policy
from edge_agent.core.timing import Timing
from edge_agent.draft import DraftModel
from edge_agent.generate import TextStream
from edge_agent.scripted_draft import ByteText, always_right, always_wrong, sometimes_right
from tests.brokers import MosquittoBroker, free_port, wait_until
from tests.system import (
    ONE_BY_ONE,
    PROMPT,
    VOCAB,
    Device,
    PacedTarget,
    Replica,
    chooser,
    collect,
    continuation,
    scripted_draft,
    text_script,
)

CUT_AT, BATCHES = 400, 1000
UP = [ConnectionState.CONNECTED]


def mostly_right(quality: float = 0.8) -> DraftModel:
    return scripted_draft(sometimes_right(chooser(), VOCAB, quality, seed=3))


def wrong() -> DraftModel:
    return scripted_draft(always_wrong(chooser(), VOCAB))


# ---- connections ----------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["device", "verifier"])
def test_a_cut_in_the_middle_of_1000_batches_changes_nothing(url: str, whose: str) -> None:
    """Case 1. Each batch is one token that is wrong, so that 1000 rounds make 1000 tokens."""
    with (
        Replica(url, PacedTarget(), relayed=whose == "verifier") as replica,
        Device(url, wrong(), relayed=whose == "device") as device,
    ):
        running = device.run(max_tokens=BATCHES, thresholds=ONE_BY_ONE, verify=VERIFY_TRIGGERED)
        assert running.reached(CUT_AT)
        link = (device if whose == "device" else replica).transport
        link.cut()
        assert len(running.tokens) < BATCHES, "the cut came too late to be one"
        assert running.wait() == continuation(PROMPT, BATCHES)
        assert wait_until(lambda: link.states[-1] is ConnectionState.CONNECTED)
        assert ConnectionState.DISCONNECTED in link.states
        stats = running.generation.stats
    assert stats.contradictions == 0
    assert stats.accepted == 0
    assert stats.target_tokens == stats.forwards == BATCHES
    assert running.generation.verified
    assert replica.core.stats.rejected == {}
    # A new attachment after the cut may judge again what was on its way; nothing more than that.
    assert BATCHES <= replica.core.stats.committed <= BATCHES + 2 * (1 + stats.reopens)


def test_many_cuts_in_a_row_change_nothing(url: str) -> None:
    """Case 1 at its worst: the device's connection dies again and again, at any point."""
    with Replica(url, PacedTarget()), Device(url, mostly_right(), relayed=True) as device:
        running = device.run(max_tokens=3000, timing=Timing(offline_after=1e6))
        for count in (100, 600, 601, 1200, 1800, 2400):
            assert running.reached(count)
            device.transport.cut()
        assert running.wait() == continuation(PROMPT, 3000)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "local"])
def test_a_cut_changes_nothing_under_any_policy(url: str, name: str) -> None:
    with (
        Replica(url, PacedTarget(seconds=0.001)),
        Device(url, mostly_right(), relayed=True) as device,
    ):
        running = device.run(max_tokens=300, policy=find_policy(name))
        for count in (50, 150):
            assert running.reached(count)
            device.transport.cut()
        assert running.wait() == continuation(PROMPT, 300)
        assert running.generation.verified


def test_a_restarted_broker_gets_its_subscriptions_back(tmp_path: Path) -> None:
    """Case 4: the next draft after the restart has its verdict, in the same generation."""
    port = free_port()
    broker = MosquittoBroker(tmp_path, port=port).start()
    try:
        with (
            Replica(broker.url, PacedTarget(seconds=0.002)) as replica,
            Device(broker.url, mostly_right()) as device,
        ):
            running = device.run(max_tokens=400)
            assert running.reached(40)
            broker.stop()
            assert wait_until(lambda: not device.transport.connected)
            assert wait_until(lambda: not replica.transport.connected)
            broker.start()
            assert running.wait() == continuation(PROMPT, 400)
            assert device.write(max_tokens=20) == continuation(PROMPT, 20)
    finally:
        broker.stop()


def test_both_sides_may_start_before_the_broker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 5: they wait, say so once, and connect."""
    port = free_port()
    broker = MosquittoBroker(tmp_path, port=port)
    replica = Replica(broker.url, PacedTarget(), "early")
    device = Device(broker.url, mostly_right(), "early")
    with caplog.at_level(logging.WARNING, logger="broker"):
        replica.start(connected=False)
        device.start(connected=False)
        try:
            running = device.run(max_tokens=50)
            down = [ConnectionState.DISCONNECTED]
            for side in (device, replica):
                transport = side.transport
                assert wait_until(lambda transport=transport: transport.states == down)
            time.sleep(1.5)  # several attempts of each
            assert device.transport.states == replica.transport.states == down
            broker.start()
            assert running.wait() == continuation(PROMPT, 50)
            assert device.transport.states == [*down, *UP]
        finally:
            device.stop()
            replica.stop()
            broker.stop()
    said = [record.getMessage() for record in caplog.records if "trying again" in record.message]
    assert len(said) == 2, said
    assert all(f"127.0.0.1:{port}" in line for line in said)


def test_a_slow_verification_costs_no_connection(url: str) -> None:
    """Case 7: the target works longer than one and a half keep-alives."""
    keepalive = {"keepalive": 2}
    with (
        Replica(url, PacedTarget(seconds=5.0), transport=keepalive) as replica,
        Device(url, mostly_right(), transport=keepalive) as device,
    ):
        # A prompt of one token, so that there is no forward for the rest of it.
        assert device.write((7,), max_tokens=1) == continuation((7,), 1)
        assert device.transport.states == replica.transport.states == UP
        assert device.transport.reconnects == replica.transport.reconnects == 0


def test_a_verifier_that_was_away_answers_again(url: str) -> None:
    """Case 10, with one replica: the session waits and is taken on by the same one."""
    with (
        Replica(url, PacedTarget(seconds=0.002), relayed=True) as replica,
        Device(url, mostly_right()) as device,
    ):
        running = device.run(max_tokens=300)
        assert running.reached(30)
        replica.transport.vanish()
        held = wait_until(lambda: not replica.transport.connected)
        before = len(running.tokens)
        time.sleep(3)
        assert held
        assert len(running.tokens) <= before + 24
        replica.transport.come_back()
        assert running.wait() == continuation(PROMPT, 300)
        assert running.generation.verified


def test_without_its_verifier_a_session_moves_to_another(url: str) -> None:
    """Case 10, with two replicas."""
    with (
        Replica(url, PacedTarget(seconds=0.002), relayed=True) as first,
        Device(url, mostly_right()) as device,
    ):
        running = device.run(max_tokens=300)
        assert running.reached(30)
        with Replica(url, PacedTarget(seconds=0.002)) as second:
            first.transport.vanish()
            begin = time.monotonic()
            assert running.wait() == continuation(PROMPT, 300)
            assert time.monotonic() - begin < 20
            assert running.generation.verifier == second.name
            assert second.core.stats.opens == 1


def test_the_second_device_of_a_name_is_told_so(url: str) -> None:
    """Case 9, through the agent: one error that names the id; the first one's text is untouched."""
    with Replica(url, PacedTarget(seconds=0.005)), Device(url, mostly_right(), "twin") as first:
        running = first.run(max_tokens=100_000)
        assert running.reached(10)
        with Device(url, mostly_right(), "twin") as second:
            with pytest.raises(TransportError, match="another client uses the id 'device-twin'"):
                second.write(max_tokens=100_000)
            assert second.transport.states[-1] is ConnectionState.FAILED
        assert running.reached(len(running.tokens) + 20)
        running.generation.cancel()
        tokens = running.wait()
        assert tokens == continuation(PROMPT, len(tokens))


def test_a_prompt_above_the_packet_limit_is_a_local_error(tmp_path: Path) -> None:
    """Case 17: named, with the link up, and the next generation as if nothing had been."""
    with (
        MosquittoBroker(tmp_path, "max_packet_size 2000") as broker,
        Replica(broker.url, PacedTarget()),
        Device(broker.url, mostly_right()) as device,
    ):
        with pytest.raises(
            TransportError, match=r"payload of \d+ bytes.*limit of 1\d\d\d bytes"
        ) as e:
            device.write(prompt=[200] * 3000, max_tokens=5)
        assert e.value.reason_code == 0x95
        assert device.transport.states == UP
        assert device.write(max_tokens=50) == continuation(PROMPT, 50)
        assert device.transport.states == UP


def test_a_round_takes_a_few_milliseconds(url: str) -> None:
    """Case 20: far below the 40 ms that Nagle's algorithm would cost."""
    with Replica(url, PacedTarget()), Device(url, wrong()) as device:
        times = [time.monotonic()]
        generation = device.generate(max_tokens=200, thresholds=ONE_BY_ONE, max_ahead=1)
        times += [time.monotonic() for _ in generation]
    rounds = [after - before for before, after in itertools.pairwise(times)]
    assert len(rounds) == 200
    assert statistics.median(rounds) < 0.010


def test_a_right_draft_is_accepted_whole(url: str) -> None:
    """The other end of case 1: where every draft is right, a forward brings a window and one."""
    with (
        Replica(url, PacedTarget()) as replica,
        Device(url, scripted_draft(always_right(chooser()))) as device,
    ):
        generation = device.generate(max_tokens=170, verify=VERIFY_TRIGGERED)
        tokens = [token for commit in generation for token in commit.tokens]
        assert tokens == continuation(PROMPT, 170)
        assert generation.stats.rolled_back == 0
        assert generation.stats.accepted == replica.core.stats.accepted
        assert generation.stats.forwards <= 170 / 5


# ---- models that fail -----------------------------------------------------------------------


def test_a_target_that_fails_gives_its_sessions_back(url: str) -> None:
    """They attach again and lose nothing; the replica serves on."""
    with (
        Replica(url, PacedTarget(fail_at=[4, 9])) as replica,
        Device(url, mostly_right()) as device,
    ):
        generation = device.generate(max_tokens=200)
        assert collect(generation) == continuation(PROMPT, 200)
        assert generation.stats.reopens == replica.core.stats.forward_failures == 2
        assert generation.verified


def test_without_its_draft_a_device_goes_on_with_the_target_alone(url: str) -> None:
    oracle = sometimes_right(chooser(), VOCAB, 0.8, seed=3)
    with Replica(url, PacedTarget()), Device(url, scripted_draft(oracle, fail_at=[20])) as device:
        generation = device.generate(max_tokens=60)
        assert collect(generation) == continuation(PROMPT, 60)
        assert generation.draft_error is not None
        assert generation.stats.drafted == 19


# ---- text -----------------------------------------------------------------------------------


def byte_system(url: str, text: str, quality: float) -> tuple[Replica, Device]:
    """A target that writes ``text`` byte by byte after PROMPT, and a draft of it."""
    script = text_script(len(PROMPT), list(text.encode()), ByteText.eos)
    options: dict[str, Any] = {"vocab_size": ByteText.vocab_size, "eos_ids": [ByteText.eos]}
    oracle = sometimes_right(chooser(script), ByteText.vocab_size, quality, seed=5)
    return (
        Replica(url, PacedTarget(script, **options)),
        Device(url, scripted_draft(oracle, **options)),
    )


@pytest.mark.parametrize("quality", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (["quick"], "The "),
        (["x jumps o"], "The quick brown fo"),
        (["lazy dog", "the"], "The quick brown fox jumps over "),
        (["The"], ""),
        (["nowhere", "lazy cow"], "The quick brown fox jumps over the lazy dog"),
        (["dog"], "The quick brown fox jumps over the lazy "),
    ],
)
def test_stop_strings_cut_exactly(
    url: str, stops: Sequence[str], expected: str, quality: float
) -> None:
    """Case 22: in the middle of a block, over two blocks; the verifier's place is given back."""
    replica, device = byte_system(url, "The quick brown fox jumps over the lazy dog", quality)
    with replica, device:
        stream = TextStream(device.generate(max_tokens=100), ByteText(), stops=stops)
        shown = ""
        for piece in stream:
            shown += piece.text
            assert expected.startswith(shown), "a piece of the stop string was shown"
        assert shown == expected == stream.summary().text
        assert stream.summary().finish_reason == "stop"
        assert wait_until(lambda: replica.sessions == 0)


@pytest.mark.parametrize("quality", [0.0, 0.6, 1.0])
def test_characters_arrive_whole(url: str, quality: float) -> None:
    """Case 32: each piece is text by itself, although a token is a byte here."""
    text = "ďábelské 🦙 čau 日本語 e\u0301 👩‍👩‍👧 " * 3
    replica, device = byte_system(url, text, quality)
    with replica, device:
        stream = TextStream(device.generate(max_tokens=1000), ByteText())
        pieces = [piece.text for piece in stream]
    assert "".join(pieces) == text == stream.summary().text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


def test_a_character_that_the_limit_cuts_is_not_shown(url: str) -> None:
    """Case 32, at the end: half a llama is no llama."""
    replica, device = byte_system(url, "ab🦙", 1.0)
    with replica, device:
        stream = TextStream(device.generate(max_tokens=4), ByteText())
        assert "".join(piece.text for piece in stream) == "ab"
        assert stream.summary().finish_reason == "length"
        assert stream.summary().tokens == 4


# ---- many sessions --------------------------------------------------------------------------


def test_two_generations_at_once_on_one_agent(url: str) -> None:
    """Case 31."""
    with Replica(url, PacedTarget(seconds=0.001)) as replica, Device(url, mostly_right()) as device:
        prompts = [(5, 6, 7), (9,)]
        running = [device.run(prompt, 300) for prompt in prompts]
        for prompt, one in zip(prompts, running, strict=True):
            assert one.wait() == continuation(prompt, 300)
        assert replica.core.stats.opens == 2
        assert wait_until(lambda: replica.sessions == 0)


def test_one_of_two_generations_can_be_cancelled(url: str) -> None:
    """Case 31, and 43 for the one: it ends soon, on the verifier too; the other is untouched."""
    with Replica(url, PacedTarget(seconds=0.001)) as replica, Device(url, mostly_right()) as device:
        dull, wanted = device.run((5, 6, 7), 100_000), device.run((9,), 300)
        assert dull.reached(10)
        dull.generation.cancel()
        assert len(dull.wait(5)) < 100_000
        assert dull.generation.finish == "cancelled"
        assert wanted.wait() == continuation((9,), 300)
        assert wait_until(lambda: replica.sessions == 0)


def test_a_device_that_stops_gives_its_places_back(url: str) -> None:
    """In order, also while other threads wait for tokens; without waiting for their consumers."""
    with Replica(url, PacedTarget(seconds=0.01)) as replica:
        with Device(url, mostly_right()) as device:
            running = [device.run((number, 1), 100_000) for number in range(3)]
            assert all(one.reached(1) for one in running)
        for one in running:
            one.wait(5)
            assert one.generation.finish == "cancelled"
        assert wait_until(lambda: replica.sessions == 0)
        assert replica.core.stats.closed == 3
        with Device(url, mostly_right()) as device:
            held = iter(device.generate(max_tokens=100_000))
            next(held)  # and never again
            begin = time.monotonic()
            device.stop()
            assert time.monotonic() - begin < 2.0


def test_two_verifiers_share_the_sessions_and_one_dies(url: str) -> None:
    """Each session is taken by exactly one replica, and moves when that one is gone."""
    targets = [PacedTarget(seconds=0.005), PacedTarget(seconds=0.005)]
    with (
        Replica(url, targets[0], relayed=True) as first,
        Replica(url, targets[1]) as second,
        Device(url, mostly_right()) as device,
    ):
        prompts = [(number, 1) for number in range(8)]
        running = [device.run(prompt, 400) for prompt in prompts]
        assert all(one.reached(1) for one in running)
        assert first.core.stats.opens + second.core.stats.opens == len(prompts)
        assert first.sessions > 0, "the broker gave one replica everything"
        assert second.sessions > 0, "the broker gave one replica everything"
        moving = {
            one.generation.session for one in running if one.generation.verifier == first.name
        }
        assert moving
        first.transport.vanish()
        for prompt, one in zip(prompts, running, strict=True):
            assert one.wait() == continuation(prompt, 400)
            assert one.generation.verified
            assert one.generation.verifier == second.name
        assert second.core.stats.opens == len(prompts)
        assert wait_until(lambda: second.sessions == 0)


def test_a_leaving_verifier_hands_its_sessions_over(url: str) -> None:
    """An orderly stop: the sessions go on elsewhere without waiting for any timer."""
    first, second = (
        Replica(url, PacedTarget(seconds=0.005)),
        Replica(url, PacedTarget(seconds=0.005)),
    )
    with Device(url, mostly_right()) as device, second:
        with first:
            running = [device.run((number, 1), 300) for number in range(6)]
            assert all(one.reached(1) for one in running)
        for number, one in enumerate(running):
            assert one.wait() == continuation((number, 1), 300)
            assert one.generation.stats.reopens <= 1
