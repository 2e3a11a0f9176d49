"""A transformers model and its tokenizer: read from a directory, and what they say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from broker.errors import ModelError
from cloud_verifier.engine.prepare import END_TOKENS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def read_model(
    directory: str, path: str, dtype: torch.dtype, device: str, reading: Mapping[str, Any]
) -> tuple[Any, PreTrainedTokenizerBase]:
    """Model and tokenizer from ``directory``; ``path`` is what the person gave, for messages."""
    import transformers

    library: Any = transformers
    library.utils.logging.disable_progress_bar()
    verbosity = library.utils.logging.get_verbosity()
    library.utils.logging.set_verbosity_error()
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(directory)
        model, report = library.AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation="eager",
            output_loading_info=True,
            **reading,
        )
        model.to(device)
    # Whatever a damaged file makes of transformers, safetensors or json: it is the file.
    except Exception as exc:
        cause = " ".join(str(exc).split())[:200]
        raise ModelError(
            f"{path} cannot be loaded ({type(exc).__name__}: {cause}): "
            "give an intact model directory, hub id or .gguf file"
        ) from exc
    finally:
        library.utils.logging.set_verbosity(verbosity)
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{path} lacks {len(missing)} weights, {missing[0]} first: fetch the model again"
        )
    return model, tokenizer


def end_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]
) -> set[int]:
    """All ids that end a text; chat models have two, and configurations often name one of them."""
    config: Any = model.config.get_text_config()
    ends: set[int] = set()
    for named in (
        getattr(model.generation_config, "eos_token_id", None),
        getattr(config, "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        if isinstance(named, int):
            ends.add(named)
        elif named is not None:
            ends.update(int(token) for token in named)
    # Only special ones: "</s>" is an ordinary piece of HTML in some vocabularies.
    added = tokenizer.added_tokens_decoder.items()
    special = set(tokenizer.all_special_ids) | {token for token, text in added if text.special}
    ends.update(token for token in special if token < len(tokens) and tokens[token] in END_TOKENS)
    return {token for token in ends if 0 <= token < len(tokens)}


def name_of(path: str) -> str:
    """What people call the model: the last part of its path or hub id."""
    name = Path(path.rstrip("/")).name
    return name.removesuffix(".gguf") or path
