"""The cache of prepared models: made once, safe against a second process and a kill half-way.

Layout below the cache directory (``PIPESD_CACHE_DIR``, else the user's cache directory)::

    models/<name>/              one prepared artefact, with the files its builder wrote
    models/<name>/manifest.json inputs, tool versions, and size, time and SHA-256 of each file
    models/.<name>.lock         held while one process prepares it
    models/.<name>.tmp-*        a build in progress, or what a killed one left behind

An artefact becomes visible by one rename of a finished, flushed directory, so a reader sees all of
it or none. A reader that finds it good takes no lock and writes nothing: a read-only cache that was
prepared elsewhere works.

What "good" means on each start: the inputs are those asked for, and every file of the manifest has
its size and time of change. Hashing half a gigabyte at each start would cost seconds; the full hash
is compared only when a time differs (a copied cache) or on demand (``verify=True``). Damage that
keeps size and time is therefore seen by ``verify`` alone.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import filelock
import platformdirs

from broker.errors import ConfigError, ModelError

MANIFEST = "manifest.json"
_FORMAT = 1
_NAME_LIMIT = 120
# No dots: "<name>.tmp-" can then never be the beginning of another artefact's name.
_NAME_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_LOCK_LIMIT_S = 3600.0
_LOCK_POLL_S = 0.2
_MANIFEST_LIMIT_BYTES = 1 << 20
_NEARLY_FULL_BYTES = 16 << 20
_FULL_WORDS = ("No space left on device", f"os error {errno.ENOSPC}")
_IN_USE_S = 3600.0
_ABSENT = "absent"

Progress = Callable[[str], None]


def say(line: str) -> None:
    """The default progress: one line on standard error."""
    print(line, file=sys.stderr, flush=True)


def cache_dir() -> Path:
    """The cache directory: ``PIPESD_CACHE_DIR``, else the user's cache directory for ``pipesd``."""
    chosen = os.environ.get("PIPESD_CACHE_DIR", "").strip()
    if chosen:
        return Path(chosen).expanduser().absolute()
    return platformdirs.user_cache_path("pipesd")


def models_dir() -> Path:
    """Where prepared artefacts lie."""
    return cache_dir() / "models"


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's content."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        buffer = bytearray(1 << 20)
        view = memoryview(buffer)
        while count := file.readinto(buffer):
            digest.update(view[:count])
        return digest.hexdigest()


def prepare_once(
    name: str,
    build: Callable[[Path], None],
    progress: Progress = say,
    *,
    label: str | None = None,
    about_s: float | None = None,
    needs_bytes: int = 0,
    inputs: Mapping[str, str] | None = None,
    tools: Sequence[str] = (),
    verify: bool = False,
) -> Path:
    """The directory of the artefact ``name``, built by ``build`` if it is not there or not good.

    ``build`` gets an empty directory and fills it; it runs in one process at a time, the others
    wait and then use the result. ``label`` names the artefact in progress lines (nothing is said
    when it is there already); ``about_s`` and ``needs_bytes`` estimate what a build takes.
    ``inputs`` (source hash, recipe) are compared with those of the artefact: another value makes it
    again. ``tools``: distributions whose versions go into the manifest, for the reader only.
    ``verify`` compares the full hash of each file.

    Raises ConfigError when the cache cannot be written or is full, ModelError when another process
    has been building for an hour, and whatever ``build`` raises.
    """
    if not name or len(name) > _NAME_LIMIT or not _NAME_CHARACTERS.issuperset(name):
        raise ConfigError(f"{name!r} cannot name a prepared model; use letters, digits, _ and -")
    label = label or name
    wanted = dict(inputs or {})
    root = models_dir()
    goal = root / name
    if _fault(goal, wanted, verify) is None:
        _note_use(goal)
        return goal
    with _cache_trouble(root):
        root.mkdir(parents=True, exist_ok=True)
    with _exclusive(root / f".{name}.lock", root, label, progress):
        fault = _fault(goal, wanted, verify)
        if fault is None:
            return goal
        if fault != _ABSENT:
            progress(f"{label} in the cache {fault}; preparing it again")
        with _cache_trouble(root):
            _remove_leftovers(root, name)
            _check_space(root, label, needs_bytes)
        started = time.monotonic()
        time_note = f", about {about_s:.0f} s" if about_s else ""
        progress(f"preparing {label} (once{time_note}) ...")
        _build(root, goal, build, wanted, tools)
        progress(f"{label}: done in {time.monotonic() - started:.0f} s")
    return goal


