"""The replicas: what they do, whether they keep up, and where their time goes."""

from __future__ import annotations

from functools import partial

from dashboards.model import Dashboard, Panel, Query, Row, Variable
from dashboards.panels import graph, stat
from dashboards.promql import LONG, rate, ratio

UID = "pipesd-verifier"
#: Prometheus tells replicas apart by address; this brings the id that they were given.
IDENTITY = (
    'on (job, instance) group_left (verifier) pipesd_verifier_build_info{verifier=~"$verifier"}'
)
NONE = "No verifier is scraped: does it run with --metrics-port, and does Prometheus know it?"
IDLE = "Nothing was verified in this time"
IDLE_STAGE = 'stage="idle"'
TOKENS = "suffix: tok/s"
_stat = partial(stat, empty=NONE)
_graph = partial(graph, empty=NONE)


def mine(expression: str, by: str = "verifier") -> str:
    """Of the chosen replicas, with their ids."""
    return f"sum by ({by}) ({expression} * {IDENTITY})"


def gauge(name: str) -> str:
    return mine(f"pipesd_verifier_{name}")


def counter(name: str, by: str = "verifier", where: str = "") -> str:
    return mine(rate(f"pipesd_verifier_{name}", where), by)


def total(expression: str) -> str:
    return f"sum({expression})"


def busy() -> str:
    """Share of time in which the engine had something to do."""
    return f"1 - {counter('stage_seconds_total', where=IDLE_STAGE)}"


def _quantile(share: float, name: str) -> str:
    buckets = mine(rate(f"pipesd_verifier_{name}_bucket", window=LONG), "le, verifier")
    return f"histogram_quantile({share:g}, {buckets})"


def _now() -> Row:
    labels = ("verifier", "target", "engine", "dtype", "version", "instance")
    return Row(
        "Now",
        (
            _stat(
                "Replicas connected",
                "none",
                "Replicas that answer the scrape and are connected to the broker.",
                total(gauge("broker_connected")),
            ),
            _stat(
                "Sessions",
                "none",
                "Sessions that the replicas hold.",
                total(gauge("sessions")),
            ),
            _stat(
                "Waiting",
                "none",
                "Sessions that want a verdict and have no seat in the forward that runs.",
                total(gauge("sessions_waiting")),
            ),
            _stat(
                "Busiest engine",
                "percentunit",
                "Share of its time in which the engine of the busiest replica had something to do.",
                f"max({busy()})",
                decimals=0,
                base="green",
                thresholds=((0.8, "orange"), (0.95, "red")),
            ),
            _stat(
                "Tokens",
                TOKENS,
                "Committed tokens per second.",
                total(counter("committed_tokens_total")),
                decimals=1,
            ),
            _stat(
                "Acceptance now",
                "percentunit",
                "Share of the judged draft tokens that was accepted.",
                ratio(
                    total(counter("accepted_tokens_total")), total(counter("judged_tokens_total"))
                ),
                empty=IDLE,
                decimals=0,
            ),
            Panel(
                "What they run",
                "table",
                "none",
                "Each replica's target, engine, precision and version.",
                NONE,
                (
                    Query(
                        f"max by ({', '.join(labels)})"
                        ' (pipesd_verifier_build_info{verifier=~"$verifier"})'
                    ),
                ),
                width=24,
                height=5,
                labels=labels[1:],
                key="verifier",
            ),
        ),
    )


def _load() -> Row:
    return Row(
        "Load",
        (
            _graph(
                "Utilisation",
                "percentunit",
                "Share of time in which the engine had something to do. Near 100 % a replica"
                " answers later the more devices there are: add one.",
                Query(busy(), "{{verifier}}"),
                most=1,
                thresholds=((0.95, "red"),),
            ),
            _graph(
                "Sessions by replica",
                "none",
                "Sessions held, and how many may be.",
                Query(gauge("sessions"), "{{verifier}}"),
                Query(gauge("sessions_limit"), "{{verifier}} limit"),
            ),
            _graph(
                "Longest wait",
                "s",
                "For how long the first of the sessions without a seat has been waiting.",
                Query(gauge("longest_wait_seconds"), "{{verifier}}"),
            ),
            _graph(
                "Committed tokens",
                TOKENS,
                "Committed tokens per second, by replica.",
                Query(counter("committed_tokens_total"), "{{verifier}}"),
                stacked=True,
            ),
            _graph(
                "K/V memory in use",
                "percentunit",
                "Of the target's slots and of the blocks of its K/V memory. When either is all"
                " taken, the session idle for longest is evicted, and prefilled again when it"
                " returns.",
                Query(ratio(gauge("blocks_in_use"), gauge("blocks")), "{{verifier}} blocks"),
                Query(ratio(gauge("slots_used"), gauge("slots")), "{{verifier}} slots"),
                most=1,
            ),
            _graph(
                "Prompts taken over",
                "percentunit",
                "Of the prompt and committed tokens that sessions needed, those that another"
                " session had computed already: prompts that begin alike share K/V memory.",
                Query(
                    ratio(
                        counter("shared_tokens_total"),
                        f"({counter('shared_tokens_total')} + {counter('prefilled_tokens_total')})",
                    ),
                    "{{verifier}}",
                ),
                most=1,
            ),
            _graph(
                "Evictions and refusals",
                "suffix: /min",
                "Per minute: slots taken from idle sessions, and openings refused, by reason.",
                Query(f"60 * {counter('evictions_total')}", "{{verifier}} evictions"),
                Query(
                    f"60 * {counter('sessions_refused_total', 'verifier, reason')} > 0",
                    "{{verifier}} {{reason}}",
                ),
            ),
        ),
    )


