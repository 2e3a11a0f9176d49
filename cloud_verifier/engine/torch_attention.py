"""Attention of a packed ragged batch: one row of tokens from many sessions, each over its own K/V.

transformers hands every layer's queries, keys and values to a function registered with its
``AttentionInterface``. Ours writes keys and values into blocks of the session they belong to and
attends there: to the memory as it lies where a session's blocks follow each other, else to a copy
made for this layer. Which token belongs to whom is in a ``Step``, which travels through the model
as a keyword argument.

Queries are taken in blocks that are aligned to absolute positions, and a block always sees the same
span of keys. A token's result therefore does not hang on how many tokens its session, or anybody,
has in this forward: kernels sum in an order that depends on the shapes they are given, and these
now depend on the position alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import AttentionInterface

from cloud_verifier.engine.slots import BLOCK
from cloud_verifier.engine.trees import depths

NAME = "pipesd_packed"

# PyTorch's flash kernel for CPUs takes queries 32 rows at a time (from 192 on a multiple of that),
# and products of fewer than 4 rows are summed in another order than larger ones.
_KERNEL_ROWS = 32
_LEAST_ROWS = 4
_FILLER = 3  # rows that a tile may need to avoid those


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's attention. ``window``: tokens seen, itself included; None: all before it."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None

    @property
    def groups(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @property
    def width(self) -> int:
        """Numbers kept for one token."""
        return self.kv_heads * (self.key_dim + self.value_dim)


class KeyValues:
    """K/V of ``tokens`` tokens: per layer keys [1, kv_heads, tokens, key_dim] and values alike.

    Zeroed at first: what lies behind the valid tokens is read, with weight 0, and 0 times whatever
    was in memory might be NaN. On a CPU pages that no session has used yet take no memory.
    """

    def __init__(
        self, layers: Sequence[Layer], tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        numbers = tokens * sum(layer.width for layer in layers)
        if device.type == "cpu":
            # torch.zeros would write to all of it.
            raw = np.zeros(numbers * dtype.itemsize, dtype=np.uint8)
            memory = torch.from_numpy(raw).view(dtype)
        else:
            memory = torch.zeros(numbers, dtype=dtype, device=device)
        self.layers: list[tuple[Tensor, Tensor]] = []
        start = 0
        for layer in layers:
            views = []
            for dim in (layer.key_dim, layer.value_dim):
                size = layer.kv_heads * tokens * dim
                views.append(memory[start : start + size].view(1, layer.kv_heads, tokens, dim))
                start += size
            self.layers.append((views[0], views[1]))

    def move(self, sources: Sequence[int], goals: Sequence[int]) -> None:
        """Copy the tokens that lie at ``sources`` to ``goals``; they may overlap."""
        for layer in self.layers:
            for stored in layer:
                index = torch.tensor([sources, goals], device=stored.device)
                stored[:, :, index[1]] = stored.index_select(2, index[0])


class Masks:
    """Additive masks (0 or -inf), cut as views from one table for each (groups, window).

    A block's mask depends on where it lies only by how many keys stand before it, so one table
    serves all positions: 67 * groups rows, and columns for the longest session seen so far.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._tables: dict[tuple[int, int | None], tuple[Tensor, int]] = {}

    def cut(self, layer: Layer, place: int, rows: int, before: int) -> Tensor:
        """For ``rows`` queries from ``place`` in a block, over ``before`` keys and the block's own.

        float[rows * groups, before + BLOCK]; query heads of a group stand beside each other.
        """
        groups, shape = layer.groups, (layer.groups, layer.window)
        table, most = self._tables.get(shape, (None, 0))
        if table is None or most < before:
            most = max(BLOCK, 2 * most, before)
            table = self._build(*shape, most)
            self._tables[shape] = table, most
        return table[place * groups : (place + rows) * groups, most - before :]

    def additive(self, hidden: Tensor, groups: int) -> Tensor:
        """The mask of ``hidden``: bool[rows, keys] on the CPU."""
        table = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -torch.inf)
        return table.repeat_interleave(groups, 0).to(self._device)

    def _build(self, groups: int, window: int | None, before: int) -> Tensor:
        # Filler rows see what the block's last row sees: a row that sees nothing would be NaN.
        query = torch.arange(BLOCK + _FILLER).clamp_(max=BLOCK - 1)[:, None]
        key = torch.arange(-before, BLOCK)[None]
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        return self.additive(hidden, groups)


