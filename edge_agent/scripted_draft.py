"""A draft without a model, for tests and simulation only.

An *oracle* says what is drafted after a sequence and how sure the draft is of it. ``always_right``,
``always_wrong`` and ``sometimes_right`` make oracles from the target's own choice; ``from_logits``
drafts like a model, from a function that gives logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from broker.errors import LocalProtocolError, ModelError
from broker.sampling import Sampler, Sampling
from edge_agent.draft import Proposal

Oracle: TypeAlias = Callable[[Sequence[int], int, Sampling], tuple[int, float]]
"""``oracle(sequence, position, sampling) -> (token, confidence)``.

``sequence``: all tokens in the cache, prompt included, not to be changed or kept; ``position``: of
the token asked for. The same arguments must give the same answer.
"""

Chooser: TypeAlias = Callable[[Sequence[int], int, Sampling], int]
"""What the target puts at ``position`` after ``sequence``; arguments as for ``Oracle``."""

LogitsFunction: TypeAlias = Callable[[Sequence[int]], npt.NDArray[np.float32]]
"""Logits float32[vocab_size] after a sequence."""


def always_right(target: Chooser, confidence: float = 0.99) -> Oracle:
    """Drafts what the target will choose."""

    def oracle(sequence: Sequence[int], position: int, sampling: Sampling) -> tuple[int, float]:
        return target(sequence, position, sampling), confidence

    return oracle


def always_wrong(target: Chooser, vocab_size: int, confidence: float = 0.2) -> Oracle:
    """Drafts another token than the target's, in each place. ``vocab_size`` is at least 2."""

    def oracle(sequence: Sequence[int], position: int, sampling: Sampling) -> tuple[int, float]:
        return (target(sequence, position, sampling) + 1) % vocab_size, confidence

    return oracle


def sometimes_right(
    target: Chooser, vocab_size: int, quality: float = 0.8, seed: int = 0
) -> Oracle:
    """Right with probability ``quality``, each sequence on its own, the same under one ``seed``.

    Confidences say something but not all, like a model's: uniform in 0.4 to 1 where the draft is
    right, in 0 to 0.8 where it is wrong.
    """

    def oracle(sequence: Sequence[int], position: int, sampling: Sampling) -> tuple[int, float]:
        state = _mix(seed * 0x9E3779B97F4A7C15 + position + 1)
        for token in sequence[-2:]:
            state = _mix(state ^ token)
        right = (state >> 32) < quality * 2**32
        level = (state & 0xFFFFFFFF) / 2**32
        token = target(sequence, position, sampling)
        if right:
            return token, 0.4 + 0.6 * level
        return (token + 1 + state % (vocab_size - 1)) % vocab_size, 0.8 * level

    return oracle


def _mix(value: int) -> int:
    # A 64-bit finaliser (multiply, xor-shift), enough to look random to a test.
    value &= 0xFFFFFFFFFFFFFFFF
    value = (value ^ (value >> 31)) * 0xD6E8FEB86659FD93 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ (value >> 32)) * 0xD6E8FEB86659FD93 & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 32)


