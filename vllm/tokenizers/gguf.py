# SPDX-License-Identifier: Apache-2.0
"""A tokenizer from GGUF metadata.

Byte-level BPE whose split rule is known here is built in memory in 0.1 s, less than reading it from
a file. Any other kind is converted by Transformers (seconds, and it imports torch), once: the
result is kept as `tokenizer.json` under `VLLM_CACHE_ROOT`, keyed by the file's identity.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from vllm import envs
from vllm.logger import init_logger
from vllm.tokenizers.fast import FastTokenizer, TokenizerSettings
from vllm.transformers_utils.gguf_reader import GGUFError, GGUFFile

logger = init_logger(__name__)

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_CACHE_FORMAT = 1  # raise it when the conversion changes

# tokenizer.ggml.pre -> whether each digit is cut off before GPT-2's rule splits the rest.
# (Transformers knows neither name and applies GPT-2's rule alone, which splits "\n\n1" as "\n",
# "\n", "1" where SmolLM2 was trained on "\n\n", "1".)
_SPLITS_DIGITS = {"gpt-2": False, "smollm": True}
# Files of these kinds are SentencePiece-like; llama.cpp begins a text with BOS unless told
# otherwise.
_BOS_BY_DEFAULT = ("llama",)
_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def tokenizer_from_gguf(file: GGUFFile) -> FastTokenizer:
    """The tokenizer that the metadata of `file` describes.

    Raises GGUFError where there is none in the file or its kind is not supported.
    """
    if file.array_length("tokenizer.ggml.tokens") is None:
        raise GGUFError(
            f"{file.path}: the file holds no vocabulary; pass --tokenizer with a tokenizer "
            "directory"
        )
    if (
        file.get("tokenizer.ggml.model") == "gpt2"
        and file.get("tokenizer.ggml.pre") in _SPLITS_DIGITS
    ):
        backend = _byte_level_bpe(file)
    else:
        backend = _converted_by_transformers(file)
    return FastTokenizer(backend, _settings(file), name_or_path=str(file.path))


def _settings(file: GGUFFile) -> TokenizerSettings:
    tokens = file.get("tokenizer.ggml.tokens")
    special = {}
    for name, key in _NAMED_TOKENS.items():
        token_id = file.get(f"tokenizer.ggml.{key}")
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise GGUFError(
                f"{file.path}: tokenizer.ggml.{key} is {token_id}, outside the vocabulary of "
                f"{len(tokens)}"
            )
        special[name] = tokens[token_id]
    add_bos = file.get(
        "tokenizer.ggml.add_bos_token", file.get("tokenizer.ggml.model") in _BOS_BY_DEFAULT
    )
    return TokenizerSettings(
        special_tokens=special,
        chat_template=file.get("tokenizer.chat_template"),
        add_bos_token=add_bos and "bos_token" in special,
        add_eos_token=file.get("tokenizer.ggml.add_eos_token", False) and "eos_token" in special,
    )


def _byte_level_bpe(file: GGUFFile) -> Tokenizer:
    tokens: list[str] = file.get("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges", ())]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise GGUFError(f"{file.path}: the vocabulary lists a token twice")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if _SPLITS_DIGITS[file.get("tokenizer.ggml.pre")]:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    _add_marked_tokens(tokenizer, tokens, file.get("tokenizer.ggml.token_type", ()))
    return tokenizer


def _add_marked_tokens(tokenizer: Tokenizer, tokens: list[str], token_types: list[int]) -> None:
    """Control and user-defined tokens are matched whole in a text; only the first kind is special.

    A control token spelled outside the byte alphabet is a mislabel of llama.cpp's converter,
    skipped as Transformers does: it would be no entry of a byte-level vocabulary.
    """
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    marked = {_CONTROL: [], _USER_DEFINED: []}
    for token, kind in zip(tokens, token_types):
        if kind == _USER_DEFINED or (kind == _CONTROL and set(token) <= alphabet):
            marked[kind].append(token)
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t in marked[_CONTROL]]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False, special=False) for t in marked[_USER_DEFINED]]
    )


def _converted_by_transformers(file: GGUFFile) -> Tokenizer:
    cached = _cache_path(file.path)
    if cached.is_file():
        try:
            return Tokenizer.from_file(str(cached))
        except Exception as error:  # tokenizers raises plain Exception
            logger.warning("converting the tokenizer again: %s cannot be read (%s)", cached, error)
    tokenizer = _convert(file)
    try:
        _save_atomically(tokenizer, cached)
    except OSError as error:
        logger.warning(
            "the converted tokenizer is not kept, so every start converts it again: %s", error
        )
    return tokenizer


def _convert(file: GGUFFile) -> Tokenizer:
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    kind, pre = file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre")
    logger.info("converting the tokenizer of %s (%s, %s); this is done once", file.path, kind, pre)
    if kind == "gpt2" and pre not in GGUF_PRE_TOKENIZER_SPLITS:
        logger.warning(
            "the split rule %r of %s is not known; GPT-2's is used, so some texts may become "
            "other tokens than the model was trained on: pass --tokenizer with a directory",
            pre,
            file.path,
        )
    try:
        architecture, parts, _ = get_gguf_tokenizer(str(file.path))
        backend, _ = convert_gguf_tokenizer(architecture, parts)
    except Exception as error:
        raise GGUFError(
            f"{file.path}: a tokenizer of kind {kind!r} cannot be converted ({error}); "
            "pass --tokenizer with a directory that holds tokenizer.json"
        ) from error
    return backend


def _cache_path(path: Path) -> Path:
    import tokenizers

    stat = path.stat()
    identity = (
        _CACHE_FORMAT,
        tokenizers.__version__,
        str(path.resolve()),
        stat.st_size,
        stat.st_mtime_ns,
    )
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()[:32]
    return Path(envs.VLLM_CACHE_ROOT) / "tokenizers" / digest / "tokenizer.json"


def _save_atomically(tokenizer: Tokenizer, target: Path) -> None:
    """Write beside the target and rename, so that another process never reads half a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=".json")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(tokenizer.to_str())
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
