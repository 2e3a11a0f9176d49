"""Devices that break the rules, against a real broker: each is answered or counted, and no other
session notices. What is no message at all is in test_junk.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import pytest

from broker.codec import decode, encode
from broker.errors import Refused as RefusedError
from broker.messages import (
    CLOSED_TOKEN,
    CLOSED_UNKNOWN,
    REFUSED_BUSY,
    REFUSED_PROMPT,
    REFUSED_TOKEN,
    VERIFY_STREAM,
    Accepted,
    Close,
    Closed,
    DraftBatch,
    Refused,
    Resync,
    SessionOpen,
    Verdict,
)
from broker.mqtt import MqttSettings, MqttTransport
from broker.sampling import Sampling
from broker.topics import down_filter, open_topic, parse_session_topic, up_topic
from broker.transport import ConnectionState, Message
from edge_agent.core.policies import find_policy
from edge_agent.core.trigger import Thresholds
from edge_agent.draft import DraftModel
from edge_agent.scripted_draft import always_right, sometimes_right
from tests.brokers import wait_until
from tests.system import (
    PATIENCE,
    PROMPT,
    VOCAB,
    VOCAB_HASH,
    Device,
    PacedTarget,
    Replica,
    Running,
    chooser,
    continuation,
    scripted_draft,
)

UP = [ConnectionState.CONNECTED]
#: Tokens that a bystander must still write after whatever was done.
ON = 30


def mostly_right() -> DraftModel:
    return scripted_draft(sometimes_right(chooser(), VOCAB, 0.8, seed=3))


@contextmanager
def bystander(url: str, replica: Replica) -> Iterator[Running]:
    """Somebody who writes meanwhile, and must notice nothing at all."""
    with Device(url, mostly_right()) as device:
        running = device.run(max_tokens=100_000)
        assert running.reached(5)
        yield running
        assert running.reached(len(running.tokens) + ON)
        running.generation.cancel()
        tokens = running.wait()
        assert tokens == continuation(PROMPT, len(tokens))
        assert running.generation.verified
        assert running.generation.stats.reopens == 0
        assert device.transport.states == replica.transport.states == UP
        assert replica.transport.callback_errors == replica.runtime.core_faults == 0


class Hand:
    """A device by hand: says what it is told to, and keeps all answers by session."""

    def __init__(self, url: str, name: str = "") -> None:
        self.name = name or f"hand-{secrets.token_hex(3)}"
        self.heard: list[tuple[str, Any]] = []
        options = {"max_queued": 100_000, "backoff_min": 0.05, "backoff_max": 0.2}
        settings = MqttSettings.from_url(url, f"device-{self.name}", **options)
        self.transport = MqttTransport(settings)
        self.transport.subscribe(down_filter(self.name), qos=1)

    def _on_message(self, message: Message) -> None:
        session = parse_session_topic(message.topic).session
        self.heard.append((session, decode(message.payload)))

    def open(self, session: str, attach: int = 1, **fields: Any) -> None:
        wanted: dict[str, Any] = {
            "prompt": PROMPT,
            "committed": (),
            "sampling": Sampling(),
            "max_tokens": 100,
            "vocab_hash": VOCAB_HASH,
            **fields,
        }
        payload = encode(SessionOpen(attach, **wanted))
        self.transport.publish(open_topic(self.name, session), payload, qos=1)

    def say(self, session: str, replica: Replica, message: Any) -> None:
        payload = message if isinstance(message, bytes) else encode(message)
        self.transport.publish(up_topic(self.name, session, replica.name), payload, qos=1)

    def told(self, session: str, kind: type) -> list[Any]:
        return [m for of, m in list(self.heard) if of == session and type(m) is kind]

    def answer(self, session: str, kind: type, count: int = 1) -> Any:
        """The ``count``-th message of that kind for the session, waited for."""
        assert wait_until(lambda: len(self.told(session, kind)) >= count, PATIENCE), self.heard
        return self.told(session, kind)[count - 1]

    def __enter__(self) -> Hand:
        self.transport.start(self._on_message, lambda event: None)
        assert wait_until(lambda: self.transport.connected, PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self.transport.stop()


def test_a_device_that_opens_sessions_without_end(url: str) -> None:
    """Refused as busy beyond the limit, with a time to come back; who waits has its turn."""
    limit, tries = 8, 300
    with (
        Replica(url, PacedTarget(seconds=0.002), max_sessions=limit, busy_retry=0.2) as replica,
        bystander(url, replica),
        Hand(url) as hog,
    ):
        for number in range(tries):
            hog.open(f"s{number}")
        answered = (Accepted, Refused)
        assert wait_until(
            lambda: sum(type(m) in answered for _, m in list(hog.heard)) == tries, PATIENCE
        )
        refused = [m for _, m in hog.heard if isinstance(m, Refused)]
        assert len(refused) == tries - (limit - 1)
        assert {m.reason for m in refused} == {REFUSED_BUSY}
        assert all(m.retry_after > 0 for m in refused)
        assert replica.sessions == limit
        assert replica.core.stats.refusals == len(refused)
        with Device(url, mostly_right()) as device:
            patient = device.run(max_tokens=40)
            assert wait_until(lambda: patient.generation.stats.refusals >= 1, PATIENCE)
            for session in [of for of, m in hog.heard if isinstance(m, Accepted)]:
                hog.say(session, replica, Close(1))
            assert patient.wait() == continuation(PROMPT, 40)
        assert wait_until(lambda: replica.sessions == 1, PATIENCE)


def test_a_device_that_never_reads(url: str) -> None:
    """Verdicts pile up for it at the broker, which is nobody else's concern."""
    released = threading.Event()
    with (
        Replica(url, PacedTarget(seconds=0.001)) as replica,
        bystander(url, replica),
        Hand(url) as sender,
    ):
        mute = MqttTransport(MqttSettings.from_url(url, "mute"))
        mute.subscribe(down_filter(sender.name), qos=1)
        # Its one thread stays in the first message: nothing is read from the socket any more.
        mute.start(lambda message: released.wait(), lambda event: None)
        try:
            assert wait_until(lambda: mute.connected, PATIENCE)
            sender.open("s", max_tokens=100_000, verify=VERIFY_STREAM)
            sender.answer("s", Verdict, 300)
            sender.say("s", replica, Close(1))
            assert wait_until(lambda: replica.sessions == 1, PATIENCE)
            assert replica.runtime.publish_failures == 0
        finally:
            released.set()
            mute.stop()


