"""Text: one BOS, chat templates, whole characters, stop strings."""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.chat import ChatTemplate, with_one_bos
from broker.errors import ConfigError
from edge_agent.text import MAX_STOP_CHARS, MAX_STOPS, Detokenizer, StopMatcher

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = {"role": "user", "content": "hi"}


class TestOneBos:
    @pytest.mark.parametrize(
        ("ids", "wanted", "expected"),
        [
            ([5, 6], True, [1, 5, 6]),  # only the vocabulary asks for it
            ([1, 5, 6], True, [1, 5, 6]),  # template and vocabulary
            ([1, 1, 5, 1], True, [1, 5, 1]),  # later ones are text
            ([1, 5, 6], False, [1, 5, 6]),  # only the template
            ([1, 1, 5], False, [1, 5]),
            ([5, 6], False, [5, 6]),  # neither
            ([], True, [1]),
            ([], False, []),
        ],
    )
    def test_exactly_one(self, ids: list[int], wanted: bool, expected: list[int]) -> None:
        assert with_one_bos(ids, 1, wanted) == expected

    def test_vocabulary_without_one(self) -> None:
        assert with_one_bos([5, 6], None, True) == [5, 6]


class TestChatTemplate:
    def test_renders_up_to_the_answer(self) -> None:
        text = ChatTemplate(CHATML, {}).render([{"role": "system", "content": "be brief"}, USER])
        assert text == (
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
            "<|im_start|>assistant\n"
        )

    def test_special_tokens_and_date(self) -> None:
        template = ChatTemplate(
            "{{ bos_token }}{{ strftime_now('%d %b %Y') }}|{{ eos_token }}|{{ pad_token }}",
            {"bos_token": "<s>", "eos_token": "</s>"},
            now=lambda: datetime(2026, 3, 1),
        )
        assert template.render([USER]) == "<s>01 Mar 2026|</s>|"

    def test_blocks_are_trimmed_and_json_is_plain(self) -> None:
        template = ChatTemplate(
            "  {% for m in messages %}\n{{ m | tojson }}\n{% break %}\n  {% endfor %}\nend", {}
        )
        rendered = template.render([{"role": "user", "content": "ďá <b>"}, USER])
        assert rendered == '{"role": "user", "content": "ďá <b>"}\nend'

    def test_generation_marks_nothing(self) -> None:
        template = ChatTemplate("{% generation %}{{ messages[0].content }}{% endgeneration %}!", {})
        assert template.render([USER]) == "hi!"

    def test_absent_fields_are_absent(self) -> None:
        template = ChatTemplate("{{ 'tools' if 'tool_calls' in messages[0] else 'none' }}", {})
        assert template.render([{**USER, "tool_calls": None}]) == "none"

    @pytest.mark.parametrize(
        ("source", "cause"),
        [
            ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
            ("{{ messages[0].content + 1 }}", "rejects the messages"),
            ("{{ messages[7].content }}", "rejects the messages"),
            ("{{ 1 / 0 }}", "division by zero"),
            ("{{ ''.__class__.__mro__ }}{{ messages.append(1) }}", "rejects the messages"),
            ("{% if %}", "broken in line 1"),
        ],
    )
    def test_a_template_that_refuses(self, source: str, cause: str) -> None:
        with pytest.raises(ConfigError, match=cause) as caught:
            ChatTemplate(source, {}).render([USER])
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("messages", [[], ["hi"], [{"content": "hi"}], [{"role": 3}]])
    def test_malformed_messages(self, messages: list[dict[str, str]]) -> None:
        with pytest.raises(ConfigError):
            ChatTemplate(CHATML, {}).render(messages)


