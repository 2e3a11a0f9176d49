"""The live view on a terminal, by rich. What devices say is text and never markup."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from cloud_verifier.top.view import MAX_TEXT, Row, VerifierRow, View

#: Lines around the devices: totals, two heads, trouble, what is left out.
_AROUND = 10
#: Replicas that are shown at most.
MAX_REPLICAS = 8
_LEAST_ROWS = 1
#: Between two columns.
_GAP = 2


class Column(NamedTuple):
    """``width`` in characters; ``rank``: those with the higher one go first when it is narrow."""

    title: str
    width: int
    rank: int
    text: Callable[[Row], str]


def _fixed(value: float | None, digits: int, scale: float = 1.0) -> str:
    if value is None:
        return "-"
    text = f"{value * scale:.{digits}f}"
    return text if len(text) <= 9 else f"{value * scale:.1e}"


def _age(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f} s" if value < 600.0 else f"{value / 60.0:.0f} min"


def _whole(value: int | None) -> str:
    return "-" if value is None else str(value)


def _online(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "?"}[value]


COLUMNS = (
    Column("device", 20, 0, lambda row: row.device),
    Column("online", 6, 2, lambda row: _online(row.online)),
    Column("TPT ms", 8, 1, lambda row: _fixed(row.tpt, 1, 1e3)),
    Column("TTFT ms", 8, 6, lambda row: _fixed(row.ttft, 0, 1e3)),
    Column("accepted", 8, 3, lambda row: _fixed(row.acceptance, 2)),
    Column("token/s", 7, 4, lambda row: _fixed(row.tokens_per_second, 1)),
    Column("R1", 5, 5, lambda row: _fixed(row.r1, 3)),
    Column("R2", 5, 5, lambda row: _fixed(row.r2, 3)),
    Column("config", 6, 7, lambda row: _whole(row.config_version)),
    Column("policy", 8, 9, lambda row: row.policy or "-"),
    Column("alpha ms", 8, 10, lambda row: _fixed(row.alpha, 1, 1e3)),
    Column("gamma ms", 8, 10, lambda row: _fixed(row.gamma, 1, 1e3)),
    Column("J/token", 7, 11, lambda row: _fixed(row.joules_per_token, 2)),
    Column("°C", 4, 8, lambda row: _fixed(row.temperature, 0)),
    Column("seen", 7, 3, lambda row: _age(row.seen)),
)  # fmt: skip


def columns_for(width: int) -> list[Column]:
    """Those that fit into ``width`` characters."""
    chosen = list(COLUMNS)
    while len(chosen) > 1 and sum(column.width + _GAP for column in chosen) > width:
        # The first of the highest rank, so that of two it is always the same one.
        chosen.remove(max(chosen, key=lambda column: column.rank))
    return chosen


def totals_line(view: View) -> Text:
    totals = view.totals
    load = f"{totals.sessions} of {totals.max_sessions}" if totals.max_sessions else "0"
    return Text(
        f"{totals.online} devices online, {totals.telemetry} with telemetry, {totals.devices} known"
        f"   {totals.tokens_per_second:.1f} token/s"
        f"   TPT {_fixed(totals.tpt, 1, 1e3)} ms"
        f"   accepted {_fixed(totals.acceptance, 2)}"
        f"   replicas {totals.verifiers_online}, sessions {load}"
    )


def device_table(rows: Sequence[Row], width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    columns = columns_for(width)
    # What is left over goes to the names.
    spare = max(0, width - sum(column.width + _GAP for column in columns))
    for column in columns:
        table.add_column(
            Text(column.title),
            width=column.width if column is not COLUMNS[0] else None,
            min_width=min(column.width, width),
            max_width=column.width + spare,
            no_wrap=True,
            overflow="ellipsis",
            justify="left" if column.title in ("device", "policy") else "right",
        )
    for row in rows:
        style = "dim" if row.online is False or row.seen is None else ""
        table.add_row(*(Text(column.text(row)) for column in columns), style=style)
    return table


def replica_table(rows: Sequence[VerifierRow]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for title in ("replica", "online", "sessions", "load", "target"):
        left = title in ("replica", "target")
        table.add_column(
            Text(title), no_wrap=True, overflow="ellipsis", justify="left" if left else "right"
        )
    for row in rows:
        most = row.max_sessions or 0
        held = "-" if row.sessions is None or not row.online else f"{row.sessions} of {most}"
        load = f"{100.0 * (row.sessions or 0) / most:.0f} %" if most and row.online else "-"
        texts = (row.verifier, _online(row.online), held, load, row.model or "-")
        table.add_row(*map(Text, texts), style="" if row.online else "dim")
    return table


def screen(view: View | None, width: int, height: int | None, trouble: str = "") -> RenderableType:
    """Everything; ``height`` in lines, None: as long as it gets. ``view`` None: nothing yet.

    ``trouble``: what to say about the source, one line.
    """
    parts: list[RenderableType] = []
    if trouble:
        parts.append(Text(trouble, style="bold red"))
    if view is None:
        return Group(*parts, Text("waiting for the first reading"))
    if not view.connected:
        parts.append(Text("the broker is away: what is shown grows old", style="bold red"))
    parts.append(totals_line(view))
    replicas = view.verifiers if height is None else view.verifiers[:MAX_REPLICAS]
    if replicas:
        parts += [Text(""), replica_table(replicas)]
        parts += _more(len(view.verifiers) - len(replicas), "replicas")
    shown = view.rows
    if height is not None:
        shown = shown[: max(_LEAST_ROWS, height - _AROUND - len(replicas))]
    parts.append(Text(""))
    if view.rows:
        parts.append(device_table(shown, width))
        parts += _more(len(view.rows) - len(shown), "devices")
    else:
        parts.append(Text("no device has been seen: they tell of themselves every few seconds"))
    return Group(*parts)


def _more(count: int, what: str) -> list[RenderableType]:
    return [Text(f"and {count} more {what}", style="dim")] if count > 0 else []


def show(console: Console, view: View, trouble: str = "") -> None:
    """Print it once; a file or pipe gets all columns and all rows."""
    if not console.is_terminal:
        console.width = sum(column.width + _GAP for column in COLUMNS) + MAX_TEXT
    console.print(screen(view, console.width, None, trouble))
