# SPDX-License-Identifier: Apache-2.0
"""Keys and values of prompts as files: one safetensors file for the beginning of a prompt.

Tensors are `<layer>.<part>` (`model.layers.0.self_attn.attn.key`): (tokens, kv_heads, ...), token by
token whatever blocks they lay in, so that engines with other page sizes and layouts read them. A
file is written beside its place and then moved there: it is whole, or it is not there.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import AttentionSpec

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger(__name__)

FORMAT = 2
TOKENS_PER_CHUNK = 16
"""Beginnings are stored up to a multiple of it."""


class PromptFileError(Exception):
    """A file is missing, damaged, or not what was expected. One line."""


@dataclass(frozen=True)
class StoredPrompt:
    """The content of a file. `first_tokens`: by layer, the first token that it holds; those of a
    sliding window may begin later."""

    tensors: dict[str, torch.Tensor]
    first_tokens: dict[str, int]


class PromptFiles:
    """The files of one model in a folder that engines share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keys(self, request: Request) -> list[str]:
        """Names of the prompt's beginnings of 1, 2, ... chunks. They depend on everything that
        changes keys and values: the tokens, what the encoder was given, the salt."""
        identifiers = [feature.identifier for feature in request.mm_features]
        digest = hashlib.sha256(repr((identifiers, request.cache_salt)).encode())
        keys = []
        for end in range(TOKENS_PER_CHUNK, request.num_prompt_tokens + 1, TOKENS_PER_CHUNK):
            chunk = request.prompt_token_ids[end - TOKENS_PER_CHUNK : end]
            digest.update(array("q", chunk).tobytes())
            keys.append(digest.hexdigest())
        return keys

    def path(self, key: str) -> Path:
        """Where the file of that name is, if there is one."""
        return self.folder / f"{key}.safetensors"

    def num_stored_tokens(self, keys: Sequence[str]) -> int:
        """Tokens of the longest beginning that is there."""
        for index in reversed(range(len(keys))):
            if os.path.exists(self.path(keys[index])):  # False too where nobody may look.
                return (index + 1) * TOKENS_PER_CHUNK
        return 0

    def write(self, key: str, prompt: StoredPrompt) -> None:
        """Stores a beginning; does nothing if it is there already.

        Raises:
            PromptFileError: it cannot be written, for want of room or rights.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        path = self.path(key)
        if os.path.exists(path):
            return
        metadata = {f"first.{layer}": str(n) for layer, n in prompt.first_tokens.items()}
        metadata |= {"format": str(FORMAT), "key": key, "crc32": str(_checksum(prompt.tensors))}
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(prompt.tensors, unfinished, metadata)
            os.replace(unfinished, path)
        except (OSError, SafetensorError) as error:  # a full disk is a SafetensorError
            if os.path.isfile(unfinished):
                unfinished.unlink(missing_ok=True)
            raise PromptFileError(f"{unfinished}: {error}") from error

    def read(self, key: str) -> StoredPrompt:
        """A beginning, checked.

        Raises:
            PromptFileError: it is missing, damaged, or another's.
        """
        from safetensors import safe_open

        path = self.path(key)
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                if (metadata.get("format"), metadata.get("key")) != (str(FORMAT), key):
                    raise PromptFileError("it is no file of this prompt")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if metadata.get("crc32") != str(_checksum(tensors)):
                raise PromptFileError("the checksum is not that of the content")
            return StoredPrompt(tensors, _first_tokens(metadata))
        except Exception as error:  # A file may hold anything, and costs nothing but itself.
            raise PromptFileError(f"{path}: {in_one_line(error)}") from error

    def remove_all(self) -> bool:
        """Forgets every prompt of this model; False if something is in the way, which is logged."""
        try:
            for path in self.folder.glob("*.safetensors"):
                path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("stored prompts are not all removed: %s", error)
            return False
        return True


def prompt_files_of(
    root: str, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> PromptFiles:
    """The folder in `root` for engines whose keys and values are the same: of one model, in one
    dtype. Page size, layout and backend may differ."""
    model = vllm_config.model_config
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    heads = [(s.num_kv_heads, s.head_size) for s in specs if isinstance(s, AttentionSpec)]
    layers = sorted(name for group in kv_cache_config.kv_cache_groups for name in group.layer_names)
    identity = (
        FORMAT, model.model, model.revision, str(model.dtype),
        vllm_config.cache_config.cache_dtype, sorted(set(heads)), layers,
    )  # fmt: skip
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()
    return PromptFiles(Path(root) / digest[:32])


def in_one_line(error: Exception) -> str:
    """What it says, and its kind where that is not for people."""
    said = " ".join(str(error).split())
    return said if isinstance(error, PromptFileError) else f"{type(error).__name__}: {said}"


def _first_tokens(metadata: Mapping[str, str]) -> dict[str, int]:
    return {
        name.removeprefix("first."): int(value)
        for name, value in metadata.items()
        if name.startswith("first.")
    }


def _checksum(tensors: dict[str, torch.Tensor]) -> int:
    import torch

    checksum = 0
    for name in sorted(tensors):
        data = tensors[name].contiguous().flatten().view(torch.uint8).numpy()
        checksum = zlib.crc32(data, zlib.crc32(name.encode(), checksum))
    return checksum
