"""What a benchmark writes beside its results is whole, and checked before the work."""

from __future__ import annotations

import json
import os

import pytest

from broker.errors import ConfigError
from edge_agent.bench.files import check_writable, replace_file, write_json


def test_a_file_takes_the_others_place_at_once(tmp_path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert os.listdir(tmp_path) == ["x.json"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, OSError])
def test_what_ends_the_writing_leaves_the_old_file(error, tmp_path) -> None:
    path = tmp_path / "x.json"
    path.write_text("old")

    def write(part) -> None:
        part.write_text("half")
        assert path.read_text() == "old"
        raise error("enough")

    with pytest.raises(ConfigError if error is OSError else error):
        replace_file(path, write)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x.json"]


def test_a_link_is_followed_and_stays(tmp_path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    link.symlink_to(real)
    write_json(link, 3)
    assert link.is_symlink()
    assert json.loads(real.read_text()) == 3


def test_a_check_leaves_nothing_and_takes_nothing(tmp_path) -> None:
    path = tmp_path / "x.json"
    check_writable(path)
    assert os.listdir(tmp_path) == []
    path.write_text("old")
    check_writable(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x.json"]


@pytest.mark.parametrize("name", ["missing/x.json", "file/x.json", ".", "", "pipe"])
def test_what_cannot_be_written_is_named(name, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("no folder")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="give another"):
        check_writable(name)
    with pytest.raises(ConfigError, match="give another"):
        write_json(name, 1)
    assert sorted(os.listdir(tmp_path)) == ["file", "pipe"]
