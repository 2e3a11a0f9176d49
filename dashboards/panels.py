"""The two panels that most of a dashboard is made of: a figure as it is now, and one over time."""

from __future__ import annotations

from dashboards.model import Panel, Query


def stat(
    title: str,
    unit: str,
    description: str,
    expr: str,
    *,
    empty: str,
    width: int = 4,
    decimals: int | None = None,
    least: float | None = None,
    most: float | None = None,
    base: str = "text",
    names: tuple[tuple[float, str, str], ...] = (),
    thresholds: tuple[tuple[float, str], ...] = (),
) -> Panel:
    """One figure as it is now; see Panel."""
    return Panel(
        title,
        "stat",
        unit,
        description,
        empty,
        (Query(expr),),
        width=width,
        height=4,
        decimals=decimals,
        least=least,
        most=most,
        base=base,
        names=names,
        thresholds=thresholds,
    )


def graph(
    title: str,
    unit: str,
    description: str,
    *queries: Query,
    empty: str,
    least: float | None = 0,
    most: float | None = None,
    stacked: bool = False,
    thresholds: tuple[tuple[float, str], ...] = (),
) -> Panel:
    """Series over time, three panels to a row of the screen; see Panel."""
    return Panel(
        title,
        "timeseries",
        unit,
        description,
        empty,
        queries,
        width=8,
        least=least,
        most=most,
        stacked=stacked,
        thresholds=thresholds,
    )
