"""What one generation is, as the session core takes it."""

from __future__ import annotations

from dataclasses import dataclass

from broker.errors import ConfigError
from broker.messages import MAX_POSITION, MAX_PROMPT, VERIFY_MODES
from broker.sampling import Sampling

LOCAL_FORBID = "forbid"
LOCAL_ALLOW = "allow"
LOCAL_ONLY = "only"
LOCAL_MODES = (LOCAL_FORBID, LOCAL_ALLOW, LOCAL_ONLY)

#: Beside the verifier's own modes (broker.messages): after each verdict that was asked for, the
#: target may write on by itself while it would idle, always ("ahead"), or where the way there and
#: back takes longer than that ("auto").
VERIFY_AHEAD = "ahead"
VERIFY_AUTO = "auto"
VERIFY_CHOICES = (VERIFY_AUTO, VERIFY_AHEAD, *VERIFY_MODES)
#: All three by measurement with the demo pairs, docs/design-notes.md.
DEFAULT_VERIFY = VERIFY_AUTO
DEFAULT_MAX_AHEAD = 24
DEFAULT_MIN_SURVIVAL = 0.001


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """One generation. ``context``: tokens that the draft model can hold.

    ``max_ahead``: unverified tokens that may exist at a time. ``min_survival``: while a verdict is
    awaited, drafting pauses when the chance of the whole draft falls below this. ``ask_first``: ask
    for a token together with the session, drafted or not: the prompt must go through
    the target anyway, and the choice after it costs next to nothing. ``verify``: one of
    VERIFY_CHOICES. ``local``:
    "forbid" (silence for ``Timing.offline_after`` seconds is an error), "allow" (go on alone),
    "only" (never ask). Raises ConfigError.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    vocab_hash: str
    vocab_size: int
    eos_ids: frozenset[int]
    context: int
    max_ahead: int = DEFAULT_MAX_AHEAD
    min_survival: float = DEFAULT_MIN_SURVIVAL
    verify: str = DEFAULT_VERIFY
    local: str = LOCAL_FORBID
    ask_first: bool = False

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ConfigError("the prompt has no tokens: give some text")
        if len(self.prompt) > MAX_PROMPT:
            size = len(self.prompt)
            raise ConfigError(f"the prompt has {size} tokens, above {MAX_PROMPT}: shorten it")
        if self.max_tokens < 1:
            raise ConfigError(f"max-tokens {self.max_tokens} is below 1: ask for at least one")
        if self.max_tokens > MAX_POSITION:
            raise ConfigError(f"max-tokens {self.max_tokens} is above 2^31-1: ask for fewer")
        if not 1 <= self.max_ahead <= 512:
            raise ConfigError(f"max-ahead {self.max_ahead} is outside 1 to 512")
        if not 0.0 <= self.min_survival <= 1.0:
            raise ConfigError(f"min-survival {self.min_survival} is outside 0 to 1: 0 turns it off")
        if self.verify not in VERIFY_CHOICES:
            raise ConfigError(f"verify {self.verify!r} is none of {', '.join(VERIFY_CHOICES)}")
        if self.local not in LOCAL_MODES:
            raise ConfigError(f"local mode {self.local!r} is none of {', '.join(LOCAL_MODES)}")
