"""A replica's metrics, as a scrape sees them."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as plain_families

from broker.messages import DraftBatch, SessionOpen, Verdict
from broker.sampling import Sampling
from broker.sensors import BackgroundSampler, Sampler
from broker.topics import open_topic, up_topic
from cloud_verifier import cli, metrics
from cloud_verifier.core.stats import VerifierStats
from cloud_verifier.core.verifier import SessionKey
from cloud_verifier.engine.scripted_target import ScriptedTarget
from cloud_verifier.engine.target import Work
from cloud_verifier.measures import STAGES, Histogram
from cloud_verifier.metrics import CARRIED, CAUSES, MAX_LABELS, NOW, OTHER, STATS, VerifierMetrics
from cloud_verifier.metrics_flags import build_labels
from cloud_verifier.runtime import VerifierRuntime, config_for
from tests.broker.sensors import boards
from tests.brokers import require, wait_until
from tests.cloud_verifier.test_runtime import Wire
from tests.commands import call

PROMTOOL = shutil.which("promtool")
PREFIX = "pipesd_verifier_"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class CountingWire(Wire):
    """With the counters of a transport."""

    bytes_sent, bytes_received, messages_sent, messages_received = 11, 12, 13, 14
    reconnects, dropped, callback_errors = 15, 16, 17


class SlowTarget(ScriptedTarget):
    """Holds its forwards while ``gate`` is closed."""

    def __init__(self) -> None:
        super().__init__(
            script=lambda text: len(text) % 50,
            vocab_size=50,
            vocab_hash="h",
            context=1000,
            max_slots=4,
        )
        self.gate = threading.Event()
        self.gate.set()

    def forward(self, batch: Sequence[Work]) -> list[list[int]]:
        assert self.gate.wait(10.0)
        return super().forward(batch)


class Served:
    """A replica with its metrics, ``root``: of the machine it believes to be on."""

    def __init__(self, root: Path) -> None:
        self.wire = CountingWire()
        self.target = SlowTarget()
        self.runtime = VerifierRuntime(
            self.wire, self.target, config_for(self.target, "v", max_sessions_per_device=200)
        )
        self.core = self.runtime.core
        self.sampler = BackgroundSampler(
            Sampler(root, watts=4.0, command=boards.no_command), interval=0.01
        )
        self.metrics = VerifierMetrics("127.0.0.1", 0, self.sampler)
        self.metrics.start()

    def watch(self) -> None:
        labels = build_labels("v", "a target", "scripted", "none")
        self.metrics.watch(self.runtime, labels)

    def open(self, session: str) -> None:
        opened = SessionOpen(1, (1, 2, 3), (), Sampling(), 100, "h")
        self.wire.deliver(open_topic("d", session), opened)

    def ask(self, session: str) -> None:
        """Three drafts, of which the first two are right."""
        held = self.core.sessions[SessionKey("d", session)]
        base = len(held.committed)
        length = held.length
        tokens = (length % 50, (length + 1) % 50, 49)
        self.wire.deliver(up_topic("d", session, "v"), DraftBatch(1, 0, base, tokens, None, True))

    def run(self, *sessions: str) -> None:
        """Each session gets one verdict over three drafts."""
        for session in sessions:
            self.open(session)
            self.ask(session)
            key = SessionKey("d", session)
            assert wait_until(lambda key=key: self.wire.of(key, Verdict))

    def text(self, path: str = "/metrics", accept: str = "") -> str:
        url = f"http://127.0.0.1:{self.metrics.server.port}{path}"
        request = urllib.request.Request(url, headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=5.0) as answer:
            found: str = answer.read().decode()
            return found

    def samples(self) -> Samples:
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in plain_families(self.text())
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float | None:
        return self.samples().get((PREFIX + name, tuple(sorted(labels.items()))))

    def health(self) -> tuple[int, str]:
        try:
            return 200, self.text("/healthz")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def close(self) -> None:
        self.target.gate.set()
        self.metrics.close()
        self.runtime.stop()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(boards.process(tmp_path, ticks=200))
    made.watch()
    made.runtime.start()
    assert wait_until(lambda: made.sampler.latest.energy_joules is not None)
    yield made
    made.close()


def total(samples: Samples, name: str) -> float | None:
    found = [value for (key, _), value in samples.items() if key == name]
    return sum(found) if found else None


def exported_as(field: str) -> str:
    known = STATS.get(field)
    name = known.name if known else field
    return PREFIX + CARRIED.get(field, name if field.endswith(NOW) else f"{name}_total")


def assert_all_exported(served: Served) -> None:
    stats, samples = served.core.stats, served.samples()
    for field in fields(stats):
        value = getattr(stats, field.name)
        wanted = sum(value.values()) if isinstance(value, Counter) else value
        assert total(samples, exported_as(field.name)) == pytest.approx(wanted), field.name


def test_every_field_of_the_stats_is_exported_as_it_is(served: Served) -> None:
    served.run("a", "b")
    stats = served.core.stats
    for number, field in enumerate(fields(stats), 1000):
        if field.name not in CARRIED and isinstance(getattr(stats, field.name), int):
            setattr(stats, field.name, number)
    stats.rejected.update({"topic": 3, "something new": 2})
    stats.refused.update({"busy": 4})
    stats.refusals = 4
    assert stats.batch_tokens > 0
    assert_all_exported(served)


def test_names_are_those_of_fields_that_there_are() -> None:
    assert STATS.keys() | CARRIED.keys() <= {field.name for field in fields(VerifierStats)}


def test_a_new_field_appears_by_itself(served: Served) -> None:
    @dataclass
    class More(VerifierStats):
        shared_blocks: int = 7
        blocks_in_use: int = 3
        core_faults: int = 2  # counted here in place of elsewhere

    served.core.stats = More()
    assert served.value("shared_blocks_total") == 7
    assert served.value("blocks_in_use") == 3
    assert served.value("core_faults_total") == 2
    text = served.text()
    assert text.count("# TYPE pipesd_verifier_core_faults_total counter\n") == 1
    assert "# TYPE pipesd_verifier_blocks_in_use gauge\n" in text
    assert_all_exported(served)


def test_a_run_is_counted(served: Served) -> None:
    served.run("a", "b")
    samples = served.samples()

    def value(name: str, **labels: str) -> float:
        return samples[PREFIX + name, tuple(sorted(labels.items()))]

    assert value("sessions_opened_total") == 2
    assert value("drafted_tokens_total") == 6
    assert value("judged_tokens_total") == 6
    assert value("accepted_tokens_total") == 4
    assert value("committed_tokens_total") == 6
    assert value("sessions") == value("slots_used") == 2
    assert value("slots") == 4
    assert value("sessions_limit") == 256
    forwards = value("forwards_total")
    assert forwards >= 2
    assert value("forward_duration_seconds_count") == forwards
    assert value("batch_sessions_count") == value("batch_tokens_count") == forwards
    assert value("batch_sessions_bucket", le="256.0") == forwards
    assert value("batch_tokens_bucket", le="+Inf") == forwards
    assert value("mqtt_sent_bytes_total") == 11
    assert value("mqtt_callback_errors_total") == 17
    assert value("broker_connected") == value("engine_alive") == 1
    for stage in STAGES:
        assert value("stage_seconds_total", stage=stage) > 0.0, stage
    labels = {"version", "verifier", "target", "engine", "dtype"}
    [(_, build)] = [key for key in samples if key[0] == PREFIX + "build_info"]
    assert {name for name, _ in build} == labels


def test_reasons_and_causes_begin_at_nought(served: Served) -> None:
    assert served.value("sessions_refused_total", reason="busy") == 0
    assert served.value("rejected_messages_total", cause="msgpack") == 0
    opened = SessionOpen(1, (1, 2, 3), (), Sampling(), 100, "another")
    served.wire.deliver(open_topic("d", "s"), opened)
    assert served.value("sessions_refused_total", reason="vocabulary") == 1
    served.wire.deliver("pipesd/1/d/s/open", DraftBatch(1, 0, 0, (), None, True))
    assert served.value("rejected_messages_total", cause="unexpected_kind") == 1


def test_the_causes_are_those_of_the_source() -> None:
    root = Path(inspect.getfile(cli)).parent.parent
    text = "".join(
        (root / path).read_text()
        for path in (
            "broker/codec.py",
            "broker/topics.py",
            "cloud_verifier/wire.py",
            "cloud_verifier/core/session.py",
        )
    )
    found = re.findall(r'cause="(\w+)"|rejected\["(\w+)"\]', text)
    assert {a or b for a, b in found} == set(CAUSES)


def test_labels_are_bounded(served: Served) -> None:
    served.core.stats.rejected.update({f"cause {number}": 1 for number in range(500)})
    causes = [key for key in served.samples() if key[0] == PREFIX + "rejected_messages_total"]
    assert len(causes) == MAX_LABELS + 1
    assert served.value("rejected_messages_total", cause=OTHER) == 500 - MAX_LABELS + len(CAUSES)


def test_case_37_series_do_not_grow_with_sessions(served: Served) -> None:
    served.run("a")
    before = served.samples().keys()
    for number in range(100):
        served.open(f"s{number}")
    assert served.value("sessions") == 101
    assert served.samples().keys() == before


def test_who_waits_for_a_seat(served: Served) -> None:
    for session in ("a", "b"):
        served.open(session)
    # The prompts go in by themselves first.
    assert wait_until(lambda: served.core.stats.forwards >= 1)
    assert wait_until(lambda: not any(s.has_work for s in served.core.sessions.values()))
    served.target.gate.clear()
    served.ask("a")
    assert wait_until(lambda: served.runtime._forward is not None)
    assert served.value("sessions_waiting") == 0
    assert served.value("longest_wait_seconds") == 0
    served.ask("b")
    assert served.value("sessions_waiting") == 1
    assert wait_until(lambda: (served.value("longest_wait_seconds") or 0.0) > 0.0)
    served.target.gate.set()
    assert wait_until(lambda: served.value("sessions_waiting") == 0)


def test_openmetrics(served: Served) -> None:
    served.run("a")
    families = {family.name: family for family in open_families(served.text(accept=OPENMETRICS))}
    assert families[PREFIX + "forwards"].type == "counter"
    assert families[PREFIX + "batch_tokens"].type == "histogram"
    assert families[PREFIX + "build"].type == "info"


def test_names_have_a_prefix_and_a_help(served: Served) -> None:
    found = list(plain_families(served.text()))
    assert len(found) > 50
    for family in found:
        assert family.name.startswith(PREFIX)
        assert family.documentation.endswith("."), family.name


def test_promtool_finds_nothing(served: Served) -> None:
    require("promtool", PROMTOOL is not None)
    served.run("a")
    boards.raspberry_pi_5(served.sampler.sampler._root)
    boards.orin_nano(served.sampler.sampler._root)
    assert wait_until(lambda: served.value("temperature_celsius") is not None)
    done = subprocess.run(
        [str(PROMTOOL), "check", "metrics"], input=served.text(), capture_output=True, text=True
    )
    assert done.stdout + done.stderr == ""
    assert done.returncode == 0


def expressions() -> list[str]:
    """The PromQL of the module's docstring."""
    blocks = re.findall(r"::\n\n((?:    .*\n)+)", metrics.__doc__ or "")
    joined = [re.sub(r"\n {6,}", " ", block) for block in blocks]
    return [line.strip() for block in joined for line in block.splitlines()]


