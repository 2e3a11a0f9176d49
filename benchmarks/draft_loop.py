"""The draft loop against a bare llama.cpp loop: ``python -m benchmarks.draft_loop [--json]``.

``bare`` is the least that a draft loop can do: ``llama_decode`` of one token, then the argmax of
its logits. ``greedy`` and ``sampled`` (temperature 0.8, top-p 0.95) are ``eval`` and ``propose`` of
``LlamaDraft``, confidence included. The three take turns, a few tokens each, so that a busy machine
slows all alike; figures are medians per token. The mark: at least 95 % of the bare loop's speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from broker.llama_library import llama_library
from broker.sampling import Sampling
from edge_agent.cpus import default_threads
from edge_agent.llama_draft import LlamaDraftModel
from edge_agent.prepare import resolve_draft

TURN = 8  # tokens before the next loop has its turn
LENGTH = 256  # generated tokens before the sequences begin anew
MARK = 0.95
PROMPT = "The lighthouse keeper wrote in his log every evening. He noted the wind, the ships and"


class Bare:
    """llama.cpp without us: context and loop of its own, over the same weights."""

    def __init__(self, model: LlamaDraftModel, prompt: list[int], threads: int) -> None:
        self._lib = lib = llama_library()
        self._model = model._model
        params = lib.llama_context_default_params()
        params.n_ctx = len(prompt) + LENGTH
        params.n_threads = params.n_threads_batch = threads
        self._context = lib.llama_init_from_model(self._model, params)
        self._rows = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._prompt = (lib.llama_token * len(prompt))(*prompt)
        self._one = (lib.llama_token * 1)()
        self._batch = lib.llama_batch_get_one(self._one, 1)

    def restart(self) -> None:
        lib = self._lib
        lib.llama_memory_clear(lib.llama_get_memory(self._context), False)
        batch = lib.llama_batch_get_one(self._prompt, len(self._prompt))
        assert lib.llama_decode(self._context, batch) == 0
        self._logits = np.ctypeslib.as_array(
            lib.llama_get_logits_ith(self._context, -1), shape=(self._rows,)
        )
        self._one[0] = int(self._logits.argmax())

    def step(self, _: int) -> None:
        lib = self._lib
        if lib.llama_decode(self._context, self._batch) != 0:
            raise RuntimeError("llama_decode failed")
        lib.llama_get_logits_ith(self._context, -1)
        self._one[0] = int(self._logits.argmax())

    def close(self) -> None:
        self._lib.llama_free(self._context)


class Ours:
    """The port, as the driver uses it."""

    def __init__(self, model: LlamaDraftModel, prompt: list[int], sampling: Sampling) -> None:
        self._draft = model.open()
        self._prompt = prompt
        self._sampling = sampling

    def restart(self) -> None:
        self._draft.rollback(0)
        self._draft.eval(self._prompt)
        self._token = self._draft.propose(0, self._sampling).token

    def step(self, position: int) -> None:
        self._draft.eval((self._token,))
        self._token = self._draft.propose(position, self._sampling).token

    def close(self) -> None:
        self._draft.close()


def measure(loops: dict[str, Bare | Ours], tokens: int) -> dict[str, float]:
    """Median milliseconds per token and loop."""
    times: dict[str, list[float]] = {name: [] for name in loops}
    names = list(loops)
    for turn in range(-(-tokens // TURN)):
        position = turn * TURN % LENGTH
        if position == 0:
            for loop in loops.values():
                loop.restart()
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            step: Callable[[int], None] = loops[name].step
            # The first token of a turn pays for what the others left in the caches.
            step(position)
            for at in range(1, TURN):
                begin = time.perf_counter()
                step(position + at)
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draft", help="a GGUF file instead of a demo pair's draft")
    parser.add_argument("--pair", default="smollm2")
    parser.add_argument("--draft-quant", default=None)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--tokens", type=int, default=400, help="per loop")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    pair = None if options.draft else options.pair
    path = resolve_draft(options.draft, pair, options.draft_quant)
    model = LlamaDraftModel(path, context=LENGTH + 64, threads=options.threads)
    prompt = model.text.encode_prompt(PROMPT)
    loops: dict[str, Bare | Ours] = {
        "bare": Bare(model, prompt, options.threads),
        "greedy": Ours(model, prompt, Sampling()),
        "sampled": Ours(model, prompt, Sampling(temperature=0.8, top_p=0.95, seed=1)),
    }
    per_token = measure(loops, options.tokens)
    for loop in loops.values():
        loop.close()
    model.close()
    ratios = {name: per_token["bare"] / per_token[name] for name in ("greedy", "sampled")}
    result = {
        "model": path.name,
        "threads": options.threads,
        "ms_per_token": {name: round(value, 3) for name, value in per_token.items()},
        "tokens_per_second": {name: round(1e3 / value, 1) for name, value in per_token.items()},
        "of_bare": {name: round(value, 4) for name, value in ratios.items()},
        "mark": MARK,
        "met": ratios["greedy"] >= MARK,
    }
    if options.json:
        print(json.dumps(result))
        return 0 if result["met"] else 1
    print(f"{path.name}, {options.threads} threads, {options.tokens} tokens per loop")
    for name, value in per_token.items():
        share = "" if name == "bare" else f"  {ratios[name]:6.1%} of bare"
        print(f"  {name:8} {value:7.3f} ms per token  {1e3 / value:6.1f} tokens/s{share}")
    print(f"  mark: greedy at {MARK:.0%} of bare or more: {'met' if result['met'] else 'MISSED'}")
    return 0 if result["met"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
