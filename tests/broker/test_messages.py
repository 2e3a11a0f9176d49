"""Messages refuse what cannot be legal when they are made, and nothing changes then."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import LocalProtocolError
from broker.messages import (
    MAX_BATCH,
    MAX_DETAIL,
    MAX_POSITION,
    MAX_PROMPT,
    MAX_TOKEN,
    Accepted,
    Close,
    Closed,
    DeviceStatus,
    DraftBatch,
    Refused,
    Resync,
    SessionOpen,
    Verdict,
    VerifierStatus,
    tokens_of,
)
from broker.sampling import Sampling
from tests.broker.message_strategies import drafts, messages

GOOD = {
    "open": SessionOpen(1, (5, 6), (7,), Sampling(), 10, "abc"),
    "accepted": Accepted(1, "v1", 100, 50),
    "refused": Refused(1, "busy", "why", 2.0),
    "draft": DraftBatch(1, 2, 3, (4, 5), None, True),
    "verdict": Verdict(1, 2, 3, (4, 5), 1, 1, None, 0.5, 0.25),
    "resync": Resync(1, 2, 3),
    "close": Close(1),
    "closed": Closed(1, "moved"),
    "verifier": VerifierStatus(True, "1", "m", "h", 10, 1, 2),
    "device": DeviceStatus(True, "1", "d"),
}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("open", {"attach": -1}),
        ("open", {"attach": 1.0}),
        ("open", {"attach": True}),
        ("open", {"prompt": ()}),
        ("open", {"prompt": (-1,)}),
        ("open", {"prompt": (MAX_TOKEN + 1,)}),
        ("open", {"prompt": (1,) * (MAX_PROMPT + 1)}),
        ("open", {"committed": (1,) * (MAX_PROMPT + 1)}),
        ("open", {"committed": ("x",)}),
        ("open", {"sampling": (0.0, 0, 1.0, 0.0, 0)}),
        ("open", {"max_tokens": 0}),
        ("open", {"max_tokens": MAX_POSITION + 1}),
        ("open", {"vocab_hash": "x" * 65}),
        ("open", {"vocab_hash": b"x"}),
        ("open", {"verify": "sometimes"}),
        ("accepted", {"verifier": 5}),
        ("accepted", {"limit": -1}),
        ("accepted", {"context": None}),
        ("refused", {"retry_after": -1.0}),
        ("refused", {"retry_after": 86_401.0}),
        ("refused", {"retry_after": float("nan")}),
        ("refused", {"detail": "x" * (MAX_DETAIL + 1)}),
        ("draft", {"epoch": -1}),
        ("draft", {"base": MAX_POSITION + 1}),
        ("draft", {"tokens": (1,) * (MAX_BATCH + 1)}),
        ("draft", {"tokens": (), "verify": False}),
        ("draft", {"verify": 1}),
        ("draft", {"parents": (-1,)}),
        ("draft", {"parents": (0, 0)}),
        ("draft", {"parents": (-1, 1)}),
        ("draft", {"parents": (-2, 0)}),
        ("draft", {"parents": 3}),
        ("draft", {"parents": ("a", "b")}),
        ("verdict", {"tokens": (), "accepted": 0}),
        ("verdict", {"tokens": (1,) * (MAX_BATCH + 2)}),
        ("verdict", {"accepted": 2}),
        ("verdict", {"accepted": 3, "judged": 3}),
        ("verdict", {"finish": "done"}),
        ("verdict", {"hold_ms": -0.1}),
        ("verdict", {"forward_ms": float("inf")}),
        ("resync", {"have": -1}),
        ("resync", {"epoch": "1"}),
        ("close", {"attach": None}),
        ("closed", {"reason": "x" * 65}),
        ("verifier", {"online": 1}),
        ("verifier", {"sessions": -1}),
        ("verifier", {"model": "x" * 201}),
        ("device", {"online": None}),
        ("device", {"draft": 3}),
    ],
)
def test_illegal_fields(name, changes) -> None:
    with pytest.raises(LocalProtocolError) as caught:
        dataclasses.replace(GOOD[name], **changes)
    assert "\n" not in str(caught.value)


@given(messages)
def test_messages_are_values(message) -> None:
    assert dataclasses.replace(message) == message
    assert hash(dataclasses.replace(message)) == hash(message)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(message, dataclasses.fields(message)[0].name, 1)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=20))
def test_tokens_become_plain_integers(values) -> None:
    for tokens in (values, iter(values), np.array(values, dtype=np.int64)):
        plain = tokens_of(tokens)
        assert plain == tuple(values)
        assert all(type(token) is int for token in plain)


@pytest.mark.parametrize(
    ("tokens", "parents", "trunk"),
    [
        ((1, 2, 3), None, (1, 2, 3)),
        ((1, 2, 3), (-1, 0, 1), (1, 2, 3)),
        ((1, 2, 3), (-1, -1, 0), (1, 3)),
        ((1, 2, 3), (-1, -1, 1), (1,)),
        ((1, 2, 3, 4), (-1, 0, 0, 1), (1, 2, 4)),
        ((), None, ()),
        ((), (), ()),
    ],
)
def test_the_trunk_is_the_path_of_first_children(tokens, parents, trunk) -> None:
    assert DraftBatch(1, 1, 0, tokens, parents, True).trunk() == trunk


@given(drafts())
def test_the_trunk_is_a_path(batch) -> None:
    trunk = batch.trunk()
    assert len(trunk) <= len(batch.tokens)
    if batch.parents is None:
        assert trunk == batch.tokens
    elif batch.tokens:
        assert trunk[0] == batch.tokens[0]  # the first token can only hang on what went before
