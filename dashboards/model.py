"""Dashboards as data, and the JSON that Grafana loads (dashboard schema 39, Grafana 11 and later).

Only what these dashboards use. Each panel must say its unit, what it shows and what it means when
it is empty; a panel that does not is a TypeError here, not a surprise on a screen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

#: Of the provisioned data source; written into each panel, since nothing that has to be resolved
#: first (an import's input, a default) can then be missing on a fresh Grafana.
DATASOURCE_UID = "pipesd-prometheus"
COLUMNS = 24
SCHEMA = 39
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

Json = dict[str, Any]


@dataclass(frozen=True)
class Query:
    """``legend``: of a series (Grafana's ``{{label}}``), or a table's column title."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Column:
    """A column of a table, of the query with the same place. ``unit``: Grafana's name of it."""

    title: str
    unit: str
    decimals: int | None = None


@dataclass(frozen=True)
class Panel:
    """``kind``: timeseries, stat, bargauge or table. ``empty``: shown instead of nothing.

    ``thresholds``: (value from which, colour), the colour below the first being ``base``.
    ``names``: words for values, such as 0 and 1. ``columns``: of a table, one for each query;
    ``labels``: instead of columns, labels of one query whose value says nothing. ``sort``: the
    column that leads, descending. ``key``: the label that joins a table's queries.
    """

    title: str
    kind: str
    unit: str
    description: str
    empty: str
    queries: tuple[Query, ...]
    width: int = 12
    height: int = 8
    decimals: int | None = None
    least: float | None = None
    most: float | None = None
    stacked: bool = False
    base: str = "text"
    thresholds: tuple[tuple[float, str], ...] = ()
    names: tuple[tuple[float, str, str], ...] = ()
    columns: tuple[Column, ...] = ()
    labels: tuple[str, ...] = ()
    key: str = "device"
    sort: str = ""
    links: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Variable:
    """A choice among label values. ``query``: Grafana's ``label_values(…)``."""

    name: str
    label: str
    description: str
    query: str
    several: bool = True
    hidden: bool = False


@dataclass(frozen=True)
class Dashboard:
    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...] = ()
    since: str = "now-3h"
    tags: tuple[str, ...] = field(default=("pipesd",))

    def panels(self) -> Iterator[Panel]:
        for row in self.rows:
            yield from row.panels


def to_json(dashboard: Dashboard, datasource: str = DATASOURCE_UID) -> Json:
    """What Grafana loads. ``datasource``: the uid in every panel and variable."""
    source = {"type": "prometheus", "uid": datasource}
    panels: list[Json] = []
    top = 0
    for row in dashboard.rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": top},
                "panels": [],
            }
        )
        top += 1
        left = height = 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                top, left, height = top + height, 0, 0
            place = {"h": panel.height, "w": panel.width, "x": left, "y": top}
            panels.append(_panel(panel, len(panels) + 1, place, source))
            left += panel.width
            height = max(height, panel.height)
        top += height
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": list(dashboard.tags),
        "schemaVersion": SCHEMA,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": dashboard.since, "to": "now"},
        "timezone": "browser",
        "annotations": {"list": [_alerts(source)]},
        "links": [
            {
                "type": "dashboards",
                "title": "PipeSD",
                "tags": ["pipesd"],
                "asDropdown": True,
                "includeVars": False,
                "keepTime": True,
                "targetBlank": False,
                "icon": "external link",
                "tooltip": "",
                "url": "",
            }
        ],
        "templating": {"list": [_variable(one, source) for one in dashboard.variables]},
        "panels": panels,
    }


def _alerts(source: Json) -> Json:
    """Firing alerts as marks in every graph."""
    return {
        "name": "Alerts",
        "datasource": source,
        "enable": True,
        "hide": False,
        "iconColor": "red",
        "target": {
            "refId": "Alerts",
            "expr": 'ALERTS{alertname=~"Pipesd.*", alertstate="firing"}',
            "interval": "60s",
        },
        "titleFormat": "{{alertname}}",
        "textFormat": "{{device}}{{instance}}",
        "tagKeys": "severity",
    }


def _variable(variable: Variable, source: Json) -> Json:
    made: Json = {
        "name": variable.name,
        "label": variable.label,
        "description": variable.description,
        "type": "query",
        "datasource": source,
        "query": {"qryType": 1, "query": variable.query, "refId": f"variable-{variable.name}"},
        "definition": variable.query,
        "refresh": 2,  # when the time range changes: what is gone leaves the list
        "sort": 1,
        "multi": variable.several,
        "includeAll": variable.several,
        "hide": 2 if variable.hidden else 0,
        "options": [],
        "current": {},
        "regex": "",
        "skipUrlSync": False,
    }
    if variable.several:
        # Not the list of all values: a thousand names make no query.
        made |= {"allValue": ".*", "current": {"text": ["All"], "value": ["$__all"]}}
    return made


