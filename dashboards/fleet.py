"""The fleet as a whole: is it well, and which devices are not."""

from __future__ import annotations

from dashboards.model import Column, Dashboard, Panel, Query, Row, Variable
from dashboards.panels import stat
from dashboards.promql import (
    device_gauge,
    each,
    fleet_rate,
    quantile,
    rate,
    ratio,
    selector,
)

UID = "pipesd-fleet"
DEVICE_PAGE = "/d/pipesd-device?var-device=${__value.text}&${__url_time_range}"
CHOSEN = 'device=~"$device"'
NOBODY = "No device has reported in this time"
IDLE = "No device generates now"
TOKENS = "suffix: tok/s"
#: Rows of the table of devices, and of each list of the worst.
ROWS = 200
WORST = 10


def _now() -> Row:
    committed = fleet_rate("committed_tokens_total", CHOSEN)
    return Row(
        "Now",
        (
            stat(
                "Devices online",
                "none",
                "Devices whose retained status says online.",
                f"sum({device_gauge('online', CHOSEN)})",
                empty=NOBODY,
            ),
            stat(
                "Generating",
                "none",
                "Generations that run now, over all devices.",
                f"sum({device_gauge('active_generations', CHOSEN)})",
                empty=NOBODY,
            ),
            stat(
                "Tokens",
                TOKENS,
                "Committed tokens per second of the whole fleet.",
                committed,
                empty=NOBODY,
                decimals=1,
            ),
            stat(
                "Time per token",
                "s",
                "TPT: generation time by committed tokens, over all tokens of the fleet.",
                ratio(fleet_rate("generation_seconds_total", CHOSEN), committed),
                empty=IDLE,
                decimals=1,
            ),
            stat(
                "Acceptance",
                "percentunit",
                "Share of the judged draft tokens that the target accepted.",
                ratio(
                    fleet_rate("accepted_tokens_total", CHOSEN),
                    fleet_rate("judged_tokens_total", CHOSEN),
                ),
                empty=IDLE,
                decimals=1,
                least=0,
                most=1,
                base="red",
                thresholds=((0.3, "orange"), (0.6, "green")),
            ),
            stat(
                "Local mode",
                "percentunit",
                "Share of generation time that devices spent without the cloud.",
                ratio(
                    fleet_rate("local_seconds_total", CHOSEN),
                    fleet_rate("generation_seconds_total", CHOSEN),
                ),
                empty=IDLE,
                decimals=1,
                least=0,
                base="green",
                thresholds=((0.05, "orange"), (0.5, "red")),
            ),
        ),
    )


def _speed() -> Row:
    tpt, ttft = "pipesd_device_tpt_seconds", "pipesd_device_ttft_seconds"
    return Row(
        "Speed",
        (
            Panel(
                "Time per token of generations",
                "timeseries",
                "s",
                "Half, 95 % and 99 % of the generations of five minutes had at most this.",
                "No generation ended in this time",
                tuple(
                    Query(quantile(share, tpt, CHOSEN), f"{share:.0%}")
                    for share in (0.5, 0.95, 0.99)
                ),
                width=8,
                least=0,
            ),
            Panel(
                "Time to the first token",
                "timeseries",
                "s",
                "From a request to its first committed token: half, 95 % and 99 % of five minutes.",
                "No generation ended in this time",
                tuple(
                    Query(quantile(share, ttft, CHOSEN), f"{share:.0%}")
                    for share in (0.5, 0.95, 0.99)
                ),
                width=8,
                least=0,
            ),
            Panel(
                "Tokens by origin",
                "timeseries",
                TOKENS,
                "Committed tokens per second: accepted drafts, the target's own, and those that no"
                " target judged.",
                NOBODY,
                (
                    Query(fleet_rate("accepted_tokens_total", CHOSEN), "accepted drafts"),
                    Query(fleet_rate("target_tokens_total", CHOSEN), "target's own"),
                    Query(fleet_rate("local_tokens_total", CHOSEN), "local"),
                ),
                width=8,
                stacked=True,
                least=0,
            ),
            Panel(
                "Forwards per token",
                "timeseries",
                "none",
                "Forwards of the target for each committed token; the target alone needs 1.",
                IDLE,
                (
                    Query(
                        ratio(
                            fleet_rate("forwards_total", CHOSEN),
                            fleet_rate("committed_tokens_total", CHOSEN),
                        ),
                        "fleet",
                    ),
                ),
                width=8,
                least=0,
                thresholds=((1, "red"),),
            ),
            Panel(
                "What asks for verdicts",
                "timeseries",
                "suffix: /s",
                "Requests per second by the rule that made them: token (R2), sequence (R1), a full"
                " window, nothing left to draft.",
                NOBODY,
                tuple(
                    Query(fleet_rate(f"triggers_{rule}_total", CHOSEN), rule)
                    for rule in ("token", "sequence", "window", "end")
                ),
                width=8,
                stacked=True,
                least=0,
            ),
            Panel(
                "Joules per token",
                "timeseries",
                "joule",
                "Energy of the devices by committed tokens. The page of one device says whether it"
                " is measured or estimated.",
                "No device of these measures or estimates its energy, or none generates",
                (
                    Query(
                        ratio(
                            fleet_rate("energy_joules_total", CHOSEN),
                            "sum("
                            + each(
                                rate("pipesd_device_committed_tokens_total", CHOSEN)
                                + " and on (device) pipesd_device_energy_joules_total"
                            )
                            + ")",
                        ),
                        "fleet",
                    ),
                ),
                width=8,
                least=0,
            ),
        ),
    )


