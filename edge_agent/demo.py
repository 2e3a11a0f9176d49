"""The main job on one machine: broker and verifier as children, this agent, one prompt.

Real models, a real broker and the same code as in a fleet; only the network is missing.
"""

from __future__ import annotations

import argparse
import json
import secrets
import time
from contextlib import ExitStack
from typing import Any

from broker.embedded import EmbeddedBroker
from broker.errors import ConfigError, ModelError, TransportError
from broker.messages import VerifierStatus
from broker.mqtt import MqttTransport
from broker.mqtt_settings import MqttSettings
from edge_agent.children import Child
from edge_agent.cpus import usable_cores
from edge_agent.generation import Request
from edge_agent.output import Show
from edge_agent.runtime import Agent, device_will

DEVICE = "demo"
#: Seconds until the verifier must be up, preparing its model included.
READY_TIMEOUT = 1800.0
#: How the line begins in which a child says why it ends; it becomes part of our own.
_VERIFIER = "cloud-verifier: "


def run_demo(args: argparse.Namespace) -> int:
    """``edge-agent demo``. Raises PipesdError; children are ended in any case."""
    from edge_agent.cli import encode_prompt, load_draft, request_from, strips_space

    show = Show(json_only=args.json)
    cores = usable_cores()
    target_threads = args.target_threads or max(1, cores - 1)
    if args.threads is None:
        args.threads = max(1, cores - target_threads)
    with ExitStack() as stack:
        broker = stack.enter_context(EmbeddedBroker())
        verifier_id = f"demo-{secrets.token_hex(3)}"
        flags = ["--pair", args.pair, "--dtype", args.dtype, "--threads", str(target_threads)]
        begin = time.monotonic()
        verifier = Child(
            "cloud_verifier.cli",
            ["serve", "--broker", broker.url, "--id", verifier_id, "--until-eof", *flags],
            threads=target_threads,
            on_line=lambda line: None if line.startswith(_VERIFIER) else show.note(line),
        )
        stack.callback(verifier.stop)
        draft = load_draft(args, show.note)
        stack.callback(draft.close)
        prompt = encode_prompt(args, draft.text)
        settings = MqttSettings.from_url(
            broker.url, f"device-{DEVICE}", will=device_will(DEVICE, draft.name)
        )
        agent = Agent(MqttTransport(settings), draft, DEVICE)
        stack.callback(agent.stop)
        agent.start()
        ready = _wait_until_ready(agent, verifier, verifier_id)
        show.note(
            f"draft {draft.name} here, target {ready.model} behind "
            f"{broker.url}, ready after {time.monotonic() - begin:.1f} s"
        )
        request: Request = request_from(args, prompt)
        summary = show.generation(
            agent.generate(request),
            draft.text,
            args.stop,
            strip_leading_space=strips_space(args, draft.text),
        )
        alone = None
        if not args.no_alone:
            verifier.stop()  # its cores are wanted for the comparison
            alone = _target_alone(
                args, prompt, flags, show, tokens=summary.tokens, threads=target_threads
            )
        show.summary(summary, alone)
        return 0


def _wait_until_ready(agent: Agent, verifier: Child, verifier_id: str) -> VerifierStatus:
    deadline = time.monotonic() + READY_TIMEOUT
    while (status := agent.verifiers().get(verifier_id)) is None:
        if not verifier.alive:
            line = verifier.last_line.removeprefix(_VERIFIER)
            if verifier.exit_code == ConfigError.exit_code:
                raise ConfigError(line)
            raise ModelError(f"the verifier ended before it was ready: {line}")
        if time.monotonic() > deadline:
            raise TransportError("the verifier was not ready in time: see --verbose")
        time.sleep(0.05)
    return status


def _target_alone(
    args: argparse.Namespace,
    prompt: tuple[int, ...],
    flags: list[str],
    show: Show,
    *,
    tokens: int,
    threads: int,
) -> dict[str, Any]:
    """What ``cloud-verifier generate --json`` says for the same prompt, settings and threads.

    ``tokens``: as many as the split run wrote, which a stop string may have ended.
    """
    show.note("the target alone, for comparison ...")
    child = Child(
        "cloud_verifier.cli",
        [
            "generate",
            "--prompt-ids",
            "-",
            "--json",
            "--until-eof",
            *flags,
            *("--max-tokens", str(max(1, tokens)), "--seed", str(args.seed)),
            *("--temperature", str(args.temperature), "--top-k", str(args.top_k)),
            *("--top-p", str(args.top_p), "--min-p", str(args.min_p)),
        ],
        threads=threads,
    )
    try:
        output = child.ask(json.dumps(list(prompt)))
        if child.exit_code != 0:
            line = child.last_line.removeprefix(_VERIFIER)
            raise ModelError(f"the target alone failed: {line}")
        report: dict[str, Any] = json.loads(output)
        return report
    finally:
        child.stop()
