"""One tokenizer, one hash, however it is spelled and padded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import ModelError
from broker.vocabulary import HASH_DIGITS, token_bytes, vocab_hash


def byte_level(text: str) -> str:
    """``text`` in GPT-2's byte alphabet, written down independently of the module's table."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in alphabet]
    alphabet.update({byte: chr(0x100 + n) for n, byte in enumerate(others)})
    return "".join(alphabet[byte] for byte in text.encode())


def test_a_hash_is_sixteen_hex_digits_and_stays_what_it_was() -> None:
    # Replicas of different versions compare these at the handshake: the value is part of the
    # protocol.
    assert vocab_hash(["<s>", "▁the", "Ġcat", "\n"]) == "de6055febdf3b948"
    assert len(vocab_hash(["a"])) == HASH_DIGITS
    assert set(vocab_hash(["a"])) <= set("0123456789abcdef")


@given(st.text(min_size=1))
def test_byte_level_spelling_reads_as_the_bytes_of_the_text(text: str) -> None:
    assert token_bytes(byte_level(text)) == text.encode()


# U+0143 is the byte alphabet's last character; past it nothing is byte-level any more.
@given(st.text(alphabet=st.characters(min_codepoint=0x144, exclude_categories=("Cs",)), min_size=1))
def test_other_spellings_read_as_utf8_with_marks_as_spaces(text: str) -> None:
    assert token_bytes("▁" + text) == b" " + text.replace("▁", " ").encode()
    assert token_bytes("é" + text) == ("é" + text.replace("▁", " ")).encode()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("  ", "▁▁"),
        ("  ", "ĠĠ"),
        ("\n\n", "ĊĊ"),
        ("\t", "ĉ"),
        (" é", "▁é"),
        ("<|im_end|>", "<|im_end|>"),
        ("<0x0A>", "<0x0A>"),
        (" the", "▁the"),
        (" the", "Ġthe"),
    ],
)
def test_spellings_of_one_token_agree(one: str, other: str) -> None:
    assert token_bytes(one) == token_bytes(other)
    assert vocab_hash(["x", one]) == vocab_hash(["x", other])


@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=20), st.integers(0, 300))
def test_padding_does_not_change_the_hash(tokens: list[str], rows: int) -> None:
    # 152064 rows on one side, 151936 on the other, 151665 tokens in truth.
    padded = [*tokens, *(f"[PAD{len(tokens) + n}]" for n in range(rows))]
    assert vocab_hash(padded) == vocab_hash(tokens)
    assert vocab_hash([*tokens, *[""] * rows]) == vocab_hash(tokens)


def test_a_gap_in_the_middle_is_the_same_empty_or_padded() -> None:
    assert vocab_hash(["a", "", "b"]) == vocab_hash(["a", "[PAD1]", "b"])
    assert vocab_hash(["a", "", "b"]) != vocab_hash(["a", "b"])


def test_a_token_that_only_looks_like_padding_counts() -> None:
    assert vocab_hash(["a", "[PAD7]"]) != vocab_hash(["a"])
    assert vocab_hash(["a", "[PAD]"]) != vocab_hash(["a"])


@given(st.lists(st.text(min_size=1, max_size=4), min_size=2, max_size=12, unique=True))
def test_order_and_content_matter(tokens: list[str]) -> None:
    spelled = [token_bytes(token) for token in tokens]
    swapped = [tokens[1], tokens[0], *tokens[2:]]
    if spelled[0] != spelled[1] and not any(token.startswith("[PAD") for token in tokens):
        assert vocab_hash(swapped) != vocab_hash(tokens)
        assert vocab_hash(tokens[:-1]) != vocab_hash(tokens)


def test_neighbouring_tokens_cannot_run_together() -> None:
    assert vocab_hash(["ab", "c"]) != vocab_hash(["a", "bc"])
    assert vocab_hash(["a1 1 b"]) != vocab_hash(["a", "b"])


def test_undecodable_text_is_hashed_not_fatal() -> None:
    assert vocab_hash(["\udcff"]) != vocab_hash(["\udcfe"])


@pytest.mark.parametrize("tokens", [[], [""], ["[PAD0]", "[PAD1]"]])
def test_a_vocabulary_without_tokens_is_an_error(tokens: list[str]) -> None:
    with pytest.raises(ModelError, match="no vocabulary"):
        vocab_hash(tokens)
