"""One device: what it does, with which settings, over which link, on which hardware."""

from __future__ import annotations

from functools import partial

from dashboards.model import Dashboard, Panel, Query, Row, Variable
from dashboards.panels import graph, stat
from dashboards.promql import device_gauge, device_rate, quantile, ratio

UID = "pipesd-device"
CHOSEN = 'device="$device"'
SILENT = "This device has not reported in this time"
IDLE = "This device does not generate now"
TOKENS = "suffix: tok/s"
_stat = partial(stat, empty=SILENT, width=3)
_graph = partial(graph, empty=SILENT)


def _now() -> Row:
    committed = device_rate("committed_tokens_total", CHOSEN)
    labels = ("version", "draft", "policy", "machine", "energy_source")
    return Row(
        "Now",
        (
            _stat(
                "Status",
                "none",
                "The retained status on the broker.",
                device_gauge("online", CHOSEN),
                names=((0, "offline", "red"), (1, "online", "green")),
            ),
            _stat(
                "Last word",
                "s",
                "Seconds since its last telemetry, by the exporter's clock.",
                f"time() - {device_gauge('last_seen_timestamp_seconds', CHOSEN)}",
                decimals=0,
            ),
            _stat(
                "Up for",
                "dtdurations",
                "Time since the agent's start.",
                device_gauge("uptime_seconds", CHOSEN),
            ),
            _stat(
                "Clock",
                "s",
                "How far its clock is ahead of the exporter's. Nothing depends on it but TLS.",
                device_gauge("clock_offset_seconds", CHOSEN),
                empty="This device does not tell the time",
                decimals=1,
            ),
            _stat(
                "Time per token now",
                "s",
                "TPT: generation time by committed tokens.",
                ratio(device_rate("generation_seconds_total", CHOSEN), committed),
                empty=IDLE,
                decimals=1,
            ),
            _stat(
                "Tokens",
                TOKENS,
                "Committed tokens per second, pauses included.",
                committed,
                decimals=1,
            ),
            _stat(
                "Acceptance",
                "percentunit",
                "Share of its judged drafts that the target accepted.",
                ratio(
                    device_rate("accepted_tokens_total", CHOSEN),
                    device_rate("judged_tokens_total", CHOSEN),
                ),
                empty=IDLE,
                decimals=0,
            ),
            _stat(
                "Config",
                "none",
                "Version of the configuration in force; 0: the device's own defaults.",
                device_gauge("config_version", CHOSEN),
                decimals=0,
            ),
            Panel(
                "What it is",
                "table",
                "none",
                "Version, draft model, policy and machine, as the device tells them. Where"
                " energy_source says estimate, joules come from CPU seconds and stated watts.",
                SILENT,
                (Query(f"max by (device, {', '.join(labels)}) (pipesd_device_info{{{CHOSEN}}})"),),
                width=24,
                height=4,
                labels=labels,
            ),
        ),
    )


def _speed() -> Row:
    committed = device_rate("committed_tokens_total", CHOSEN)
    return Row(
        "Speed",
        (
            _graph(
                "Time per token",
                "s",
                "TPT beside its parts: a token of the draft model, and a forward of the target as"
                " seen from here.",
                Query(ratio(device_rate("generation_seconds_total", CHOSEN), committed), "TPT"),
                Query(device_gauge("gamma_seconds", CHOSEN), "draft token (gamma)"),
                Query(device_gauge("forward_seconds", CHOSEN), "target forward"),
            ),
            _graph(
                "Time to the first token",
                "s",
                "Of the generations that ended in five minutes: half and 95 % had at most this.",
                *(
                    Query(quantile(share, "pipesd_device_ttft_seconds", CHOSEN), f"{share:.0%}")
                    for share in (0.5, 0.95)
                ),
                empty="No generation ended in this time",
            ),
            _graph(
                "Tokens by origin",
                TOKENS,
                "Committed tokens per second: accepted drafts, the target's own, and local ones.",
                Query(device_rate("accepted_tokens_total", CHOSEN), "accepted drafts"),
                Query(device_rate("target_tokens_total", CHOSEN), "target's own"),
                Query(device_rate("local_tokens_total", CHOSEN), "local"),
                stacked=True,
            ),
            _graph(
                "Fate of drafts",
                TOKENS,
                "Tokens per second that were drafted, judged, accepted, and dropped after a"
                " contradiction.",
                *(
                    Query(device_rate(f"{name}_tokens_total", CHOSEN), name.replace("_", " "))
                    for name in ("drafted", "judged", "accepted", "rolled_back")
                ),
            ),
            _graph(
                "Acceptance and forwards",
                "none",
                "Accepted by judged drafts, and forwards of the target for each committed token.",
                Query(
                    ratio(
                        device_rate("accepted_tokens_total", CHOSEN),
                        device_rate("judged_tokens_total", CHOSEN),
                    ),
                    "acceptance",
                ),
                Query(
                    ratio(device_rate("forwards_total", CHOSEN), committed), "forwards per token"
                ),
                empty=IDLE,
            ),
            _graph(
                "Generations",
                "suffix: /min",
                "Per minute: generations that ended, and those of them that ended with an error.",
                Query(f"60 * {device_rate('generations_total', CHOSEN)}", "ended"),
                Query(f"60 * {device_rate('generation_errors_total', CHOSEN)}", "failed"),
            ),
        ),
    )