def _traffic() -> Row:
    return Row(
        "Link and faults",
        (
            Panel(
                "Traffic per token",
                "timeseries",
                "bytes",
                "MQTT payload bytes for each committed token.",
                IDLE,
                tuple(
                    Query(
                        ratio(
                            fleet_rate(f"{way}_bytes_total", CHOSEN),
                            fleet_rate("committed_tokens_total", CHOSEN),
                        ),
                        way,
                    )
                    for way in ("uplink", "downlink")
                ),
                width=8,
                least=0,
            ),
            Panel(
                "Interruptions",
                "timeseries",
                "suffix: /min",
                "Per minute: waits that ran out, sessions opened again, openings refused,"
                " connections made again, generations that failed.",
                NOBODY,
                tuple(
                    Query(f"60 * {fleet_rate(f'{name}_total', CHOSEN)}", legend)
                    for name, legend in (
                        ("timeouts", "timeouts"),
                        ("reopens", "opened again"),
                        ("refusals", "refused"),
                        ("reconnects", "reconnects"),
                        ("generation_errors", "failed generations"),
                    )
                ),
                width=8,
                least=0,
            ),
            Panel(
                "Wrong messages",
                "timeseries",
                "suffix: /min",
                "Per minute: messages and configurations that devices had to drop, and telemetry"
                " that the exporter dropped, by cause.",
                NOBODY,
                (
                    Query(f"60 * {fleet_rate('rejected_messages_total', CHOSEN)}", "messages"),
                    Query(f"60 * {fleet_rate('config_rejected_total', CHOSEN)}", "configurations"),
                    Query(
                        "60 * sum by (cause) (" + rate("pipesd_exporter_dropped_total") + ") > 0",
                        "exporter: {{cause}}",
                    ),
                ),
                width=8,
                least=0,
            ),
        ),
    )


def _worst(title: str, unit: str, description: str, empty: str, expr: str) -> Panel:
    return Panel(
        title,
        "bargauge",
        unit,
        description,
        empty,
        (Query(expr, "{{device}}"),),
        width=6,
        height=9,
        least=0,
    )


def _devices() -> Row:
    tpt = selector("device:pipesd_tpt_seconds:rate5m", CHOSEN)
    last = device_gauge("last_seen_timestamp_seconds", CHOSEN)
    listed = f"and on (device) topk({ROWS}, {last})"
    columns = (
        (f"topk({ROWS}, {last}) * 1000", Column("Last word", "dateTimeFromNow")),
        (f"{device_gauge('online', CHOSEN)} {listed}", Column("Online", "bool_yes_no")),
        (f"{tpt} {listed}", Column("Time per token", "s", 1)),
        (
            f"{selector('device:pipesd_acceptance:ratio_rate5m', CHOSEN)} {listed}",
            Column("Acceptance", "percentunit", 0),
        ),
        (
            f"{selector('device:pipesd_committed_tokens:rate5m', CHOSEN)} {listed}",
            Column("Tokens", TOKENS, 1),
        ),
        (f"{device_gauge('r1_ratio', CHOSEN)} {listed}", Column("R1", "none", 3)),
        (f"{device_gauge('r2_ratio', CHOSEN)} {listed}", Column("R2", "none", 3)),
        (f"{device_gauge('config_version', CHOSEN)} {listed}", Column("Config", "none", 0)),
        (
            f"{device_gauge('temperature_celsius', CHOSEN)} {listed}",
            Column("Temperature", "celsius", 0),
        ),
    )
    return Row(
        "Which devices",
        (
            _worst(
                "Slowest",
                "s",
                "Devices with the highest time per token over five minutes.",
                IDLE,
                f"topk({WORST}, {tpt})",
            ),
            _worst(
                "Worst drafts",
                "percentunit",
                "Devices with the lowest acceptance over five minutes.",
                IDLE,
                f"bottomk({WORST}, {selector('device:pipesd_acceptance:ratio_rate5m', CHOSEN)})",
            ),
            _worst(
                "Silent for longest",
                "s",
                "Seconds since a device's last telemetry; after the exporter's time to live it"
                " leaves this list, and all series.",
                NOBODY,
                f"topk({WORST}, time() - {last})",
            ),
            _worst(
                "Hottest",
                "celsius",
                "Devices with the highest processor temperature.",
                "No device of these has a temperature sensor",
                f"topk({WORST}, {device_gauge('temperature_celsius', CHOSEN)})",
            ),
            Panel(
                "Devices",
                "table",
                "none",
                f"The {ROWS} devices that were heard last. A click on a name opens its page.",
                NOBODY,
                tuple(Query(expr) for expr, _ in columns),
                width=24,
                height=12,
                columns=tuple(column for _, column in columns),
                sort="Time per token",
                links=(("This device", DEVICE_PAGE),),
            ),
        ),
    )


def _replicas() -> Row:
    known = "No verifier has been heard of: is the exporter connected?"
    return Row(
        "Replicas, as the broker knows them",
        (
            Panel(
                "Replicas online",
                "timeseries",
                "none",
                "Verifiers whose retained status says online.",
                known,
                (Query("sum(max by (verifier) (pipesd_fleet_verifier_online))", "online"),),
                least=0,
            ),
            Panel(
                "Sessions by replica",
                "timeseries",
                "none",
                "Sessions that each verifier says it holds, in its status.",
                known,
                (Query("max by (verifier) (pipesd_fleet_verifier_sessions)", "{{verifier}}"),),
                stacked=True,
                least=0,
            ),
        ),
    )


def dashboard() -> Dashboard:
    return Dashboard(
        UID,
        "PipeSD fleet",
        "Is the fleet well, how fast is it, and which devices are not.",
        (_now(), _speed(), _devices(), _traffic(), _replicas()),
        (
            Variable(
                "device",
                "Device",
                "One or several devices; All: the fleet.",
                "label_values(pipesd_device_last_seen_timestamp_seconds, device)",
            ),
        ),
    )
