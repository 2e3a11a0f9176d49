"""From token pieces to text that is safe to show.

``Detokenizer`` joins pieces to whole characters, and ``StopMatcher`` cuts the text at a stop
string. Nothing here knows a model.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

from broker.errors import ConfigError

if TYPE_CHECKING:
    pass

MAX_STOPS = 16
"""Stop strings of one generation."""

MAX_STOP_CHARS = 256
"""Characters of one stop string; as many are held back at most."""


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
