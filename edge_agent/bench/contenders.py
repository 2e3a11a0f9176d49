"""What a benchmark compares: the policies and PipeSD's ablations, with constants per scenario."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from broker.errors import ConfigError
from broker.messages import VERIFY_EAGER, VERIFY_TRIGGERED
from edge_agent.core.config import VERIFY_AHEAD, VERIFY_AUTO
from edge_agent.core.policies import SEND_AT_ONCE, SEND_HELD, Policy, find_policy, vanilla
from edge_agent.core.trigger import Thresholds

SYSTEM = "system"
ABLATION = "ablation"
BASELINE = "baseline"
REFERENCE = "reference"
#: What ``--policies`` takes beside names.
GROUPS = {
    "systems": (SYSTEM,),
    "ablations": (ABLATION,),
    "baselines": (BASELINE,),
    "references": (REFERENCE,),
    "main": (SYSTEM, BASELINE, REFERENCE),
    "all": (SYSTEM, ABLATION, BASELINE, REFERENCE),
}

#: ``{policy: {scenario: {constant: value}}}``, as ``--constants`` reads it.
Constants = Mapping[str, Mapping[str, Mapping[str, float]]]

_THRESHOLDS = ("r1", "r2", "window")
_CONSTANTS = (*_THRESHOLDS, "min_survival", "max_ahead", "ask_again")
_WHOLE = ("window", "max_ahead", "ask_again")


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to run a session, by ``name``; ``base``: the policy that ``change`` makes it of."""

    name: str
    group: str
    note: str
    base: str
    change: Callable[[Policy], Policy] = lambda policy: policy

    def policy(self, constants: Constants | None = None, scenario: str = "") -> Policy:
        """With its constants for that scenario, else those of its base, else the defaults.

        Raises ConfigError for constants that cannot be.
        """
        known = constants or {}
        policy = find_policy(self.base)
        if scenario in known.get(self.name, {}):
            policy = _apply(self.change(policy), known[self.name][scenario])
        else:
            policy = self.change(_apply(policy, known.get(self.base, {}).get(scenario, {})))
        return replace(policy, name=self.name)


def _apply(policy: Policy, values: Mapping[str, float]) -> Policy:
    exact: dict[str, Any] = {
        name: int(value) if name in _WHOLE else value for name, value in values.items()
    }
    thresholds = {name: exact[name] for name in _THRESHOLDS if name in exact}
    rest = {name: value for name, value in exact.items() if name not in _THRESHOLDS}
    return replace(policy, thresholds=replace(policy.thresholds, **thresholds), **rest)


def _without_r1(policy: Policy) -> Policy:
    return replace(policy, thresholds=replace(policy.thresholds, r1=0.0))


def _without_r2(policy: Policy) -> Policy:
    return replace(policy, thresholds=replace(policy.thresholds, r2=0.0))


def _fixed(policy: Policy) -> Policy:
    return replace(policy, thresholds=Thresholds(0.0, 0.0, vanilla().thresholds.window))


def _no_pipeline(policy: Policy) -> Policy:
    return replace(policy, proactive=False, sending=SEND_HELD)


def _immediate(policy: Policy) -> Policy:
    return replace(policy, sending=SEND_AT_ONCE)


def _verified(how: str) -> Callable[[Policy], Policy]:
    return lambda policy: replace(policy, verify=how)


def _papers(change: Callable[[Policy], Policy]) -> Callable[[Policy], Policy]:
    """As the paper ablates: the target waits for triggers, or its own work would blur the rest."""
    return lambda policy: _verified(VERIFY_TRIGGERED)(change(policy))


