"""A real target behind a real broker, and what it writes alone, to compare split runs with."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from broker.messages import VERIFY_TRIGGERED
from broker.sampling import Sampling
from cloud_verifier import reference
from cloud_verifier.engine.prepare import resolve_target
from cloud_verifier.engine.target import Work
from cloud_verifier.engine.torch_target import TorchTarget
from edge_agent.core.effects import EdgeStats
from edge_agent.draft import DraftModel
from edge_agent.llama_draft import LlamaDraftModel
from edge_agent.prepare import resolve_draft
from edge_agent.scripted_draft import Chooser, Oracle, ScriptedDraftModel
from tests.brokers import MosquittoBroker
from tests.system import Device, Replica, collect

#: Generations that run at once, each with its own thread and draft sequence.
AT_ONCE = 4
DRAFT_CONTEXT = 1024
#: Tokens of K/V memory that the replica does not hand out, for the target's own runs.
KEPT_BACK = 1024
#: Seconds for one generation, on a busy machine.
LIMIT_S = 300.0


@dataclass(frozen=True)
class Case:
    """One generation to be: ``prompt`` in token ids."""

    name: str
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int


@dataclass(frozen=True)
class Text:
    """What came out: token ids, and why it ended."""

    tokens: list[int]
    finish: str | None


@dataclass(frozen=True)
class Outcome:
    """A case, what the target alone writes, and what the split run wrote."""

    case: Case
    alone: Text
    split: Text
    stats: EdgeStats
    verified: bool

    @property
    def equal(self) -> bool:
        return self.alone == self.split

    @property
    def first_difference(self) -> int:
        """Position of the first token that differs."""
        pairs = zip(self.alone.tokens, self.split.tokens, strict=False)
        common = min(len(self.alone.tokens), len(self.split.tokens))
        return next((i for i, (a, b) in enumerate(pairs) if a != b), common)


class SharedTarget(TorchTarget):
    """The target's own runs and a replica's use one engine in turns."""

    lock = threading.Lock()

    def forward(self, batch: Sequence[Work]) -> list[list[int]]:
        """As TorchTarget.forward."""
        with self.lock:
            return super().forward(batch)


class Lab:
    """A pair's target with one replica that serves it."""

    def __init__(self, url: str, pair: str, dtype: str) -> None:
        self.url = url
        self.pair = pair
        self.source = resolve_target(None, pair)
        self.target = SharedTarget.load(self.source, dtype=dtype, max_slots=8)
        total = self.target.total_blocks
        left = total - KEPT_BACK // self.target.block_tokens
        self.kept_back = tuple(range(left, total))
        """Blocks of K/V memory for the target's own runs."""
        self.replica = Replica(url, self.target, total_blocks=left)
        self._alone: dict[Case, Text] = {}

    def alone(self, case: Case) -> Text:
        """What the target alone writes; computed once."""
        if case not in self._alone:
            assert self.replica.sessions == 0, "the target's slots are in use"
            steps = list(
                reference.generate(
                    self.target, case.prompt, case.sampling, case.max_tokens, blocks=self.kept_back
                )
            )
            self._alone[case] = Text([step.token for step in steps], steps[-1].finish)
        return self._alone[case]

    def split(
        self, draft: DraftModel, cases: Sequence[Case], at_once: int = AT_ONCE, **request: Any
    ) -> list[Outcome]:
        """Run all cases with this draft, ``at_once`` at a time."""
        alone = [self.alone(case) for case in cases]
        # What is counted of forwards and acceptance is the drafts', not of a target that writes on.
        request.setdefault("verify", VERIFY_TRIGGERED)

        def run(device: Device, case: Case, text: Text) -> Outcome:
            generation = device.generate(
                case.prompt, case.max_tokens, sampling=case.sampling, **request
            )
            tokens = collect(generation)
            split = Text(tokens, generation.finish)
            return Outcome(case, text, split, generation.stats, generation.verified)

        with Device(self.url, draft) as device, ThreadPoolExecutor(at_once) as pool:
            jobs = [pool.submit(run, device, *one) for one in zip(cases, alone, strict=True)]
            return [job.result(LIMIT_S) for job in jobs]

    def oracle(self) -> Chooser:
        """The target's choice in every text that was computed already."""
        known = {(*case.prompt, case.sampling.seed): text for case, text in self._alone.items()}

        def choose(sequence: Sequence[int], position: int, sampling: Sampling) -> int:
            prompt = tuple(sequence[: len(sequence) - position])
            tokens = known[(*prompt, sampling.seed)].tokens
            return tokens[position] if position < len(tokens) else 0

        return choose

    def scripted(self, oracle: Oracle) -> ScriptedDraftModel:
        """A draft with the target's vocabulary that says what ``oracle`` does."""
        return ScriptedDraftModel(
            oracle,
            self.target.vocab_size,
            vocab_hash=self.target.vocab_hash,
            eos_ids=sorted(self.target.eos_ids),
        )

    @contextmanager
    def draft(self, quant: str) -> Iterator[LlamaDraftModel]:
        """The pair's draft in this quantisation."""
        path = resolve_draft(None, self.pair, quant)
        model = LlamaDraftModel(path, context=DRAFT_CONTEXT, threads=1, max_sequences=AT_ONCE)
        try:
            yield model
        finally:
            model.close()


@contextmanager
def open_lab(folder: Path, pair: str, dtype: str = "float32") -> Iterator[Lab]:
    """A lab, with torch on two cores, and a broker in ``folder`` that no other replica serves."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with MosquittoBroker(folder) as broker:
        lab = Lab(broker.url, pair, dtype)
        try:
            with lab.replica:
                yield lab
        finally:
            lab.target.close()
            torch.set_num_threads(before)


def differences(outcomes: Iterable[Outcome]) -> list[str]:
    """What is wrong with each run that did not end as the target's own."""
    return [
        f"{o.case.name}: at {o.first_difference} of {o.alone} the split run has {o.split}"
        for o in outcomes
        if not o.equal
    ]
