"""A real pair for benchmarks: its target, and recorded texts (recorded where there are none).

A text hangs on the target's precision, so each precision has a file of its own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from broker.cache import cache_dir
from broker.errors import ModelError
from cloud_verifier.engine.target import Target
from edge_agent.bench.traces import Trace, read_traces

PROMPTS, MAX_TOKENS = 8, 192
ENGINES = ("torch", "llama")


@dataclass(frozen=True, slots=True)
class Chosen:
    """``threads``: of the target."""

    pair: str
    engine: str
    dtype: str
    threads: int


def load_target(chosen: Chosen, slots: int, context: int) -> Target:
    """The target, with so many slots of ``context`` tokens. Raises ModelError."""
    pair, engine, dtype, threads = chosen.pair, chosen.engine, chosen.dtype, chosen.threads
    if engine == "llama":
        from cloud_verifier.engine.llama_prepare import resolve_gguf
        from cloud_verifier.engine.llama_target import LlamaTarget

        source = str(resolve_gguf(None, pair, dtype))
        return LlamaTarget(source, dtype=dtype, context=context, max_slots=slots, threads=threads)
    from cloud_verifier.engine.prepare import resolve_target
    from cloud_verifier.engine.torch_target import TorchTarget

    return TorchTarget.load(
        resolve_target(None, pair), dtype=dtype, context=context, max_slots=slots, threads=threads
    )


def texts_of(pair: str, dtype: str, given: str | None) -> tuple[list[Trace], Path]:
    """The traces, and where they are; ``given``: a file to read or, where there is none, to write.

    Raises ConfigError for a file that is no record, ModelError when recording fails.
    """
    path = Path(given) if given else cache_dir() / "benchmarks" / f"texts-{pair}-{dtype}.jsonl"
    if not path.exists():
        _record(pair, dtype, path)
    return read_traces(path), path


def _record(pair: str, dtype: str, path: Path) -> None:
    print(
        f"recording {PROMPTS} texts of {pair} in {dtype} to {path}: two minutes or so",
        file=sys.stderr,
        flush=True,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pipesd-record-") as folder:
        flags = ["bench", "--pair", pair, "--dtype", dtype, "--policies", "cloud"]
        flags += ["--scenarios", "loopback", "--prompt-count", str(PROMPTS)]
        flags += ["--max-tokens", str(MAX_TOKENS), "--record", f"{folder}/texts.jsonl"]
        done = subprocess.run(
            [sys.executable, "-m", "edge_agent.cli", *flags, "--out", f"{folder}/run"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise ModelError(f"recording failed ({last}): run edge-agent bench --record by hand")
        # Read back before it is kept: half a file would be taken for a record.
        read_traces(f"{folder}/texts.jsonl")
        path.write_bytes(Path(f"{folder}/texts.jsonl").read_bytes())
