"""What a person sees of a generation: text as it is committed, then the figures."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from edge_agent.core.effects import SOURCE_ACCEPTED, SOURCE_LOCAL
from edge_agent.core.pipeline import PIPELINED
from edge_agent.core.sending import Learnt
from edge_agent.generate import Pieces, Running, Summary, TextStream

_COLOURS = {SOURCE_ACCEPTED: "\x1b[32m", SOURCE_LOCAL: "\x1b[33m"}
_TARGET = "\x1b[1;36m"
_RESET = "\x1b[0m"


class Show:
    """Text to standard output, notes and figures to standard error; ``json_only``: one object.

    Colours only on a terminal, and not with NO_COLOR set (no-color.org).
    """

    def __init__(self, *, json_only: bool) -> None:
        self._json = json_only
        self._colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self._at_line_start = True

    def note(self, line: str) -> None:
        """Progress, for people; never mixed into the text of a pipe."""
        if not self._at_line_start:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._at_line_start = True
        print(line, file=sys.stderr, flush=True)

    def generation(
        self,
        generation: Running,
        text: Pieces,
        stops: Sequence[str],
        *,
        strip_leading_space: bool = False,
    ) -> Summary:
        """Stream the text; the summary. Raises what ends the generation."""
        stream = TextStream(generation, text, stops=stops, strip_leading_space=strip_leading_space)
        try:
            with closing(iter(stream)) as pieces:
                for piece in pieces:
                    if not self._json:
                        self._write(piece.text, piece.source)
        finally:
            if not self._json and not self._at_line_start:
                sys.stdout.write("\n")
                sys.stdout.flush()
                self._at_line_start = True
        return stream.summary()

    def _write(self, text: str, source: str) -> None:
        if self._colour:
            sys.stdout.write(f"{_COLOURS.get(source, _TARGET)}{text}{_RESET}")
        else:
            sys.stdout.write(text)
        sys.stdout.flush()
        self._at_line_start = text.endswith("\n")

    def summary(
        self, summary: Summary, alone: dict[str, Any] | None = None, name: str | None = None
    ) -> None:
        """The figures, beside those of the target alone where there are any.

        ``name``: of the prompt, where there are several.
        """
        if self._json:
            report = summary.as_dict() if name is None else {"prompt": name, **summary.as_dict()}
            if alone is not None:
                report["target_alone_tpt_ms"] = alone["tpt_ms"]
                report["target_alone_equal"] = alone["token_ids"] == summary.token_ids
            print(json.dumps(report, ensure_ascii=False), flush=True)
            return
        if name is not None:
            print(f"\n{name:>13}", file=sys.stderr)
        for line in lines(summary, alone, colour=self._colour and sys.stderr.isatty()):
            print(line, file=sys.stderr, flush=True)


def lines(
    summary: Summary, alone: dict[str, Any] | None = None, *, colour: bool = False
) -> list[str]:
    """The figures as text, a line each."""
    count = max(summary.tokens, 1)
    share = 100.0 * summary.accepted / summary.drafted if summary.drafted else 0.0
    rows = [
        ("tokens", f"{summary.tokens} ({summary.finish_reason}), {_mode(summary)}"),
        ("TPT", f"{summary.tpt_ms:.1f} ms per token"),
        ("TTFT", f"{summary.ttft_ms:.0f} ms to the first token"),
        (
            "acceptance",
            f"{summary.accepted} of {summary.drafted} drafted tokens ({share:.0f} %)",
        ),
        ("forwards", f"{summary.forwards / count:.2f} of the target per token"),
        ("uplink", f"{summary.uplink_bytes / count:.1f} bytes per token"),
    ]
    if summary.link.known:
        rows.append(("link", _link(summary.link)))
    if alone is not None:
        total = alone["tpt_ms"] * alone["tokens"] / 1000.0
        equal = "the same text" if alone["token_ids"] == summary.token_ids else "ANOTHER text"
        rows.append(
            ("target alone", f"{alone['tpt_ms']:.1f} ms per token, {total:.2f} s in all, {equal}")
        )
    if colour:
        rows.append(
            (
                "colours",
                f"{_COLOURS[SOURCE_ACCEPTED]}accepted drafts{_RESET}, "
                f"{_TARGET}the target's own tokens{_RESET}",
            )
        )
    return ["", *(f"{name:>13}  {value}" for name, value in rows)]


def _link(link: Learnt) -> str:
    costs = f"{1000.0 * link.alpha:.1f} ms there and back"
    if link.model == PIPELINED:
        costs += f", busy for {1000.0 * link.occupancy:.1f} ms of it"
    plan = "one message" if link.messages == 1 else f"{link.messages} messages"
    return f"{costs} ({link.model} cost model); {link.window} tokens go up in {plan}"


def _mode(summary: Summary) -> str:
    if summary.verified:
        return "all verified"
    return "none verified (local)" if summary.mode == "local" else "partly verified (local mode)"
