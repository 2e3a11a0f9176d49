"""What is to be measured, as the flags of ``edge-agent bench`` say it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from broker.errors import ConfigError
from broker.flags import sampling_from
from edge_agent.bench.cells import Settings, order
from edge_agent.bench.contenders import Constants, Contender, read_constants, select
from edge_agent.bench.link import SCENARIOS, WIRE_IDS, Scenario, find_scenario
from edge_agent.bench.prompts import BUILT_IN, BenchPrompt, check_names, read_prompts
from edge_agent.bench.tuned import to_tune, wish_of
from edge_agent.cpus import usable_cores

if TYPE_CHECKING:
    from edge_agent.llama_draft import LlamaDraftModel

MAX_TOKENS = 64
FULL_SCENARIOS = ("wifi", "4g", "far", "slow-edge", "S1", "S2", "S3", "S4")
FULL_PROMPTS = 8
FULL_MINUTES = 60.0
QUICK_SCENARIOS = ("wifi", "4g")
QUICK_POLICIES = ("main",)
QUICK_PROMPTS = 3
QUICK_TOKENS = 32
QUICK_MINUTES = 2.0
_MAX_CELLS = 200_000


class Choices:
    """The flags, checked. Raises ConfigError, before anything is loaded."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        quick = args.quick
        self.contenders = select(_names(args.policies, QUICK_POLICIES if quick else ("all",)))
        self.scenarios = _scenarios(args)
        self.prompts = _prompts(args)
        self.constants: Constants = {} if args.constants is None else read_constants(args.constants)
        self.tune = wish_of(args, self.prompts)
        if quick:
            args.max_tokens = min(args.max_tokens, QUICK_TOKENS)
        self.sampling = sampling_from(args)
        self.limit_s = 60.0 * _limit_minutes(args)
        if not 1 <= args.repeats <= 1_000:
            raise ConfigError(f"--repeats {args.repeats} is outside 1 to 1000")
        if args.target_threads is not None and args.target_threads < 1:
            raise ConfigError(f"--target-threads {args.target_threads} is below 1: leave it out")
        given = [model for model in (args.draft, args.target) if model is not None]
        if len(given) not in (0, 2) or (given and args.pair is not None):
            raise ConfigError("give --draft and --target, or --pair, or none of them")
        if not given and args.pair is None:
            args.pair = "smollm2"
        for name in self.constants:
            for scenario in self.constants[name]:
                if scenario not in self.scenarios and scenario not in SCENARIOS:
                    raise ConfigError(f"--constants: unknown scenario {scenario!r} of {name}")
        if not 0.0 < args.timeout <= 3_600.0:
            raise ConfigError(f"--timeout {args.timeout:g} is outside 0 to 3600 seconds")
        cores = usable_cores()
        self.target_threads = args.target_threads or max(1, cores - 1)
        if args.threads is None:
            args.threads = max(1, cores - self.target_threads)
        self.broker = broker_kind(args.broker_kind)
        self.cells = list(
            order(
                [one.name for one in self.contenders],
                list(self.scenarios),
                [prompt.name for prompt in self.prompts],
                args.repeats,
                args.seed,
            )
        )
        if len(self.cells) > _MAX_CELLS:
            raise ConfigError(f"{len(self.cells)} generations, above {_MAX_CELLS}: choose fewer")
        self.settings = self._settings()

    @property
    def tunes(self) -> bool:
        """Whether constants are to be found."""
        policies = [one.name for one in self.contenders]
        return self.tune is not None and bool(to_tune(policies, self.scenarios, self.constants))

    def use(self, constants: Constants) -> None:
        """Compare with these, which were found."""
        self.constants = constants
        self.settings = self._settings()

    def _settings(self) -> Settings:
        args = self.args
        quant = f" {args.draft_quant}" if args.draft_quant else ""
        return Settings(
            draft=(args.pair or Path(args.draft).name) + quant,
            target=args.pair or args.target,
            dtype=args.dtype,
            broker=self.broker,
            draft_threads=args.threads,
            target_threads=self.target_threads,
            max_tokens=args.max_tokens,
            repeats=args.repeats,
            seed=args.seed,
            verify=args.verify,
            sampling=dataclasses.asdict(self.sampling),
            policies={one.name: self._constants(one) for one in self.contenders},
            scenarios={name: one.to_dict() for name, one in self.scenarios.items()},
            prompts={
                prompt.name: {"text": prompt.text, "chat": prompt.chat} for prompt in self.prompts
            },
        )

    def _constants(self, contender: Contender) -> dict[str, Any]:
        """Its policy by scenario, once where it is the same everywhere."""
        found = {
            name: dataclasses.asdict(contender.policy(self.constants, name))
            for name in self.scenarios
        }
        first = next(iter(found.values()))
        return {"all": first} if all(one == first for one in found.values()) else found


