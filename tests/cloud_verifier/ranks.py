"""One rank of a tiny target cut over several: what ``test_torch_parallel`` starts with torchrun.

``python -m tests.cloud_verifier.ranks FOLDER GOAL``: rank 0 writes to GOAL, as JSON, what it found.
With ``stall`` behind it rank 1 stands still in the middle, and rank 0 writes what it says of that.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch

from broker.errors import LocalProtocolError
from broker.sampling import Sampling
from cloud_verifier.engine import torch_parallel
from cloud_verifier.engine.target import Work
from cloud_verifier.engine.torch_parallel import ParallelTarget, Ranks
from cloud_verifier.engine.torch_target import TorchTarget
from tests.brokers import wait_until
from tests.tiny_models import sequence_of

SLOTS = 4
SAMPLED = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=7)


def rounds(seed: int, count: int) -> list[list[Work]]:
    """Batches of sessions that come, grow, lose drafts, draft trees, and start again."""
    dice = random.Random(seed)
    held = [0] * SLOTS
    found = []
    for number in range(count):
        batch = []
        for slot in dice.sample(range(SLOTS), dice.randint(1, SLOTS)):
            keep = dice.choice([0, held[slot], max(0, held[slot] - 2)])
            if keep > 90:
                keep = 0
            fed = sequence_of(dice.choice([1, 3, 5, 30]), 100 * number + slot)
            asked, parents = dice.randint(1, len(fed)), None
            if len(fed) == 5:
                asked, parents = 4, (-1, 0, -1)
            how = SAMPLED if slot % 2 else Sampling()
            batch.append(Work(slot, keep, tuple(fed), asked, keep, how, parents))
            held[slot] = keep + len(fed) - len(parents or ())
        found.append(batch)
    return found


def look(target: ParallelTarget, whole: TorchTarget) -> dict[str, Any]:
    """How the cut target compares with the whole one, and with itself in other company."""
    wrong, refused = 0, ""
    for number, batch in enumerate(rounds(3, 40)):
        wrong += target.forward(batch) != whole.forward(batch)
        if number % 10 == 9:
            for each in (target, whole):
                each.forward([Work(SLOTS, 0, (1, 2), 1, 0, Sampling())])
                each.free(SLOTS)
        if number == 20:
            # Refused on rank 0 alone, and nothing of it is told.
            try:
                target.forward([Work(0, 0, (target.vocab_size,), 1, 0, Sampling())])
            except LocalProtocolError as exc:
                refused = type(exc).__name__
    for slot in range(SLOTS):
        target.free(slot)
        whole.free(slot)
    texts = [sequence_of(length, 50 + length) for length in (3, 17, 40, 70)]
    works = [
        Work(slot, 0, tuple(text), len(text), 0, Sampling()) for slot, text in enumerate(texts)
    ]
    together = target.logits(works)
    expected = whole.logits(works)
    alone = []
    for work in works:
        target.free(work.slot)
        alone.append(target.logits([work]))
    target.free(0)
    bits = [torch.equal(torch.cat(alone), together)]
    for keep in (0, 1, 2):  # a token by itself, as a session without drafts feeds it
        row = target.logits([Work(0, keep, (texts[0][keep],), 1, 0, Sampling())])
        bits.append(torch.equal(row[0], together[keep]))
    return {
        "wrong": wrong,
        "refused": refused,
        "difference": float((together - expected).abs().max()),
        "spread": float(expected.std()),
        "same_bits": bits,
        "heads": [target.layers[0].heads, whole.layers[0].heads],
        "bytes_per_token": [target.bytes_per_token, whole.bytes_per_token],
    }


def stall(folder: str, goal: str) -> None:
    torch_parallel._FORWARD_S = 2.0
    ranks = Ranks("cpu")
    target = ParallelTarget.join(folder, ranks, max_slots=SLOTS, threads=1)
    work = Work(0, 0, (1, 2), 1, 0, Sampling())
    if not ranks.first:
        assert ranks.hear() == ("logits", (work,))
        wait_until(lambda: Path(goal).exists(), 60)
        os._exit(0)
    ended = 0
    for _ in range(2):  # and nothing more is tried afterwards
        try:
            target.forward([work])
        except SystemExit:
            ended += 1
    target.close()
    Path(goal).write_text(json.dumps({"lost": target.lost, "ended": ended}))


def main(folder: str, goal: str, what: str = "look") -> None:
    if what == "stall":
        stall(folder, goal)
        return
    ranks = Ranks("cpu")
    target = ParallelTarget.join(folder, ranks, max_slots=SLOTS + 1, threads=1)
    if not ranks.first:
        target.follow()
        return
    whole = TorchTarget.load(folder, max_slots=SLOTS + 1, threads=1)
    try:
        Path(goal).write_text(json.dumps(look(target, whole)))
    finally:
        target.close()
        target.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
