"""The target's model directory: a given one, a GGUF file's, or a demo pair's, converted once.

transformers reads a GGUF file in 15 to 60 seconds each time, a directory of safetensors in one, so
a GGUF is dequantised once and kept in the cache with its tokenizer, chat template and end tokens.

Weights are stored as float32 up to two billion parameters: a dequantised weight is scale times
integer and fits no 16-bit type exactly, and a float32 target is the reference that others are
compared with. Larger models would fill disks and are stored as bfloat16; the split run and the
target-only run then still read the same weights.

``python -m cloud_verifier.engine.prepare --pair smollm2`` prepares ahead of time and prints the
path.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from broker.cache import Progress, forget_oldest, prepare_once, say
from broker.child import end_with_parent, run_step
from broker.errors import ConfigError, ModelError, PipesdError
from broker.gguf_header import GgufHeader, read_header
from broker.pairs import PAIRS, Pair, check_source, find_pair, source_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RECIPE = "1"
_TOOLS = ("gguf", "safetensors", "tokenizers", "torch", "transformers")
_LIMIT_S = 3600.0
_FLOAT32_PARAMETERS = 2_000_000_000
_KEPT = 8  # converted GGUF files of people; gigabytes each
_OVERHEAD_BYTES = 64 << 20
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
_CONTROL, _USER_DEFINED = 3, 4

# Control tokens that end a turn or a text, by the names that model families give them. A GGUF names
# one end token; chat models often have two (end of turn, end of text), and both must end the text.
END_TOKENS = frozenset(
    {
        "</s>",
        "<eos>",
        "<end_of_turn>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|end|>",
        "<|im_end|>",
        "<|return|>",
    }
)

# llama.cpp's pre-tokenizers that cut every digit apart before GPT-2's rule; transformers knows
# GPT-2's rule alone, and joins " 1" where these do not.
_DIGIT_SPLITTERS = frozenset(
    {"codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"}
)


def resolve_target(target: str | None, pair: str | None = None, progress: Progress = say) -> str:
    """What transformers can load: a model directory or a hub id.

    ``target``: a directory or hub id (returned as they are) or a GGUF file (converted once and
    cached). ``pair``: a demo pair instead. Raises ConfigError when neither or both are given;
    ModelError for a path that is missing, truncated, or no model.
    """
    if target and pair is not None:
        raise ConfigError("give --target or --pair, not both")
    if pair is not None:
        return str(prepare_target(pair, progress))
    if not target:
        raise ConfigError("no target model; give --target MODEL or --pair NAME")
    path = Path(target).expanduser()
    if path.is_file():
        return str(gguf_to_dir(path, progress))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(
                f"{path} has no config.json; give a transformers model directory or a .gguf file"
            )
        return str(path)
    if target.endswith(".gguf") or not _HUB_ID.fullmatch(target):
        raise ModelError(f"model {target} does not exist; check the path")
    return target


def prepare_target(pair: str | Pair, progress: Progress = say, *, verify: bool = False) -> Path:
    """The model directory of a demo pair's target, made on the first call and cached.

    Raises ConfigError for an unknown pair, a missing package or an unwritable cache; ModelError
    when the source is damaged or the conversion fails.
    """
    pair = find_pair(pair) if isinstance(pair, str) else pair

    def build(directory: Path) -> None:
        source = source_file(pair, progress)
        check_source(pair, source)
        _convert_in_child(source, directory, "float32")

    return prepare_once(
        f"target-{pair.name}-{pair.sha256[:8]}",
        build,
        progress,
        label=f"target {pair.name}",
        about_s=pair.target_s,
        needs_bytes=pair.target_bytes,
        inputs={"sha256": pair.sha256, "dtype": "float32", "recipe": _RECIPE},
        tools=_TOOLS,
        verify=verify,
    )


def gguf_to_dir(path: Path, progress: Progress = say, *, verify: bool = False) -> Path:
    """The model directory made from the GGUF file ``path``, cached by the file's fingerprint.

    Raises ModelError when the file is missing, truncated, no GGUF, or of an architecture that
    transformers cannot read; ConfigError when the cache cannot be written.
    """
    header = read_header(path)
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(f"{path} is one part of a split GGUF; merge it with llama-gguf-split")
    dtype = "float32" if header.parameters <= _FLOAT32_PARAMETERS else "bfloat16"
    fingerprint = _fingerprint(path, header)
    stem = re.sub(r"[^A-Za-z0-9_]+", "-", path.stem)[:60]

    def build(directory: Path) -> None:
        forget_oldest("gguf-", _KEPT - 1, progress)
        _convert_in_child(path, directory, dtype)

    return prepare_once(
        f"gguf-{stem}-{fingerprint[:16]}",
        build,
        progress,
        label=f"target {path.name}",
        needs_bytes=header.parameters * (4 if dtype == "float32" else 2) + _OVERHEAD_BYTES,
        inputs={"fingerprint": fingerprint, "dtype": dtype, "recipe": _RECIPE},
        tools=_TOOLS,
        verify=verify,
    )


def tokenizer_tokens(tokenizer: PreTrainedTokenizerBase, rows: int | None = None) -> list[str]:
    """The text of each token id as the tokenizer spells it, for ``broker.vocabulary.vocab_hash``.

    ``rows``: rows of the model's embedding; entries of the tokenizer past them (a token that this
    model has no weights for) are left out. Ids without a token give "".
    """
    texts: list[str] = []
    count = len(tokenizer) if rows is None else min(rows, len(tokenizer))
    for text in tokenizer.convert_ids_to_tokens(list(range(count))):
        texts.append("" if text is None else text)
    return texts


def _fingerprint(path: Path, header: GgufHeader) -> str:
    """Hex digest of a file's identity in milliseconds, where hashing all of it takes seconds.

    Size and time of change, the whole header, and samples of the weights spread over the file.
    """
    state = path.stat()
    digest = hashlib.sha256(f"{state.st_size} {state.st_mtime_ns}".encode())
    sample, samples = 1 << 14, 256
    with path.open("rb") as file:
        digest.update(file.read(header.data_start))
        stride = max(sample, (state.st_size - header.data_start) // samples)
        for offset in range(header.data_start, state.st_size, stride):
            file.seek(offset)
            digest.update(file.read(sample))
    return digest.hexdigest()


def _convert_in_child(source: Path, directory: Path, dtype: str) -> None:
    run_step(
        "cloud_verifier.engine.prepare",
        ["--convert", str(source.resolve()), str(directory), dtype],
        f"converting {source.name}",
        limit_s=_LIMIT_S,
        environment=_QUIET,
    )


def _convert(source: Path, directory: Path, dtype_name: str) -> None:
    """In the child: GGUF to a model directory."""
    import torch
    import transformers

    library: Any = transformers  # its annotations do not cover what is called here
    header = read_header(source)
    where: dict[str, Any] = {
        "pretrained_model_name_or_path": str(source.parent),
        "gguf_file": source.name,
    }
    if hasattr(library, "GgufConfig"):
        # Newer releases may keep some architectures packed; a target is plain dense weights.
        where["quantization_config"] = library.GgufConfig(dequantize=True)
    loaded, report = library.AutoModelForCausalLM.from_pretrained(
        **where, dtype=getattr(torch, dtype_name), output_loading_info=True
    )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(f"it lacks {len(missing)} weights, {missing[0]} first")
    # Saving a model that was loaded from GGUF is refused, so its weights move to a plain one.
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    settings.pop("_name_or_path", None)
    with torch.device("meta"):
        model = type(loaded)(type(loaded.config).from_dict(settings))
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = library.GenerationConfig(
        bos_token_id=loaded.config.bos_token_id,
        eos_token_id=end_ids(header),
        pad_token_id=loaded.config.pad_token_id,
    )
    model.save_pretrained(directory)
    _tokenizer(source, header).save_pretrained(directory)


def _tokenizer(source: Path, header: GgufHeader) -> PreTrainedTokenizerBase:
    """The GGUF's tokenizer, mended where transformers cuts text otherwise than llama.cpp."""
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # The generic class: it saves and loads the tokenizer as it stands. A model's own class would
    # build it anew from vocabulary and merges, without what is mended here.
    tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(
        str(source.parent), gguf_file=source.name
    )
    backend: Any = getattr(tokenizer, "backend_tokenizer")  # noqa: B009
    metadata = header.metadata
    if metadata.get("tokenizer.ggml.pre") in _DIGIT_SPLITTERS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if metadata.get("tokenizer.ggml.model") == "llama":
        # Runs of spaces are user-defined tokens, matched whole and longest first before any merge;
        # transformers leaves them to the merges, which cut runs of 32 and more differently.
        kinds = metadata.get("tokenizer.ggml.token_type", ())
        runs = (
            "\u2581" * len(text)
            for text, kind in zip(metadata.get("tokenizer.ggml.tokens", ()), kinds, strict=False)
            if kind == _USER_DEFINED and text and not text.strip(" ")
        )
        backend.add_tokens(
            [
                AddedToken(run, normalized=True, special=False)
                for run in runs
                if backend.token_to_id(run) is not None
            ]
        )
    return tokenizer


def end_ids(header: GgufHeader) -> list[int]:
    """Ids that end a text: those the file names, and control tokens known by their spelling.

    For every engine, so that replicas of different engines end a text at the same token.
    """
    metadata = header.metadata
    ends = {
        metadata[key]
        for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        if isinstance(metadata.get(key), int)
    }
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    for token, (text, kind) in enumerate(zip(tokens, kinds, strict=False)):
        if kind == _CONTROL and text in END_TOKENS:
            ends.add(token)
    return sorted(ends)


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m cloud_verifier.engine.prepare``: prepare a pair's target and print its path."""
    parser = argparse.ArgumentParser(prog="cloud_verifier.engine.prepare", description=main.__doc__)
    parser.add_argument("--pair", choices=tuple(PAIRS), default="smollm2")
    parser.add_argument("--verify", action="store_true", help="compare the full hash of each file")
    parser.add_argument("--convert", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        if options.convert:
            end_with_parent()
            source, directory, dtype = options.convert
            _convert(Path(source), Path(directory), dtype)
        else:
            print(prepare_target(options.pair, verify=options.verify))
    except PipesdError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
