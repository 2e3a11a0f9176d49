"""The flags of ``edge-agent bench``. Nothing heavy is imported here."""

from __future__ import annotations

import argparse

from broker.flags import add_sampling_flags
from broker.messages import VERIFY_STREAM
from edge_agent.bench import choices
from edge_agent.bench.contenders import CONTENDERS, GROUPS
from edge_agent.bench.link import SCENARIOS, WIRE_IDS, WIRES
from edge_agent.bench.tuned import BUDGET, WAYS
from edge_agent.core.config import DEFAULT_VERIFY, VERIFY_CHOICES


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """All but those of the draft model and the common ones."""
    what = parser.add_argument_group("what is compared")
    what.add_argument(
        "--policies",
        metavar="NAMES",
        help=f"comma-separated: {', '.join(CONTENDERS)}, or groups: {', '.join(GROUPS)} (all)",
    )
    what.add_argument(
        "--scenarios",
        metavar="NAMES",
        help=f"comma-separated: {', '.join(SCENARIOS)} ({', '.join(choices.FULL_SCENARIOS)})",
    )
    what.add_argument(
        "--scenario-file", metavar="FILE", help="JSON list of scenarios of your own, run as well"
    )
    what.add_argument(
        "--wire",
        choices=WIRES,
        default=WIRE_IDS,
        help="ids: what is sent (default); full-probs: emulation, the uplink is charged as if each "
        "token carried the draft's whole distribution",
    )
    what.add_argument("--prompts", metavar="FILE", help='JSONL, {"prompt": T} a line (built in)')
    what.add_argument("--raw", action="store_true", help="continue the file's prompts as text")
    what.add_argument(
        "--prompt-count",
        type=int,
        metavar="N",
        help=f"only the first N prompts ({choices.FULL_PROMPTS})",
    )
    what.add_argument("--repeats", type=int, default=1, metavar="N", help="times each (1)")
    what.add_argument(
        "--constants", metavar="FILE", help="JSON: {policy: {scenario: {r1, r2, window, ...}}}"
    )
    add_tuning_flags(parser.add_argument_group("constants found before comparing"))
    what.add_argument(
        "--quick",
        action="store_true",
        help=f"{choices.QUICK_PROMPTS} prompts of {choices.QUICK_TOKENS} tokens, policies "
        f"{', '.join(choices.QUICK_POLICIES)}, scenarios {', '.join(choices.QUICK_SCENARIOS)}, "
        "where nothing else is said",
    )
    add_sampling_flags(parser, max_tokens=choices.MAX_TOKENS)
    models = parser.add_argument_group("target model and devices")
    models.add_argument("--target", metavar="M", help="directory, hub id or GGUF file")
    models.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="precision of the target; float32 (default): all texts must be equal",
    )
    models.add_argument("--target-threads", type=int, metavar="N", help="CPU threads of the target")
    models.add_argument(
        "--gamma-floor-ms", type=float, default=0.0, metavar="MS", help="emulate a slower device"
    )
    models.add_argument(
        "--forward-floor-ms", type=float, default=0.0, metavar="MS", help="emulate a slower target"
    )
    models.add_argument(
        "--verify",
        choices=[choice for choice in VERIFY_CHOICES if choice != VERIFY_STREAM],
        default=DEFAULT_VERIFY,
        help=f"as in generate, for policies that do not say themselves ({DEFAULT_VERIFY})",
    )
    models.add_argument(
        "--broker-kind",
        choices=("auto", "mosquitto", "embedded"),
        default="auto",
        help="auto (default): mosquitto where it is installed",
    )
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--out", metavar="PREFIX", help="write PREFIX.jsonl, .json and .html (pipesd-bench-TIME)"
    )
    run.add_argument(
        "--record",
        metavar="FILE",
        help="afterwards record the texts in FILE (replaced) for replays of the comparison without "
        "models: python -m edge_agent.bench.replay FILE",
    )
    run.add_argument("--resume", metavar="FILE", help="go on with that .jsonl, with the same flags")
    run.add_argument(
        "--report-only", action="store_true", help="with --resume: run nothing, write the reports"
    )
    run.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds of silence after which a generation has failed (30)",
    )
    run.add_argument(
        "--max-minutes",
        type=float,
        metavar="F",
        help=f"begin nothing after so long, tuning apart ({choices.FULL_MINUTES:g}; "
        f"quick: {choices.QUICK_MINUTES:g})",
    )


def add_tuning_flags(group: argparse._ArgumentGroup) -> None:
    """Those of ``edge_agent.bench.tuned``."""
    group.add_argument(
        "--tune",
        choices=WAYS,
        help="give each policy its best constants in each scenario first, by trying a grid of them "
        "on replays of other prompts; writes PREFIX.constants.json, which --constants reads. What "
        "--constants says stays",
    )
    group.add_argument(
        "--tune-budget",
        type=int,
        metavar="N",
        help=f"candidates that each policy is granted in each scenario ({BUDGET})",
    )
    group.add_argument(
        "--tune-prompts",
        metavar="FILE",
        help="JSONL as --prompts, none of them compared (built in)",
    )
