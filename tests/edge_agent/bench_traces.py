"""Traces made up for tests: from a list of marks, or at random from a seed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from broker.sampling import Sampling
from edge_agent.bench.forward_table import ForwardTable
from edge_agent.bench.traces import Trace

VOCAB = 1_000
EOS = 7
WRONG = 999


def make_trace(agrees: Sequence[bool], **changes: Any) -> Trace:
    """A text of as many tokens, each drafted right or wrong; 10 ms to draft, 40 ms a forward."""
    size = len(agrees)
    tokens = tuple(100 + position for position in range(size))
    settings: dict[str, Any] = {
        "name": "made up",
        "draft": "draft",
        "target": "target",
        "sampling": Sampling(),
        "vocab_size": VOCAB,
        "eos_ids": frozenset({EOS}),
        "max_tokens": size,
        "prompt": (1, 2, 3),
        "tokens": tokens,
        "drafted": tuple(t if ok else WRONG for t, ok in zip(tokens, agrees, strict=True)),
        "confidences": tuple(0.9 if ok else 0.3 for ok in agrees),
        "second_right": (None,) * size,
        "gammas": (0.010,) * size,
        "prompt_seconds": 0.0,
        "forward": ForwardTable(((1, 0.040),)),
        **changes,
    }
    return Trace(**settings)


def random_trace(seed: int, size: int = 40) -> Trace:
    """Another one for each seed: quality, confidences, times, prompt, and how the text ends."""
    draw = random.Random(seed)
    quality = draw.random()
    agrees = [draw.random() < quality for _ in range(size)]
    trace = make_trace(
        agrees,
        prompt=tuple(range(1, draw.choice((2, 20, 700)))),
        confidences=tuple(
            min(1.0, max(0.0, draw.gauss(0.85 if ok else 0.5, 0.2))) for ok in agrees
        ),
        gammas=tuple(draw.uniform(0.0, 0.02) for _ in agrees),
        prompt_seconds=draw.uniform(0.0, 0.3),
        forward=ForwardTable(((1, draw.uniform(0.0, 0.1)), (20, 0.1), (300, 0.6))),
    )
    if draw.random() < 0.5:
        tokens = (*trace.tokens[:-1], EOS)
        drafted = (*trace.drafted[:-1], EOS if agrees[-1] else WRONG)
        trace = dataclasses.replace(trace, tokens=tokens, drafted=drafted, max_tokens=size + 30)
    if draw.random() < 0.3:
        # A draft that would end the text too early, somewhere.
        at = draw.randrange(size - 1)
        drafted = (*trace.drafted[:at], EOS, *trace.drafted[at + 1 :])
        trace = dataclasses.replace(trace, drafted=drafted)
    return trace
