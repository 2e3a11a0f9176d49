"""From chat messages to a prompt, the same on both sides, whatever model file the template is from.

``ChatTemplate`` renders the template that a model file carries, ``with_one_bos`` settles how many
begin-of-sequence tokens a prompt has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from broker.errors import ConfigError

if TYPE_CHECKING:
    import jinja2


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
        raise ConfigError("chat templates need jinja2: pip install jinja2") from error
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
