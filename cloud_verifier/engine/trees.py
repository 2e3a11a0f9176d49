"""The shape of what a work feeds: a chain, or a trunk with a tree of drafted tokens behind it.

``Work.parents`` names for each drafted token the drafted token before it, -1 for the last token of
the trunk. Parents stand before their children, so any prefix of a tree is a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloud_verifier.engine.target import Work


def is_tree(parents: Sequence[int]) -> bool:
    """Whether each parent is -1 or a token before its child: no cycle, no parent ahead."""
    return all(-1 <= parent < node for node, parent in enumerate(parents))


def is_path(parents: Sequence[int], path: Sequence[int]) -> bool:
    """Whether ``path`` leads from the trunk from parent to child; the empty path does."""
    before = -1
    for node in path:
        if not 0 <= node < len(parents) or parents[node] != before:
            return False
        before = node
    return True


def depths(parents: Sequence[int]) -> list[int]:
    """How many drafted tokens stand before each node: 0 right behind the trunk."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def lineage(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the trunk down to ``node``, which is the last; none for -1."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def branches(parents: Sequence[int]) -> list[list[int]]:
    """The tree cut into runs from parent to child, each node in one; the first child's run is last.

    In this order a cache that holds one branch only is cut back to where each run begins, and ends
    with the branch that the drafter named first at every fork.
    """
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents):
        children[parent].append(node)  # -1, the trunk, is the last list
    runs: list[list[int]] = []
    before = -1
    stack = list(children[-1])
    while stack:
        node = stack.pop()
        if runs and parents[node] == before:
            runs[-1].append(node)
        else:
            runs.append([node])
        before = node
        stack += children[node]
    return runs


def trunk(work: Work) -> int:
    """How many of ``work.tokens`` are a chain; all of them without ``parents``."""
    return len(work.tokens) - len(work.parents or ())


def offsets(work: Work) -> list[int]:
    """Where each of ``work.tokens`` stands in its sequence, counted from ``work.keep``."""
    chain = trunk(work)
    return [*range(chain), *(chain + depth for depth in depths(work.parents or ()))]


def choice_positions(work: Work) -> list[int]:
    """The generated position that each of the work's choices is for."""
    asked = offsets(work)[len(work.tokens) - work.choices :]
    return [work.position + offset - asked[0] for offset in asked]
