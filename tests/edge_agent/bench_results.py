"""Results of a benchmark, made by hand."""

from __future__ import annotations

from typing import Any

from edge_agent.bench.cells import Result, Settings
from edge_agent.bench.link import SCENARIOS
from edge_agent.bench.watch import (
    DOWN,
    DRAFT,
    FORWARD,
    HOLD,
    ROLLBACK,
    UP_AIR,
    UPLINK,
    VERDICT,
    Span,
)

TOKENS = tuple(range(10))


def result(policy: str, scenario: str = "4g", prompt: str = "a", **values: Any) -> Result:
    """Ten tokens in a second, unless told otherwise."""
    known = {
        "repeat": 0,
        "tokens": TOKENS,
        "finish": "length",
        "ttft_s": 0.1,
        "total_s": 1.0,
        "drafted": 12,
        "accepted": 6,
        "judged": 8,
        "forwards": 4,
        "kept": 3,
        "dropped": 1,
        "proactive": 5,
        "wire_up": 200,
        "messages_up": 5,
        "payload_up": 90,
        "gamma_s": 0.01,
        "forward_samples": ((2, 50.0), (3, 60.0), (1, 40.0)),
        **values,
    }
    return Result(policy, scenario, prompt, **known)


def settings(**values: Any) -> Settings:
    known = {
        "draft": "smollm2",
        "target": "smollm2",
        "dtype": "float32",
        "broker": "embedded",
        "draft_threads": 1,
        "target_threads": 1,
        "max_tokens": 10,
        "repeats": 1,
        "seed": 0,
        "verify": "triggered",
        "sampling": {"temperature": 0.0},
        "policies": {"pipesd": {}, "vanilla": {}, "cloud": {}},
        "scenarios": {"4g": SCENARIOS["4g"].to_dict()},
        "prompts": {"a": {"text": "A", "chat": True}, "b": {"text": "B", "chat": True}},
        **values,
    }
    return Settings(**known)


#: Three rounds of 100 ms; in the second one of two drafted tokens is rolled back.
TIMELINE = (
    Span(DRAFT, 0.000, 0.010),
    Span(UPLINK, 0.010, 0.020),
    Span(UP_AIR, 0.020, 0.030),
    Span(HOLD, 0.030, 0.032),
    Span(FORWARD, 0.032, 0.080, 1),
    Span(DOWN, 0.080, 0.100),
    Span(VERDICT, 0.100, 0.100, 2),
    Span(DRAFT, 0.100, 0.110),
    Span(DRAFT, 0.110, 0.120),
    Span(FORWARD, 0.130, 0.180, 2),
    Span(VERDICT, 0.200, 0.200, 2),
    Span(ROLLBACK, 0.200, 0.200, 1),
    Span(DRAFT, 0.201, 0.211),
    Span(FORWARD, 0.230, 0.280, 1),
    Span(VERDICT, 0.305, 0.305, 1),
)
