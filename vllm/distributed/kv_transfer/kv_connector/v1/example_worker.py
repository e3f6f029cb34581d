# SPDX-License-Identifier: Apache-2.0
"""The worker's half of `ExampleConnector`: between files and pages."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnectorMetadata,
    LoadTokens,
    SaveTokens,
)
from vllm.distributed.kv_transfer.kv_connector.v1.prompt_files import (
    PromptFileError,
    PromptFiles,
    StoredPrompt,
    in_one_line,
)
from vllm.distributed.kv_transfer.kv_connector.v1.token_access import LayerTokens, access_layers
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import CrossAttentionSpec, KVCacheConfig, SlidingWindowSpec

logger = init_logger(__name__)


@dataclass
class _Buffer:
    """A prompt on its way into a file: (num_tokens, ...) tensors, filled step by step."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    first_tokens: dict[str, int] = field(default_factory=dict)


class ExampleConnectorWorker:
    """Reads files into pages and pages into files."""

    def __init__(self, files: PromptFiles) -> None:
        self._files = files
        self._layers: dict[str, LayerTokens] = {}
        self._saves: list[SaveTokens] = []
        self._buffers: dict[str, _Buffer] = {}
        self._errors: set[int] = set()
        self._reading: dict[str, tuple[LoadTokens, Future[StoredPrompt]]] = {}
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="prompt-files")

    def register_kv_caches(
        self,
        kv_caches: dict[str, torch.Tensor],
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        """The caches to read and write.

        Raises:
            ValueError: of one of them it is not known where tokens are.
        """
        self._layers = access_layers(kv_caches, vllm_config, kv_cache_config)

    def drop_saves(self, req_ids: set[str]) -> None:
        """The step computes nothing of these requests."""
        for req_id in req_ids:
            self._buffers.pop(req_id, None)
        self._saves = [save for save in self._saves if save.req_id not in req_ids]

    def start_step(self, metadata: ExampleConnectorMetadata) -> None:
        """Loads what is to be there before the step, and starts to read the rest."""
        for req_id in metadata.dropped:
            self._buffers.pop(req_id, None)
        self._saves = metadata.saves
        for load in metadata.loads:
            if load.is_async:
                self._reading[load.req_id] = load, self._readers.submit(self._files.read, load.key)
                continue
            self._load(load, partial(self._files.read, load.key))

    # --- Loading ---

    def take_loaded(self) -> set[str]:
        """Requests whose asynchronous load is over."""
        over = {req_id for req_id, (_, read) in self._reading.items() if read.done()}
        for req_id in over:
            load, read = self._reading.pop(req_id)
            self._load(load, read.result)
        return over

    def take_errors(self) -> set[int]:
        """Pages that were to be filled and were not."""
        errors, self._errors = self._errors, set()
        return errors

    def _load(self, load: LoadTokens, read: Callable[[], StoredPrompt]) -> None:
        try:
            prompt = read()
            found = [self._find(load, prompt, name) for name in self._layers]
            for layer, begin, tokens in found:
                layer.write(load.block_ids[layer.group], begin, tokens)
        except Exception as error:  # Whatever is wrong with a file, it is this load's alone.
            self._fail(load, error)

    def _find(
        self, load: LoadTokens, prompt: StoredPrompt, name: str
    ) -> tuple[LayerTokens, int, dict[str, torch.Tensor]]:
        """A layer, its first token that is loaded, and what is to be written from there on."""
        layer = self._layers[name]
        tokens = {part: prompt.tensors.get(f"{name}.{part}") for part in layer.parts}
        begin, end = load.begin, load.end
        is_cross = isinstance(layer.spec, CrossAttentionSpec)
        if is_cross:
            begin, end = 0, load.num_encoder_tokens
        if any(part is None or part.dim() == 0 or len(part) < end for part in tokens.values()):
            raise PromptFileError(f"{self._files.path(load.key)} lacks tokens of layer {name}")
        if not is_cross:
            self._check_window(layer, load, prompt.first_tokens.get(name, end))
        tokens = {part: values[begin:end] for part, values in tokens.items()}
        try:
            layer.check(tokens)
        except ValueError as error:
            raise PromptFileError(f"{self._files.path(load.key)}: {name}: {error}") from error
        return layer, begin, tokens

    def _check_window(self, layer: LayerTokens, load: LoadTokens, first_token: int) -> None:
        """The token after the loaded ones looks at a window of them; all must be in the file."""
        needed = load.begin
        if isinstance(layer.spec, SlidingWindowSpec):
            needed = max(needed, load.end - layer.spec.sliding_window + 1)
        if first_token > needed:
            raise PromptFileError(
                f"{self._files.path(load.key)} begins at token {first_token}, not {needed}"
            )

    def _fail(self, load: LoadTokens, error: Exception) -> None:
        said = in_one_line(error)
        logger.warning("request %s: no keys and values from a file: %s", load.req_id, said)
        specs = {layer.group: layer.spec for layer in self._layers.values()}
        for group, spec in specs.items():
            pages = load.block_ids[group]
            if not isinstance(spec, CrossAttentionSpec):
                size = spec.block_size
                pages = pages[load.begin // size : -(-load.end // size)]
            self._errors.update(page for page in pages if page)

    # --- Saving ---

    def save_layer(self, name: str) -> None:
        """The layer's cache holds the step's keys and values."""
        layer = self._layers[name]
        for save in self._saves:
            buffer = self._buffers.setdefault(save.req_id, _Buffer())
            pages, begin, end = save.block_ids[layer.group], save.begin, save.end
            num_tokens = save.num_tokens
            if isinstance(layer.spec, CrossAttentionSpec):
                if begin > 0:
                    continue
                end = num_tokens = save.num_encoder_tokens
            elif begin == 0:
                # Pages of a sliding window that were not needed any more are 0.
                begin = next((i for i, page in enumerate(pages) if page), 0) * layer.spec.block_size
            if name not in buffer.first_tokens:
                buffer.first_tokens[name] = begin
            if begin >= end:
                continue
            for part, tokens in layer.read(pages, begin, end).items():
                key = f"{name}.{part}"
                if key not in buffer.tensors:
                    shape = (num_tokens, *tokens.shape[1:])
                    buffer.tensors[key] = torch.zeros(shape, dtype=tokens.dtype)
                buffer.tensors[key][begin:end] = tokens

    def finish_saves(self) -> None:
        """Writes the files that have become complete."""
        for save in self._saves:
            buffer = self._buffers.get(save.req_id)
            if buffer is None or save.end < save.num_tokens:
                continue
            del self._buffers[save.req_id]
            try:
                self._files.write(save.key, StoredPrompt(buffer.tensors, buffer.first_tokens))
            except PromptFileError as error:
                # Others compute the prompt themselves; this request has lost nothing.
                logger.warning("request %s: its prompt is not stored: %s", save.req_id, error)
        self._saves = []

    def shutdown(self) -> None:
        """Waits for nobody."""
        self._readers.shutdown(wait=False, cancel_futures=True)