def test_drafts_for_another_attach_epoch_or_base(url: str) -> None:
    """Case 2 among them. The session that they were meant for goes on, and so do the others."""
    with (
        Replica(url, PacedTarget(seconds=0.001)) as replica,
        bystander(url, replica),
        Hand(url) as hand,
    ):
        text = continuation(PROMPT, 40)
        stats = replica.core.stats
        hand.open("s", attach=3)
        hand.answer("s", Accepted)
        # An attachment that never was, and one that is over.
        hand.say("s", replica, DraftBatch(9, 0, 0, (1, 2), None, True))
        assert hand.answer("s", Closed) == Closed(9, CLOSED_UNKNOWN)
        hand.say("s", replica, DraftBatch(2, 0, 0, (1, 2), None, True))
        assert wait_until(lambda: stats.stale_attach == 1, PATIENCE)
        # The second batch before the first: held back, asked for, then judged on the right text.
        hand.say("s", replica, DraftBatch(3, 5, 3, tuple(text[3:6]), None, True))
        asked = hand.answer("s", Resync)
        assert (asked.epoch, asked.have) == (5, 0)
        assert stats.gaps == 1
        hand.say("s", replica, DraftBatch(3, 5, 0, tuple(text[:3])))
        hand.say("s", replica, DraftBatch(3, 5, 3, tuple(text[3:6]), None, True))
        verdict = hand.answer("s", Verdict)
        assert (verdict.start, list(verdict.tokens)) == (0, text[:7])
        # An epoch that is over: counted, and nothing of it is judged.
        hand.say("s", replica, DraftBatch(3, 4, 7, (1, 2), None, True))
        assert wait_until(lambda: stats.stale_drafts >= 1, PATIENCE)
        # A base far beyond any text.
        hand.say("s", replica, DraftBatch(3, 5, 2**31 - 9, (1, 2), None, True))
        assert wait_until(lambda: stats.gaps == 2, PATIENCE)
        # Sessions that nobody has, of this device and of none.
        hand.say("ghost", replica, DraftBatch(1, 0, 0, (1, 2), None, True))
        assert hand.answer("ghost", Closed) == Closed(1, CLOSED_UNKNOWN)
        hand.say("s", replica, DraftBatch(3, 6, 7, (), None, True))
        assert hand.answer("s", Verdict, 2).tokens == (text[7],)
        hand.say("s", replica, Close(3))


