"""Expressions that several panels share.

A device may be scraped twice, by the exporter and on its own port: ``max by (device)`` makes one
series of both before anything is summed. A ratio has its denominator filtered by ``> 0``: nothing
happened is an empty panel with a word of its own, never NaN.
"""

from __future__ import annotations

#: Of counters in graphs; Grafana makes it four scrapes or one pixel, whichever is more.
WINDOW = "$__rate_interval"
#: Of histograms of generations, which are rarer than scrapes.
LONG = "5m"


def selector(metric: str, where: str = "") -> str:
    """``metric`` with label matchers, if there are any."""
    return f"{metric}{{{where}}}" if where else metric


def rate(metric: str, where: str = "", window: str = WINDOW) -> str:
    return f"rate({selector(metric, where)}[{window}])"


def each(expression: str, by: str = "device") -> str:
    """One series for each device, however often it is scraped."""
    return f"max by ({by}) ({expression})"


def device_rate(name: str, where: str = "", window: str = WINDOW) -> str:
    """Of each device's counter ``name``, without its prefix."""
    return each(rate(f"pipesd_device_{name}", where, window))


def device_gauge(name: str, where: str = "") -> str:
    """Of each device's gauge ``name``, without its prefix."""
    return each(selector(f"pipesd_device_{name}", where))


def fleet_rate(name: str, where: str = "", window: str = WINDOW) -> str:
    """Over all devices."""
    return f"sum({device_rate(name, where, window)})"


def ratio(above: str, below: str) -> str:
    """``above / below`` where anything is below."""
    return f"{above} / ({below} > 0)"


def quantile(share: float, histogram: str, where: str = "", by: str = "le") -> str:
    """Of a histogram, over everything but ``by``. ``histogram``: its full name."""
    buckets = rate(f"{histogram}_bucket", where, LONG)
    return f"histogram_quantile({share:g}, sum by ({by}) ({buckets}))"
