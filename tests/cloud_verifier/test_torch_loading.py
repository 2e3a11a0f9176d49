"""How the torch engine loads a model, what it makes of a damaged one, and the real pairs."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from broker.errors import ModelError
from broker.sampling import Sampling
from cloud_verifier.engine.target import Work
from cloud_verifier.engine.torch_target import TorchTarget
from tests.tiny_models import (
    VOCAB,
    model_of,
    plain_logits,
    rows_of,
    sequence_of,
)

GREEDY = Sampling()


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of 97 tokens, as a person would have it on disk."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    words = {f"w{i}": i for i in range(94)} | {"<|end|>": 94, "<|im_end|>": 95, "</s>": 96}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")),
        eos_token="</s>",
        additional_special_tokens=["<|im_end|>"],
    )
    tokenizer.add_tokens(["<|end|>"])  # spelled like an end, and an ordinary token
    tokenizer.save_pretrained(path)
    model = copy.deepcopy(model_of("llama"))
    model.generation_config.eos_token_id = [3]
    model.config.eos_token_id = 4
    model.save_pretrained(path)
    return path


def test_a_directory_is_loaded_with_its_vocabulary_and_end_tokens(directory: Path) -> None:
    target = TorchTarget.load(str(directory), max_slots=2, context=50)
    assert (target.name, target.vocab_size, target.context) == ("tiny-llama", VOCAB, 50)
    assert len(target.vocab_hash) == 16
    # Named by the generation settings, the configuration, the tokenizer, and by spelling.
    assert target.eos_ids == {3, 4, 96, 95}
    text = sequence_of(20, 10)
    expected = plain_logits(model_of("llama"), text)
    assert torch.allclose(rows_of(target, 1, 0, text), expected, atol=2e-4, rtol=1e-4)
    assert rows_of(TorchTarget.load(str(directory), dtype="bfloat16"), 0, 0, text).dtype == (
        torch.bfloat16
    )


def damaged(directory: Path, goal: Path, kind: str) -> Path:
    shutil.copytree(directory, goal)
    weights = goal / "model.safetensors"
    if kind == "truncated weights":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif kind == "no weights":
        weights.unlink()
    elif kind == "weights of another model":
        from safetensors.torch import load_file, save_file

        tensors = load_file(weights)
        tensors = {name: value for name, value in tensors.items() if "layers.1" not in name}
        save_file(tensors, weights, {"format": "pt"})
    elif kind == "no tokenizer":
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (goal / name).unlink()
    elif kind == "no json":
        (goal / "config.json").write_text("{")
    elif kind == "unknown architecture":
        config = json.loads((goal / "config.json").read_text())
        (goal / "config.json").write_text(json.dumps({**config, "model_type": "abacus"}))
    return goal


@pytest.mark.parametrize(
    "kind",
    [
        "truncated weights",
        "no weights",
        "weights of another model",
        "no tokenizer",
        "no json",
        "unknown architecture",
    ],
)
def test_a_damaged_directory_is_one_line_with_cause_and_mend(
    directory: Path, tmp_path: Path, kind: str
) -> None:
    path = damaged(directory, tmp_path / "damaged", kind)
    with pytest.raises(ModelError) as caught:
        TorchTarget.load(str(path))
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert ": " in message


@pytest.mark.parametrize("path", ["/nowhere/model", "/nowhere/model.gguf"])
def test_a_missing_model_is_a_model_error(path: str) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        TorchTarget.load(path)


def test_no_model_file_is_a_model_error(tmp_path: Path) -> None:
    for name, content in (("text.gguf", b"not a model" * 100), ("cut.gguf", b"GGUF\x03\0\0\0")):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ModelError) as caught:
            TorchTarget.load(str(path))
        assert name in str(caught.value)


def test_slots_and_scripted_targets_need_no_torch() -> None:
    code = (
        "import sys; import cloud_verifier.engine.slots, cloud_verifier.engine.scripted_target; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# The real pairs


def long_text() -> str:
    return " ".join(
        f"Item {i}: the {i * 37 % 101}th stone of the wall is {i % 7} feet wide." for i in range(60)
    )


@pytest.mark.models
def test_smollm2_says_what_generate_says(one_thread: None) -> None:
    from cloud_verifier.engine.prepare import prepare_target

    path = str(prepare_target("smollm2"))
    library: Any = transformers
    tokenizer = library.AutoTokenizer.from_pretrained(path)
    chat = [{"role": "user", "content": "Name three rivers of Europe."}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    model = library.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    reference = model.generate(
        torch.tensor([prompt]), max_new_tokens=30, do_sample=False, min_new_tokens=30
    )[0, len(prompt) :].tolist()
    del model

    target = TorchTarget.load(path)
    assert target.vocab_size == 49152
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in target.eos_ids
    ends = set(target.eos_ids)
    fed, keep, found = tuple(prompt), 0, []
    for position in range(30):
        [[token]] = target.forward([Work(0, keep, fed, 1, position, GREEDY)])
        found.append(token)
        keep, fed = keep + len(fed), (token,)
    if ends & set(found):
        # generate() was kept from ending, the target's choice was not.
        stop = min(found.index(token) for token in ends & set(found))
        found, reference = found[:stop], reference[:stop]
    assert len(found) >= 10
    assert found == reference


@pytest.mark.models
def test_gemma3_sees_its_window_and_no_further(one_thread: None) -> None:
    from cloud_verifier.engine.prepare import prepare_target

    path = str(prepare_target("gemma3"))
    library: Any = transformers
    tokenizer = library.AutoTokenizer.from_pretrained(path)
    ids = tokenizer(long_text())["input_ids"][:700]
    model = library.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    window = model.config.sliding_window
    assert len(ids) > window + 100
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=20).logits[
            0
        ]
    del model
    target = TorchTarget.load(path)
    assert {layer.window for layer in target.layers} == {window, None}
    target.forward([Work(0, 0, tuple(ids[:300]), 0, 0, GREEDY)])
    target.forward([Work(0, 300, tuple(ids[300:690]), 0, 0, GREEDY)])
    found = rows_of(target, 0, 680, ids[680:])
    assert torch.allclose(found, expected, atol=2e-3, rtol=1e-3)
    assert found.argmax(-1).tolist() == expected.argmax(-1).tolist()
