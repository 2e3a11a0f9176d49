"""The flag with which somebody states what no sensor measures."""

from __future__ import annotations

import argparse

from broker.errors import ConfigError

#: Of one busy core: no processor draws more.
MAX_CORE_WATTS = 1_000.0


def add_watts_flag(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--watts",
        type=float,
        default=None,
        metavar="W",
        help="watts that one busy core draws: energy is estimated where no sensor measures it",
    )


def check_watts(watts: float | None) -> float | None:
    """``watts`` itself. Raises ConfigError outside 0 to ``MAX_CORE_WATTS``."""
    if watts is not None and not 0.0 < watts <= MAX_CORE_WATTS:
        raise ConfigError(
            f"--watts {watts:g} is outside 0 to {MAX_CORE_WATTS:g}: give the watts of one busy core"
        )
    return watts