def test_the_promql_of_the_docstring(served: Served, tmp_path: Path) -> None:
    assert len(expressions()) == 8
    known = {name for name, _ in served.samples()}
    for expression in expressions():
        for name in re.findall(r"pipesd_verifier_\w+", expression):
            assert name in known, name
    require("promtool", PROMTOOL is not None)
    rules = ["groups:", "- name: derived", "  rules:"]
    for number, expression in enumerate(expressions()):
        rules += [f"  - record: derived:{number}", f"    expr: {expression!r}"]
    (tmp_path / "rules.yml").write_text("\n".join(rules) + "\n")
    done = subprocess.run(
        [str(PROMTOOL), "check", "rules", str(tmp_path / "rules.yml")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_documentation_names_every_series(served: Served) -> None:
    """But those of fields that came later, which appear by themselves."""
    root = served.sampler.sampler._root
    boards.raspberry_pi_5(root)
    assert wait_until(lambda: served.value("undervoltage") is not None)
    text = (Path(inspect.getfile(cli)).parent.parent / "docs/metrics.md").read_text()
    section = text[text.index("## A verifier") : text.index("## Sensors and energy")]
    named = set(re.findall(r"`(\w+)`", section))
    later = {exported_as(f.name).removeprefix(PREFIX) for f in fields(VerifierStats)}
    later -= {exported_as(name).removeprefix(PREFIX) for name in STATS}
    for name in {name.removeprefix(PREFIX) for name, _ in served.samples()} - later:
        assert named & {name, re.sub(r"_(bucket|sum|count)$", "", name)}, name


def test_sensors_that_are_not_there_have_no_series(tmp_path: Path) -> None:
    made = Served(tmp_path)
    try:
        made.watch()
        names = {name for name, _ in made.samples()}
        for absent in ("temperature", "throttled", "energy", "process_", "machine_"):
            assert not [name for name in names if name.startswith(PREFIX + absent)]
    finally:
        made.close()


def test_readings(served: Served) -> None:
    assert served.value("process_cpu_seconds_total") == 200 / boards.TICKS
    assert served.value("process_resident_memory_bytes") == 1000 * boards.PAGE
    assert served.value("energy_joules_total", source="estimate") == 4.0 * 200 / boards.TICKS


def test_health(tmp_path: Path) -> None:
    made = Served(tmp_path)
    try:
        assert made.health() == (503, "the target is loading\n")
        assert made.value("start_time_seconds") is not None
        made.watch()
        assert made.health() == (503, "the engine does not run\n")
        made.runtime.start()
        assert made.health() == (200, "ok\n")
        made.wire.connected = False
        assert made.health() == (503, "no connection to the broker\n")
        assert made.value("broker_connected") == 0
        made.wire.connected = True
        assert made.health() == (200, "ok\n")
        made.runtime.stop()
        assert made.health() == (503, "the engine does not run\n")
        assert made.value("engine_alive") == 0
    finally:
        made.close()


def test_a_failed_forward_is_time_spent_too(served: Served, monkeypatch) -> None:
    def fail(batch: Sequence[Work]) -> Any:
        raise ZeroDivisionError("a bug of the target")

    monkeypatch.setattr(served.target, "forward", fail)
    served.open("a")
    served.ask("a")
    assert wait_until(lambda: served.value("forward_failures_total") == 1)
    assert served.runtime._forward is None
    assert served.value("sessions") == 0


def test_histogram() -> None:
    held = Histogram((1, 2, 4))
    for value in (0, 1, 2, 3, 4, 5):
        held.observe(value)
    other = held.copy()
    held.observe(1)
    assert other.counts == [2, 1, 2, 1]
    assert other.total == 15


SERVE = ("serve", "--broker", "mqtt://127.0.0.1:9", "--target", "/nowhere/at/all")


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        (("--metrics-port", "70000"), "--metrics-port 70000"),
        (("--metrics-port", "-1"), "--metrics-port -1"),
        (("--metrics-port", "1", "--metrics-bind", "no such host"), "cannot listen"),
        (("--watts", "-3"), "--watts -3"),
        (("--watts", "nan"), "--watts nan"),
    ],
)
def test_wrong_flags_are_one_line(flags: tuple[str, ...], cause: str) -> None:
    done = call("cloud-verifier", *SERVE, *flags)
    assert done.code == 2
    [line] = done.lines
    assert cause in line


def test_a_port_in_use_is_one_line_before_the_target_is_loaded(served: Served) -> None:
    port = str(served.metrics.server.port)
    done = call("cloud-verifier", *SERVE, "--metrics-port", port)
    assert done.code == 2
    [line] = done.lines
    assert "in use" in line
    assert port in line


def test_without_prometheus_client(monkeypatch) -> None:
    for name in list(sys.modules):
        if name.split(".")[0] == "prometheus_client" or name == "cloud_verifier.metrics":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    done = call("cloud-verifier", *SERVE, "--metrics-port", "1")
    assert done.code == 2
    [line] = done.lines
    assert "pip install 'pipesd[cloud]'" in line
