"""Token ids and pieces equal those of transformers, for both demo pairs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.chat import ChatTemplate, with_one_bos
from broker.errors import ConfigError, LocalProtocolError
from broker.llama_library import MAX_TEXT_BYTES
from cloud_verifier.engine.prepare import prepare_target
from edge_agent.llama_draft import LlamaDraftModel
from edge_agent.llama_text import LlamaText, _count_tokens
from edge_agent.text import Detokenizer
from tests.draft_models import draft_file, draft_model

pytestmark = pytest.mark.models

PAIRS = ["smollm2", "gemma3"]

TEXTS = [
    "",
    " ",
    "\n",
    "\n\n \n\t\n",
    "Hello world",
    " leading space",
    "  two leading",
    "trailing  ",
    "ďábelské 🦙",
    "日本語のテキスト、مرحبا, ½ ² ① ٣",
    "def f(x):\n    return x ** 2\n\n\tif True:\r\n  pass",
    "1234567890 3.14159 1e-9",
    "It's we'll they'RE don't",
    "a    b                                                  c",
    "zero\u200bwidth, nbsp\u00a0, e\u0301 and é, \ufeffbom, \x00 nul",
    "▁under a▁b",
    "🏳️‍🌈👩‍👩‍👧",
    "x" * 300,
    "a<|im_end|>b <|im_start|>user\nhi<end_of_turn>\n",
    "<0x0A> <unused0> </s> <td>",
]

GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<start_of_turn>"
    "{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

CHATS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": "  ďábelské 🦙\n\n\tdef f():\n        pass  "}],
    [
        {"role": "user", "content": "What is 2+2?"},
        {"role": "assistant", "content": "4."},
        {"role": "user", "content": "Sure? <|im_end|>"},
    ],
]


# Left out: code points that no Unicode version assigns, whose class the two libraries guess
# differently, and a written-out U+2581, which transformers cannot tell from a space.
ANY_TEXT = st.text(
    st.characters(exclude_characters="▁", exclude_categories=["Cs", "Cn", "Co"]), max_size=60
)


@lru_cache(maxsize=2)
def target_tokenizer(pair: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(prepare_target(pair))


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def text(pair: str) -> LlamaText:
    return draft_model(pair).text


@pytest.fixture(scope="module")
def tokenizer(pair: str) -> Any:
    return target_tokenizer(pair)


def decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize("sample", TEXTS)
def test_plain_text(text: LlamaText, tokenizer: Any, sample: str) -> None:
    ids = text.encode_prompt(sample)
    assert ids == tokenizer(sample)["input_ids"]
    joined = b"".join(map(text.piece, ids)).decode()
    assert joined == decode(tokenizer, ids)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(sample=ANY_TEXT)
def test_any_text(text: LlamaText, tokenizer: Any, sample: str) -> None:
    ids = text.encode_prompt(sample)
    assert ids == tokenizer(sample)["input_ids"]
    detokenizer = Detokenizer()
    shown = [detokenizer.feed(text.piece(token)) for token in ids]
    assert "".join(shown) == decode(tokenizer, ids)


def test_every_piece(text: LlamaText, tokenizer: Any, pair: str) -> None:
    step = 1 if pair == "smollm2" else 7
    for token in range(0, text.vocab_size, step):
        assert text.piece(token).decode("utf-8", "replace") == decode(tokenizer, [token]), token


def test_an_answer_is_shown_without_broken_characters(text: LlamaText, tokenizer: Any) -> None:
    sample = "ďábelské 🦙 と 👩‍👩‍👧"
    ids = text.encode_prompt(sample)
    detokenizer = Detokenizer()
    shown = [detokenizer.feed(text.piece(token)) for token in ids]
    assert "".join(shown) == sample
    assert "\ufffd" not in "".join(shown)
    assert len(ids) > len(sample.split())


@pytest.mark.parametrize("messages", CHATS)
def test_chat(messages: list[dict[str, str]]) -> None:
    model = draft_model("smollm2")
    tokenizer = target_tokenizer("smollm2")
    expected = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert model.text.has_chat_template
    assert model.text.encode_chat(messages) == list(expected)


@pytest.mark.parametrize("messages", CHATS)
def test_chat_with_a_template_that_writes_the_bos(messages: list[dict[str, str]]) -> None:
    """gemma's tokenizer adds a BOS and its template writes one: the prompt has one."""
    tokenizer = target_tokenizer("gemma3")
    expected = tokenizer.apply_chat_template(
        messages, chat_template=GEMMA_TEMPLATE, add_generation_prompt=True, return_dict=False
    )
    text = draft_model("gemma3").text
    template = ChatTemplate(GEMMA_TEMPLATE, {"bos_token": "<bos>", "eos_token": "<eos>"})
    ids = text.encode_prompt(template.render(messages))
    assert ids == list(expected)
    assert ids.count(2) == 1
    assert with_one_bos(ids, 2, True) == ids


def test_one_bos_where_the_vocabulary_asks_for_it() -> None:
    gemma, smollm = draft_model("gemma3").text, draft_model("smollm2").text
    assert gemma.encode_prompt("<bos>Hi") == gemma.encode_prompt("Hi")
    assert gemma.encode_prompt("Hi")[0] == 2
    assert gemma.encode_prompt("") == [2]
    assert smollm.encode_prompt("") == []


def test_no_template() -> None:
    text = draft_model("gemma3").text
    assert not text.has_chat_template
    with pytest.raises(ConfigError, match="--raw"):
        text.encode_chat(CHATS[0])


def test_control_tokens_have_no_text(text: LlamaText) -> None:
    for token in draft_model("smollm2").eos_ids if text.vocab_size == 49152 else (0, 1, 2, 106):
        assert text.piece(token) == b""


def test_answers_begin_without_a_space_of_the_tokenizer(text: LlamaText) -> None:
    """smollm2 is no SentencePiece vocabulary, and gemma3's file turns the space off."""
    assert not text.adds_space_prefix


def test_ids_outside_the_vocabulary(text: LlamaText) -> None:
    for token in (-1, text.rows, 2**31, 2**40):
        with pytest.raises(LocalProtocolError):
            text.piece(token)


def test_text_that_cannot_be_a_prompt() -> None:
    text = draft_model("smollm2").text
    with pytest.raises(ConfigError, match="Unicode"):
        text.encode_prompt("a\udcffb")
    with pytest.raises(ConfigError, match=str(MAX_TEXT_BYTES)):
        text.encode_prompt("a" * (MAX_TEXT_BYTES + 1))


def test_a_closed_model_has_no_text() -> None:
    model = LlamaDraftModel(draft_file("smollm2"), context=64, threads=1)
    text = model.text
    model.close()
    for call in (lambda: text.piece(5), lambda: text.encode_prompt("a")):
        with pytest.raises(LocalProtocolError):
            call()


@pytest.mark.parametrize(
    ("texts", "count"),
    [
        (["a", "b", "[PAD2]", "[PAD3]"], 2),
        (["a", "", "c", "", "[PAD4]"], 3),
        (["a", "[PAD7]"], 2),  # a token that only looks like padding
        (["a", "b"], 2),
        ([], 0),
    ],
)
def test_padding_is_no_part_of_the_vocabulary(texts: list[str], count: int) -> None:
    assert _count_tokens(texts) == count
