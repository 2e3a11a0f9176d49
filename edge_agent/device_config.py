"""What a device is told to work with: taken from its ``config`` topic, checked, and applied.

The broker retains the latest config, so a device hears it whenever it comes; an empty payload takes
it back. What is wrong changes nothing: it is counted by cause, and said once for each.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import Protocol

from broker.codec import decode
from broker.errors import RemoteProtocolError
from broker.telemetry import CONFIG_SCHEMA, DeviceConfig
from edge_agent.core.policies import POLICIES, Policy, find_policy
from edge_agent.core.trigger import Thresholds

log = logging.getLogger(__name__)

#: What a config may set; a session names those that it leaves to it.
R1, R2, WINDOW, POLICY = TUNABLES = ("r1", "r2", "window", "policy")
ALL_TUNABLES = frozenset(TUNABLES)
#: A config that names no policy means this one: the thresholds of others are their own.
DEFAULT_POLICY = "pipesd"
#: Policies that a config may name. Not local: nobody from outside may have a device write what no
#: target stands for.
NAMEABLE = tuple(name for name in POLICIES if name != "local")


class Wish(Protocol):
    """What of a request is to be decided here; see edge_agent.generation.Request."""

    @property
    def policy(self) -> Policy: ...
    @property
    def thresholds(self) -> Thresholds | None: ...
    @property
    def tunable(self) -> frozenset[str]: ...


def read_config(payload: bytes) -> DeviceConfig | None:
    """The config in a message; None: there is none any more. Raises RemoteProtocolError."""
    if not payload:
        return None
    config = decode(payload)
    if not isinstance(config, DeviceConfig):
        raise RemoteProtocolError("no config", cause="unexpected_kind")
    return check_config(config)


def check_config(config: DeviceConfig) -> DeviceConfig:
    """``config`` itself. Raises RemoteProtocolError where this version cannot work with it."""
    if config.schema != CONFIG_SCHEMA:
        raise RemoteProtocolError(
            f"a config of form {config.schema}, this agent knows {CONFIG_SCHEMA}", cause="schema"
        )
    if config.version < 1:
        raise RemoteProtocolError("a config of version 0, which means none", cause="version")
    if config.policy and config.policy not in NAMEABLE:
        raise RemoteProtocolError(f"a config with policy {config.policy!r}", cause="policy")
    return config


class RemoteConfig:
    """The config in force, None for the device's own settings, and what was wrong so far.

    One thread takes; any may read ``current``, which is replaced as a whole. ``rejected`` counts by
    cause, a fixed set.
    """

    def __init__(self, current: DeviceConfig | None = None) -> None:
        self.current = current
        self.rejected: Counter[str] = Counter()

    @property
    def version(self) -> int:
        """Of the config in force; 0: none is."""
        current = self.current
        return 0 if current is None else current.version

    def take(self, payload: bytes) -> bool:
        """A message has come; whether another config is in force now."""
        try:
            config = read_config(payload)
        except RemoteProtocolError as error:
            self.rejected[error.cause] += 1
            if self.rejected[error.cause] == 1:
                log.warning(
                    "a config was refused (%s): %s; version %d stays in force: see who publishes "
                    "there",
                    error.cause,
                    str(error)[:200],
                    self.version,
                )
            return False
        changed = config != self.current
        self.current = config
        return changed


def policy_of(config: DeviceConfig | None, wish: Wish) -> Policy:
    """The policy of a generation that begins now, with its thresholds."""
    policy = wish.policy
    if config is not None and config.policy and POLICY in wish.tunable:
        named = find_policy(config.policy)
        policy = policy if named.name == policy.name else named
    return replace(policy, thresholds=thresholds_of(config, wish, policy))


def thresholds_of(config: DeviceConfig | None, wish: Wish, policy: Policy) -> Thresholds:
    """Those of a generation that runs by ``policy``, whichever that became.

    First what the request has fixed, then the config if it means that policy, then the policy's.
    """
    own = wish.thresholds or wish.policy.thresholds
    if policy.name != wish.policy.name:
        asked = {name: getattr(own, name) for name in (R1, R2, WINDOW) if name not in wish.tunable}
        own = replace(find_policy(policy.name).thresholds, **asked)
    if config is None or (config.policy or DEFAULT_POLICY) != policy.name:
        return own
    return Thresholds(
        config.r1 if R1 in wish.tunable else own.r1,
        config.r2 if R2 in wish.tunable else own.r2,
        config.window if config.window and WINDOW in wish.tunable else own.window,
    )
