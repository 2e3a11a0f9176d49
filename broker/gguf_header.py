"""Reading the header of a GGUF file, and telling a whole file from a broken one.

Both halves take GGUF files from people. A truncated download must give one line, not a crash in
native code or a conversion that fails after half a minute, so the header is walked here first, with
limits, and the extent of every tensor is compared with the size of the file.

Format: GGUF versions 2 and 3, little-endian (ggml's ``docs/gguf.md``).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from broker.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_TENSORS = 1 << 20
_MAX_PAIRS = 1 << 16
_MAX_ARRAY = 1 << 24
_MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_DEFAULT_ALIGNMENT = 32

# ggml type -> (values per block, bytes per block). A type that is not listed (newer than this
# table) is only checked to begin inside the file.
_BLOCKS = {
    0: (1, 4),
    1: (1, 2),
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    9: (32, 36),
    10: (256, 84),
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
    15: (256, 292),
    16: (256, 66),
    17: (256, 74),
    18: (256, 98),
    19: (256, 50),
    20: (32, 18),
    21: (256, 110),
    22: (256, 82),
    23: (256, 136),
    24: (1, 1),
    25: (1, 2),
    26: (1, 4),
    27: (1, 8),
    28: (1, 8),
    29: (256, 56),
    30: (1, 2),
    34: (256, 54),
    35: (256, 66),
    39: (32, 17),
}


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says of itself.

    ``metadata``: the key-value pairs; arrays of strings as lists, arrays of numbers as tuples.
    ``tensors``: names in file order. ``parameters``: values in all tensors. ``data_start``: offset
    of the tensor data in bytes.
    """

    version: int
    architecture: str
    tensors: tuple[str, ...]
    parameters: int
    data_start: int
    metadata: dict[str, Any] = field(repr=False)


def read_header(path: Path) -> GgufHeader:
    """The checked header of ``path``.

    Raises ModelError when the file is missing, unreadable, no GGUF, truncated, or nonsense.
    """
    try:
        if path.is_dir():
            raise ModelError(f"{path} is a directory, not a GGUF file; name the .gguf file in it")
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise ModelError(f"{path} is not a GGUF file; give one made for llama.cpp")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Walk(data, path).header()
    except FileNotFoundError:
        raise ModelError(f"model file {path} does not exist; check the path") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelError(f"cannot read model file {path}: {reason}; check the file") from error


class _Walk:
    """One pass over a mapped file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._size = len(data)
        self._at = 4

    def header(self) -> GgufHeader:
        try:
            return self._header()
        except struct.error:
            raise self._truncated() from None

    def _header(self) -> GgufHeader:
        (version,) = self._take("I")
        if version not in _VERSIONS:
            raise ModelError(
                f"{self._path} is GGUF version {version}, supported are 2 and 3 (little-endian); "
                "convert it again with a current llama.cpp"
            )
        tensor_count, pair_count = self._take("QQ")
        if tensor_count > _MAX_TENSORS or pair_count > _MAX_PAIRS:
            raise self._broken(f"claims {tensor_count} tensors and {pair_count} metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self._string()
            (kind,) = self._take("I")
            metadata[key] = self._value(kind)
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise self._broken("names no architecture")
        names, ends = [], []
        parameters = 0
        for _ in range(tensor_count):
            names.append(self._string())
            (dims,) = self._take("I")
            if dims > _MAX_DIMS:
                raise self._broken(f"has a tensor of {dims} dimensions")
            count = 1
            for extent in self._take("Q" * dims):
                count *= extent
            parameters += count
            kind, offset = self._take("IQ")
            per_block, block_bytes = _BLOCKS.get(kind, (1, 0))
            ends.append(offset + -(-count // per_block) * block_bytes)
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise self._broken("has an odd alignment")
        data_start = -(-self._at // alignment) * alignment
        if names and data_start + max(ends) > self._size:
            raise self._truncated()
        return GgufHeader(version, architecture, tuple(names), parameters, data_start, metadata)

    def _take(self, format_: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + format_, self._data, self._at)
        self._at += struct.calcsize("<" + format_)
        return values

    def _string(self) -> str:
        (length,) = struct.unpack_from("<Q", self._data, self._at)
        start = self._at + 8
        if length > self._size - start:
            raise self._truncated()
        self._at = start + length
        return self._data[start : self._at].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._take(_SCALARS[kind])[0]
        if kind != _ARRAY:
            raise self._broken(f"has a metadata value of unknown type {kind}")
        kind, count = self._take("IQ")
        if count > _MAX_ARRAY:
            raise self._broken(f"has an array of {count} entries")
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind not in _SCALARS:
            raise self._broken(f"has an array of type {kind}")
        return self._take(f"{count}{_SCALARS[kind]}")

    def _truncated(self) -> ModelError:
        return ModelError(
            f"{self._path} is truncated ({self._size} bytes are too few for its contents); "
            "download it again"
        )

    def _broken(self, what: str) -> ModelError:
        return ModelError(f"{self._path} {what}: not a usable GGUF file; get it again")