def _panel(panel: Panel, number: int, place: Json, source: Json) -> Json:
    defaults: Json = {
        "unit": panel.unit,
        "noValue": panel.empty,
        "color": {"mode": "thresholds" if panel.thresholds else "palette-classic"},
        "thresholds": {
            "mode": "absolute",
            "steps": [
                {"color": panel.base, "value": None},
                *({"color": colour, "value": value} for value, colour in panel.thresholds),
            ],
        },
        "mappings": [
            {
                "type": "value",
                "options": {
                    f"{value:g}": {"text": text, "color": colour, "index": index}
                    for index, (value, text, colour) in enumerate(panel.names)
                },
            }
        ]
        if panel.names
        else [],
        "links": [{"title": title, "url": url} for title, url in panel.links],
    }
    for name, value in (("decimals", panel.decimals), ("min", panel.least), ("max", panel.most)):
        if value is not None:
            defaults[name] = value
    made: Json = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {},
        "targets": [
            _target(query, letter, panel.kind, source)
            for letter, query in zip(_LETTERS, panel.queries, strict=False)
        ],
    }
    {"timeseries": _timeseries, "stat": _stat, "bargauge": _bargauge, "table": _table}[panel.kind](
        panel, made
    )
    return made


def _target(query: Query, letter: str, kind: str, source: Json) -> Json:
    over_time = kind == "timeseries"
    return {
        "refId": letter,
        "datasource": source,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "range": over_time,
        "instant": not over_time,
        "format": "table" if kind == "table" else "time_series",
    }


def _timeseries(panel: Panel, made: Json) -> None:
    defaults = made["fieldConfig"]["defaults"]
    # Lines keep colours of their own, a limit is drawn as a line of its own.
    defaults["color"] = {"mode": "palette-classic"}
    defaults["custom"] = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 25 if panel.stacked else 5,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "line" if panel.thresholds else "off"},
    }
    made["options"] = {
        "legend": {
            "displayMode": "table",
            "placement": "right" if panel.width == COLUMNS else "bottom",
            "showLegend": True,
            "calcs": ["lastNotNull", "max"],
        },
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


_LAST: Json = {"calcs": ["lastNotNull"], "fields": "", "values": False}


def _stat(panel: Panel, made: Json) -> None:
    made["options"] = {
        "reduceOptions": _LAST,
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "textMode": "value" if len(panel.queries) == 1 else "auto",
        "wideLayout": True,
    }


def _bargauge(panel: Panel, made: Json) -> None:  # noqa: ARG001
    made["options"] = {
        "reduceOptions": _LAST,
        "displayMode": "basic",
        "orientation": "horizontal",
        "showUnfilled": True,
        "valueMode": "color",
        "namePlacement": "left",
        "sizing": "auto",
        "minVizHeight": 16,
        "minVizWidth": 8,
    }


def _table(panel: Panel, made: Json) -> None:
    """One line for each value of ``key``, one column for each query.

    Each query gives ``key`` and a value; joined over ``key``, the value of query B is "Value #B".
    """
    several = len(panel.queries) > 1
    letters = _LETTERS[: len(panel.columns)]
    values = [f"Value #{letter}" if several else "Value" for letter in letters]
    unwanted = ["Time", *(f"Time {n}" for n in range(1, len(values) + 1))]
    if panel.labels:
        unwanted.append("Value")
    made["transformations"] = [
        *([{"id": "joinByField", "options": {"byField": panel.key, "mode": "outer"}}] * several),
        {
            "id": "organize",
            "options": {
                "excludeByName": dict.fromkeys(unwanted, True),
                "indexByName": {
                    name: at for at, name in enumerate([panel.key, *panel.labels, *values])
                },
                "renameByName": {
                    value: column.title for value, column in zip(values, panel.columns, strict=True)
                },
            },
        },
    ]
    overrides = made["fieldConfig"]["overrides"]
    for column in panel.columns:
        properties: list[Json] = [{"id": "unit", "value": column.unit}]
        if column.decimals is not None:
            properties.append({"id": "decimals", "value": column.decimals})
        overrides.append(
            {
                "matcher": {"id": "byName", "options": column.title},
                "properties": properties,
            }
        )
    if panel.links:
        title, url = panel.links[0]
        made["fieldConfig"]["defaults"]["links"] = []
        overrides.append(
            {
                "matcher": {"id": "byName", "options": panel.key},
                "properties": [{"id": "links", "value": [{"title": title, "url": url}]}],
            }
        )
    made["options"] = {
        "showHeader": True,
        "cellHeight": "sm",
        "footer": {"show": False, "reducer": ["sum"], "countRows": False, "fields": ""},
        "sortBy": [{"displayName": panel.sort, "desc": True}] if panel.sort else [],
    }
