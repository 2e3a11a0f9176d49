"""What a split run sends up, with the real pair: payload bytes and messages per committed token.

    python -m benchmarks.uplink [--pair smollm2|gemma3] [--draft-quant Q] [--tokens N] [--json]

Everything that the edge publishes for a session counts, the prompt in SessionOpen included; it is
also given by itself, since it does not grow with the text. The mark is at most 16 bytes per token.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from broker.embedded import EmbeddedBroker
from broker.errors import ConfigError
from broker.mqtt import MqttSettings, MqttTransport
from cloud_verifier.engine.prepare import resolve_target
from cloud_verifier.engine.torch_target import TorchTarget
from cloud_verifier.runtime import VerifierRuntime, config_for, online_status, status_will
from edge_agent.bench.prompts import BUILT_IN
from edge_agent.generation import Request
from edge_agent.llama_draft import LlamaDraftModel
from edge_agent.prepare import resolve_draft
from edge_agent.runtime import Agent, device_will

MARK = 16.0


def measure(pair: str, quant: str | None, tokens: int) -> dict[str, float]:
    """Sums over the built-in prompts; runs the verifier in this process."""
    target = TorchTarget.load(resolve_target(None, pair), dtype="float32", threads=1)
    draft = LlamaDraftModel(resolve_draft(None, pair, quant), threads=1)
    config = config_for(target, "uplink")
    with EmbeddedBroker() as broker:
        will = status_will("uplink", online_status(config, target.name))
        link = MqttSettings.from_url(broker.url, "verifier-uplink", will=will)
        runtime = VerifierRuntime(MqttTransport(link), target, config)
        runtime.start()
        link = MqttSettings.from_url(broker.url, "device-uplink", will=device_will("uplink", "d"))
        agent = Agent(MqttTransport(link), draft, "uplink")
        agent.start()
        committed = sent = messages = 0
        opening: list[int] = []  # bytes of each SessionOpen

        def observe(name: str, _begin: float, _end: float, details: Mapping[str, Any]) -> None:
            if name == "sent" and details["kind"] == "SessionOpen":
                opening.append(details["bytes"])

        try:
            for prompt in BUILT_IN:
                words = draft.text
                if words.has_chat_template and prompt.chat:
                    ids = words.encode_chat([{"role": "user", "content": prompt.text}])
                else:
                    ids = words.encode_prompt(prompt.text)
                generation = agent.generate(Request(tuple(ids), tokens), observe)
                committed += sum(len(commit.tokens) for commit in generation)
                sent += generation.traffic.uplink_bytes
                messages += generation.traffic.uplink_messages
        finally:
            agent.stop()
            runtime.stop()
            draft.close()
            target.close()
    return {
        "tokens": committed,
        "bytes_per_token": sent / committed,
        "opening_bytes_per_token": sum(opening) / committed,
        "messages_per_token": messages / committed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.uplink", description=__doc__)
    parser.add_argument("--pair", choices=("smollm2", "gemma3"), default="smollm2")
    parser.add_argument("--draft-quant", default=None)
    parser.add_argument("--tokens", type=int, default=64, metavar="N")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    try:
        row = measure(args.pair, args.draft_quant, args.tokens)
    except ConfigError as error:
        print(f"uplink: {error}", file=sys.stderr)
        return error.exit_code
    met = row["bytes_per_token"] <= MARK
    if args.json:
        print(json.dumps(row))
    else:
        print(
            f"{args.pair}: {row['bytes_per_token']:.1f} payload bytes up per committed token "
            f"({row['opening_bytes_per_token']:.1f} of them the opening with its prompt), "
            f"{row['messages_per_token']:.2f} messages, over {row['tokens']:.0f} tokens"
        )
        print(f"mark: at most {MARK:.0f} bytes: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
