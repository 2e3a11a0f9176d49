"""The draft model of a benchmark and what it runs against, each loaded when it is first wanted."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING

from edge_agent.bench.choices import Choices, encode
from edge_agent.bench.prompts import BenchPrompt
from edge_agent.bench.recording import Pair

if TYPE_CHECKING:
    from edge_agent.bench.cells import Result
    from edge_agent.bench.runner import Runner
    from edge_agent.core.policies import Policy
    from edge_agent.llama_draft import LlamaDraftModel

LoadDraft = Callable[[argparse.Namespace, Callable[[str], None]], "LlamaDraftModel"]
#: Characters of the target's name that a trace takes.
_MAX_NAME = 200


class Machines:
    """A context manager; what was loaded ends with it. ``note`` hears progress.

    Reading a property raises ConfigError, ModelError or TransportError where loading fails.
    """

    def __init__(self, chosen: Choices, load: LoadDraft, note: Callable[[str], None]) -> None:
        self._chosen = chosen
        self._load = load
        self._note = note
        self._begin = time.monotonic()
        self._opened: list[Callable[[], None]] = []

    def __enter__(self) -> Machines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._opened:
            self._opened.pop()()

    @cached_property
    def draft(self) -> LlamaDraftModel:
        """The draft model."""
        draft = self._load(self._chosen.args, self._note)
        self._opened.append(draft.close)
        return draft

    @cached_property
    def prompts(self) -> dict[str, tuple[int, ...]]:
        """Token ids of the prompts that are compared."""
        return self.encode(self._chosen.prompts)

    def encode(self, prompts: Sequence[BenchPrompt]) -> dict[str, tuple[int, ...]]:
        """Token ids by name. Raises ConfigError when one does not fit."""
        return {prompt.name: encode(prompt, self.draft, self._chosen.args) for prompt in prompts}

    @cached_property
    def runner(self) -> Runner:
        """Brokers, verifiers and devices, up and warm."""
        # Imported this late: they bring the MQTT client in.
        from edge_agent.bench.runner import Plan, Runner

        chosen, args = self._chosen, self._chosen.args
        plan = Plan(
            {one.name: one for one in chosen.contenders},
            chosen.scenarios,
            self.prompts,
            chosen.constants,
            chosen.sampling,
            args.max_tokens,
            args.verify,
            args.seed,
            frozenset([chosen.prompts[0].name]),
            args.timeout,
        )
        target = ["--pair", args.pair] if args.pair else ["--target", args.target]
        runner = Runner(
            plan,
            self.draft,
            broker=chosen.broker,
            flags=[*target, "--dtype", args.dtype],
            threads=chosen.target_threads,
            note=self._note,
        )
        self._opened.append(runner.close)
        runner.__enter__()
        spent = time.monotonic() - self._begin
        self._note(
            f"draft {self.draft.name}, target {runner.target}, {len(chosen.cells)} generations, "
            f"ready after {spent:.0f} s"
        )
        return runner

    def alone(self, name: str, prompt: tuple[int, ...], policy: Policy) -> Result:
        """See ``Runner.alone``."""
        return self.runner.alone(name, prompt, policy)

    @property
    def pair(self) -> Pair:
        """For recording."""
        chosen = self._chosen
        name = str(chosen.settings.target)[-_MAX_NAME:]
        return Pair(self.draft, name, chosen.sampling, chosen.args.max_tokens)
