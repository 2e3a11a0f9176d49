"""An emulated device's place in a fleet: its figures, its telemetry, and the config it follows.

The same figures, messages and rules as a real agent's (``edge_agent.metrics``, ``.telemetry``,
``.device_config``), woken by the fleet's loop instead of a thread.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from broker.clock import Clock
from broker.codec import encode
from broker.errors import PipesdError
from broker.telemetry import DeviceConfig
from broker.topics import config_topic, telemetry_topic
from broker.transport import Transport
from edge_agent.bench.fleet_habits import Habits
from edge_agent.bench.fleet_loop import Sleeper
from edge_agent.core.policies import Policy
from edge_agent.core.session import EdgeSession
from edge_agent.core.trigger import Thresholds
from edge_agent.device_config import ALL_TUNABLES, RemoteConfig, policy_of, thresholds_of
from edge_agent.meter import Meter
from edge_agent.metrics import DeviceFigures
from edge_agent.telemetry import compose

#: What an emulated device calls itself.
DRAFT, MACHINE = "recorded", "emulated"


@dataclass(frozen=True, slots=True)
class _Wish:
    policy: Policy
    thresholds: Thresholds | None
    tunable: frozenset[str]


class FleetReport:
    """Of one device. Silent, and deaf to configs, unless ``habits.telemetry_s`` is above 0.

    ``rejected``: messages that were wrong. ``lost``: telemetry that could not be handed over.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        habits: Habits,
        clock: Clock,
        arm: Callable[[Sleeper], None],
    ) -> None:
        self.wake_at = math.inf
        self.rejected = 0
        self.lost = 0
        self.config_topic = config_topic(name)
        self.speaks = habits.telemetry_s > 0.0
        self._topic = telemetry_topic(name)
        self._transport = transport
        self._interval = habits.telemetry_s
        self._clock = clock
        self._arm = arm
        self._wish = _Wish(habits.policy, None, ALL_TUNABLES if self.speaks else frozenset())
        self._figures = DeviceFigures(clock.now())
        self._remote = RemoteConfig()
        self._boot = secrets.token_hex(8)
        self._sequence = 0
        self._meter: Meter | None = None
        self._core: EdgeSession | None = None

    def begin(self) -> None:
        """The device is about to connect."""
        if self.speaks:
            self._transport.subscribe(self.config_topic, qos=1)

    def connected(self) -> None:
        """The connection is up: the first message goes out now."""
        if self.speaks and self.wake_at == math.inf:
            self.wake_at = self._clock.now()
            self._arm(self)

    def wake(self) -> None:
        """A message is due."""
        now = self._clock.now()
        self.wake_at = now + self._interval
        self._arm(self)
        self._tell(now)

    def leave(self) -> None:
        """The last message; nothing is due any more."""
        if self.speaks and self.wake_at < math.inf:
            self.wake_at = math.inf
            self._tell(self._clock.now())

    def _tell(self, now: float) -> None:
        if not self._transport.connected:
            return  # the next one tells it all
        self._sequence += 1
        message = compose(
            self._figures.snapshot(now, self._given(), policy=self.policy.name),
            boot=self._boot,
            sequence=self._sequence,
            clock=time.time(),
            draft=DRAFT,
            machine=MACHINE,
        )
        try:
            self._transport.publish(self._topic, encode(message), qos=0)
        except PipesdError:
            self.lost += 1

    def _given(self) -> dict[str, float]:
        thresholds = self.policy.thresholds
        return {
            "rejected_messages_total": float(self.rejected),
            "config_rejected_total": float(sum(self._remote.rejected.values())),
            "reconnects_total": float(self._transport.reconnects),
            "config_version": float(self._remote.version),
            "r1_ratio": thresholds.r1,
            "r2_ratio": thresholds.r2,
        }

    # -- config ---------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """What the next generation goes by."""
        return policy_of(self._remote.current, self._wish)

    def configure(self, payload: bytes) -> None:
        """A config came; it changes the running generation as it does an agent's."""
        before = self._remote.current
        if self._remote.take(payload) and self._core is not None:
            self._apply(self._core, before)

    def _apply(self, core: EdgeSession, before: DeviceConfig | None) -> None:
        now = thresholds_of(self._remote.current, self._wish, core.policy)
        if now != thresholds_of(before, self._wish, core.policy):
            core.trigger.thresholds = now

    # -- the running generation -----------------------------------------------------------------

    def started(self, core: EdgeSession, now: float) -> None:
        """A generation was asked for."""
        self._core = core
        self._meter = Meter(core, now)
        self._figures.begin(self._meter)

    def committed(self, tokens: int, now: float) -> None:
        """So many more tokens are final."""
        if self._meter is not None:
            self._meter.committed(tokens, now)

    def sent(self, size: int) -> None:
        """A message with ``size`` bytes of payload went out for it."""
        if self._meter is not None:
            self._meter.traffic[0] += size
            self._meter.traffic[2] += 1

    def heard(self, size: int) -> None:
        """One came."""
        if self._meter is not None:
            self._meter.traffic[1] += size
            self._meter.traffic[3] += 1

    def ended(self, now: float, *, failed: bool) -> None:
        """It is over."""
        meter, self._meter, self._core = self._meter, None, None
        if meter is not None:
            meter.failed = failed
            meter.ended(now)
            self._figures.end(meter, now)