def _settings() -> Row:
    return Row(
        "Settings in force",
        (
            _graph(
                "Thresholds",
                "none",
                "R1 (sequence) and R2 (token). Where R1 is the larger one the token rule never"
                " decides.",
                Query(device_gauge("r1_ratio", CHOSEN), "R1"),
                Query(device_gauge("r2_ratio", CHOSEN), "R2"),
                most=1,
            ),
            _graph(
                "What asks for verdicts",
                "suffix: /s",
                "Requests per second by the rule that made them.",
                *(
                    Query(device_rate(f"triggers_{rule}_total", CHOSEN), rule)
                    for rule in ("token", "sequence", "window", "end")
                ),
                stacked=True,
            ),
            _graph(
                "Window and configuration",
                "none",
                "Tokens that the sending plan covers, and the version of the configuration.",
                Query(device_gauge("window_tokens", CHOSEN), "window"),
                Query(device_gauge("config_version", CHOSEN), "config version"),
            ),
        ),
    )


def _link() -> Row:
    return Row(
        "Link",
        (
            _graph(
                "Way up",
                "s",
                "What a message needs at least (alpha), and for how long it keeps the link busy.",
                Query(device_gauge("alpha_seconds", CHOSEN), "alpha"),
                Query(device_gauge("occupancy_seconds", CHOSEN), "occupancy"),
            ),
            _graph(
                "Way up, per token",
                "s",
                "What each token in a message adds (beta).",
                Query(device_gauge("beta_seconds", CHOSEN), "beta"),
            ),
            _graph(
                "Traffic",
                "Bps",
                "MQTT payload bytes per second.",
                Query(device_rate("uplink_bytes_total", CHOSEN), "up"),
                Query(device_rate("downlink_bytes_total", CHOSEN), "down"),
            ),
            _graph(
                "Messages",
                "suffix: /s",
                "Messages per second for generations.",
                Query(device_rate("uplink_messages_total", CHOSEN), "up"),
                Query(device_rate("downlink_messages_total", CHOSEN), "down"),
            ),
            _graph(
                "Interruptions",
                "suffix: /min",
                "Per minute: waits that ran out, sessions opened again, openings refused,"
                " connections made again.",
                *(
                    Query(f"60 * {device_rate(f'{name}_total', CHOSEN)}", legend)
                    for name, legend in (
                        ("timeouts", "timeouts"),
                        ("reopens", "opened again"),
                        ("refusals", "refused"),
                        ("reconnects", "reconnects"),
                    )
                ),
            ),
            _graph(
                "Without the cloud, and wrong messages",
                "none",
                "Seconds in local mode per second; messages and configurations dropped per second.",
                Query(device_rate("local_seconds_total", CHOSEN), "local mode"),
                Query(device_rate("rejected_messages_total", CHOSEN), "wrong messages"),
                Query(device_rate("config_rejected_total", CHOSEN), "wrong configurations"),
            ),
        ),
    )


def _hardware() -> Row:
    committed = device_rate("committed_tokens_total", CHOSEN)
    energy = "This device neither measures nor estimates its energy"
    return Row(
        "Hardware",
        (
            _graph(
                "CPU",
                "none",
                "Cores that the agent keeps busy.",
                Query(device_rate("cpu_seconds_total", CHOSEN), "cores"),
            ),
            _graph(
                "Memory",
                "bytes",
                "Of the agent, and what the machine has and has left.",
                Query(device_gauge("resident_memory_bytes", CHOSEN), "agent"),
                Query(device_gauge("machine_available_memory_bytes", CHOSEN), "available"),
                Query(device_gauge("machine_memory_bytes", CHOSEN), "machine"),
            ),
            _graph(
                "Temperature",
                "celsius",
                "Temperature of the processor.",
                Query(device_gauge("temperature_celsius", CHOSEN), "processor"),
                empty="This device has no temperature sensor",
                least=None,
            ),
            _graph(
                "Throttled",
                "percentunit",
                "Share of the time in which the hardware was throttled.",
                Query(device_rate("throttled_seconds_total", CHOSEN), "share"),
                Query(device_gauge("throttled", CHOSEN), "now"),
                empty="This device does not tell when it is throttled",
                most=1,
            ),
            _graph(
                "Power",
                "watt",
                "Of the machine; see energy_source above for where it comes from.",
                Query(device_rate("energy_joules_total", CHOSEN), "power"),
                empty=energy,
            ),
            _graph(
                "Joules per token",
                "joule",
                "Energy of the machine by committed tokens.",
                Query(
                    ratio(device_rate("energy_joules_total", CHOSEN), committed), "joules per token"
                ),
                empty=energy,
            ),
        ),
    )


def dashboard() -> Dashboard:
    return Dashboard(
        UID,
        "PipeSD device",
        "What one device does, with which settings, over which link and on which hardware.",
        (_now(), _speed(), _settings(), _link(), _hardware()),
        (
            Variable(
                "device",
                "Device",
                "The device to look at.",
                "label_values(pipesd_device_last_seen_timestamp_seconds, device)",
                several=False,
            ),
        ),
    )
