"""What a session's drafts hold beside the chain of first children: the other branches of trees.

The chain itself (``DraftBatch.trunk``) is kept apart, since later batches go on from its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from broker.messages import DraftBatch


class Branch(NamedTuple):
    """Drafted tokens beside the chain. ``fork``: the absolute position of those without a parent.

    ``parents``: per token the index in this branch of the token before it; -1: the chain's token
    before ``fork``.
    """

    fork: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]


class Nodes(NamedTuple):
    """The part of a tree that lies beside its chain, as ``Work.parents`` wants it."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]


def branches_of(batch: DraftBatch) -> list[Branch]:
    """The branches of a batch beside its chain; none for a chain."""
    if batch.parents is None:
        return []
    chain = -1  # the node of the chain that was found last
    depth: list[int] = []
    on_chain: list[bool] = []
    home: dict[int, int] = {}  # node -> which branch
    place: dict[int, int] = {}  # node -> index in its branch
    found: list[tuple[int, list[int], list[int]]] = []
    for node, (token, parent) in enumerate(zip(batch.tokens, batch.parents, strict=True)):
        depth.append(0 if parent < 0 else depth[parent] + 1)
        on_chain.append(parent == chain)
        if parent == chain:
            chain = node
            continue
        if parent < 0 or on_chain[parent]:
            home[node] = len(found)
            found.append((batch.base + depth[node], [], []))
        else:
            home[node] = home[parent]
        _, tokens, parents = found[home[node]]
        place[node] = len(tokens)
        tokens.append(token)
        parents.append(place.get(parent, -1))
    return [Branch(fork, tuple(tokens), tuple(parents)) for fork, tokens, parents in found]


class Branches:
    """The branches of one epoch, at most ``limit`` tokens in all."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._branches: dict[Branch, None] = {}  # in their order; one of many is found at once
        self._tokens = 0

    def __len__(self) -> int:
        """Tokens in all branches."""
        return self._tokens

    def clear(self) -> None:
        self._branches.clear()
        self._tokens = 0

    def add(self, branch: Branch) -> bool:
        """Take ``branch`` in; False when it is here already or there is no room for it."""
        if branch in self._branches or self._tokens + len(branch.tokens) > self._limit:
            return False
        self._branches[branch] = None
        self._tokens += len(branch.tokens)
        return True

    def pass_by(self, committed: int) -> None:
        """``committed`` tokens are final, and they went along the chain."""
        self._branches = {each: None for each in self._branches if each.fork >= committed}
        self._tokens = sum(len(branch.tokens) for branch in self._branches)

    def beside(self, judged: int, committed: int, depth: int, room: int) -> Nodes:
        """What to judge beside the first ``judged`` tokens of the chain that follows ``committed``.

        Parents count the chain's tokens first. At most ``room`` tokens, none deeper than ``depth``
        tokens behind what is committed.
        """
        tokens: list[int] = []
        parents: list[int] = []
        for branch in self._branches:
            offset = branch.fork - committed
            if not 0 <= offset <= judged:
                continue
            depths: list[int] = []
            index: dict[int, int] = {-1: offset - 1}
            for node, parent in enumerate(branch.parents):
                depths.append(offset if parent < 0 else depths[parent] + 1)
                if parent in index and depths[node] < depth and len(tokens) < room:
                    index[node] = judged + len(tokens)
                    tokens.append(branch.tokens[node])
                    parents.append(index[parent])
        return Nodes(tuple(tokens), tuple(parents))


def accepted_path(
    drafts: tuple[int, ...], parents: tuple[int, ...] | None, choices: Sequence[int]
) -> list[int]:
    """The drafted tokens, by index, that the target's ``choices`` go along.

    ``choices[0]`` follows what is committed, ``choices[i + 1]`` follows ``drafts[i]``. Without
    ``parents`` the drafts are a chain.
    """
    path: list[int] = []
    last = -1
    while True:
        wanted = choices[last + 1]
        if parents is None:
            found = last + 1 if last + 1 < len(drafts) and drafts[last + 1] == wanted else None
        else:
            found = next(
                (
                    node
                    for node in range(last + 1, len(drafts))
                    if parents[node] == last and drafts[node] == wanted
                ),
                None,
            )
        if found is None:
            return path
        path.append(found)
        last = found
