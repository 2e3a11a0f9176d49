"""What a benchmark runs against: brokers with a real verifier behind them, and emulated devices."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Protocol
from urllib.parse import urlsplit

from broker.embedded import EmbeddedBroker
from broker.errors import ConfigError, ModelError, TransportError
from broker.mqtt import MqttTransport
from broker.mqtt_settings import MqttSettings
from edge_agent.bench.link import Link, Scenario
from edge_agent.bench.mosquitto import Mosquitto
from edge_agent.bench.relay import EmulatedLink
from edge_agent.bench.slow import SlowDraftModel
from edge_agent.children import Child
from edge_agent.draft import DraftModel
from edge_agent.runtime import Agent, device_will

MOSQUITTO = "mosquitto"
EMBEDDED = "embedded"
BROKERS = (MOSQUITTO, EMBEDDED)
#: Seconds until a verifier must be up, preparing its model included.
READY_S = 1800.0
#: How the line begins in which a verifier says why it ends.
_VERIFIER = "cloud-verifier: "


class _Broker(Protocol):
    @property
    def url(self) -> str: ...
    @property
    def alive(self) -> bool: ...
    def stop(self) -> None: ...


class Station:
    """A broker and a verifier as child processes; each forward takes ``floor_s`` at least.

    ``flags``: of ``cloud-verifier serve``, which model and how. ``note`` hears progress.
    """

    def __init__(
        self,
        kind: str,
        flags: Sequence[str],
        threads: int,
        *,
        floor_s: float = 0.0,
        note: Callable[[str], None],
    ) -> None:
        self.verifier = ""
        self._kind = kind
        self._flags = [*flags, "--threads", str(threads)]
        if floor_s > 0.0:
            self._flags += ["--forward-floor-ms", repr(floor_s * 1000.0)]
        self._threads = threads
        self._note = note
        self._broker: _Broker | None = None
        self._child: Child | None = None

    def start(self) -> None:
        """Start both; the verifier loads its model meanwhile, which ``Device.meet`` waits for.

        Raises ConfigError or TransportError when the broker does not come up.
        """
        self.stop()
        self._broker = Mosquitto().start() if self._kind == MOSQUITTO else EmbeddedBroker().start()
        self.verifier = f"bench-{secrets.token_hex(3)}"
        where = ["--broker", self._broker.url, "--id", self.verifier, "--until-eof"]
        self._child = Child(
            "cloud_verifier.cli",
            # Each policy computes every prompt, or the first to come would pay for all of them.
            ["serve", "--no-prefix-sharing", *where, *self._flags],
            threads=self._threads,
            on_line=lambda line: None if line.startswith(_VERIFIER) else self._note(line),
        )

    @property
    def alive(self) -> bool:
        """Whether both run."""
        both = (self._broker, self._child)
        return all(one is not None and one.alive for one in both)

    @property
    def address(self) -> tuple[str, int]:
        """Where the broker listens."""
        assert self._broker is not None
        parts = urlsplit(self._broker.url)
        return parts.hostname or "127.0.0.1", parts.port or 1883

    def check(self) -> None:
        """Raises what ended the verifier (ConfigError, ModelError) or the broker."""
        if self._child is not None and not self._child.alive:
            line = self._child.last_line.removeprefix(_VERIFIER)
            if self._child.exit_code == ConfigError.exit_code:
                raise ConfigError(line)
            raise ModelError(f"the verifier ended: {line}")
        if self._broker is not None and not self._broker.alive:
            raise TransportError("the broker ended: see --verbose")

    def stop(self) -> None:
        """End both; idempotent."""
        child, self._child = self._child, None
        if child is not None:
            child.stop()
        broker, self._broker = self._broker, None
        if broker is not None:
            broker.stop()


def steady(link: Link) -> bool:
    """Whether a message meets the same whenever it is sent, and however many went before it.

    Over a link that is not, every cell gets a link of its own, which begins anew, so that each
    policy meets the same rates, cuts and luck.
    """
    return not (link.rates or link.cuts or link.jitter_s or link.stall_probability)


class Device:
    """An agent behind an emulated link to a station. ``offset_s``, ``seed``: as in EmulatedLink."""

    def __init__(
        self,
        station: Station,
        scenario: Scenario,
        draft: DraftModel,
        name: str,
        *,
        offset_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.scenario = scenario
        self._station = station
        floor = scenario.gamma_floor_s
        self._draft = SlowDraftModel(draft, floor) if floor > 0.0 else draft
        self.link = EmulatedLink(
            *station.address,
            scenario.link,
            seed=seed,
            pad_bytes_per_token=scenario.pad_bytes_per_token,
            offset_s=offset_s,
        ).start()
        settings = MqttSettings.from_url(
            self.link.url, f"device-{name}", will=device_will(name, draft.name)
        )
        self.agent = Agent(MqttTransport(settings), self._draft, name)
        self.agent.start()

    def meet(self) -> str:
        """Wait until the verifier is up and known here; its model's name.

        Raises what ended a child, or TransportError when it takes too long.
        """
        wanted = self._station.verifier
        deadline = time.monotonic() + READY_S
        while (status := self.agent.verifiers().get(wanted)) is None:
            self._station.check()
            if time.monotonic() > deadline:
                raise TransportError(
                    f"no verifier within {READY_S:.0f} s over {self.scenario.name}: see --verbose"
                )
            time.sleep(0.02)
        return status.model

    def close(self) -> None:
        """End the agent and its link; idempotent."""
        self.agent.stop()
        self.link.close()