@dataclass(frozen=True, slots=True)
class Segment:
    """One session's rows of the packed batch: ``rows`` from ``start``, stored from ``first`` on.

    ``table``: the blocks in which its text lies. ``parents``: of a tree in the last rows, see
    ``Work.parents``. Its tokens are stored one behind the other, while their positions follow from
    their depths.
    """

    table: tuple[int, ...]
    start: int
    rows: int
    first: int
    parents: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.first + self.rows

    def place(self, token: int) -> int:
        """Where a token lies in memory."""
        return self.table[token // BLOCK] * BLOCK + token % BLOCK

    def runs(self, first: int, end: int) -> list[tuple[int, int]]:
        """Where tokens ``first`` to ``end`` lie in memory: starts and lengths, as few as may be."""
        found: list[tuple[int, int]] = []
        while first < end:
            place, offset = divmod(first, BLOCK)
            count = min(BLOCK - offset, end - first)
            start = self.table[place] * BLOCK + offset
            if found and sum(found[-1]) == start:
                found[-1] = found[-1][0], found[-1][1] + count
            else:
                found.append((start, count))
            first += count
        return found


class _Piece(NamedTuple):
    """Rows of one session in one block. ``padded``: ``rows`` with filler; ``position``: first's."""

    start: int
    rows: int
    padded: int
    position: int


class _Tile(NamedTuple):
    """A piece with what it attends to: ``keys`` keys of its session from ``key_start`` on."""

    start: int
    rows: int
    padded: int
    key_start: int
    keys: int
    mask: Tensor


class _Course(NamedTuple):
    """A session's pieces, and where the keys of all of them lie: ``runs`` of memory.

    The pieces' ``key_start`` counts from the first of those keys; without runs the keys follow each
    other, and it is a place in memory.
    """

    runs: list[tuple[int, int]]
    tiles: list[_Tile]

    def read(self, stored: Tensor) -> Tensor:
        """Memory itself, or a copy of the keys (or values) that are needed in their order."""
        if not self.runs:
            return stored
        return torch.cat([stored.narrow(2, start, count) for start, count in self.runs], dim=2)


@dataclass(slots=True)
class Step:
    """What attention has to know of one packed forward."""

    segments: Sequence[Segment]
    memory: KeyValues
    masks: Masks
    layers: Sequence[Layer]
    # Where rows go: place in memory, row, how many.
    writes: list[tuple[int, int, int]] = field(init=False)
    _courses: dict[tuple[int, int | None], list[_Course]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.writes = []
        for segment in self.segments:
            row = segment.start
            for place, count in segment.runs(segment.first, segment.end):
                self.writes.append((place, row, count))
                row += count

    def rows_needed(self) -> int:
        """Rows the packed batch must have, filler behind the last session's included."""
        return max(
            piece.start + piece.padded
            for groups in {layer.groups for layer in self.layers}
            for segment in self.segments
            for piece in _cut_segment(segment, groups)
        )

    def courses(self, layer: Layer) -> list[_Course]:
        """What ``layer`` attends to, session by session, in the order of their rows."""
        shape = (layer.groups, layer.window)
        if shape not in self._courses:
            self._courses[shape] = [self._course(segment, layer) for segment in self.segments]
        return self._courses[shape]

    def _course(self, segment: Segment, layer: Layer) -> _Course:
        tiles = [self._tile(segment, piece, layer) for piece in _cut_segment(segment, layer.groups)]
        first = min(tile.key_start for tile in tiles)
        end = max(tile.key_start + tile.keys for tile in tiles)
        runs = segment.runs(first, end)
        if len(runs) == 1:
            first -= runs[0][0]
            runs = []
        return _Course(runs, [tile._replace(key_start=tile.key_start - first) for tile in tiles])

    def _tile(self, segment: Segment, piece: _Piece, layer: Layer) -> _Tile:
        if segment.parents:
            return _tree_tile(segment, piece, layer, self.masks)
        block, place = divmod(piece.position, BLOCK)
        before = block * BLOCK
        if layer.window is not None:
            before = min(before, -(-(layer.window - 1) // BLOCK) * BLOCK)
        start = block * BLOCK - before
        mask = self.masks.cut(layer, place, piece.padded, before)
        return _Tile(piece.start, piece.rows, piece.padded, start, before + BLOCK, mask)


def _cut_segment(segment: Segment, groups: int) -> list[_Piece]:
    """The pieces of a session's rows, cut where blocks end.

    Filler rows are whatever follows in the packed batch; their results are dropped. They keep each
    product at four rows or more.
    """
    pieces = []
    position, end = segment.first, segment.first + segment.rows
    while position < end:
        stop = min(end, (position // BLOCK + 1) * BLOCK)
        start = segment.start + position - segment.first
        rows = stop - position
        pieces.append(_Piece(start, rows, _with_filler(rows, groups), position))
        position = stop
    return pieces


def _tree_tile(segment: Segment, piece: _Piece, layer: Layer, masks: Masks) -> _Tile:
    """As ``Step._tile`` where a token sees the trunk and, of the tree, its own ancestors."""
    nodes = len(segment.parents)
    trunk = segment.end - nodes  # where the tree is stored
    places = torch.arange(segment.end)
    places[trunk:] = trunk + torch.tensor(depths(segment.parents))
    ancestors = torch.eye(nodes, dtype=torch.bool)
    for node, parent in enumerate(segment.parents):
        if parent >= 0:
            ancestors[node] |= ancestors[parent]

    # Filler rows see what the piece's last row sees: a row that sees nothing would be NaN.
    query = torch.arange(piece.position, piece.position + piece.padded)
    query.clamp_(max=piece.position + piece.rows - 1)
    key_end = (piece.position // BLOCK + 1) * BLOCK
    key_start = 0
    if layer.window is not None:
        first_seen = int(places[query].min()) - layer.window + 1
        key_start = max(0, first_seen // BLOCK * BLOCK)
    key = torch.arange(key_start, key_end)
    hidden = key[None] > query[:, None]
    valid = key < segment.end
    in_tree = valid & (key >= trunk)
    for row, stored in enumerate(query.tolist()):
        if stored >= trunk:
            hidden[row, in_tree] |= ~ancestors[stored - trunk, key[in_tree] - trunk]
        if layer.window is not None:
            hidden[row, valid] |= places[key[valid]] <= places[stored] - layer.window
    mask = masks.additive(hidden, layer.groups)
    keys = key_end - key_start
    return _Tile(piece.start, piece.rows, piece.padded, key_start, keys, mask)


def _with_filler(rows: int, groups: int) -> int:
    while 0 < rows * groups % _KERNEL_ROWS < _LEAST_ROWS:
        rows += 1
    return rows


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,  # noqa: ARG001 - the interface's; never built for this function
    *,
    pipesd_step: Step,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Write ``key`` and ``value`` into the slots and attend there; transformers' interface.

    ``query``: [1, heads, rows, key_dim]; ``key``, ``value``: [1, kv_heads, rows, dim].
    Returns [1, rows, heads, value_dim].
    """
    index: int = module.layer_idx  # type: ignore[assignment]
    layer = pipesd_step.layers[index]
    stored_keys, stored_values = pipesd_step.memory.layers[index]
    for place, row, count in pipesd_step.writes:
        # narrow() costs half of what the same slice does, and there are many.
        stored_keys.narrow(2, place, count).copy_(key.narrow(2, row, count))
        stored_values.narrow(2, place, count).copy_(value.narrow(2, row, count))

    total, kv_heads, groups = query.shape[2], layer.kv_heads, layer.groups
    # [1, kv_heads, rows * groups, dim]: the heads that share keys become rows of one product.
    queries = query.view(1, kv_heads, groups, total, -1).transpose(2, 3).flatten(2, 3)
    parts = []
    for course in pipesd_step.courses(layer):
        keys, values = course.read(stored_keys), course.read(stored_values)
        for tile in course.tiles:
            attended = _attend(
                queries.narrow(2, tile.start * groups, tile.padded * groups),
                keys.narrow(2, tile.key_start, tile.keys),
                values.narrow(2, tile.key_start, tile.keys),
                tile.mask,
                scaling=scaling,
                softcap=softcap,
            )
            if tile.padded != tile.rows:
                attended = attended.narrow(2, 0, tile.rows * groups)
            parts.append(attended)
    segment = pipesd_step.segments[-1]
    filler = total - segment.start - segment.rows
    if filler:
        # Numbers, whatever they are: memory as it was found might be NaN, which is slow.
        parts.append(queries.new_zeros(1, kv_heads, filler * groups, layer.value_dim))
    result = torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
    merged = result.view(kv_heads, total, groups, -1).transpose(0, 1)
    return merged.reshape(1, total, layer.heads, layer.value_dim), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    # [1, kv_heads, rows, dim] each; mask: [rows, keys]
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    scores = torch.tanh(scores / softcap) * softcap + mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value)


def register() -> None:
    """Make ``NAME`` known to transformers. No mask function goes with it: none is built then."""
    AttentionInterface.register(NAME, packed_attention)
