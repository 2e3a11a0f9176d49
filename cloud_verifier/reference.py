"""The target alone: the text that every split run must equal, and the time it takes.

Runs over the same engine port, one token per forward, so that speed and text can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from broker.errors import ConfigError
from broker.messages import FINISH_LENGTH, FINISH_STOP
from broker.sampling import Sampling
from cloud_verifier.engine.target import Target, Work

#: Prompt tokens per forward.
PREFILL_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Step:
    """One token and the seconds since the beginning; ``finish`` is set on the last one."""

    token: int
    seconds: float
    finish: str | None


def generate(
    target: Target,
    prompt: tuple[int, ...],
    sampling: Sampling,
    max_tokens: int,
    *,
    blocks: tuple[int, ...] = (),
) -> Iterator[Step]:
    """The target's own continuation of ``prompt`` (token ids) in slot 0.

    ``blocks``: of K/V memory, needed where a verifier hands out those of the same target, from
    which these must have been kept back (see ``Work.blocks``).

    Raises ConfigError for a prompt that is empty or leaves no room in the context.
    """
    if not prompt:
        raise ConfigError("the prompt has no tokens: give some text")
    if len(prompt) >= target.context:
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens and the context {target.context}: shorten it"
        )
    limit = min(max_tokens, target.context - len(prompt))
    begin = time.monotonic()
    keep = 0
    while len(prompt) - keep > PREFILL_TOKENS:
        piece = prompt[keep : keep + PREFILL_TOKENS]
        target.forward([Work(0, keep, piece, 0, 0, sampling, blocks=blocks)])
        keep += len(piece)
    feed = prompt[keep:]
    for position in range(limit):
        [[token]] = target.forward([Work(0, keep, feed, 1, position, sampling, blocks=blocks)])
        keep += len(feed)
        feed = (token,)
        finish = None
        if token in target.eos_ids:
            finish = FINISH_STOP
        elif position + 1 == limit:
            finish = FINISH_LENGTH
        yield Step(token, time.monotonic() - begin, finish)
        if finish is not None:
            return
