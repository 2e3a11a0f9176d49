"""From messages to a prompt, and from token pieces to text that is safe to show.

``ChatTemplate`` renders the template that a model file carries, ``with_one_bos`` settles how many
begin-of-sequence tokens a prompt has, ``Detokenizer`` joins pieces to whole characters, and
``StopMatcher`` cuts the text at a stop string. Nothing here knows a model.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from broker.errors import ConfigError

if TYPE_CHECKING:
    import jinja2

MAX_STOPS = 16
"""Stop strings of one generation."""

MAX_STOP_CHARS = 256
"""Characters of one stop string; as many are held back at most."""


def with_one_bos(ids: Sequence[int], bos: int | None, wanted: bool) -> list[int]:
    """``ids`` beginning with exactly one ``bos``: where ``wanted``, or where it led already.

    Template and tokenizer may both write it, and a model that reads two answers worse.
    ``bos`` None: the vocabulary has none, ``ids`` stay as they are.
    """
    if bos is None:
        return list(ids)
    first = 0
    while first < len(ids) and ids[first] == bos:
        first += 1
    return [bos, *ids[first:]] if wanted or first else list(ids)


class ChatTemplate:
    """A model's chat template in jinja2, with the environment that transformers gives it.

    ``special_tokens``: texts by name (``bos_token``, ``eos_token``, ...), as the template reads
    them. The template comes with a model file, so it runs in jinja2's immutable sandbox.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._now = now

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text, up to where the assistant's answer begins.

        Raises ConfigError when ``messages`` is empty or malformed, or the template rejects it.
        """
        if not messages:
            raise ConfigError("no messages; give at least one")
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ConfigError("a message is no object with a role; give role and content")
        jinja2 = _import_jinja2()
        try:
            return _compile(self._source).render(
                messages=[_without_none(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                strftime_now=lambda form: self._now().strftime(form),
                **self._special_tokens,
            )
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the model's chat template is broken in line {error.lineno} ({error.message}); "
                "give plain text with --raw"
            ) from error
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            cause = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(
                f"the model's chat template rejects the messages: {cause}; change their roles or "
                "contents"
            ) from error


def _import_jinja2() -> ModuleType:
    try:
        import jinja2
    except ImportError as error:
        raise ConfigError("chat templates need jinja2: install pipesd[edge]") from error
    return jinja2


def _without_none(message: Mapping[str, Any]) -> dict[str, Any]:
    # Chat APIs send absent fields as null; templates test for presence only.
    return {key: value for key, value in message.items() if value is not None}


@lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """``{% generation %}`` marks what the assistant wrote, for training; here it is no-op."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: Any) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def reject(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # jinja2's own filter escapes for HTML.
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = reject
    return environment


class Detokenizer:
    """Joins the UTF-8 pieces of tokens to text, whole characters only.

    A character split over tokens comes out with its last byte; one that the end of the stream cuts
    short never does. Bytes that no continuation can make valid give U+FFFD.
    ``strip_leading_space``: drop the one space that SentencePiece vocabularies put before the first
    word of an answer.
    """

    def __init__(self, *, strip_leading_space: bool = False) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = strip_leading_space

    def feed(self, piece: bytes) -> str:
        """The characters that ``piece`` completes; may be ""."""
        text = self._decoder.decode(piece)
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class StopMatcher:
    """Cuts a stream of text before the first stop string; no part of that string is ever shown.

    The first stop is the one that is complete first; of several complete at the same character,
    the longest. The result does not depend on how the text is split. Text that may be the
    beginning of a stop is held back, at most ``MAX_STOP_CHARS`` characters.

    Raises ConfigError for more than ``MAX_STOPS`` strings, an empty one, or one too long.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if len(stops) > MAX_STOPS:
            raise ConfigError(f"{len(stops)} stop strings; give at most {MAX_STOPS}")
        for stop in stops:
            if not stop:
                raise ConfigError("an empty stop string; leave it out")
            if len(stop) > MAX_STOP_CHARS:
                raise ConfigError(
                    f"a stop string of {len(stop)} characters; give at most {MAX_STOP_CHARS}"
                )
        # Knuth-Morris-Pratt: a fallback table and a count of matched characters per stop.
        self._stops = [(stop, _fallbacks(stop)) for stop in dict.fromkeys(stops)]
        self._matched = [0] * len(self._stops)
        self._held = ""
        self.stop: str | None = None
        """The stop string that ended the text."""

    def feed(self, text: str) -> str:
        """What of the text so far may be shown now; "" after the stop."""
        if self.stop is not None:
            return ""
        if not self._stops:
            return text
        buffer = self._held + text
        for at in range(len(self._held), len(buffer)):
            found = self._advance(buffer[at])
            if found is not None:
                self.stop = found
                self._held = ""
                return buffer[: at + 1 - len(found)]
        safe = len(buffer) - max(self._matched)
        self._held = buffer[safe:]
        return buffer[:safe]

    def finish(self) -> str:
        """The text has ended: what was held back, as no stop can come any more."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> str | None:
        found: str | None = None
        for index, (stop, fallbacks) in enumerate(self._stops):
            count = self._matched[index]
            while count and stop[count] != char:
                count = fallbacks[count - 1]
            if stop[count] == char:
                count += 1
            if count == len(stop) and (found is None or len(stop) > len(found)):
                found = stop
            # A complete match ends the text, so its table is not read again.
            self._matched[index] = count
        return found


def _fallbacks(stop: str) -> list[int]:
    # [i]: length of the longest proper prefix of stop that ends at character i.
    table = [0] * len(stop)
    count = 0
    for at in range(1, len(stop)):
        while count and stop[at] != stop[count]:
            count = table[count - 1]
        if stop[at] == stop[count]:
            count += 1
        table[at] = count
    return table