def _known() -> dict[str, Contender]:
    ablations: list[tuple[str, str, Callable[[Policy], Policy]]] = [
        ("no-pipeline", "both thresholds, nothing sent or drafted ahead", _no_pipeline),
        ("fixed", f"a verdict every {vanilla().thresholds.window} tokens, pipelined", _fixed),
        ("token-only", "the token rule alone (R1 off)", _without_r1),
        ("sequence-only", "the sequence rule alone (R2 off)", _without_r2),
        ("immediate", "each token sent when drafted, unplanned", _immediate),
    ]
    modes: list[tuple[str, str]] = [
        (VERIFY_TRIGGERED, "the paper's: the target waits for triggers"),
        (VERIFY_EAGER, "the target also judges what came without one (ids, planned: hardly any)"),
        (VERIFY_AHEAD, "the target also writes on by itself, whenever it would idle"),
    ]
    return {
        one.name: one
        for one in (
            Contender("pipesd", SYSTEM, "both thresholds, sending and drafting ahead", "pipesd"),
            *(
                Contender(f"pipesd-{name}", ABLATION, note, "pipesd", _verified(name))
                for name, note in modes
            ),
            Contender("vanilla", BASELINE, "fixed draft length, edge idle meanwhile", "vanilla"),
            Contender("hsl", BASELINE, "token rule, one upload, edge idle meanwhile", "hsl"),
            Contender("edgellm", BASELINE, "adaptive sequence rule, drafts ahead", "edgellm"),
            Contender("cloud", REFERENCE, "the target alone, streamed", "cloud"),
            Contender("local", REFERENCE, "the draft alone: another text", "local"),
            *(
                Contender(f"pipesd-{name}", ABLATION, note, "pipesd", _papers(change))
                for name, note, change in ablations
            ),
            Contender(
                "edgellm-auto",
                ABLATION,
                "edgellm with this verifier's readiness to write on",
                "edgellm",
                _verified(VERIFY_AUTO),
            ),
        )
    }


CONTENDERS: Mapping[str, Contender] = _known()


def select(names: Sequence[str]) -> list[Contender]:
    """Those named, or in the groups named, each once. Raises ConfigError that lists the names."""
    chosen: dict[str, Contender] = {}
    for name in names:
        if name in GROUPS:
            found = [one for one in CONTENDERS.values() if one.group in GROUPS[name]]
        elif name in CONTENDERS:
            found = [CONTENDERS[name]]
        else:
            known = ", ".join((*CONTENDERS, *GROUPS))
            raise ConfigError(f"unknown policy {name!r}: choose among {known}")
        chosen.update({one.name: one for one in found})
    if not chosen:
        raise ConfigError("no policy to measure: name some with --policies")
    return list(chosen.values())


def read_constants(path: str) -> dict[str, dict[str, dict[str, float]]]:
    """The file of ``--constants``. Raises ConfigError naming file and cause."""
    try:
        data: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise ConfigError(f"cannot read --constants {path}: {cause}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--constants {path} is no JSON: {error}") from None
    return check_constants(data, f"--constants {path}")


def check_constants(data: object, what: str) -> dict[str, dict[str, dict[str, float]]]:
    """``data`` as constants. Raises ConfigError that begins with ``what``."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for policy, scenarios in _table(data, what).items():
        if policy not in CONTENDERS:
            raise ConfigError(f"{what}: unknown policy {policy!r}: use {', '.join(CONTENDERS)}")
        found[policy] = {}
        for scenario, values in _table(scenarios, f"{what}: {policy}").items():
            where = f"{what}: {policy}, {scenario}"
            found[policy][scenario] = _values(_table(values, where), where)
            try:
                CONTENDERS[policy].policy(found, scenario)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from None
    return found


def _table(data: object, what: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ConfigError(
            f"{what}: {str(data)[:40]!r} is no table, as {{policy: {{scenario: {{r1: ...}}}}}} is"
        )
    return data


def _values(values: dict[str, Any], where: str) -> dict[str, float]:
    for name, value in values.items():
        if name not in _CONSTANTS:
            raise ConfigError(f"{where}: unknown constant {name!r}: use {', '.join(_CONSTANTS)}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise ConfigError(f"{where}: {name} {value!r} is no number")
        if name in _WHOLE and value != int(value):
            raise ConfigError(f"{where}: {name} {value} is no whole number")
    if not 0.0 <= values.get("min_survival", 0.0) <= 1.0:
        raise ConfigError(f"{where}: min_survival {values['min_survival']} is outside 0 to 1")
    if not 1 <= values.get("max_ahead", 1) <= 512:
        raise ConfigError(f"{where}: max_ahead {values['max_ahead']} is outside 1 to 512")
    return values
