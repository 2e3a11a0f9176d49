"""Time per token of choosing with the shared noise: ``python -m benchmarks.noise [--json]``.

The rows are random: ``flat`` ones (normal logits, standard deviation 3: thousands of tokens inside
top-p 0.95) and ``peaked`` ones, with half a dozen tokens well above the rest as a language model
mostly has them. Each round runs all cases of a library one after the other, so that a busy machine
slows all of them alike; the figure is the median over the rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from broker.noise import hash_ids, noise_key
from broker.sampling import Sampler, Sampling

SMOLLM2, QWEN2 = 49_152, 151_936  # sizes of vocabularies
SESSIONS, ROWS = 8, 5  # of the packed batch


@dataclass
class Case:
    """``run(round)`` chooses ``tokens`` tokens; ``mark``: the most ms a token may take, if any."""

    name: str
    run: Callable[[int], object]
    tokens: int = 1
    mark: float | None = None


def logits(size: int, rows: int, peaked: bool) -> npt.NDArray[np.float32]:
    """float32[rows, size]"""
    rng = np.random.default_rng(size)
    values = rng.standard_normal((rows, size)) * 3
    if peaked:
        values[:, :6] += (16, 15, 14.5, 14, 13, 12)
    return values.astype(np.float32)


def numpy_cases() -> list[Case]:
    cases = []
    for size, label in ((SMOLLM2, "49k"), (QWEN2, "152k")):
        sampler = Sampler(size)
        marks = {"greedy": 0.1 if size == SMOLLM2 else None, "T=0.8": 1.5}
        for shape in ("peaked", "flat"):
            row = logits(size, 1, shape == "peaked")[0]
            for name, sampling in settings().items():

                def run(
                    turn: int,
                    sampler: Sampler = sampler,
                    row: npt.NDArray[np.float32] = row,
                    sampling: Sampling = sampling,
                ) -> object:
                    return sampler.choose_with_confidence(row, turn, sampling)

                cases.append(Case(f"numpy {label} {shape:6} {name}", run, mark=marks.get(name)))
    ids = np.arange(QWEN2, dtype=np.uint32)
    out, scratch = np.empty_like(ids), np.empty_like(ids)
    cases.append(
        Case("numpy 152k hash alone", lambda turn: hash_ids(ids, noise_key(1, turn), out, scratch))
    )
    return cases


def torch_cases() -> list[Case]:
    import torch

    from cloud_verifier.engine.torch_sampling import choose_many

    torch.set_num_threads(os.cpu_count() or 1)
    cases = []
    for size, label in ((SMOLLM2, "49k"), (QWEN2, "152k")):
        batch = torch.from_numpy(logits(size, SESSIONS * ROWS, peaked=True))
        for name, sampling in settings().items():

            def run(
                turn: int, batch: torch.Tensor = batch, sampling: Sampling = sampling
            ) -> object:
                return choose_many(batch, [(ROWS, turn, sampling)] * SESSIONS)

            cases.append(
                Case(f"torch {label} peaked {name}, {SESSIONS}x{ROWS}", run, SESSIONS * ROWS)
            )
    return cases


def settings() -> dict[str, Sampling]:
    return {
        "greedy": Sampling(),
        "T=0.8": Sampling(0.8, seed=1),
        "T=0.8 top-p=0.95": Sampling(0.8, top_p=0.95, seed=1),
        "T=0.8 top-k=50": Sampling(0.8, top_k=50, seed=1),
    }


def measure(cases: list[Case], rounds: int) -> dict[str, float]:
    """Median ms per token of each case."""
    times: dict[str, list[float]] = {case.name: [] for case in cases}
    for turn in range(-2, rounds):  # two rounds to warm up
        for case in cases:
            start = time.perf_counter()
            case.run(turn + 2)
            if turn >= 0:
                times[case.name].append((time.perf_counter() - start) / case.tokens * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.noise", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50, help="rounds of all cases (50)")
    parser.add_argument("--json", action="store_true", help="one JSON object: name -> ms per token")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: at least 1")
    cases = numpy_cases()
    medians = measure(cases, arguments.rounds)
    if importlib.util.find_spec("torch") is not None:
        # Apart from the single rows: batches of tens of megabytes would empty their caches.
        cases += (others := torch_cases())
        medians |= measure(others, arguments.rounds)
    kept = all(case.mark is None or medians[case.name] <= case.mark for case in cases)
    if arguments.json:
        print(json.dumps({name: round(ms, 4) for name, ms in medians.items()}))
        return 0 if kept else 1
    print(f"{'ms per token, median of ' + str(arguments.rounds):48} {'ms':>8}  mark")
    for case in cases:
        ms = medians[case.name]
        verdict = (
            "" if case.mark is None else f"{case.mark} {'kept' if ms <= case.mark else 'MISSED'}"
        )
        print(f"{case.name:48} {ms:8.3f}  {verdict}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
