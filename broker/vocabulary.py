"""One hash for one tokenizer, whichever library spelled its tokens.

Edge and cloud exchange token ids, so an id must mean the same on both sides. At the handshake they
compare this hash. The edge reads the vocabulary from a GGUF file through llama.cpp, the cloud from
a tokenizer of transformers, and the two spell the same token differently:

==================  =======================  =======================
token               GGUF                     transformers
==================  =======================  =======================
byte-level BPE      ``Ġthe``                 ``Ġthe``
SentencePiece       ``▁the``                 ``▁the``
run of spaces       ``"  "`` or ``▁▁``       ``▁▁``
added token         as written, ``"\\n\\n"``   as written or ``ĊĊ``
no such id          ``[PAD151700]`` or ``""``  none
==================  =======================  =======================

So each spelling is taken back to the bytes that it stands for before it is hashed. Ids without a
token are left out, wherever they are: the same tokenizer with an embedding padded to 151936 or
152064 rows has one hash.

The hash covers ids and texts, not merges, scores or pre-tokenizer: those decide how the edge cuts a
prompt, which is the edge's business alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from broker.errors import ModelError

HASH_DIGITS = 16
_SPACE_MARK = "\u2581"


def _byte_spelling() -> dict[int, str]:
    """Translation from GPT-2's byte alphabet to Latin-1, whose code points are the bytes.

    The alphabet writes each printable byte as itself and the 68 others as U+0100 onwards, in order.
    Characters below U+0100 that are not in the alphabet go to U+FFFF, which Latin-1 refuses.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table: dict[int, str] = {}
    spare = 0x100
    for byte in range(0x100):
        if byte not in printable:
            table[byte] = "\uffff"
            table[spare] = chr(byte)
            spare += 1
    return table


_BYTE_SPELLING = _byte_spelling()


def token_bytes(text: str) -> bytes:
    """The bytes that a token's spelling stands for.

    A text written wholly in the byte alphabet stands for those bytes, any other for its UTF-8 with
    ``▁`` as a space. Distinct tokens of one vocabulary may in principle coincide (a SentencePiece
    ``é`` reads as the byte E9), which only matters in that both sides do the same.
    """
    if _SPACE_MARK not in text:
        try:
            return text.translate(_BYTE_SPELLING).encode("latin-1")
        except UnicodeEncodeError:
            pass
    return text.replace(_SPACE_MARK, " ").encode("utf-8", "surrogatepass")


def vocab_hash(tokens: Sequence[str]) -> str:
    """16 hex digits for a vocabulary; ``tokens[id]`` is the text of ``id``, "" where there is none.

    Equal for the same tokenizer read from GGUF and through transformers, with or without padding.
    Raises ModelError for a vocabulary without tokens, which would match any other such.
    """
    digest = hashlib.sha256()
    found = False
    for token, text in enumerate(tokens):
        if not text or text == f"[PAD{token}]":
            continue
        spelled = token_bytes(text)
        digest.update(b"%d %d " % (token, len(spelled)))
        digest.update(spelled)
        found = True
    if not found:
        raise ModelError("the model has no vocabulary; use a GGUF or directory with its tokenizer")
    return digest.hexdigest()[:HASH_DIGITS]