def forget_oldest(prefix: str, keep: int, progress: Progress = say) -> int:
    """Remove the least recently used artefacts named ``prefix...`` until ``keep`` are left.

    One that was used within the last hour stays: a process may be loading it. Returns how many
    were removed; each is said in a line.
    """
    root = models_dir()
    used = []
    for path in root.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            used.append(((path / MANIFEST).stat().st_mtime, path))
    removed = 0
    for when, path in sorted(used)[: max(0, len(used) - keep)]:
        if time.time() - when < _IN_USE_S:
            continue
        aside = path.with_name(f".{path.name}.tmp-forgotten")
        with contextlib.suppress(OSError):
            path.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
            progress(f"removed the prepared model {path.name}, the longest unused of {len(used)}")
            removed += 1
    return removed


def _build(
    root: Path,
    goal: Path,
    build: Callable[[Path], None],
    inputs: Mapping[str, str],
    tools: Sequence[str],
) -> None:
    """Build beside ``goal``, flush, and put it in place by a rename."""
    with _cache_trouble(root):
        workplace = Path(tempfile.mkdtemp(prefix=f".{goal.name}.tmp-", dir=root))
    try:
        try:
            with _cache_trouble(root):
                build(workplace)
        except ModelError as error:
            # A builder in another process cannot hand over errno. A full disk shows in what it
            # said, or in the space that is left where its unfinished file still lies.
            said_so = any(words in str(error) for words in _FULL_WORDS)
            if said_so or shutil.disk_usage(root).free < _NEARLY_FULL_BYTES:
                raise _full(root) from error
            raise
        if not any(workplace.iterdir()):
            raise ModelError(f"preparing {goal.name} wrote no files; report this as a fault")
        with _cache_trouble(root):
            _write_manifest(workplace, _describe(workplace, inputs, tools))
            for path in (*workplace.rglob("*"), workplace):
                # Temporary files begin private; a prepared cache may be shared between users.
                path.chmod(0o755 if path.is_dir() else 0o644)
                _flush(path)
            if goal.exists():
                goal.rename(workplace.with_name(f"{workplace.name}-old"))
            workplace.rename(goal)
            _flush(root)
    finally:
        _remove_leftovers(root, goal.name)


def _describe(
    directory: Path, inputs: Mapping[str, str], tools: Sequence[str]
) -> dict[str, object]:
    files = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            state = path.stat()
            files[path.relative_to(directory).as_posix()] = {
                "size": state.st_size,
                "mtime_ns": state.st_mtime_ns,
                "sha256": sha256_of(path),
            }
    versions = {"python": sys.version.split()[0]}
    for tool in ("pipesd", *tools):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[tool] = metadata.version(tool)
    return {"format": _FORMAT, "inputs": dict(inputs), "made_with": versions, "files": files}


def _fault(goal: Path, inputs: Mapping[str, str], verify: bool) -> str | None:
    """Why the artefact cannot be used, or None. Reads its manifest and stats its files."""
    try:
        manifest = _read_manifest(goal)
    except FileNotFoundError:
        return _ABSENT if not goal.is_dir() else "has no manifest"
    except (OSError, ValueError):
        return _ABSENT if not goal.is_dir() else "has a damaged manifest"
    if manifest["inputs"] != dict(inputs):
        return "was made from something else"
    retimed = False
    for relative, entry in manifest["files"].items():
        path = goal / relative
        try:
            state = path.stat()
            if state.st_size != entry["size"]:
                return f"is damaged ({relative} has {state.st_size} bytes, not {entry['size']})"
            moved = not _same_time(state.st_mtime_ns, entry["mtime_ns"])
            if (moved or verify) and sha256_of(path) != entry["sha256"]:
                return f"is damaged ({relative} does not match its hash)"
        except OSError as error:
            return f"is damaged ({relative}: {error.strerror})"
        if moved:
            entry["mtime_ns"] = state.st_mtime_ns
            retimed = True
    if retimed:
        # Spares the next start the hashing; a cache that cannot be written just hashes again.
        with contextlib.suppress(OSError):
            _write_manifest(goal, manifest)
    return None