def test_ids_and_prompts_beyond_what_the_target_has(url: str) -> None:
    """Case 27: each answered with its reason; case 29: a prompt that leaves no place."""
    context = 1000
    target = PacedTarget(seconds=0.001, context=1 << 17)
    with Replica(url, target) as wide, bystander(url, wide), Hand(url) as hand:
        hand.open("prompt", prompt=(1, VOCAB, 2))
        assert hand.answer("prompt", Refused).reason == REFUSED_TOKEN
        hand.open("text", committed=(1, VOCAB))
        assert hand.answer("text", Refused).reason == REFUSED_TOKEN
        for place, token in enumerate((VOCAB, 2**31 - 1)):
            session = f"draft-{place}"
            hand.open(session)
            hand.answer(session, Accepted)
            hand.say(session, wide, DraftBatch(1, 0, 0, (1, token), None, True))
            assert hand.answer(session, Closed) == Closed(1, CLOSED_TOKEN)
            hand.say(session, wide, Close(1))
        assert wait_until(lambda: wide.sessions == 1, PATIENCE)
    with Replica(url, PacedTarget(context=context)) as narrow, Hand(url) as hand:
        for length in (context, 5 * context):
            hand.open(f"long-{length}", prompt=(7,) * length)
            assert hand.answer(f"long-{length}", Refused).reason == REFUSED_PROMPT
        hand.open("fits", prompt=(7,) * (context - 1))
        assert hand.answer("fits", Accepted).limit == 1
        assert narrow.sessions == 1


def test_a_padded_vocabulary(url: str) -> None:
    """Case 27: more rows on the edge are no other tokenizer; a draft from there is told so."""
    rows = {"vocab_size": VOCAB + 64}
    padded = scripted_draft(sometimes_right(chooser(), VOCAB, 0.8, seed=3), **rows)
    beyond = scripted_draft(lambda *_: (VOCAB + 3, 0.9), **rows)
    with Replica(url, PacedTarget(seconds=0.001)) as replica, bystander(url, replica):
        with Device(url, padded) as device:
            assert device.write(max_tokens=60) == continuation(PROMPT, 60)
        with Device(url, beyond) as device:
            with pytest.raises(RefusedError) as refusal:
                device.write(max_tokens=60)
            assert refusal.value.reason == CLOSED_TOKEN
        assert replica.core.stats.rejected["token_out_of_range"] >= 1
        assert wait_until(lambda: replica.sessions == 1, PATIENCE)


TREES = {
    "cycle": [1, 0],
    "itself": [0, 1],
    "ahead": [-1, 2, 0],
    "before the root": [-2, 0],
    "too few": [-1],
    "too many": [-1, 0, 1, 2],
    "no integers": [-1, "0"],
    "nested": [-1, [0]],
}


