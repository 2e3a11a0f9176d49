"""Prompts of a benchmark, built in and read."""

from __future__ import annotations

import pytest

from broker.errors import ConfigError
from edge_agent.bench.prompts import BUILT_IN, TUNING, BenchPrompt, read_prompts


def test_tuning_never_sees_what_is_compared() -> None:
    names = [prompt.name for prompt in (*BUILT_IN, *TUNING)]
    texts = {prompt.text for prompt in (*BUILT_IN, *TUNING)}
    assert len(set(names)) == len(names) == len(texts)
    assert any(not prompt.chat for prompt in BUILT_IN)


def test_a_file_is_read_line_by_line(tmp_path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"id": "one", "prompt": "Hi"}\n\n{"prompt": "def f():", "chat": false}\n'
        '{"prompt": "žluťoučký"}',
        encoding="utf-8",
    )
    assert read_prompts(str(path)) == (
        BenchPrompt("one", "Hi"),
        BenchPrompt("line 3", "def f():", chat=False),
        BenchPrompt("line 4", "žluťoučký"),
    )
    assert [prompt.chat for prompt in read_prompts(str(path), chat=False)] == [False] * 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no prompt"),
        ("\n \n", "holds no prompt"),
        ('{"prompt": "a"}\n{', "line 2 is no JSON"),
        ('{"prompt": "a"}\n\n{"text": "b"}', 'line 3 has no text as "prompt"'),
        ('{"prompt": "a"}\n{"prompt": "\\ud800"}', "line 2 has half of a surrogate pair"),
        ('{"prompt": 7}', "line 1"),
        ('{"prompt": "  "}', "line 1"),
        ('["a"]', "line 1"),
        ("[" * 100_000, "line 1"),
        ('{"prompt": "a", "chat": "yes"}', "neither true nor false"),
        ('{"id": "x", "prompt": "a"}\n{"id": "x", "prompt": "b"}', "'x' comes twice"),
    ],
)
def test_what_is_wrong_is_named_by_file_and_line(text, words, tmp_path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        read_prompts(str(path))
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 400


def test_files_that_cannot_be_read(tmp_path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_prompts(str(tmp_path / "missing"))
    path = tmp_path / "latin"
    path.write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(ConfigError, match="UTF-8"):
        read_prompts(str(path))
