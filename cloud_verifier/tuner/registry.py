"""Who tunes which device, what is kept about it, and what the operator demands: one table.

A lease needs no clock that two machines agree on. Its owner raises ``beat`` in every cycle; another
tuner takes the lease over when it has seen the same beat for ``lease_s`` seconds of its own
monotonic clock, by an update that holds only if owner and beat are still those. A clock that jumps
or differs changes nothing, and of two that try at once one wins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from broker.errors import LocalProtocolError
from cloud_verifier.tuner.core.messages import Choice, Record
from cloud_verifier.tuner.core.space import Pair
from cloud_verifier.tuner.database import Database

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: Seconds without a beat after which a lease may be taken over.
LEASE_S = 30.0
#: Devices in the table: every one that ever told something, so a bound for who makes up names.
MAX_ROWS = 100_000
#: Devices of a class that are looked at.
_MAX_CLASS = 200


@dataclass(frozen=True, slots=True)
class Row:
    """One device. ``owner``: of its lease, empty: nobody. ``settled``: counts settled searches."""

    device: str
    owner: str
    beat: int
    device_class: str
    record: Record
    settled: int = 0


class Registry:
    """See the module. Every method raises StudyError when the database fails.

    ``refused``: times that a new device found no room in the table.
    """

    def __init__(self, database: Database, owner: str, *, lease_s: float = LEASE_S) -> None:
        """``owner``: unlike any other's, also of an earlier start."""
        self.owner = owner
        self.latest: dict[str, Row] = {}  # of the last sync
        self.refused = 0
        self._database = database
        self._table = database.devices
        self._lease_s = lease_s
        self._beats: dict[str, tuple[str, int, float]] = {}

    # -- leases -----------------------------------------------------------------------------------

    def sync(self, now: float) -> dict[str, Row]:
        """Renew this tuner's leases; everything there is. ``now``: monotonic seconds."""
        table = self._table
        with self._database.transaction() as connection:
            connection.execute(
                table.update().where(table.c.owner == self.owner).values(beat=table.c.beat + 1)
            )
            rows = self._rows(connection)
        beats: dict[str, tuple[str, int, float]] = {}
        for name, row in rows.items():
            known = self._beats.get(name)
            if known is not None and known[:2] == (row.owner, row.beat):
                beats[name] = known
            else:
                beats[name] = (row.owner, row.beat, now)
        self._beats, self.latest = beats, rows
        return rows

    def acquire(self, devices: Iterable[str], now: float) -> dict[str, Record]:
        """Those of ``devices`` whose lease this tuner has from now on, and what is kept of them."""
        from sqlalchemy.exc import IntegrityError

        table = self._table
        got: list[str] = []
        room = MAX_ROWS - len(self.latest)
        with self._database.transaction() as connection:
            for device in devices:
                known = self._beats.get(device)
                if known is None:
                    if room <= 0:
                        self.refused += 1
                        continue
                    room -= 1
                    try:
                        with connection.begin_nested():
                            connection.execute(
                                table.insert().values(device=device, owner=self.owner)
                            )
                        got.append(device)
                    except IntegrityError:
                        pass  # another tuner was first; the next sync shows it
                    continue
                owner, beat, since = known
                if owner == self.owner:
                    got.append(device)  # taken earlier, but what followed failed
                    continue
                if owner and now - since < self._lease_s:
                    continue
                taken = connection.execute(
                    table.update()
                    .where(table.c.device == device, table.c.owner == owner, table.c.beat == beat)
                    .values(owner=self.owner, beat=beat + 1)
                )
                if taken.rowcount == 1:
                    got.append(device)
            rows = self._rows(connection, got)
        return {name: row.record for name, row in rows.items()}

    def release(self, devices: Iterable[str] | None = None) -> None:
        """Let others have ``devices``; None: all that this tuner has."""
        table = self._table
        query = table.update().where(table.c.owner == self.owner).values(owner="")
        if devices is not None:
            query = query.where(table.c.device.in_(list(devices)))
        with self._database.transaction() as connection:
            connection.execute(query)

    def save(self, device: str, device_class: str, record: Record) -> bool:
        """Keep how a search ended, or that a new one began; False: the operator was faster."""
        table = self._table
        values: dict[str, Any] = {"campaign": record.campaign, "device_class": device_class[:512]}
        before = record.campaign
        if record.settled is None:
            before -= 1
            values |= {"r1": None, "r2": None, "tpt": None, "trials": 0}
        else:
            pair = record.settled.pair
            values |= {"r1": pair.r1, "r2": pair.r2, "tpt": record.settled.tpt}
            values |= {"trials": record.settled.trials, "settled": table.c.settled + 1}
        with self._database.transaction() as connection:
            done = connection.execute(
                table.update()
                .where(
                    table.c.device == device,
                    table.c.owner == self.owner,
                    table.c.campaign == before,
                )
                .values(**values)
            )
            return done.rowcount == 1

    # -- the operator's ---------------------------------------------------------------------------

    def rows(self) -> dict[str, Row]:
        """Everything there is, leases left alone."""
        with self._database.transaction() as connection:
            return self._rows(connection)

    def pin(self, device: str, pair: Pair | None) -> None:
        """Hold the device at ``pair`` until it is freed by None."""
        r1, r2 = (None, None) if pair is None else (pair.r1, pair.r2)
        self._change(device, {"pin_r1": r1, "pin_r2": r2})

    def reset(self, device: str) -> None:
        """Forget what was found and any pin; the next search begins from nothing."""
        values = {"campaign": self._table.c.campaign + 1, "trials": 0}
        gone = dict.fromkeys(("r1", "r2", "tpt", "pin_r1", "pin_r2"))
        self._change(device, {**values, **gone})

    def _change(self, device: str, values: dict[str, Any]) -> None:
        table = self._table
        with self._database.transaction() as connection:
            if self._row(connection, device) is None:
                connection.execute(table.insert().values(device=device))
            connection.execute(table.update().where(table.c.device == device).values(**values))

    def _row(self, connection: Connection, device: str) -> Any:
        table = self._table
        return connection.execute(table.select().where(table.c.device == device)).first()

    def _rows(self, connection: Connection, names: list[str] | None = None) -> dict[str, Row]:
        table = self._table
        query = table.select()
        if names is not None:
            query = query.where(table.c.device.in_(names))
        return {row.device: _row(row) for row in connection.execute(query)}


