"""The draft model of one generation, answered from a record instead of a model."""

from __future__ import annotations

from edge_agent.bench.traces import Trace
from edge_agent.core.effects import DraftNext


class RecordedDraft:
    """What the draft model answers along ``trace``; its cache is only known by its length.

    Beside a wrong token the text would go on differently, which nobody recorded: what is drafted
    there is wrong too, and has the confidences of the same positions. ``floor_s``: least seconds
    that drafting a token takes.
    """

    def __init__(self, trace: Trace, floor_s: float = 0.0) -> None:
        self._trace = trace
        self._floor_s = floor_s
        self._text = (*trace.prompt, *trace.tokens)
        self._right = 0  # leading tokens of the cache that are the target's
        # Two tokens that do not end the text, where there are any: one is not the target's.
        spare = (token for token in range(trace.vocab_size) if token not in trace.eos_ids)
        first = next(spare, 0)
        self._fillers = (first, next(spare, first))

    def feed(self, effect: DraftNext) -> tuple[int, float, float]:
        """The token, its confidence, and the seconds that it takes to draft it."""
        trace, text = self._trace, self._text
        right = min(self._right, effect.keep)
        for index, token in enumerate(effect.feed, effect.keep):
            if right != index or index >= len(text) or text[index] != token:
                break
            right += 1
        self._right = right
        position = min(effect.position, len(trace.tokens) - 1)
        took = trace.gammas[position] + (len(effect.feed) - 1) * trace.prompt_gamma
        token = trace.drafted[position]
        if right < effect.keep + len(effect.feed) or effect.position != position:
            one, other = self._fillers
            token = one if trace.tokens[position] != one else other
        return token, trace.confidences[position], max(took, self._floor_s)
