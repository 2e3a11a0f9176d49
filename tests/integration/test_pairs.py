"""The demo pairs as pairs: one vocabulary, one way to cut text, drafts that mostly agree."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from broker.llama_library import llama_library
from broker.pairs import PAIRS
from broker.vocabulary import vocab_hash
from cloud_verifier.engine.prepare import prepare_target, tokenizer_tokens
from edge_agent.prepare import prepare_draft

pytestmark = pytest.mark.models

GREEDY_TOKENS = 64
PROMPTS = {
    "smollm2": ["Explain how a bicycle stays upright.", "Write a short poem about the sea."],
    "gemma3": ["Photosynthesis is the process by which", "The three laws of motion are"],
}
TEXTS = [
    "",
    "Hello world",
    " leading",
    "Hello\nworld\n\n\n",
    "a 1234 b12c3.14, 1 000 and  12 34",
    "def f(x):\n\treturn x**2  # ok\r\n",
    "a" + " " * 40 + "deep" + " " * 32 + "deeper",
    "ďábelské 🦙 čau 日本語テキスト e\u0301 \u00a0 ½ ² ٣٤",
    "don't we'll I'M",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<start_of_turn> <eos> <b>bold</b> </s> [multimodal]",
]


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    llama_library()  # with its log callback, which outlives this module as llama.cpp demands
    # One thread: two would wait for each other at every layer where the cores are shared.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=sorted(PAIRS))
def pair(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(pair: str) -> Any:
    return AutoTokenizer.from_pretrained(prepare_target(pair))


@pytest.fixture(scope="module")
def vocabulary(pair: str) -> Iterator[Any]:
    """The draft's vocabulary in llama.cpp."""
    parameters = llama_cpp.llama_model_default_params()
    parameters.vocab_only = True
    path = str(prepare_draft(pair)).encode()
    model = llama_cpp.llama_model_load_from_file(path, parameters)
    assert model is not None
    yield llama_cpp.llama_model_get_vocab(model)
    llama_cpp.llama_model_free(model)


def llama_ids(vocabulary: Any, text: str) -> list[int]:
    raw = text.encode()
    ids = (llama_cpp.llama_token * (len(raw) + 8))()
    count = llama_cpp.llama_tokenize(vocabulary, raw, len(raw), ids, len(ids), True, True)
    assert count >= 0
    return list(ids[:count])


def test_both_sides_have_one_vocabulary(tokenizer: Any, vocabulary: Any) -> None:
    edge = [
        llama_cpp.llama_vocab_get_text(vocabulary, token).decode("utf-8", "surrogateescape")
        for token in range(llama_cpp.llama_vocab_n_tokens(vocabulary))
    ]
    cloud = tokenizer_tokens(tokenizer)
    assert len(edge) == len(cloud)
    assert vocab_hash(edge) == vocab_hash(cloud)


def test_the_pairs_have_different_vocabularies() -> None:
    hashes = {
        vocab_hash(tokenizer_tokens(AutoTokenizer.from_pretrained(prepare_target(name))))
        for name in PAIRS
    }
    assert len(hashes) == len(PAIRS)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_both_sides_cut_text_alike(text: str, tokenizer: Any, vocabulary: Any) -> None:
    assert tokenizer(text)["input_ids"] == llama_ids(vocabulary, text)


def test_both_sides_cut_source_code_alike(tokenizer: Any, vocabulary: Any) -> None:
    code = Path(__file__).read_text()
    for start in range(0, len(code) - 300, 150):
        text = code[start : start + 300]
        assert tokenizer(text)["input_ids"] == llama_ids(vocabulary, text)


@pytest.fixture(scope="module")
def greedy(pair: str, tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """Per prompt: its ids, and what the target in float32 goes on with."""
    model = AutoModelForCausalLM.from_pretrained(prepare_target(pair), dtype=torch.float32)
    results = []
    for prompt in PROMPTS[pair]:
        if tokenizer.chat_template:
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                return_dict=False,
            )
        else:
            ids = tokenizer(prompt)["input_ids"]
        assert ids.count(tokenizer.bos_token_id) == (3 if pair == "smollm2" else 1)
        with torch.inference_mode():
            whole = model.generate(
                torch.tensor([ids]), max_new_tokens=GREEDY_TOKENS, do_sample=False
            )
        results.append((ids, whole[0, len(ids) :].tolist()))
    return results


def test_the_target_makes_sense(
    pair: str, tokenizer: Any, greedy: list[tuple[list[int], list[int]]]
) -> None:
    expected = {"smollm2": ("bicycle", "sea"), "gemma3": ("light", "motion")}[pair]
    for word, (_, answer) in zip(expected, greedy, strict=True):
        assert len(answer) >= 16
        assert word in tokenizer.decode(answer, skip_special_tokens=True)


@pytest.mark.parametrize(("quant", "least"), [("source", 0.9), ("q3_k_m", 0.6), ("q2_k", 0.4)])
def test_the_draft_agrees_with_the_target(
    pair: str, quant: str, least: float, greedy: list[tuple[list[int], list[int]]]
) -> None:
    draft = llama_cpp.Llama(
        str(prepare_draft(pair, quant)),
        n_ctx=256,
        n_threads=1,
        n_threads_batch=1,
        logits_all=True,
        verbose=False,
    )
    agreed = total = 0
    for prompt, answer in greedy:
        draft.reset()
        draft.eval([*prompt, *answer])
        choices = np.asarray(draft.scores)[len(prompt) - 1 : len(prompt) + len(answer) - 1]
        agreed += int((choices.argmax(axis=1) == np.array(answer)).sum())
        total += len(answer)
    draft.close()
    assert agreed / total > least, f"{agreed} of {total} tokens agree"
