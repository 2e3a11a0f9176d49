"""The text of load tests: the same for everybody, of any length, with ends here and there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broker import load_text
from cloud_verifier.engine.scripted_target import ScriptedTarget
from cloud_verifier.scripted import make_target

PROMPTS = st.lists(st.integers(0, load_text.VOCAB_SIZE - 1), min_size=1, max_size=12)


@given(PROMPTS, st.integers(1, 60))
def test_a_text_is_what_its_tokens_are_one_by_one(prompt, size) -> None:
    text = load_text.write(prompt, size)
    assert 1 <= len(text) <= size
    for position, token in enumerate(text):
        assert token == load_text.next_token([*prompt, *text[:position]])
        assert 0 <= token < load_text.VOCAB_SIZE
    assert load_text.END not in text[:-1]
    assert len(text) == size or text[-1] == load_text.END


def test_texts_do_not_repeat_themselves_or_each_other() -> None:
    texts = [load_text.write((1, number), 200) for number in range(200)]
    tokens = [token for text in texts for token in text]
    ended = sum(text[-1] == load_text.END for text in texts)
    assert 0.5 < ended / (len(tokens) / load_text.END_SHARE) < 2.0
    assert len(set(tokens)) > 0.7 * len(tokens)


def test_the_scripted_target_writes_it() -> None:
    target = make_target(2, 0.0)
    assert isinstance(target, ScriptedTarget)
    assert (target.vocab_hash, target.eos_ids) == (load_text.VOCAB_HASH, {load_text.END})
    assert target.max_slots == 2
    slow = make_target(2, 0.001)
    assert (slow.name, slow.vocab_size) == (target.name, load_text.VOCAB_SIZE)
