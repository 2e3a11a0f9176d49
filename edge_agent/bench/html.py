"""A benchmark's report: one HTML file with its plots inside, which needs nothing from outside."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from edge_agent.bench.cells import Result
from edge_agent.bench.contenders import CONTENDERS, REFERENCE
from edge_agent.bench.report import cells_of, load_line, remarks
from edge_agent.bench.summary import Row
from edge_agent.bench.svg import Bar, bars, gantt
from edge_agent.bench.tuned import rows_of

_STYLE = """\
:root{--ink:#1d2733;--soft:#5d6b7a;--line:#dde3ea;--paper:#fff;--system:#1f6fd1;--ablation:#8bb8ee;
--baseline:#e0a040;--reference:#97a3b0;--draft:#3aa06b;--link:#7d5bc4;--verify:#d9722e;--bad:#c8342b}
@media(prefers-color-scheme:dark){:root{--ink:#e5ebf2;--soft:#9aa8b7;--line:#333f4d;--paper:#161c24;
--system:#5aa0f2;--ablation:#37618f;--baseline:#c58a32;--reference:#66727f}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:1080px;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.2rem;margin-top:2.4rem;border-top:1px solid var(--line);
padding-top:1rem}h3{font-size:1rem;margin:1.2rem 0 .3rem}
p.note,figcaption,small{color:var(--soft);font-size:.87rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.87rem}
th,td{padding:.22rem .6rem;text-align:right;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{text-align:left;white-space:nowrap}
td.first{font-weight:700}tr.system td:first-child{color:var(--system);font-weight:700}
.scroll{overflow-x:auto}.charts{display:flex;flex-wrap:wrap;gap:1rem}figure{margin:0}
.good{color:var(--draft)}.bad{color:var(--bad);font-weight:700}
pre{font-size:.8rem;overflow-x:auto;white-space:pre-wrap}
svg text{font:11px system-ui,sans-serif;fill:var(--ink)}svg .tick,svg .count{fill:var(--soft);
font-size:10px}svg .count{font-size:9px}
.grid,.rule{stroke:var(--line)}.whisker{stroke:var(--ink);fill:none;stroke-width:1.2}
.dot{fill:var(--ink);opacity:.35}
.bar.system{fill:var(--system)}.bar.ablation{fill:var(--ablation)}.bar.baseline{fill:var(--baseline)}
.bar.reference{fill:var(--reference)}
rect.draft{fill:var(--draft)}rect.lost{fill:var(--bad);opacity:.55}
rect.uplink{fill:var(--link)}rect.up,rect.down{fill:var(--link);opacity:.4}
rect.hold{fill:var(--verify);opacity:.35}rect.forward{fill:var(--verify)}
line.commit{stroke:var(--ink);stroke-dasharray:2 2}line.rollback{stroke:var(--bad)}
.key span{display:inline-block;width:.9em;height:.7em;margin:0 .3em 0 1em}
"""
_KEY = (
    ("var(--draft)", "1", "drafting a token"),
    ("var(--bad)", ".55", "drafting one that was rolled back"),
    ("var(--link)", "1", "a message occupies the uplink"),
    ("var(--link)", ".4", "under way"),
    ("var(--verify)", ".35", "waiting at the verifier"),
    ("var(--verify)", "1", "forward of the target"),
)
_COLUMNS = (
    ("policy", "policy"),
    ("TPT, ms", "tpt"),
    ("quartiles", "spread"),
    ("TTFT, ms", "ttft"),
    ("accepted", "acceptance"),
    ("draft length", "length"),
    ("forwards / token", "forwards"),
    ("bytes up / token", "bytes"),
    ("messages up / token", "messages"),
    ("proactive kept", "kept"),
    ("&times; cloud", "cloud"),
    ("&times; best baseline", "best"),
)


def page(
    header: Mapping[str, Any],
    rows: Sequence[Row],
    results: Sequence[Result],
    texts: Sequence[str],
    *,
    planned: int,
) -> str:
    """The whole file. ``header``: of the results file; ``texts``: lines on the texts' identity."""
    settings = header["settings"]
    scenarios = list(dict.fromkeys(row.scenario for row in rows))
    good = sum(result.error is None for result in results)
    same = len(texts) == 1
    facts = (
        f"Draft {settings['draft']}, target {settings['target']} ({settings['dtype']}), "
        f"{settings['max_tokens']} tokens at most, {len(settings['prompts'])} prompts, "
        f"{settings['repeats']} repeats, broker {settings['broker']}. "
        f"{good} of {planned} generations done. Begun {header['started']}."
    )
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>PipeSD benchmark</title><style>{_STYLE}</style></head><body>",
        "<h1>PipeSD benchmark</h1>",
        f'<p class="note">{escape(facts)}</p>',
        f'<p class="{"good" if same else "bad"}">{"<br>".join(map(escape, texts))}</p>',
        '<p class="note">Links are emulated between the agent and a real broker; models and '
        "protocol are real. Device and target share this machine.</p>",
    ]
    busy = load_line(rows, header["environment"].get("cores", 1))
    if busy is not None:
        parts.append(f'<p class="bad">{escape(busy)}</p>')
    parts += _overview(rows, scenarios)
    for scenario in scenarios:
        mine = [row for row in rows if row.scenario == scenario]
        definition = settings["scenarios"].get(scenario, {})
        parts += _section(scenario, definition, mine, results)
        parts += _tuned(header, scenario)
    failed = [result for result in results if result.error is not None]
    if failed:
        parts.append("<h2>Failed</h2><ul>")
        parts += [
            f"<li>{escape(f'{one.policy} in {one.scenario}, {one.prompt}: {one.error}')}</li>"
            for one in failed
        ]
        parts.append("</ul>")
    parts.append("<h2>Settings</h2><details><summary>everything that results depend on</summary>")
    everything = {"environment": header["environment"], "settings": settings}
    parts.append(f"<pre>{escape(json.dumps(everything, indent=1, ensure_ascii=False))}</pre>")
    parts.append("</details></body></html>\n")
    return "\n".join(parts)


def _kind(policy: str) -> str:
    return CONTENDERS[policy].group if policy in CONTENDERS else REFERENCE


def _overview(rows: Sequence[Row], scenarios: Sequence[str]) -> list[str]:
    """Median TPT of every policy in every scenario; the quickest with the target's text in bold."""
    by_place = {(row.policy, row.scenario): row for row in rows}
    policies = list(dict.fromkeys(row.policy for row in rows))
    quickest = {
        scenario: min(
            (row.tpt_ms for row in rows if row.scenario == scenario and row.policy != "local"),
            default=None,
        )
        for scenario in scenarios
    }
    heads = "".join(f"<th>{escape(scenario)}</th>" for scenario in scenarios)
    lines = [
        "<h2>Time per token</h2>",
        '<p class="note">TPT: milliseconds per committed token from the request on, median over '
        "prompts. Bold: the quickest that writes the target's text (local does not).</p>",
        f'<div class="scroll"><table><tr><th>policy</th>{heads}</tr>',
    ]
    for policy in policies:
        cells = []
        for scenario in scenarios:
            row = by_place.get((policy, scenario))
            if row is None:
                cells.append("<td>-</td>")
                continue
            first = ' class="first"' if row.tpt_ms == quickest[scenario] else ""
            cells.append(f"<td{first}>{row.tpt_ms:.1f}</td>")
        lines.append(f'<tr class="{_kind(policy)}"><td>{escape(policy)}</td>{"".join(cells)}</tr>')
    lines.append("</table></div>")
    return lines


def _section(
    scenario: str, definition: Mapping[str, Any], rows: Sequence[Row], results: Sequence[Result]
) -> list[str]:
    wire = definition.get("wire", "ids")
    label = scenario if wire == "ids" else f"{scenario} [{wire}]"
    lines = [f"<h2>{escape(label)}</h2>"]
    if definition.get("note"):
        lines.append(f'<p class="note">{escape(str(definition["note"]))}</p>')
    lines += _table(rows)
    lines += [f'<p class="note">{escape(line)}</p>' for line in remarks(rows)]
    lines.append("<h3>Time per token, ms: median, quartiles, single prompts</h3>")
    lines.append(
        bars(
            f"TPT in {label}",
            [
                Bar(
                    row.policy,
                    _kind(row.policy),
                    row.tpt_ms,
                    f"{row.tpt_ms:.1f}",
                    row.tpt_low_ms,
                    row.tpt_high_ms,
                    row.tpt_prompts_ms,
                )
                for row in rows
            ],
            width=900,
        )
    )
    timelines = _timelines(scenario, rows, results)
    picture = gantt(f"rounds in {label}", timelines)
    if picture:
        key = "".join(
            f'<span style="background:{colour};opacity:{opacity}"></span>{what}'
            for colour, opacity, what in _KEY
        )
        lines += [
            "<h3>A typical round of each policy, from a verdict's arrival on</h3>",
            f'<div class="scroll">{picture}</div>',
            f'<p class="note key">{key}; +n: tokens committed, red line: a rollback</p>',
        ]
    lines += ['<div class="charts">', *_small_charts(label, rows), "</div>"]
    return lines


def _tuned(header: Mapping[str, Any], scenario: str) -> list[str]:
    """The constants that were found for a scenario; nothing in a run without tuning."""
    rows = "".join(
        f"<tr><td>{escape(policy)}</td><td>{escape(constants)}</td><td>{tried}</td>"
        f"<td>{tpt_ms:.1f}</td></tr>"
        for policy, constants, tried, tpt_ms in rows_of(header, scenario)
    )
    if not rows:
        return []
    return [
        "<h3>Constants</h3>",
        f'<p class="note">The best on {len(header["tuning"]["prompts"])} other texts, by replay.'
        "</p>",
        '<div class="scroll"><table><tr><th>policy</th><th>constants</th><th>candidates</th>'
        f"<th>TPT there, ms</th></tr>{rows}</table></div>",
    ]


def _timelines(scenario: str, rows: Sequence[Row], results: Sequence[Result]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for row in rows:
        for result in results:
            place = (result.policy, result.scenario)
            if place == (row.policy, scenario) and result.timeline:
                found.setdefault(row.policy, result.timeline)
    return found


def _table(rows: Sequence[Row]) -> list[str]:
    heads = "".join(f"<th>{title}</th>" for title, _ in _COLUMNS)
    lines = [f'<div class="scroll"><table><tr>{heads}</tr>']
    for row in rows:
        texts = cells_of(row)
        cells = "".join(f"<td>{escape(texts[key])}</td>" for _, key in _COLUMNS)
        lines.append(f'<tr class="{_kind(row.policy)}">{cells}</tr>')
    lines.append("</table></div>")
    return lines


def _small_charts(label: str, rows: Sequence[Row]) -> list[str]:
    def percent(value: float | None) -> float | None:
        return None if value is None else 100.0 * value

    def some(value: float, row: Row) -> float | None:
        return value if row.messages_up_per_token else None  # local sends nothing

    charts = (
        ("Drafts accepted, %", [percent(row.acceptance) for row in rows], ".0f", 100.0),
        (
            "Draft length, tokens judged a verdict",
            [row.draft_length or None for row in rows],
            ".1f",
            None,
        ),
        ("Proactive tokens kept, %", [percent(row.kept) for row in rows], ".0f", 100.0),
        (
            "Bytes up a token, MQTT packets",
            [some(row.wire_up_per_token, row) for row in rows],
            ".0f",
            None,
        ),
        (
            "Forwards of the target a token",
            [row.forwards_per_token or None for row in rows],
            ".2f",
            None,
        ),
        ("Time to the first token, ms", [row.ttft_ms for row in rows], ".0f", None),
    )
    lines = []
    for title, values, form, top in charts:
        items = [
            Bar(row.policy, _kind(row.policy), value, "-" if value is None else f"{value:{form}}")
            for row, value in zip(rows, values, strict=True)
        ]
        plot = bars(f"{title}: {label}", items, top=top)
        lines.append(f"<figure><h3>{title}</h3>{plot}</figure>")
    return lines
