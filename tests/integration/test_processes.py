"""Real processes that are stopped, killed and started again; none is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.codec import decode
from broker.messages import VerifierStatus
from broker.mqtt import MqttSettings, MqttTransport
from broker.topics import verifier_status_topic
from broker.transport import Message
from cloud_verifier.engine.scripted_target import hashed_script
from tests.brokers import wait_until
from tests.commands import (
    FIELDS,
    PATIENCE,
    Command,
    call,
    clean_environment,
    run_command,
    still_alive,
)
from tests.draft_models import draft_model
from tests.system import PacedTarget, Replica

pytestmark = [pytest.mark.models, pytest.mark.slow]

STORY = "Write a long story about a lighthouse keeper and a heron."
LENGTH = 60
#: Seconds in which whatever was told to end has ended, on a busy machine.
SOON = 20.0
INTERRUPTED = 130


def serve(url: str, name: str) -> Command:
    flags = ["--broker", url, "--pair", "smollm2", "--threads", "1", "--id", name]
    return Command("cloud-verifier", "serve", *flags)


def serving(command: Command) -> None:
    """Wait until it says that it serves."""
    command.until(lambda: " serves " in command.out, 180)


def writer(url: str, *flags: str) -> Command:
    """A generation that takes a while."""
    what = ["--pair", "smollm2", "--threads", "1", "--prompt", STORY, "--max-tokens", str(LENGTH)]
    return Command("edge-agent", "generate", "--broker", url, "--timeout", "120", *what, *flags)


class Statuses:
    """The statuses of a verifier as a device hears them."""

    def __init__(self, url: str, name: str) -> None:
        self.heard: list[VerifierStatus] = []
        self._transport = MqttTransport(MqttSettings.from_url(url, f"watch-{name}"))
        self._transport.subscribe(verifier_status_topic(name), qos=1)
        self._transport.start(self._on_message, lambda event: None)

    def _on_message(self, message: Message) -> None:
        status = decode(message.payload)
        assert isinstance(status, VerifierStatus)
        self.heard.append(status)

    @property
    def online(self) -> bool | None:
        return self.heard[-1].online if self.heard else None

    def __enter__(self) -> Statuses:
        return self

    def __exit__(self, *_: object) -> None:
        self._transport.stop()


# ---- the verifier ---------------------------------------------------------------------------


def test_a_verifier_killed_in_the_middle_of_an_answer(url: str) -> None:
    """The device waits for the next one, and the text is as if nothing had been."""
    name = "mortal"
    with serve(url, name) as first, Statuses(url, name) as statuses:
        serving(first)
        assert wait_until(lambda: statuses.online, PATIENCE)
        with writer(url) as device:
            device.until(lambda: len(device.out) > 20)
            first.signal(signal.SIGKILL)
            assert first.wait().code == -signal.SIGKILL
            assert wait_until(lambda: statuses.online is False, PATIENCE), "no will"
            told = device.out
            with serve(url, name) as second:
                result = device.wait(180)
                # Orderly now: SIGTERM is how a service ends.
                second.signal(signal.SIGTERM)
                ended = second.wait(SOON)
    assert result.code == 0, result.err
    assert "all verified" in result.err
    assert len(result.out) > len(told) + 20, "it was over before the verifier was killed"
    flags = ["--pair", "smollm2", "--threads", "1", "--prompt", STORY, "--max-tokens", str(LENGTH)]
    alone = call("cloud-verifier", "generate", *flags, "--json")
    assert result.out == json.loads(alone.out)["text"] + "\n"
    assert (ended.code, ended.err) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_verifier_that_is_told_to_stop(url: str, number: int) -> None:
    """Exit code 0 within seconds, with a session running; its status says offline for good."""
    name = f"polite-{number}"
    with serve(url, name) as command:
        serving(command)
        with writer(url) as device:
            device.until(lambda: len(device.out) > 20)
            command.signal(number)
            result = command.wait(SOON)
            device.signal(signal.SIGINT)
            assert device.wait(SOON).code == INTERRUPTED
    assert (result.code, result.err) == (0, "")
    with Statuses(url, name) as later:
        assert wait_until(lambda: later.heard, PATIENCE), "the farewell was not retained"
        assert later.online is False


def test_a_verifier_ends_with_its_parents_pipe(url: str) -> None:
    """``--until-eof``, while it serves and already while it loads."""
    for loaded in (True, False):
        flags = ["serve", "--broker", url, "--pair", "smollm2", "--threads", "1", "--until-eof"]
        with Command("cloud-verifier", *flags, stdin=subprocess.PIPE) as command:
            if loaded:
                serving(command)
            else:
                # Into the loading: torch is there, the model is not.
                maps = Path(f"/proc/{command.process.pid}/maps")
                command.until(lambda maps=maps: "libtorch" in maps.read_text())
            assert command.process.stdin is not None
            command.process.stdin.close()
            assert command.wait(SOON).code == 0
            assert "Traceback" not in command.err


# ---- a generation ---------------------------------------------------------------------------


@pytest.fixture
def replica(url: str) -> Iterator[Replica]:
    """A scripted verifier that takes its time, for the drafts of smollm2."""
    draft = draft_model("smollm2")
    facts = {"vocab_size": draft.vocab_size, "vocab_hash": draft.vocab_hash}
    with Replica(url, PacedTarget(hashed_script(draft.vocab_size), seconds=0.05, **facts)) as made:
        yield made


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_generation_gives_its_place_back(
    url: str, replica: Replica, number: int
) -> None:
    with writer(url, "--max-tokens", "5000") as command:
        command.until(lambda: replica.core.stats.committed > 5)
        command.signal(number)
        result = command.wait(SOON)
    assert result.code == INTERRUPTED
    assert result.err == ""
    assert wait_until(lambda: replica.sessions == 0, SOON)
    assert replica.core.stats.closed == 1


def test_a_reader_that_hangs_up_ends_the_generation(url: str, replica: Replica) -> None:
    """As ``edge-agent generate ... | head -c 1`` does."""
    where = ["--broker", url, "--pair", "smollm2", "--threads", "1"]
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "edge_agent.cli", "generate", *where),
            *("--prompt", STORY, "--max-tokens", "5000"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.wait(SOON) == 1
        assert process.stderr.read() == b""
    assert wait_until(lambda: replica.sessions == 0, SOON)
    assert replica.core.stats.closed == 1


def test_a_signal_is_not_lost_in_a_callback() -> None:
    """Python runs signal handlers in callbacks from C too, where nothing can be raised."""
    program = """
