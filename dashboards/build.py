"""Write the dashboards: ``python -m dashboards.build [--check] [--datasource UID] [--out FOLDER]``.

Without flags the files of ``dashboards/grafana`` are written anew; ``--check`` only says which of
them are not what the code gives. A Grafana with a data source of its own takes files made with
``--datasource``, its uid, and ``--out``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dashboards import device, fleet, tuner, verifier
from dashboards.model import DATASOURCE_UID, Dashboard, to_json

FOLDER = Path(__file__).parent / "grafana"


def dashboards() -> tuple[Dashboard, ...]:
    """All of them."""
    return (fleet.dashboard(), device.dashboard(), verifier.dashboard(), tuner.dashboard())


def render(datasource: str = DATASOURCE_UID) -> dict[str, str]:
    """File names and texts."""
    return {
        f"{one.uid}.json": json.dumps(to_json(one, datasource), indent=1, ensure_ascii=False) + "\n"
        for one in dashboards()
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="dashboards.build", description="Write the dashboards.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1: something differs")
    parser.add_argument(
        "--datasource", default=DATASOURCE_UID, metavar="UID", help="of Grafana's Prometheus"
    )
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="FOLDER", help="where to")
    args = parser.parse_args(argv)
    texts = render(args.datasource)
    if args.check:
        stale = [
            name
            for name, text in texts.items()
            if not (args.out / name).is_file() or (args.out / name).read_text("utf-8") != text
        ]
        for name in stale:
            print(f"{args.out / name} is not what the code gives: python -m dashboards.build")
        return 1 if stale else 0
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (args.out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"dashboards.build: cannot write to {args.out}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
