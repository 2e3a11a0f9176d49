"""The target port: the big model that decides, many sequences in one forward.

Held by ``tests/contract/test_target.py`` for every implementation. The engine has no policy: which
slot belongs to whom, what is evicted and what runs next is decided in ``cloud_verifier.core``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from broker.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Work:
    """What one session puts into a forward.

    ``slot``: index of its place in the K/V store. ``keep``: tokens of that slot that stay valid;
    what lies behind is forgotten first (rejected drafts, an evicted session's rest). ``tokens``
    are appended at sequence positions ``keep``, ``keep+1``, ...; at least one. The target's choice
    is asked after each of the last ``choices`` tokens (0: prefill only), the first of them being
    the choice for generated position ``position``, with ``sampling`` and its noise.

    ``parents`` makes a tree of the last ``len(parents)`` tokens, the drafted ones: for each of them
    the index, among the drafted, of the token before it; -1: the last token before the drafted,
    which must be there. Each token sees its ancestors and no other branch. A tree is asked after
    each drafted token and the one before them at least; a choice is for the generated position that
    follows from the depth of its token.

    ``path`` tells what became of the tree in the slot's last work: the indices, from the first
    drafted token down, of those that were accepted. They are valid tokens then, behind those
    before the tree, and the rest of the tree is forgotten; without a path all of it is.

    ``blocks``: the blocks of K/V memory in which the session's text lies, in its order, with room
    for ``keep`` and ``tokens``. Works may name the same blocks for what stands before ``keep``,
    never for what they write. Blocks are handed out and shared in
    ``cloud_verifier.core.block_table``, the engine keeps no tables of its own; those of a tree stay
    where they are until its path was told. Without any the work has those of the slot itself,
    until blocks were named for some work: from then on a slot has none of its own. An engine for
    which a slot is one block (see ``Target``) need not look at them.
    """

    slot: int
    keep: int
    tokens: tuple[int, ...]
    choices: int
    position: int
    sampling: Sampling
    parents: tuple[int, ...] | None = None
    path: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()


class Target(Protocol):
    """A loaded target model. ``forward`` is called from one thread, never two at a time.

    Its K/V memory is ``total_blocks`` blocks of ``block_tokens`` tokens, enough for one context at
    least. With blocks of a whole context there are as many as slots, and nothing is shared.
    """

    name: str
    vocab_size: int
    context: int
    vocab_hash: str
    eos_ids: frozenset[int]
    max_slots: int
    block_tokens: int
    total_blocks: int

    def forward(self, batch: Sequence[Work]) -> list[list[int]]:
        """One packed forward over all of ``batch`` (distinct slots).

        Returns per work a list of ``work.choices`` token ids. The result of one work does not
        depend on its company. Raises ModelError when the model fails: the slots of the batch then
        hold ``keep`` valid tokens at most and the caller must start them again from 0.
        """
        ...

    def close(self) -> None: ...
