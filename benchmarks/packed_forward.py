"""The packed forward of the torch target: ``python -m benchmarks.packed_forward [--target MODEL]``.

``8x5``: five drafted tokens of each of eight sessions in one forward, with the choice after each;
``1x5`` and ``1x1``: one session alone. ``plain``: transformers' own forward with its own cache over
as many tokens of one sequence, and the argmax. All take turns, so that a busy machine slows all
alike; figures are medians. Marks: 8x5 in at most 2.5 times the time of 1x5, and each engine's
forward in at most 1.2 times the time of the plain one.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from broker.sampling import Sampling
from cloud_verifier.engine.prepare import resolve_target
from cloud_verifier.engine.target import Work
from cloud_verifier.engine.torch_target import DTYPES, TorchTarget

PAST = 100  # tokens that each session has before
SESSIONS = 8
BATCH_MARK, PLAIN_MARK = 2.5, 1.2
BUDGET_S = 8.0  # of turns, for each precision


def engine_cases(target: TorchTarget, texts: list[list[int]]) -> dict[str, Callable[[], object]]:
    greedy = Sampling()
    for slot, text in enumerate(texts):
        target.forward([Work(slot, 0, tuple(text[:PAST]), 0, 0, greedy)])

    def run(sessions: int, tokens: int) -> object:
        return target.forward(
            [
                Work(slot, PAST, tuple(text[PAST : PAST + tokens]), tokens, 0, greedy)
                for slot, text in enumerate(texts[:sessions])
            ]
        )

    return {
        "1x1": lambda: run(1, 1),
        "1x5": lambda: run(1, 5),
        f"{SESSIONS}x1": lambda: run(SESSIONS, 1),
        f"{SESSIONS}x5": lambda: run(SESSIONS, 5),
    }


def plain_cases(model: Any, text: list[int]) -> dict[str, Callable[[], object]]:
    import torch
    import transformers

    cache = transformers.DynamicCache(config=model.config)
    known = inspect.signature(type(model).forward).parameters
    name = "cache" if "cache" in known else "past_key_values"

    @torch.inference_mode()
    def run(start: int, tokens: int) -> object:
        ids = torch.tensor([text[start : start + tokens]])
        logits = model(input_ids=ids, use_cache=True, **{name: cache}).logits[0]
        return logits.argmax(-1).tolist()

    def again(tokens: int) -> object:
        if (extra := cache.get_seq_length() - PAST) > 0:
            cache.crop(-extra)
        return run(PAST, tokens)

    run(0, PAST)
    return {
        f"plain {tokens}": lambda tokens=tokens: again(tokens)  # type: ignore[misc]
        for tokens in (1, 5, SESSIONS * 5)
    }


def measure(cases: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median ms of each case."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    begin = time.perf_counter()
    for turn in range(-2, rounds):  # two rounds to warm up
        if turn >= 3 and time.perf_counter() - begin > BUDGET_S:
            break
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            if turn >= 0:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def ratios_of(ms: dict[str, float]) -> dict[str, tuple[float, float | None]]:
    """What is compared with what: the ratio and its mark, if it has one."""
    many = f"{SESSIONS}x5"
    return {
        f"{many} / 1x5": (ms[many] / ms["1x5"], BATCH_MARK),
        f"{many} / plain 5": (ms[many] / ms["plain 5"], None),
        f"{SESSIONS}x1 / 1x1": (ms[f"{SESSIONS}x1"] / ms["1x1"], None),
        "1x1 / plain 1": (ms["1x1"] / ms["plain 1"], PLAIN_MARK),
        "1x5 / plain 5": (ms["1x5"] / ms["plain 5"], PLAIN_MARK),
        f"{many} / plain {SESSIONS * 5}": (ms[many] / ms[f"plain {SESSIONS * 5}"], PLAIN_MARK),
    }


def bench(directory: str, dtype: str, rounds: int) -> dict[str, float]:
    target = TorchTarget.load(directory, dtype=dtype, max_slots=SESSIONS, context=PAST + 64)
    import transformers

    library: Any = transformers
    model = library.AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[dtype])
    draw = random.Random(1)  # noqa: S311 - any text will do
    texts = [
        [draw.randrange(target.vocab_size) for _ in range(PAST + SESSIONS * 5)]
        for _ in range(SESSIONS)
    ]
    ms = measure(engine_cases(target, texts) | plain_cases(model.eval(), texts[0]), rounds)
    target.close()
    return ms


def main() -> int:
    import torch  # not before cloud_verifier.engine, which sets how its idle threads wait

    parser = argparse.ArgumentParser(prog="python -m benchmarks.packed_forward")
    parser.add_argument("--target", help="a model directory, hub id or GGUF instead of the pair's")
    parser.add_argument("--pair", default="smollm2")
    parser.add_argument("--dtype", choices=DTYPES, help="one precision instead of both")
    parser.add_argument("--threads", type=int, help="of torch (its own choice)")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each case, at most (15)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    if options.threads is not None:
        torch.set_num_threads(max(1, options.threads))
    directory = resolve_target(options.target, None if options.target else options.pair)
    results: dict[str, Any] = {"threads": torch.get_num_threads()}
    for dtype in [options.dtype] if options.dtype else list(DTYPES):
        ms = bench(directory, dtype, options.rounds)
        ratios = ratios_of(ms)
        results[dtype] = {
            "ms": {name: round(value, 2) for name, value in ms.items()},
            "ratios": {name: round(ratio, 3) for name, (ratio, _) in ratios.items()},
            "met": all(mark is None or ratio <= mark for ratio, mark in ratios.values()),
        }
        if options.json:
            continue
        print(f"{dtype}, {torch.get_num_threads()} threads, {PAST} tokens of past")
        print("  " + "  ".join(f"{name} {value:.1f} ms" for name, value in ms.items()))
        for name, (ratio, mark) in ratios.items():
            verdict = "" if mark is None else f"  mark {mark}: {_verdict(ratio, mark)}"
            print(f"  {name:16} {ratio:6.2f}{verdict}")
    if options.json:
        print(json.dumps(results))
    return 0 if all(results[name]["met"] for name in DTYPES if name in results) else 1


def _verdict(ratio: float, mark: float) -> str:
    return "met" if ratio <= mark else "MISSED"


if __name__ == "__main__":
    raise SystemExit(main())
