"""What a device counts and measures: one table for the device that sends it and the exporter.

Each figure has a number that never changes its meaning; a payload carries numbers, the exporter
turns them into series ``pipesd_device_<name>`` with the label ``device``. Names and units follow
the Prometheus conventions (prometheus.io, metric and label naming): seconds, bytes, a counter ends
in ``_total``. Counters count since the agent's start; that they begin anew is what ``rate()``
expects of a counter.

Derived figures, in PromQL (``by (device)`` where several are summed):

TPT in seconds, as the paper defines it::

    rate(pipesd_device_generation_seconds_total[5m])
        / rate(pipesd_device_committed_tokens_total[5m])

acceptance::

    rate(pipesd_device_accepted_tokens_total[5m]) / rate(pipesd_device_judged_tokens_total[5m])

forwards of the target per committed token::

    rate(pipesd_device_forwards_total[5m]) / rate(pipesd_device_committed_tokens_total[5m])

joules per committed token::

    rate(pipesd_device_energy_joules_total[5m]) / rate(pipesd_device_committed_tokens_total[5m])
"""

from __future__ import annotations

from typing import NamedTuple

COUNTER = "counter"
GAUGE = "gauge"


class Figure(NamedTuple):
    """``number``: on the wire; ``name``: without prefix; ``kind``: COUNTER or GAUGE."""

    number: int
    name: str
    kind: str
    help: str


#: Of a number that makes sense in any of them; more is a broken sender.
MAX_VALUE = 1e15

FIGURES: tuple[Figure, ...] = (
    Figure(1, "generations_total", COUNTER, "Generations that ended, however they did."),
    Figure(2, "generation_errors_total", COUNTER, "Generations that ended with an error."),
    Figure(
        3,
        "generation_seconds_total",
        COUNTER,
        "Seconds from each request to its last committed token so far.",
    ),
    Figure(4, "drafted_tokens_total", COUNTER, "Tokens that the draft model proposed."),
    Figure(5, "judged_tokens_total", COUNTER, "Draft tokens that the target judged."),
    Figure(6, "accepted_tokens_total", COUNTER, "Draft tokens that the target accepted."),
    Figure(7, "committed_tokens_total", COUNTER, "Tokens that are final: accepted, own or local."),
    Figure(8, "target_tokens_total", COUNTER, "Committed tokens that are the target's own."),
    Figure(9, "local_tokens_total", COUNTER, "Committed tokens that no target judged."),
    Figure(10, "rolled_back_tokens_total", COUNTER, "Draft tokens dropped after a contradiction."),
    Figure(11, "forwards_total", COUNTER, "Verdicts taken in, each one forward of the target."),
    Figure(12, "triggers_token_total", COUNTER, "Requests for a verdict by the token rule (R2)."),
    Figure(13, "triggers_sequence_total", COUNTER, "Requests by the sequence rule (R1)."),
    Figure(14, "triggers_window_total", COUNTER, "Requests because the draft window was full."),
    Figure(15, "triggers_end_total", COUNTER, "Requests because nothing was left to draft."),
    Figure(16, "uplink_bytes_total", COUNTER, "MQTT payload bytes sent for generations."),
    Figure(17, "downlink_bytes_total", COUNTER, "MQTT payload bytes received for generations."),
    Figure(18, "uplink_messages_total", COUNTER, "Messages sent for generations."),
    Figure(19, "downlink_messages_total", COUNTER, "Messages received for generations."),
    Figure(20, "timeouts_total", COUNTER, "Waits for a verdict that ran out and were repeated."),
    Figure(21, "reopens_total", COUNTER, "Sessions that were opened again, here or elsewhere."),
    Figure(22, "refusals_total", COUNTER, "Openings that a verifier refused."),
    Figure(23, "reconnects_total", COUNTER, "Connections to the broker after the first."),
    Figure(24, "local_seconds_total", COUNTER, "Seconds spent generating without the cloud."),
    Figure(25, "rejected_messages_total", COUNTER, "Messages dropped because they were wrong."),
    Figure(26, "config_rejected_total", COUNTER, "Config messages that could not be applied."),
    Figure(27, "cpu_seconds_total", COUNTER, "CPU seconds of the agent's process."),
    Figure(28, "energy_joules_total", COUNTER, "Energy of the machine; info: energy_source."),
    Figure(29, "throttled_seconds_total", COUNTER, "Seconds in which the hardware was throttled."),
    Figure(40, "alpha_seconds", GAUGE, "Fixed part of a message's way up (paper 3.2)."),
    Figure(41, "beta_seconds", GAUGE, "A message's way up, per token in it (paper 3.2)."),
    Figure(42, "gamma_seconds", GAUGE, "Time in which the draft model makes a token (paper 3.2)."),
    Figure(43, "occupancy_seconds", GAUGE, "Time for which a message keeps the link busy."),
    Figure(44, "forward_seconds", GAUGE, "A forward of the target, as seen from here."),
    Figure(45, "window_tokens", GAUGE, "Tokens that the sending plan covers."),
    Figure(46, "r1_ratio", GAUGE, "Sequence threshold R1 in force."),
    Figure(47, "r2_ratio", GAUGE, "Token threshold R2 in force."),
    Figure(48, "config_version", GAUGE, "Version of the config in force; 0: none."),
    Figure(49, "active_generations", GAUGE, "Generations that run now."),
    Figure(50, "uptime_seconds", GAUGE, "Since the agent's start."),
    Figure(51, "resident_memory_bytes", GAUGE, "Resident memory of the agent's process."),
    Figure(52, "machine_memory_bytes", GAUGE, "Memory of the machine."),
    Figure(53, "machine_available_memory_bytes", GAUGE, "Memory that is available on the machine."),
    Figure(54, "temperature_celsius", GAUGE, "Temperature of the processor."),
    Figure(55, "throttled", GAUGE, "1 while the hardware is throttled."),
)

BY_NUMBER: dict[int, Figure] = {figure.number: figure for figure in FIGURES}
BY_NAME: dict[str, Figure] = {figure.name: figure for figure in FIGURES}

#: Upper bounds in seconds of the histograms ``ttft_seconds`` and ``tpt_seconds`` (of one
#: generation each), from 1 ms to 120 s; what is above goes into +Inf.
BUCKETS: tuple[float, ...] = (
    0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