def _names(given: str | None, default: Sequence[str]) -> list[str]:
    if given is None:
        return list(default)
    return [name.strip() for name in given.split(",") if name.strip()]


def _scenarios(args: argparse.Namespace) -> dict[str, Scenario]:
    own = [] if args.scenario_file is None else _read_scenarios(args.scenario_file)
    default = () if own else QUICK_SCENARIOS if args.quick else FULL_SCENARIOS
    found = [find_scenario(name) for name in _names(args.scenarios, default)] + own
    if not found:
        raise ConfigError("no scenario to measure in: name some with --scenarios")
    check_names([scenario.name for scenario in found], "--scenarios")
    floors = {
        "gamma_floor_s": args.gamma_floor_ms / 1000.0,
        "forward_floor_s": args.forward_floor_ms / 1000.0,
    }
    for name, value in floors.items():
        if not 0.0 <= value <= 60.0:
            flag = name.replace("_s", "_ms").replace("_", "-")
            raise ConfigError(f"--{flag} {value * 1000.0:g} is outside 0 to 60000")
    return {
        scenario.name: dataclasses.replace(
            scenario,
            wire=args.wire if args.wire != WIRE_IDS else scenario.wire,
            gamma_floor_s=max(scenario.gamma_floor_s, floors["gamma_floor_s"]),
            forward_floor_s=max(scenario.forward_floor_s, floors["forward_floor_s"]),
        )
        for scenario in found
    }


def _read_scenarios(path: str) -> list[Scenario]:
    try:
        data: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise ConfigError(f"cannot read --scenario-file {path}: {cause}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--scenario-file {path} is no JSON: {error}") from None
    if not isinstance(data, list) or not 1 <= len(data) <= 100:
        raise ConfigError(f"--scenario-file {path} is no list of 1 to 100 scenarios: mend it")
    try:
        return [Scenario.from_dict(one) for one in data]
    except ConfigError as error:
        raise ConfigError(f"--scenario-file {path}: {error}") from None


def _prompts(args: argparse.Namespace) -> tuple[BenchPrompt, ...]:
    count = args.prompt_count
    if count is not None and count < 1:
        raise ConfigError(f"--prompt-count {count} is below 1: leave it out for the default")
    if args.prompts is None and args.tune_prompts is None and args.raw:
        raise ConfigError("--raw goes with --prompts: the built-in prompts know what they are")
    every = BUILT_IN if args.prompts is None else read_prompts(args.prompts, chat=not args.raw)
    return every[: count or (QUICK_PROMPTS if args.quick else FULL_PROMPTS)]


def _limit_minutes(args: argparse.Namespace) -> float:
    minutes = args.max_minutes
    if minutes is None:
        return QUICK_MINUTES if args.quick else FULL_MINUTES
    if not 0.0 < minutes < math.inf:
        raise ConfigError(f"--max-minutes {minutes:g} is not above 0: leave it out")
    return float(minutes)


def broker_kind(kind: str) -> str:
    from edge_agent.bench.mosquitto import find_mosquitto

    installed = find_mosquitto() is not None
    if kind == "mosquitto" and not installed:
        raise ConfigError("mosquitto is not installed: install it, or --broker-kind embedded")
    if kind == "auto":
        return "mosquitto" if installed else "embedded"
    return kind


def encode(
    prompt: BenchPrompt, draft: LlamaDraftModel, args: argparse.Namespace
) -> tuple[int, ...]:
    """Its token ids. Raises ConfigError when it does not fit the draft's context."""
    text = draft.text
    if prompt.chat and text.has_chat_template:
        tokens = tuple(text.encode_chat([{"role": "user", "content": prompt.text}]))
    else:
        tokens = tuple(text.encode_prompt(prompt.text))
    if len(tokens) + args.max_tokens > draft.context:
        raise ConfigError(
            f"prompt {prompt.name} has {len(tokens)} tokens; with {args.max_tokens} more it is "
            f"longer than the draft's context of {draft.context}: shorten it, or --draft-context"
        )
    return tokens