def test_trees_that_are_none(url: str) -> None:
    """A cycle, a parent ahead and their like: dropped and counted, the session lives on."""
    with (
        Replica(url, PacedTarget(seconds=0.001)) as replica,
        bystander(url, replica),
        Hand(url) as hand,
    ):
        text = continuation(PROMPT, 10)
        hand.open("s")
        hand.answer("s", Accepted)
        sound = msgpack.unpackb(encode(DraftBatch(1, 0, 0, (1, 2), (-1, 0), True)))
        counted = replica.core.stats.rejected
        for name, parents in TREES.items():
            tokens = [1, 2, 3][: max(2, min(3, len(parents)))]
            broken = [parents if field == [-1, 0] else field for field in sound]
            broken = [tokens if field == [1, 2] else field for field in broken]
            before = sum(counted.values())
            hand.say("s", replica, msgpack.packb(broken))
            assert wait_until(lambda b=before: sum(counted.values()) == b + 1, PATIENCE), name
        assert set(counted) <= {"fields", "msgpack"}
        assert hand.told("s", Verdict) == []
        # A sound one is judged.
        hand.say("s", replica, DraftBatch(1, 0, 0, (text[0], 5), (-1, -1), True))
        verdict = hand.answer("s", Verdict)
        assert list(verdict.tokens) == text[: len(verdict.tokens)]
        assert verdict.tokens
        hand.say("s", replica, Close(1))


def test_a_batch_of_thousands_of_tokens(url: str) -> None:
    """It is none: no device may be so far ahead."""
    with (
        Replica(url, PacedTarget(seconds=0.001)) as replica,
        bystander(url, replica),
        Hand(url) as hand,
    ):
        hand.open("s", max_tokens=10_000)
        hand.answer("s", Accepted)
        batch = msgpack.unpackb(encode(DraftBatch(1, 0, 0, (1, 2), None, True)))
        many = [[1] * 20_000 if field == [1, 2] else field for field in batch]
        hand.say("s", replica, msgpack.packb(many))
        rejected = replica.core.stats.rejected
        assert wait_until(lambda: sum(rejected.values()) == 1, PATIENCE), rejected
        hand.say("s", replica, DraftBatch(1, 0, 0, (), None, True))
        assert list(hand.answer("s", Verdict).tokens) == continuation(PROMPT, 1)
        hand.say("s", replica, Close(1))


def test_two_verifiers_with_one_id(url: str) -> None:
    """One of them is told so and gives up; texts are exact all the while."""
    with (
        Replica(url, PacedTarget(seconds=0.002), "twin") as first,
        Device(url, mostly_right()) as device,
    ):
        running = device.run(max_tokens=100_000)
        assert running.reached(10)
        second = Replica(url, PacedTarget(seconds=0.002), "twin").start(connected=False)
        try:
            both = (first, second)
            failed = ConnectionState.FAILED
            assert wait_until(
                lambda: any(one.transport.states[-1:] == [failed] for one in both), PATIENCE
            )
            (left,) = [one for one in both if one.transport.states[-1] is failed]
            assert "another client uses the id 'verifier-twin'" in left.transport.events[-1].reason
            (stays,) = [one for one in both if one is not left]
            assert wait_until(lambda: stays.transport.connected, PATIENCE)
            assert running.reached(len(running.tokens) + ON)
            running.generation.cancel()
            tokens = running.wait()
            assert tokens == continuation(PROMPT, len(tokens))
            assert device.write(max_tokens=20) == continuation(PROMPT, 20)
        finally:
            second.stop()


