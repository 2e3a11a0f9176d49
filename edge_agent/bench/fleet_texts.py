"""What the devices of a fleet write, and what their drafts say on the way: recorded or made up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from broker import load_text
from broker.errors import ConfigError
from broker.sampling import Sampling
from edge_agent.bench.forward_table import ForwardTable
from edge_agent.bench.traces import Trace

#: Made-up texts of one fleet: enough that no two devices near each other write the same one.
TEXTS = 128
AGREEMENT = 0.8
GAMMA_S = 0.008
_PROMPT_GAMMA_S = 0.0005
_SHORTEST_PROMPT, _LONGEST_PROMPT = 8, 48
_NOT_MEASURED = ForwardTable(((1, 0.0),))


def made_up(seed: int, max_tokens: int, count: int = TEXTS) -> list[Trace]:
    """Texts of ``broker.load_text`` with drafts that agree with them at ``AGREEMENT``.

    The same for the same ``seed``. Confidences tell something but not all, as a model's do: they
    are drawn from 0.5 to 1 where the draft is right, from 0.2 to 0.9 where it is wrong.
    """
    draw = random.Random(f"fleet texts {seed}")  # noqa: S311 (no secret)
    return [_made_up(draw, f"made-up-{number}", max_tokens) for number in range(count)]


def _made_up(draw: random.Random, name: str, max_tokens: int) -> Trace:
    length = draw.randint(_SHORTEST_PROMPT, _LONGEST_PROMPT)
    prompt = tuple(draw.randrange(1, load_text.VOCAB_SIZE) for _ in range(length))
    tokens = load_text.write(prompt, max_tokens)
    agrees = [draw.random() < AGREEMENT for _ in tokens]
    return Trace(
        name=name,
        draft="made up",
        target="scripted text",
        sampling=Sampling(),
        vocab_size=load_text.VOCAB_SIZE,
        eos_ids=frozenset({load_text.END}),
        max_tokens=max_tokens,
        prompt=prompt,
        tokens=tokens,
        drafted=_drafted(tokens, agrees),
        confidences=tuple(
            draw.uniform(0.5, 1.0) if right else draw.uniform(0.2, 0.9) for right in agrees
        ),
        second_right=(None,) * len(tokens),
        gammas=(GAMMA_S,) * len(tokens),
        prompt_seconds=_PROMPT_GAMMA_S * length,
        forward=_NOT_MEASURED,
    )


def on_scripted_target(trace: Trace, number: int, max_tokens: int | None = None) -> Trace:
    """``trace`` with the text that a scripted target writes: its times, and where its draft agrees.

    A text longer than the record meets it again from its beginning. ``number`` goes into the
    prompt, so that no two traces bring the same text. ``max_tokens``: None for the trace's.
    """
    size = trace.max_tokens if max_tokens is None else max_tokens
    prompt = (
        1 + number % (load_text.VOCAB_SIZE - 1),
        *(token % load_text.VOCAB_SIZE for token in trace.prompt[1:]),
    )
    tokens = load_text.write(prompt, size)
    places = [position % len(trace.tokens) for position in range(len(tokens))]
    agrees = trace.agrees
    return replace(
        trace,
        target="scripted text",
        sampling=Sampling(),
        vocab_size=load_text.VOCAB_SIZE,
        eos_ids=frozenset({load_text.END}),
        max_tokens=size,
        prompt=prompt,
        tokens=tokens,
        drafted=_drafted(tokens, [agrees[place] for place in places]),
        confidences=tuple(trace.confidences[place] for place in places),
        second_right=(None,) * len(tokens),
        gammas=tuple(trace.gammas[place] for place in places),
    )


def _drafted(tokens: Sequence[int], agrees: Sequence[bool]) -> tuple[int, ...]:
    """Right where ``agrees`` says so, else some other token that does not end the text."""
    top = load_text.VOCAB_SIZE - 1
    return tuple(
        token if right else 1 + token % top for token, right in zip(tokens, agrees, strict=True)
    )


def check_texts(traces: Sequence[Trace], vocab_hash: str, context: int) -> None:
    """Raises ConfigError where a verifier with that vocabulary and context cannot write them."""
    for trace in traces:
        length = len(trace.prompt) + trace.max_tokens
        if length > context:
            raise ConfigError(
                f"{trace.name} with {length} tokens is longer than the verifier's context of "
                f"{context}: leave it out, or start the verifier with a longer --context"
            )
        scripted = trace.target == "scripted text"
        if scripted != (vocab_hash == load_text.VOCAB_HASH):
            raise ConfigError(
                f"{trace.name} is no text of the verifier that runs there: record traces with its "
                "models and give them with --traces"
            )
