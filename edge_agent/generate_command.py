"""``edge-agent generate``: one text, or one after the other for as long as the device is to work.

With ``--repeat`` the device works on: a text that came to nothing is said and counted, and the next
one is tried after a pause that grows while nothing succeeds.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from broker.command import Stopped
from broker.errors import PipesdError, Refused
from broker.flags import broker_settings
from broker.topics import check_device_id
from edge_agent.bench.prompts import BenchPrompt, read_prompts
from edge_agent.device_flags import check_device_flags, check_work_flags, upkeep_from

if TYPE_CHECKING:
    from broker.transport import Transport
    from edge_agent.llama_draft import LlamaDraftModel
    from edge_agent.output import Show
    from edge_agent.runtime import Agent

#: Seconds before the next try after a failure; each further one doubles it, up to the last.
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 60.0


def run_generate(args: argparse.Namespace) -> int:
    """The command. Raises PipesdError; Stopped only where an interruption is no orderly end."""
    from edge_agent.cli import (
        check_draft_flags,
        default_device_id,
        encode_prompt,
        load_draft,
        request_from,
        strips_space,
    )

    device = check_device_id(default_device_id() if args.device_id is None else args.device_id)
    # Everything that is wrong with the flags, before a model is loaded.
    asked = request_from(args, (0,))
    check_draft_flags(args)
    check_device_flags(args)
    check_work_flags(args)
    local_only = asked.policy.local
    if not local_only:
        broker_settings(args, f"device-{device}", None)
    prompts = None if args.prompts is None else read_prompts(args.prompts, chat=not args.raw)

    from edge_agent.output import Show
    from edge_agent.runtime import Agent, device_will
    from edge_agent.unconnected import UnconnectedTransport

    show = Show(json_only=args.json)
    with ExitStack() as stack:
        draft = load_draft(args, show.note)
        stack.callback(draft.close)
        own: Encoded | None = None
        if prompts is None:  # what is wrong with it, before anything is connected
            own = encode_prompt(args, draft.text), strips_space(args, draft.text)
            request_from(args, own[0])
        transport: Transport = UnconnectedTransport()
        if not local_only:
            from broker.mqtt import MqttTransport

            will = device_will(device, draft.name)
            transport = MqttTransport(broker_settings(args, f"device-{device}", will))
        agent = Agent(transport, draft, device, upkeep=upkeep_from(args, device), wish=asked)
        if args.metrics_port:
            from edge_agent.device_metrics import device_metrics

            server = device_metrics(agent, args.metrics_bind, args.metrics_port, alone=local_only)
            stack.callback(server.close)
            server.start()
        stack.callback(agent.stop)
        agent.start()
        writer = Writer(args, agent, draft, show, own)
        try:
            return write_all(
                writer.write,
                prompts,
                repeat=args.repeat,
                pause_s=args.pause,
                note=show.note,
                hopeless=lambda: agent.link_failed,
            )
        except Stopped:
            if args.repeat == 0:
                return 0  # how a device that works for ever is meant to end
            raise


#: A prompt's tokens, and whether the answer's first word brings a space that is not part of it.
Encoded = tuple[tuple[int, ...], bool]


class Writer:
    """Writes one text after the other. ``own``: the prompt of the flags, if there is one."""

    def __init__(
        self,
        args: argparse.Namespace,
        agent: Agent,
        draft: LlamaDraftModel,
        show: Show,
        own: Encoded | None,
    ) -> None:
        self._args = args
        self._agent = agent
        self._draft = draft
        self._show = show
        self._own = own

    def write(self, prompt: BenchPrompt | None) -> None:
        """That of ``prompt``, None: of the flags. Raises what ends the generation."""
        from edge_agent.cli import request_from

        args, text = self._args, self._draft.text
        if prompt is None:
            assert self._own is not None
            tokens, strip = self._own
        elif prompt.chat and text.has_chat_template:
            tokens = tuple(text.encode_chat([{"role": "user", "content": prompt.text}]))
            strip = text.adds_space_prefix
        else:
            tokens, strip = tuple(text.encode_prompt(prompt.text)), False
        summary = self._show.generation(
            self._agent.generate(request_from(args, tokens)),
            text,
            args.stop,
            strip_leading_space=strip,
        )
        self._show.summary(summary, name=None if prompt is None else prompt.name)


def write_all(
    write: Callable[[BenchPrompt | None], None],
    prompts: Sequence[BenchPrompt] | None,
    *,
    repeat: int,
    pause_s: float,
    note: Callable[[str], None],
    hopeless: Callable[[], bool],
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Write every prompt ``repeat`` times (0: for ever); the exit code: that of the last failure.

    ``prompts``: None for the one of the flags. ``hopeless``: whether the next try must fail too.
    Raises what ends a text where it is, or where ``repeat`` is 1.
    """
    code = 0
    failures = 0  # in a row
    first = True
    for prompt in _rounds(prompts, repeat):
        if not first and pause_s > 0.0:
            sleep(pause_s)
        first = False
        try:
            write(prompt)
        except PipesdError as error:
            if repeat == 1 or hopeless():
                raise
            code = error.exit_code
            name = "" if prompt is None else f" ({prompt.name})"
            note(f"failed{name}: {' '.join(str(error).split())}")
            wait = min(LAST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures, 10))
            failures += 1
            if isinstance(error, Refused):
                wait = max(wait, min(LAST_PAUSE_S, error.retry_after))
            sleep(max(0.0, wait - pause_s))
        else:
            failures = 0
    return code


def _rounds(prompts: Sequence[BenchPrompt] | None, repeat: int) -> Iterator[BenchPrompt | None]:
    for _ in itertools.count() if repeat == 0 else range(repeat):
        yield from prompts if prompts is not None else (None,)