def test_what_the_broker_could_not_keep_is_noticed_by_position(url: str) -> None:
    """Case 14: a hundred batches are lost while the verifier is away; none is left out."""
    with Replica(url, PacedTarget(), relayed=True) as replica, Hand(url) as hand:
        text = continuation(PROMPT, 420)
        hand.open("s", max_tokens=420)
        hand.answer("s", Accepted)
        batches = [
            DraftBatch(1, 0, base, tuple(text[base : base + 4])) for base in range(0, 400, 4)
        ]
        hand.say("s", replica, batches[0])
        assert wait_until(lambda: replica.core.stats.drafts == 4, PATIENCE)
        replica.transport.vanish()
        assert wait_until(lambda: not replica.transport.connected, PATIENCE)
        for batch in batches[1:-1]:
            hand.say("s", replica, batch)
        said = len(batches)  # the opening, and all but the last of these
        assert wait_until(lambda: hand.transport.messages_sent == said, PATIENCE)
        replica.transport.come_back()
        assert wait_until(lambda: replica.transport.connected, PATIENCE)
        last = batches[-1]
        hand.say("s", replica, DraftBatch(1, 0, last.base, last.tokens, None, True))
        have = hand.answer("s", Resync).have
        assert have == 4, "it took what came after a gap"
        assert hand.told("s", Verdict) == []
        tokens: list[int] = []
        for start in range(have, 400, 100):
            end = min(400, start + 100)
            hand.say("s", replica, DraftBatch(1, 0, start, tuple(text[start:end]), None, True))
        assert wait_until(
            lambda: sum(len(v.tokens) for v in hand.told("s", Verdict)) >= 401, PATIENCE
        )
        for verdict in sorted(hand.told("s", Verdict), key=lambda one: one.start):
            assert verdict.start == len(tokens)
            tokens += verdict.tokens
        assert tokens == text[: len(tokens)]
        hand.say("s", replica, Close(1))


@pytest.mark.parametrize(
    ("context", "prompt", "wanted", "ahead", "places"),
    [(64, 10, 500, 16, 54), (64, 10, 500, 256, 54), (4096, 3, 76, 256, 76), (64, 63, 500, 256, 1)],
)
def test_drafts_beyond_the_places_that_are_left(
    url: str, context: int, prompt: int, wanted: int, ahead: int, places: int
) -> None:
    """Case 29: context 64 and long drafts; 256 drafts where 76 places are left."""
    draft = scripted_draft(always_right(chooser()))
    start = tuple(1 + number % 200 for number in range(prompt))
    with Replica(url, PacedTarget(seconds=0.002, context=context)) as replica:
        with Device(url, draft) as device:
            running = device.run(
                start, wanted, max_ahead=ahead, thresholds=Thresholds(0.0, 0.0, ahead)
            )
            assert running.wait() == continuation(start, places)
            assert running.generation.finish == "length"
        assert replica.core.stats.committed == places
        assert wait_until(lambda: replica.sessions == 0, PATIENCE)


def test_drafts_of_three_and_fifty_tokens_in_one_forward(url: str) -> None:
    """Case 30: both are judged as alone, in forwards that they share."""
    target = PacedTarget(seconds=0.02)
    # Two that ask in turn may pass each other for ever; with a third some must meet.
    sizes = {(1, 2, 3): 3, (4, 5, 6): 50, (7, 8, 9): 20}
    policy = find_policy("vanilla")
    with Replica(url, target) as replica, Device(url, mostly_right()) as device:

        def write(prompt: tuple[int, ...]) -> Running:
            size = sizes[prompt]
            window = Thresholds(0.0, 0.0, size)
            return device.run(prompt, 150, policy=policy, max_ahead=size, thresholds=window)

        alone = {}
        for prompt in sizes:
            running = write(prompt)
            assert running.wait() == continuation(prompt, 150)
            alone[prompt] = running.generation.stats
        before = replica.core.stats.forwards, replica.core.stats.batch_sessions
        together = {prompt: write(prompt) for prompt in sizes}
        for prompt, running in together.items():
            assert running.wait() == continuation(prompt, 150)
            stats = running.generation.stats
            for name in ("accepted", "judged", "forwards"):
                assert getattr(stats, name) == getattr(alone[prompt], name), name
        forwards = replica.core.stats.forwards - before[0]
        seats = replica.core.stats.batch_sessions - before[1]
        assert seats > forwards, "they never shared a forward"
