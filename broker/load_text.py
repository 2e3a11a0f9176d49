"""The text that a scripted target writes in load tests: a pure function that both sides know.

The verifier's scripted target computes it token by token; emulated devices compute it beforehand,
to draft it and to check what comes back. It looks random, costs a microsecond a token, and about
one token in ``END_SHARE`` ends it, so that texts of a fleet end in different ways.
"""

from __future__ import annotations

from collections.abc import Sequence

VOCAB_SIZE = 50_000
#: Stands for the vocabulary in SessionOpen and VerifierStatus; no real tokenizer hashes to it.
VOCAB_HASH = "load-test-script"
END = 0
END_SHARE = 500
#: Tokens that the next one follows from, beside the length.
_ORDER = 4


def next_token(sequence: Sequence[int]) -> int:
    """The token after ``sequence`` (prompt and text so far), from 0 to ``VOCAB_SIZE`` - 1."""
    state = len(sequence)
    for token in sequence[-_ORDER:]:
        state = (state * 0x9E3779B1 + token + 1) & 0xFFFFFFFF
    # A 32-bit finaliser: without it the low bits would repeat within a few tokens.
    state = ((state ^ (state >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    state = ((state ^ (state >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    state ^= state >> 16
    if state % END_SHARE == 0:
        return END
    return 1 + (state >> 3) % (VOCAB_SIZE - 1)


def write(prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """The whole text after ``prompt``: to its end, or ``max_tokens`` tokens."""
    sequence = list(prompt)
    while len(sequence) - len(prompt) < max_tokens:
        sequence.append(next_token(sequence))
        if sequence[-1] == END:
            break
    return tuple(sequence[len(prompt) :])
