"""A real Prometheus for tests (Debian package ``prometheus``), and its promtool."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.brokers import free_port, require, wait_until

PROMETHEUS = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")

Labels = frozenset[tuple[str, str]]


class Prometheus:
    """Scrapes ``jobs`` (name to ``host:port`` of each target) every second.

    As a context manager it leaves nothing behind; what it stored lies in ``folder``.
    """

    def __init__(
        self,
        folder: Path,
        jobs: Mapping[str, Iterable[str]],
        *,
        scrape_s: float = 1.0,
        rules: Iterable[Path] = (),
    ) -> None:
        require("prometheus", PROMETHEUS is not None)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._log = folder / "prometheus.log"
        interval = f"{round(scrape_s * 1000)}ms"
        config = {
            "global": {"scrape_interval": interval, "evaluation_interval": interval},
            "rule_files": [str(path) for path in rules],
            "scrape_configs": [
                {"job_name": name, "static_configs": [{"targets": list(targets)}]}
                for name, targets in jobs.items()
            ],
        }
        self._config = folder / "prometheus.yml"
        self._config.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Prometheus:
        assert PROMETHEUS is not None
        with self._log.open("ab") as log:
            process = self._process = subprocess.Popen(
                [
                    PROMETHEUS,
                    f"--config.file={self._config}",
                    f"--storage.tsdb.path={self._folder / 'prometheus'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                    "--log.level=warn",
                ],
                stdout=log,
                stderr=log,
                cwd=self._folder,
            )
        ready = wait_until(lambda: self._ready() or process.poll() is not None, 30)
        assert ready, f"prometheus is not ready: {self._log.read_text()[-1500:]}"
        assert process.poll() is None, f"no prometheus: {self._log.read_text()[-1500:]}"
        return self

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()  # nobody reads its storage again
            self._process.wait(10)
            self._process = None

    def get(self, path: str, **parameters: str) -> Any:
        """The ``data`` of an API call."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}{path}?{query}", timeout=10) as answer:
                content = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}?{query}: {error.read().decode()}") from None
        assert content["status"] == "success", content
        return content["data"]

    def query(self, expression: str) -> dict[Labels, float]:
        """An instant query: values by labels, the metric's name among them where there is one."""
        data = self.get("/api/v1/query", query=expression)
        if data["resultType"] == "scalar":
            return {frozenset(): float(data["result"][1])}
        return {
            frozenset(found["metric"].items()): float(found["value"][1]) for found in data["result"]
        }

    def values(self, expression: str, label: str) -> dict[str, float]:
        """An instant query: values by one label."""
        all_ = self.query(expression)
        found = {dict(labels).get(label, ""): value for labels, value in all_.items()}
        assert len(found) == len(all_), f"{label} does not tell these series apart"
        return found

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def __enter__(self) -> Prometheus:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def check_metrics(text: str) -> str:
    """What promtool finds wrong with an exposition; nothing: empty."""
    require("promtool", PROMTOOL is not None)
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    found = done.stdout + done.stderr
    assert done.returncode == 0 or found, done.returncode
    return found
