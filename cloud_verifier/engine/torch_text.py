"""Text to ids and back with the target's own tokenizer, for the target alone.

In a split run the edge does this with the draft's vocabulary, which is the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from broker.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TargetText:
    """The tokenizer in ``source``, a model directory or hub id. Raises ModelError."""

    def __init__(self, source: str) -> None:
        from transformers import AutoTokenizer

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError, KeyError) as error:
            cause = " ".join(str(error).split())[:200]
            raise ModelError(f"no usable tokenizer in {source} ({cause}): check --target") from None
        self._tokenizer: PreTrainedTokenizerBase = tokenizer

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode_prompt(self, text: str) -> list[int]:
        """Plain text to continue, with the model's BOS where it has one. Raises ConfigError."""
        return self._ids(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Messages by the chat template, ready for the answer. Raises ConfigError."""
        if not self.has_chat_template:
            raise ConfigError("the model has no chat template: use --prompt with --raw")
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # noqa: BLE001 (a template is a program that may raise anything)
            cause = " ".join(str(error).split())[:200]
            raise ConfigError(f"the chat template rejects the messages: {cause}") from None
        return self._ids(str(text), add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"the prompt is no valid Unicode (at character {error.start}); give UTF-8 text"
            ) from None
        ids = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return [int(token) for token in ids]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens`` without control tokens."""
        text = self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)