def _row(row: Any) -> Row:
    pin = _pair(row.pin_r1, row.pin_r2)
    pair = _pair(row.r1, row.r2)
    settled = None if pair is None else Choice(pair, row.tpt or 0.0, row.trials)
    record = Record(row.campaign, settled, pin)
    return Row(row.device, row.owner, row.beat, row.device_class, record, row.settled)


def _pair(r1: float | None, r2: float | None) -> Pair | None:
    """Somebody else may have written there: what is no pair counts as none."""
    if r1 is None or r2 is None:
        return None
    try:
        return Pair(r1, r2)
    except LocalProtocolError:
        return None


def prior_pairs(rows: Iterable[Row], device: str, device_class: str) -> list[Pair]:
    """What was best for other devices of nearly the same class, the most typical first."""
    pairs = [
        row.record.settled.pair
        for row in rows
        if row.device != device
        and row.record.settled is not None
        and row.record.settled.tpt > 0.0
        and alike(row.device_class, device_class)
    ][:_MAX_CLASS]
    return sorted(pairs, key=lambda pair: sum(_away(pair, other) for other in pairs))


def _away(left: Pair, right: Pair) -> float:
    return abs(left.r1 - right.r1) + abs(left.r2 - right.r2)


def alike(left: str, right: str) -> bool:
    """Whether two classes are the same but for a step of the link, which rounding may make."""
    if not left or not right:
        return False
    *machine, alpha, gamma, forward = left.rsplit("|", 3)
    *other, alpha2, gamma2, forward2 = right.rsplit("|", 3)
    if machine != other:
        return False
    for one, two in ((alpha, alpha2), (gamma, gamma2), (forward, forward2)):
        if one != two and ("-" in (one, two) or abs(int(one) - int(two)) > 1):
            return False
    return True