class ScriptedDraftModel:
    """Implements ``DraftModel`` over an oracle; for tests and simulation only.

    ``evals`` and ``proposals`` count the calls of all sequences. ``fail_at``: numbers of the
    ``eval`` calls, from 1, that raise ModelError as a failing model does.
    """

    def __init__(
        self,
        oracle: Oracle,
        vocab_size: int,
        *,
        context: int = 4096,
        max_sequences: int = 1024,
        vocab_hash: str = "scripted",
        eos_ids: Sequence[int] = (),
        name: str = "scripted",
        fail_at: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.context = context
        self.vocab_hash = vocab_hash
        self.eos_ids = frozenset(eos_ids)
        self.evals = 0
        self.proposals = 0
        self.fail_at = frozenset(fail_at)
        self._oracle = oracle
        self._max_sequences = max_sequences
        self._drafts: set[ScriptedDraft] = set()
        self._closed = False

    @classmethod
    def from_logits(
        cls, logits: LogitsFunction, vocab_size: int, **settings: Any
    ) -> ScriptedDraftModel:
        """Drafts as a model with these logits would, shared noise included."""
        sampler = Sampler(vocab_size)

        def oracle(sequence: Sequence[int], position: int, sampling: Sampling) -> tuple[int, float]:
            return sampler.choose_with_confidence(logits(sequence), position, sampling)

        return cls(oracle, vocab_size, **settings)

    @property
    def open_sequences(self) -> int:
        return len(self._drafts)

    def open(self) -> ScriptedDraft:
        """See ``DraftModel.open``."""
        if self._closed:
            raise LocalProtocolError("the draft model is closed")
        if len(self._drafts) >= self._max_sequences:
            raise ModelError(
                f"{self._max_sequences} draft sequences are open already; wait for one to end"
            )
        draft = ScriptedDraft(self)
        self._drafts.add(draft)
        return draft

    def close(self) -> None:
        self._closed = True
        for draft in tuple(self._drafts):
            draft.close()


class ScriptedDraft:
    """One sequence of a ``ScriptedDraftModel``. ``tokens``: its cache, for tests to look at."""

    def __init__(self, model: ScriptedDraftModel) -> None:
        self.tokens: list[int] = []
        self._model = model
        self._oracle = model._oracle
        self._ready = False
        self._closed = False

    @property
    def length(self) -> int:
        return len(self.tokens)

    def eval(self, tokens: Sequence[int]) -> None:
        """See ``Draft.eval``. Raises LocalProtocolError for no tokens or ids out of range."""
        model = self._model
        self._check_open()
        if not tokens:
            raise LocalProtocolError("nothing to evaluate")
        if min(tokens) < 0 or max(tokens) >= model.vocab_size:
            raise LocalProtocolError(f"token ids outside 0 to {model.vocab_size - 1}")
        if len(self.tokens) + len(tokens) > model.context:
            raise ModelError(
                f"the draft's context of {model.context} tokens cannot take {len(tokens)} more "
                f"after {len(self.tokens)}; raise the draft's context or shorten the prompt"
            )
        model.evals += 1
        if model.evals in model.fail_at:
            self._ready = False
            raise ModelError("the scripted draft was told to fail here")
        self.tokens.extend(tokens)
        self._ready = True

    def rollback(self, length: int) -> None:
        """See ``Draft.rollback``."""
        self._check_open()
        if not 0 <= length <= len(self.tokens):
            raise LocalProtocolError(f"rollback to {length} of {len(self.tokens)} tokens")
        self._ready = False
        del self.tokens[length:]

    def propose(self, position: int, sampling: Sampling) -> Proposal:
        """See ``Draft.propose``."""
        if not self._ready:
            raise LocalProtocolError("no logits: evaluate a token first")
        self._model.proposals += 1
        return Proposal(*self._oracle(self.tokens, position, sampling))

    def close(self) -> None:
        """See ``Draft.close``."""
        self._ready = False
        self._closed = True
        self._model._drafts.discard(self)

    def _check_open(self) -> None:
        if self._closed:
            raise LocalProtocolError("the draft sequence is closed")


class ByteText:
    """A ``TextModel`` whose tokens are bytes, for tests: characters often span several tokens.

    Token 256 ends the text; ``vocab_size`` is 257. A chat is its messages' contents, one a line.
    """

    vocab_size = 257
    eos = 256
    has_chat_template = True

    def encode_prompt(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return self.encode_prompt("".join(f"{message['content']}\n" for message in messages))

    def piece(self, token: int) -> bytes:
        """The byte itself; b"" for the end. Raises LocalProtocolError for any other id."""
        if not 0 <= token < self.vocab_size:
            raise LocalProtocolError(f"token {token} is outside the vocabulary of 257")
        return b"" if token == self.eos else bytes((token,))
