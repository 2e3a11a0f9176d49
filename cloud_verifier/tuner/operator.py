"""What an operator does by hand: ``tune status``, ``pin``, ``unpin`` and ``reset``.

They work on the storage and on the retained config, whether or not a tuner runs: one that does sees
the change in its next cycle.
"""

from __future__ import annotations

import argparse
import json
import secrets
import threading
from typing import Any

from broker.command import Stopped
from broker.errors import ConfigError, LocalProtocolError, TransportError
from broker.flags import broker_settings
from broker.topics import check_device_id
from broker.transport import ConnectionEvent, ConnectionState
from cloud_verifier.tuner.configs import Configs
from cloud_verifier.tuner.core.space import LEAST, MOST, Pair
from cloud_verifier.tuner.database import BrokenStudyError, Database, default_url
from cloud_verifier.tuner.optuna_studies import OptunaStudies
from cloud_verifier.tuner.registry import Registry, Row

#: Seconds for the broker to answer, and for what it retains to arrive.
_CONNECT_S, _SETTLE_S = 10.0, 0.5


def run(args: argparse.Namespace) -> int:
    """One action. Raises ConfigError, TransportError or StudyError."""
    if args.device is not None:
        check_device_id(args.device, "DEVICE")
    action = args.command1
    pair: Pair | None = None
    if action == "pin":
        pair = _pair(args)
    if action != "status" and args.broker:
        broker_settings(args, "operator", None)  # wrong usage before anything changes
    database = Database(args.storage or default_url())
    try:
        registry = Registry(database, "")
        if action == "status":
            return _status(args, registry, OptunaStudies(database))
        if action == "reset":
            registry.reset(args.device)
        else:
            registry.pin(args.device, pair)
    finally:
        database.close()
    if action == "unpin":
        print(f"{args.device} is free; a running tuner goes on with it")
    elif not args.broker:
        print(f"{args.device}: noted; without --broker its config waits for a running tuner")
    else:
        version = _publish(args, pair)
        said = f"is held at {pair}, version {version}" if pair else "forgot what was found for it"
        print(f"{args.device} {said}")
    return 0


def _pair(args: argparse.Namespace) -> Pair:
    if args.r1 is None or args.r2 is None:
        raise ConfigError("tune pin needs both --r1 and --r2")
    try:
        return Pair(args.r1, args.r2)
    except LocalProtocolError as error:
        raise ConfigError(f"{error}: give --r1 and --r2 from {LEAST} to {MOST}") from None


def _publish(args: argparse.Namespace, pair: Pair | None) -> int:
    """Retain a config for the device, or with None take it away; its version."""
    from broker.mqtt import MqttTransport

    there, failed = threading.Event(), []

    def on_event(event: ConnectionEvent) -> None:
        if event.state is ConnectionState.FAILED:
            failed.append(event.reason)
        if event.state is not ConnectionState.DISCONNECTED:
            there.set()

    settings = broker_settings(args, f"operator-{secrets.token_hex(4)}", None)
    configs = Configs(MqttTransport(settings), on_event)
    configs.start()
    try:
        if not there.wait(_CONNECT_S) or failed:
            why = failed[0] if failed else f"no answer in {_CONNECT_S:.0f} s"
            raise TransportError(f"the storage is changed, but not the config: {why}; try again")
        threading.Event().wait(_SETTLE_S)
        if pair is None:
            configs.clear(args.device)
            return 0
        return configs.publish(args.device, pair, anew=False)
    except Stopped:
        raise TransportError("stopped: the storage is changed, the config perhaps not") from None
    finally:
        configs.stop(5.0)


def _status(args: argparse.Namespace, registry: Registry, studies: OptunaStudies) -> int:
    rows = registry.rows()
    if args.device is not None:
        if args.device not in rows:
            raise ConfigError(f"nothing is known of {args.device}: see tune status for all")
        rows = {args.device: rows[args.device]}
    found = {name: _described(row, studies) for name, row in sorted(rows.items())}
    if args.device is not None:
        campaign = rows[args.device].record.campaign
        found[args.device]["history"] = studies.history(args.device, campaign)
    if args.json:
        print(json.dumps({"devices": found}))
        return 0
    print(f"{'device':24}{'state':11}{'search':>7}{'trials':>8}{'R1':>8}{'R2':>8}{'TPT ms':>9}")
    for name, one in found.items():
        numbers = [one["r1"], one["r2"], one["tpt_ms"]]
        texts = ["-" if value is None else f"{value:.3f}" for value in numbers[:2]]
        texts.append("-" if numbers[2] is None else f"{numbers[2]:.1f}")
        print(
            f"{name:24}{one['state']:11}{one['search']:7}{one['trials']:8}"
            f"{texts[0]:>8}{texts[1]:>8}{texts[2]:>9}"
        )
        for trial in one.get("history", ()):
            print(f"  {_trial_line(trial)}")
    return 0


def _described(row: Row, studies: OptunaStudies) -> dict[str, Any]:
    """Plain values: what stands, or the best so far of a search that goes on."""
    record = row.record
    settled = record.settled
    broken, best = False, settled
    if settled is None:
        try:
            best = studies.best(row.device, record.campaign)
        except BrokenStudyError:
            broken = True
    trials = 0 if best is None else best.trials
    pair = record.pin or (None if best is None else best.pair)
    if record.pin is not None:
        state = "pinned"
    elif settled is not None:
        state = "settled"
    elif broken:
        state = "broken"
    else:
        state = "searching" if row.owner else "waiting"
    return {
        "state": state,
        "search": record.campaign,
        "trials": trials,
        "r1": None if pair is None else pair.r1,
        "r2": None if pair is None else pair.r2,
        "tpt_ms": None if best is None or not best.tpt else round(1e3 * best.tpt, 2),
        "tuner": row.owner,
        "class": row.device_class,
    }


def _trial_line(trial: dict[str, Any]) -> str:
    head = f"{trial['number'] + 1:3} {trial['state']:9}"
    if trial["r1"] is not None:
        head += f" R1 {trial['r1']:.3f} R2 {trial['r2']:.3f}"
    if trial["tpt"] is not None:
        head += f" {1e3 * trial['tpt']:8.1f} ms" + (" dropped early" if trial["early"] else "")
    return head + (f" ({trial['cause']})" if trial["cause"] else "")
