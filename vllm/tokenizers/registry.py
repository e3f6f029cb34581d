# SPDX-License-Identifier: Apache-2.0
"""`get_tokenizer`: the tokenizer of a directory, a GGUF file or a cached hub model."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from vllm.logger import init_logger
from vllm.tokenizers.directory import is_plain_tokenizer_dir, tokenizer_from_directory
from vllm.tokenizers.gguf import tokenizer_from_gguf
from vllm.tokenizers.protocol import TokenizerLike
from vllm.transformers_utils.config import open_gguf, resolve_model_path

logger = init_logger(__name__)

SUPPORTED_MODES = ("auto", "hf")


def get_tokenizer(
    tokenizer_name: str | Path,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
) -> TokenizerLike:
    """The tokenizer that `tokenizer_name` names.

    Mode "auto" takes this project's thin class wherever it gives the same result as Transformers'
    (no torch, no transformers), "hf" always Transformers' AutoTokenizer for directories.
    Raises ValueError when it cannot be found or read, or the mode is not supported.
    """
    if tokenizer_mode not in SUPPORTED_MODES:
        raise ValueError(
            f"tokenizer_mode {tokenizer_mode!r} is not supported; supported: "
            f"{', '.join(SUPPORTED_MODES)}"
        )
    path = resolve_model_path(tokenizer_name, revision, download_dir)
    if path.is_file():
        return tokenizer_from_gguf(open_gguf(path))
    if tokenizer_mode == "auto" and is_plain_tokenizer_dir(path):
        return tokenizer_from_directory(path)
    return _auto_tokenizer(path, trust_remote_code)


def _auto_tokenizer(path: Path, trust_remote_code: bool) -> TokenizerLike:
    logger.debug("loading the tokenizer of %s through transformers", path)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:
        raise ValueError(
            f"{path} holds no tokenizer that transformers can load: {error}"
        ) from error


cached_get_tokenizer = lru_cache(maxsize=8)(get_tokenizer)
