"""The tuner: what it tries, what it found, and whether it can work at all."""

from __future__ import annotations

from functools import partial

from dashboards.model import Column, Dashboard, Panel, Query, Row, Variable
from dashboards.panels import graph, stat
from dashboards.promql import device_gauge, each, rate, ratio, selector

UID = "pipesd-tuner"
CHOSEN = 'device=~"$device"'
DEVICE_PAGE = "/d/pipesd-device?var-device=${__value.text}&${__url_time_range}"
NONE = "No tuner is scraped: does it run with --metrics-port?"
UNTUNED = "No device is tuned in this time"
#: Devices in a table, and in a graph.
ROWS, LINES = 200, 20
_stat = partial(stat, empty=NONE)
_graph = partial(graph, empty=NONE)


def counter(name: str, by: str = "", where: str = "") -> str:
    """Over all tuners, each of which minds other devices."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} ({rate(f'pipesd_tuner_{name}', where)})"


def gauge(name: str, by: str = "", where: str = "") -> str:
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} ({selector(f'pipesd_tuner_{name}', where)})"


def of_device(name: str) -> str:
    return each(selector(f"pipesd_tuner_device_{name}", CHOSEN))


def _now() -> Row:
    return Row(
        "Now",
        (
            _stat(
                "Devices minded",
                "none",
                "Devices that a tuner holds the lease of.",
                gauge("devices"),
            ),
            _stat(
                "Searching",
                "none",
                "Devices on which trials are made now.",
                gauge("searching"),
            ),
            _stat(
                "Settled",
                "none",
                "Devices that run with the best pair that was found for them.",
                gauge("devices", where='phase="settled"'),
            ),
            _stat(
                "Trials an hour",
                "none",
                "Trials that ended, however they did, at the pace of now.",
                f"3600 * {counter('trials_total')}",
                decimals=0,
            ),
            _stat(
                "Gain",
                "percentunit",
                "Time per token saved by the best pair against the first trial of each search, on"
                " average over the devices.",
                "1 - avg("
                + of_device("best_tpt_seconds")
                + " / ("
                + of_device("first_tpt_seconds")
                + " > 0))",
                empty=UNTUNED,
                decimals=0,
            ),
            _stat(
                "Broker",
                "none",
                "Whether the tuner can send configurations to devices.",
                "min(pipesd_tuner_broker_connected)",
                names=((0, "away", "red"), (1, "connected", "green")),
            ),
        ),
    )


def _devices() -> Row:
    best = of_device("best_tpt_seconds")
    listed = f"and on (device) topk({ROWS}, {of_device('campaign')})"
    columns = (
        ("trial", Column("Trial", "none", 0)),
        ("campaign", Column("Search", "none", 0)),
        ("current_tpt_seconds", Column("TPT now", "s", 1)),
        ("best_tpt_seconds", Column("TPT best", "s", 1)),
        ("best_r1_ratio", Column("Best R1", "none", 3)),
        ("best_r2_ratio", Column("Best R2", "none", 3)),
        ("pinned", Column("Pinned", "bool_yes_no")),
    )
    return Row(
        "Devices",
        (
            _graph(
                "Time per token, measured last",
                "s",
                f"Of the {LINES} slowest devices, as the tuner measured it: it falls while a search"
                " finds better pairs.",
                Query(f"topk({LINES}, {of_device('current_tpt_seconds')})", "{{device}}"),
                empty=UNTUNED,
            ),
            _graph(
                "Best time per token",
                "s",
                f"Of the {LINES} devices whose best pair is the slowest.",
                Query(f"topk({LINES}, {best})", "{{device}}"),
                empty=UNTUNED,
            ),
            _graph(
                "Thresholds in force",
                "none",
                "R1 and R2 of the chosen devices, as they report them: their steps are the trials.",
                Query(f"topk({LINES}, {device_gauge('r1_ratio', CHOSEN)})", "{{device}} R1"),
                Query(f"topk({LINES}, {device_gauge('r2_ratio', CHOSEN)})", "{{device}} R2"),
                empty="No device has reported in this time",
                most=1,
            ),
            Panel(
                "Searches",
                "table",
                "none",
                f"Up to {ROWS} devices: the trial under way (0: none), the search's number, and"
                " the best pair known. A click on a name opens its page.",
                UNTUNED,
                tuple(Query(f"{of_device(name)} {listed}") for name, _ in columns),
                width=24,
                height=10,
                columns=tuple(column for _, column in columns),
                sort="TPT now",
                links=(("This device", DEVICE_PAGE),),
            ),
        ),
    )


def _search() -> Row:
    return Row(
        "Search",
        (
            _graph(
                "Devices by phase",
                "none",
                "unsuited: its policy has rules of its own; away: it is silent; waiting: for a"
                " place, or after a failed trial.",
                Query(gauge("devices", "phase"), "{{phase}}"),
                stacked=True,
            ),
            _graph(
                "Trials by how they ended",
                "suffix: /h",
                "Per hour. early: the guard dropped a trial that was clearly bad.",
                Query(f"3600 * {counter('trials_total', 'state')}", "{{state}}"),
                stacked=True,
            ),
            _graph(
                "Why trials fail",
                "suffix: /h",
                "Per hour, by cause; no_ack: the device never told that it took the thresholds.",
                Query(f"3600 * {counter('trial_failures_total', 'cause')} > 0", "{{cause}}"),
                empty="No trial failed in this time",
            ),
            _graph(
                "Searches ended and begun anew",
                "suffix: /h",
                "Per hour: searches that ended with a best pair, and those begun anew because the"
                " time per token or the link moved.",
                Query(f"3600 * {counter('searches_total')}", "ended"),
                Query(f"3600 * {counter('drifts_total', 'cause')}", "anew: {{cause}}"),
            ),
            _graph(
                "Configurations sent",
                "suffix: /min",
                "Per minute, and those that did not go out.",
                Query(f"60 * {counter('config_publishes_total')}", "sent"),
                Query(f"60 * {counter('config_publish_failures_total')}", "failed"),
            ),
            _graph(
                "Places in use",
                "percentunit",
                "Searches under way, by those that may be at a time (--parallel).",
                Query(ratio(gauge("searching"), gauge("places")), "in use"),
                most=1,
            ),
        ),
    )


def _source() -> Row:
    return Row(
        "Source and storage",
        (
            _graph(
                "Readings",
                "suffix: /min",
                "Requests per minute to Prometheus or the exporter, and failed ones by cause.",
                Query(f"60 * {counter('queries_total')}", "all"),
                Query(f"60 * {counter('source_errors_total', 'cause')} > 0", "{{cause}}"),
            ),
            _graph(
                "Left out of readings",
                "suffix: /min",
                "Per minute: devices and samples that made no sense, by cause.",
                Query(f"60 * {counter('rejected_total', 'cause')} > 0", "{{cause}}"),
                empty="Nothing was left out in this time",
            ),
            _graph(
                "Storage and other events",
                "suffix: /min",
                "Per minute: times that the storage did not answer, and what else happened.",
                Query(f"60 * {counter('storage_errors_total')}", "storage errors"),
                Query(f"60 * {counter('events_total', 'event')} > 0", "{{event}}"),
            ),
        ),
    )


def dashboard() -> Dashboard:
    return Dashboard(
        UID,
        "PipeSD tuner",
        "What the tuner tries, what it found, and whether it can work at all.",
        (_now(), _devices(), _search(), _source()),
        (
            Variable(
                "device",
                "Device",
                "One or several devices; All: every one that is tuned.",
                "label_values(pipesd_device_r1_ratio, device)",
            ),
        ),
        since="now-12h",
    )
