"""The shape of drafted trees: paths, runs and positions."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from broker.sampling import Sampling
from cloud_verifier.engine.target import Work
from cloud_verifier.engine.trees import (
    branches,
    choice_positions,
    depths,
    is_path,
    is_tree,
    lineage,
    offsets,
    trunk,
)


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, 30))))


def work(parents: tuple[int, ...] | None, tokens: int, choices: int) -> Work:
    return Work(0, 10, tuple(range(tokens)), choices, 50, Sampling(), parents)


def test_a_cycle_or_a_parent_ahead_is_no_tree() -> None:
    assert is_tree(())
    assert is_tree((-1, 0, 0, -1, 3))
    assert not is_tree((0,))
    assert not is_tree((-1, 2, 1))
    assert not is_tree((-2,))


def test_the_first_child_s_branch_runs_last() -> None:
    #  0 - 1 - 2    and 0 - 3, and 4 - 5 from the trunk
    parents = (-1, 0, 1, 0, -1, 4)
    assert branches(parents) == [[4, 5], [0, 3], [1, 2]]
    assert depths(parents) == [0, 1, 2, 1, 0, 1]
    assert lineage(parents, 2) == [0, 1, 2]
    assert lineage(parents, -1) == []
    assert branches(()) == []


@given(parents=trees(), seed=st.integers(0, 1000))
def test_runs_hold_each_node_once_behind_its_parent(parents: tuple[int, ...], seed: int) -> None:
    runs = branches(parents)
    order = [node for run in runs for node in run]
    assert sorted(order) == list(range(len(parents)))
    cached: list[int] = []  # what a cache of one branch holds
    for run in runs:
        del cached[depths(parents)[run[0]] :]
        for node in run:
            assert cached == lineage(parents, node)[:-1]
            cached.append(node)
    path = lineage(parents, random.Random(seed).randrange(-1, len(parents)))
    assert is_path(parents, path)
    assert not is_path(parents, [*path, len(parents)])
    if len(path) > 1:
        assert not is_path(parents, path[1:])


def test_positions_follow_from_depth() -> None:
    tree = work((-1, 0, 0, -1), 6, 5)
    assert trunk(tree) == 2
    assert offsets(tree) == [0, 1, 2, 3, 3, 2]
    assert choice_positions(tree) == [50, 51, 52, 52, 51]
    chain = work(None, 4, 2)
    assert trunk(chain) == 4
    assert choice_positions(chain) == [50, 51]
    assert choice_positions(work(None, 4, 0)) == []