def _same_time(found_ns: int, noted_ns: int) -> bool:
    """Equal times of change; archives and some file systems keep whole seconds only."""
    second = 1_000_000_000
    return found_ns == noted_ns or (
        found_ns % second == 0 and found_ns // second == noted_ns // second
    )


def _read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest with its shape checked. Raises OSError, or ValueError for anything odd."""
    with (directory / MANIFEST).open("rb") as file:
        raw = file.read(_MANIFEST_LIMIT_BYTES + 1)
    if len(raw) > _MANIFEST_LIMIT_BYTES:
        raise ValueError("manifest too large")
    manifest = json.loads(raw)
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise ValueError("manifest of another format")
    files = manifest.get("files")
    if not isinstance(files, dict) or not files or not isinstance(manifest.get("inputs"), dict):
        raise ValueError("manifest without files")
    for entry in files.values():
        if not isinstance(entry, dict) or not (
            isinstance(entry.get("size"), int)
            and isinstance(entry.get("mtime_ns"), int)
            and isinstance(entry.get("sha256"), str)
        ):
            raise ValueError("manifest with an odd entry")
    return manifest


def _write_manifest(directory: Path, manifest: Mapping[str, object]) -> None:
    """Replace the manifest as a whole."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{MANIFEST}-", dir=directory)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1, sort_keys=True)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        Path(temporary).replace(directory / MANIFEST)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _exclusive(lock_file: Path, root: Path, label: str, progress: Progress) -> Iterator[None]:
    """Hold the artefact's lock; the system frees it when its holder dies."""
    lock = filelock.FileLock(lock_file)
    with _cache_trouble(root):
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            progress(f"waiting for another process that is preparing {label} ...")
            try:
                lock.acquire(timeout=_LOCK_LIMIT_S, poll_interval=_LOCK_POLL_S)
            except filelock.Timeout as error:
                raise ModelError(
                    f"another process has been preparing {label} for an hour; end it and try again"
                ) from error
        except NotImplementedError as error:
            raise ConfigError(
                f"the file system of {root} has no file locks; set PIPESD_CACHE_DIR to a local one"
            ) from error
    try:
        yield
    finally:
        lock.release()


def _remove_leftovers(root: Path, name: str) -> None:
    """Remove what killed builds of ``name`` left; the caller holds its lock."""
    for path in root.glob(f".{name}.tmp-*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _note_use(goal: Path) -> None:
    """Remember the use by the manifest's time; a cache that cannot be written has no order."""
    with contextlib.suppress(OSError):
        os.utime(goal / MANIFEST)


def _check_space(root: Path, label: str, needs_bytes: int) -> None:
    free = shutil.disk_usage(root).free
    if free < needs_bytes:
        raise ConfigError(
            f"{label} needs about {needs_bytes >> 20} MB and {root} has {free >> 20} MB free; "
            "free some or set PIPESD_CACHE_DIR to another directory"
        )


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _full(root: Path) -> ConfigError:
    return ConfigError(
        f"the disk of the model cache {root} is full; "
        "free some space or set PIPESD_CACHE_DIR to another directory"
    )


@contextlib.contextmanager
def _cache_trouble(root: Path) -> Iterator[None]:
    """Turn failing file operations into one line that says what to mend."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _full(root) from error
        if error.filename is not None and not _concerns(cache_dir(), Path(error.filename)):
            raise ModelError(
                f"cannot read {error.filename} ({error.strerror}); check that file"
            ) from error
        raise ConfigError(
            f"cannot write the model cache {root} ({error.strerror or error}); "
            "make it writable or set PIPESD_CACHE_DIR to another directory"
        ) from error


def _concerns(directory: Path, path: Path) -> bool:
    """Whether ``path`` lies in ``directory`` or is one of its parents, which may be missing."""
    return path.is_relative_to(directory) or directory.is_relative_to(path)
