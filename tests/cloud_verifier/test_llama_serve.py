"""A replica that serves with llama.cpp, as a process, with the real pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.brokers import MosquittoBroker
from tests.commands import Command, run_command

PAIR = ("--pair", "smollm2", "--threads", "1")
ENGINE = ("--engine", "llama", "--context", "256")


@pytest.mark.models
@pytest.mark.slow
def test_a_split_run_says_what_both_engines_say_alone(tmp_path: Path) -> None:
    what = (*PAIR, "--prompt", "Name three rivers.", "--max-tokens", "20", "--json")
    with (
        MosquittoBroker(tmp_path) as broker,
        Command(
            "cloud-verifier",
            "serve",
            *("--broker", broker.url, "--id", "served", "--slots", "4", *PAIR, *ENGINE),
        ) as verifier,
    ):
        verifier.until(lambda: "verifier served serves smollm2" in verifier.out, 120)
        flags = ("--broker", broker.url, "--timeout", "60", *what)
        split = run_command("edge-agent", "generate", *flags, timeout=120)
        verifier.signal(15)
        assert verifier.wait().code == 0
    own = run_command("cloud-verifier", "generate", *what, *ENGINE, "--slots", "1", timeout=120)
    torch = run_command("cloud-verifier", "generate", *what, timeout=120)
    results = [split, own, torch]
    assert [(result.code, result.err) for result in results] == [(0, "")] * 3
    texts = [json.loads(result.out) for result in results]
    assert texts[0]["accepted"] > 0
    for field in ("text", "token_ids", "finish_reason", "tokens"):
        assert texts[0][field] == texts[1][field] == texts[2][field]