import ctypes, os, signal, sys, time
from broker.command import raise_on_signals, run

@ctypes.CFUNCTYPE(None)
def callback():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)

class Finaliser:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)

def work():
    raise_on_signals()
    if sys.argv[1] == "callback":
        callback()
    else:
        Finaliser()
    time.sleep(60)
    return 0

sys.exit(run(work, "test"))
"""
    for where in ("callback", "finaliser"):
        done = subprocess.run(
            [sys.executable, "-c", program, where],
            capture_output=True,
            timeout=30,
            env=clean_environment(),
            check=False,
        )
        assert (done.returncode, done.stderr) == (INTERRUPTED, b"")


# ---- the demo -------------------------------------------------------------------------------


def demo(*flags: str, env: dict[str, str] | None = None) -> Command:
    return Command("edge-agent", "demo", "--prompt", STORY, *flags, env=env)


#: When the demo is struck: after which of its doings.
MOMENTS: dict[str, Callable[[Command], object]] = {
    "broker": lambda c: len(c.children()) >= 1,
    "verifier": lambda c: any("cloud_verifier.cli" in child.what for child in c.children()),
    "ready": lambda c: "ready after" in c.err,
    "writing": lambda c: len(c.out) > 20,
    "comparing": lambda c: "for comparison" in c.err and c.children(),
}


def flags_for(moment: str) -> list[str]:
    # Short where the comparison is wanted, long enough to be struck where it is not.
    return ["--max-tokens", "12" if moment == "comparing" else "400"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_ends_the_demo_and_all_its_children(moment: str) -> None:
    """As from a terminal: to the whole process group."""
    with demo(*flags_for(moment)) as command:
        command.until(lambda: MOMENTS[moment](command), 180)
        children = command.children()
        assert children
        os.killpg(command.process.pid, signal.SIGINT)
        result = command.wait(SOON)
        left = still_alive(children, SOON)
    assert left == []
    assert result.code == INTERRUPTED
    assert "Traceback" not in result.err


def test_a_second_ctrl_c_does_not_tear_the_clean_up() -> None:
    with demo("--max-tokens", "400") as command:
        command.until(lambda: MOMENTS["writing"](command), 180)
        children = command.children()
        for _ in range(3):
            os.killpg(command.process.pid, signal.SIGINT)
        result = command.wait(SOON)
        left = still_alive(children, SOON)
    assert left == []
    assert result.code == INTERRUPTED
    assert "Traceback" not in result.err


@pytest.mark.parametrize("moment", ["verifier", "writing", "comparing"])
def test_a_killed_demo_leaves_no_child(moment: str) -> None:
    """It can say nothing to them; they notice."""
    with demo(*flags_for(moment)) as command:
        command.until(lambda: MOMENTS[moment](command), 180)
        children = command.children()
        assert children
        command.signal(signal.SIGKILL)
        assert command.wait().code == -signal.SIGKILL
        left = still_alive(children, SOON)
    assert left == []


def test_the_demo_shows_text_and_figures(tmp_path: Path) -> None:
    """Plain in a pipe; and settings for a fleet, lying around here, do not confuse its parts."""
    config = tmp_path / "pipesd.toml"
    config.write_text('[cloud-verifier]\ntarget = "/missing"\n')
    trap = {
        "PIPESD_CONFIG": str(config),
        "PIPESD_TARGET": "/missing",
        "PIPESD_BROKER": "mqtts://missing",
        "PIPESD_CA_FILE": "/missing",
    }
    with demo("--max-tokens", "16", env=trap) as command:
        result = command.wait(300)
    assert result.code == 0, result.err
    assert "\x1b" not in result.out + result.err
    assert len(result.out) > 20
    for word in ("tokens", "TPT", "TTFT", "acceptance", "forwards", "uplink", "target alone"):
        assert word in result.err
    assert "16 (length), all verified" in result.err
    assert "the same text" in result.err
    assert re.search(r"\d+\.\d bytes per token", result.err)


def test_the_demo_prints_one_object() -> None:
    flags = ["--prompt", "Name two colours.", "--max-tokens", "8", "--temperature", "0.8"]
    result = run_command("edge-agent", "demo", *flags, "--seed", "4", "--json", timeout=300)
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert list(report)[: len(FIELDS)] == FIELDS
    assert report["target_alone_equal"] is True
    assert report["target_alone_tpt_ms"] > 0
    assert report["verified"] is True