class TestDetokenizer:
    def test_a_character_split_over_tokens(self) -> None:
        data = "ďábelské 🦙".encode()
        for size in range(1, len(data) + 1):
            detokenizer = Detokenizer()
            pieces = [data[at : at + size] for at in range(0, len(data), size)]
            shown = [detokenizer.feed(piece) for piece in pieces]
            assert "".join(shown) == "ďábelské 🦙"
            assert all("\ufffd" not in text for text in shown)

    def test_a_character_cut_short_is_dropped(self) -> None:
        detokenizer = Detokenizer()
        assert detokenizer.feed("ok 🦙".encode()[:-1]) == "ok "

    def test_invalid_bytes_are_marked(self) -> None:
        detokenizer = Detokenizer()
        assert [detokenizer.feed(piece) for piece in (b"a\xff", b"b\xc4", b"c")] == [
            "a\ufffd",
            "b",
            "\ufffdc",
        ]

    def test_the_space_before_the_first_word(self) -> None:
        detokenizer = Detokenizer(strip_leading_space=True)
        pieces = (b"", b" Hello", b" there", b"  x")
        assert [detokenizer.feed(p) for p in pieces] == ["", "Hello", " there", "  x"]
        kept = Detokenizer()
        assert kept.feed(b" Hello") == " Hello"

    @given(st.text(), st.lists(st.integers(0, 40), max_size=12))
    def test_any_split_gives_the_whole(self, text: str, cuts: list[int]) -> None:
        data = text.encode()
        edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
        detokenizer = Detokenizer()
        parts = [detokenizer.feed(data[a:b]) for a, b in pairwise(edges)]
        assert "".join(parts) == text

    @given(st.binary(max_size=40), st.integers(1, 5))
    def test_any_split_of_any_bytes(self, data: bytes, size: int) -> None:
        whole = Detokenizer().feed(data)
        split = Detokenizer()
        parts = [split.feed(data[at : at + size]) for at in range(0, len(data), size)]
        assert "".join(parts) == whole


def shown(stops: list[str], parts: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    text = "".join(matcher.feed(part) for part in parts)
    return text + matcher.finish(), matcher.stop


def expected(stops: list[str], text: str) -> tuple[str, str | None]:
    """The definition: the first end of any stop, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


class TestStopMatcher:
    def test_cut_in_the_middle_of_a_block(self) -> None:
        assert shown(["END"], ["some text END and more", " never"]) == ("some text ", "END")

    def test_a_stop_over_several_blocks_is_never_shown(self) -> None:
        matcher = StopMatcher(["\nUser:"])
        parts = ["Hello", ".\n", "Us", "er", ": hi"]
        assert [matcher.feed(part) for part in parts] == ["Hello", ".", "", "", ""]
        assert matcher.stop == "\nUser:"
        assert matcher.finish() == ""

    def test_what_was_only_a_beginning_comes_later(self) -> None:
        matcher = StopMatcher(["\nUser:"])
        assert [matcher.feed(part) for part in ["a\nUs", "e", "less"]] == ["a", "", "\nUseless"]
        assert matcher.stop is None

    def test_the_end_releases_what_was_held(self) -> None:
        assert shown(["###"], ["a#", "#"]) == ("a##", None)

    def test_a_stop_inside_its_own_repetition(self) -> None:
        assert shown(["aab"], ["aa", "aa", "b"]) == ("aa", "aab")

    def test_of_two_the_first_complete_one(self) -> None:
        assert shown(["abcde", "cd"], ["abcde"]) == ("ab", "cd")
        assert shown(["d", "bcd"], ["abcd"]) == ("a", "bcd")

    def test_nothing_after_the_stop(self) -> None:
        matcher = StopMatcher(["x"])
        assert matcher.feed("axb") == "a"
        assert matcher.feed("more") == ""

    def test_without_stops_all_passes(self) -> None:
        assert StopMatcher([]).feed("anything") == "anything"

    def test_what_is_held_is_bounded(self) -> None:
        matcher = StopMatcher(["a" * MAX_STOP_CHARS])
        out = 0
        for fed in range(1, 2000, 7):
            out += len(matcher.feed("ba" * 3 + "b"))
            out += len(matcher.feed("a" * (fed % MAX_STOP_CHARS)))
            assert len(matcher._held) < MAX_STOP_CHARS
        assert matcher.stop is None
        assert out > 0

    @pytest.mark.parametrize(
        "stops", [[""], ["x" * (MAX_STOP_CHARS + 1)], [str(n) for n in range(MAX_STOPS + 1)]]
    )
    def test_stops_out_of_range(self, stops: list[str]) -> None:
        with pytest.raises(ConfigError):
            StopMatcher(stops)

    @given(
        st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4),
        st.text("ab\nc", max_size=30),
        st.lists(st.integers(0, 30), max_size=8),
    )
    def test_any_split_gives_the_definition(
        self, stops: list[str], text: str, cuts: list[int]
    ) -> None:
        edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
        parts = [text[a:b] for a, b in pairwise(edges)]
        assert shown(stops, parts) == expected(stops, text)

    @given(
        st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
        st.text("abc", max_size=30),
    )
    def test_no_part_of_the_stop_is_ever_shown(self, stops: list[str], text: str) -> None:
        cut, _ = expected(stops, text)
        matcher = StopMatcher(stops)
        so_far = ""
        for char in text:
            so_far += matcher.feed(char)
            assert cut.startswith(so_far)