def _forwards() -> Row:
    return Row(
        "Forwards",
        (
            _graph(
                "Duration",
                "s",
                "Half and 99 % of the forwards of five minutes took at most this.",
                Query(_quantile(0.5, "forward_duration_seconds"), "{{verifier}} 50 %"),
                Query(_quantile(0.99, "forward_duration_seconds"), "{{verifier}} 99 %"),
                empty=IDLE,
            ),
            _graph(
                "Sessions in a forward",
                "none",
                "On average. More of them share what a forward costs.",
                Query(
                    ratio(counter("batch_sessions_sum"), counter("batch_sessions_count")),
                    "{{verifier}}",
                ),
                empty=IDLE,
            ),
            _graph(
                "Tokens in a forward",
                "none",
                "On average, drafts and prefills.",
                Query(
                    ratio(counter("batch_tokens_sum"), counter("batch_tokens_count")),
                    "{{verifier}}",
                ),
                empty=IDLE,
            ),
            _graph(
                "Where the time goes",
                "percentunit",
                "Share of time by stage, averaged over the chosen replicas. receive and part of"
                " publish are the network's thread, the rest is the engine's.",
                Query(
                    f"avg by (stage) ({counter('stage_seconds_total', 'stage, verifier')})",
                    "{{stage}}",
                ),
                stacked=True,
            ),
            _graph(
                "Forwards per token",
                "none",
                "A session's share: forwards that it sat in, by tokens committed; the target alone"
                " needs 1.",
                Query(
                    ratio(counter("batch_sessions_sum"), counter("committed_tokens_total")),
                    "{{verifier}}",
                ),
                empty=IDLE,
                thresholds=((1, "red"),),
            ),
            _graph(
                "Acceptance",
                "percentunit",
                "Accepted by judged draft tokens.",
                Query(
                    ratio(counter("accepted_tokens_total"), counter("judged_tokens_total")),
                    "{{verifier}}",
                ),
                empty=IDLE,
                most=1,
            ),
        ),
    )


def _faults() -> Row:
    return Row(
        "Faults and traffic",
        (
            _graph(
                "Wrong input",
                "suffix: /min",
                "Per minute: messages that were dropped, by cause.",
                Query(
                    f"60 * {counter('rejected_messages_total', 'cause')} > 0",
                    "{{cause}}",
                ),
                empty="Nothing wrong came in, or no verifier is scraped",
            ),
            _graph(
                "Mended on the way",
                "suffix: /min",
                "Per minute: verdicts repeated, drafts asked for again, sessions that expired.",
                *(
                    Query(f"60 * {total(counter(f'{name}_total'))}", legend)
                    for name, legend in (
                        ("verdict_repeats", "verdicts repeated"),
                        ("resyncs", "drafts asked again"),
                        ("sessions_expired", "sessions expired"),
                    )
                ),
            ),
            _graph(
                "Faults",
                "suffix: /min",
                "Per minute: forwards that failed, exceptions of the core, messages that could not"
                " be published, connections made again.",
                *(
                    Query(f"60 * {counter(f'{name}_total')}", f"{{{{verifier}}}} {legend}")
                    for name, legend in (
                        ("forward_failures", "failed forwards"),
                        ("core_faults", "core faults"),
                        ("publish_failures", "not published"),
                        ("mqtt_reconnects", "reconnects"),
                    )
                ),
            ),
            _graph(
                "Traffic",
                "Bps",
                "MQTT payload bytes per second.",
                Query(counter("mqtt_received_bytes_total"), "{{verifier}} in"),
                Query(counter("mqtt_sent_bytes_total"), "{{verifier}} out"),
            ),
            _graph(
                "Memory and CPU",
                "bytes",
                "Resident memory of the process.",
                Query(gauge("process_resident_memory_bytes"), "{{verifier}}"),
                empty="This system does not tell a process its memory",
            ),
            _graph(
                "Joules per token",
                "joule",
                "Energy of the replica's machine by committed tokens; source estimate: CPU seconds"
                " times stated watts.",
                Query(
                    f"{counter('energy_joules_total', 'verifier, source')}"
                    " / on (verifier) group_left ()"
                    f" ({counter('committed_tokens_total')} > 0)",
                    "{{verifier}} ({{source}})",
                ),
                empty="No replica measures or estimates its energy, or none has work",
            ),
        ),
    )


def dashboard() -> Dashboard:
    return Dashboard(
        UID,
        "PipeSD verifier",
        "What the replicas do, whether they keep up, and where their time goes.",
        (_now(), _load(), _forwards(), _faults()),
        (
            Variable(
                "verifier",
                "Replica",
                "One or several replicas; All: every one that is scraped.",
                "label_values(pipesd_verifier_build_info, verifier)",
            ),
        ),
    )
