# SPDX-License-Identifier: Apache-2.0
"""A connector over files in a folder that engines share: what one has computed of a prompt, others
load. Small enough to start one's own from.

    --kv-transfer-config '{"kv_connector": "ExampleConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": "/some/folder"}}'

With `"load_async": true` files are read between steps and hold nobody up; without, a step waits for
the files of its requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.prompt_files import (
    TOKENS_PER_CHUNK,
    prompt_files_of,
)
from vllm.v1.kv_cache_interface import CrossAttentionSpec

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_OPTIONS = ("shared_storage_path", "load_async")


@dataclass(frozen=True)
class LoadTokens:
    """Tokens `[begin, end)` of file `key` go into these pages, and all `num_encoder_tokens` of its
    encoder output into those of cross-attention. A page 0 is none; pages that have their content
    are 0 here."""

    req_id: str
    key: str
    begin: int
    end: int
    num_encoder_tokens: int
    block_ids: tuple[list[int], ...]
    is_async: bool


@dataclass(frozen=True)
class SaveTokens:
    """After this step tokens `[begin, end)` are in these pages; at `num_tokens` the file is
    complete. With `begin` 0 the encoder's output is, too."""

    req_id: str
    key: str
    begin: int
    end: int
    num_tokens: int
    num_encoder_tokens: int
    block_ids: tuple[list[int], ...]


@dataclass
class ExampleConnectorMetadata(KVConnectorMetadata):
    """`dropped`: requests whose saving has come to nothing."""

    loads: list[LoadTokens] = field(default_factory=list)
    saves: list[SaveTokens] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


@dataclass
class _Saving:
    """A prompt that is being computed, to be stored."""

    key: str
    num_tokens: int
    num_encoder_tokens: int
    block_ids: tuple[list[int], ...] = ()
    has_begun: bool = False


class ExampleConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's half, and the way to the worker's (`ExampleConnectorWorker`)."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = self._kv_transfer_config
        unknown = sorted(set(config.kv_connector_extra_config).difference(_OPTIONS))
        root = config.get_from_extra_config("shared_storage_path", None)
        if unknown or not isinstance(root, str):
            wrong = f"has no option {unknown[0]!r}" if unknown else "needs shared_storage_path"
            raise ValueError(
                f"ExampleConnector {wrong}; kv_connector_extra_config takes shared_storage_path "
                "(a folder that the engines share) and load_async (true or false)"
            )
        self._files = prompt_files_of(root, vllm_config, kv_cache_config)
        self._is_async = bool(config.get_from_extra_config("load_async", False))
        self._specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._keys: dict[str, list[str]] = {}
        self._num_stored: dict[str, int] = {}
        self._num_hits: dict[str, int] = {}
        self._saving: dict[str, _Saving] = {}
        self._metadata = ExampleConnectorMetadata()
        if role is KVConnectorRole.WORKER:
            from vllm.distributed.kv_transfer.kv_connector.v1.example_worker import (
                ExampleConnectorWorker,
            )

            self._worker = ExampleConnectorWorker(self._files)

    # --- The scheduler's half ---

    def on_new_request(self, request: Request) -> None:
        self._keys[request.request_id] = self._files.keys(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if not self._kv_transfer_config.is_kv_consumer:
            return 0, False
        request_id = request.request_id
        stored = self._num_stored.get(request_id)
        if stored is None:
            stored = self._files.num_stored_tokens(self._keys[request_id])
            self._num_stored[request_id] = stored
        self._num_hits[request_id] = num_computed_tokens
        # The prompt's last token is computed here in any case.
        stored = min(stored, request.num_prompt_tokens - 1)
        return max(0, stored - num_computed_tokens), self._is_async

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        request_id = request.request_id
        num_encoder_tokens = sum(f.mm_position.length for f in request.mm_features)
        if num_external_tokens:
            begin = self._num_hits[request_id]
            index = self._num_stored[request_id] // TOKENS_PER_CHUNK - 1
            self._metadata.loads.append(
                LoadTokens(
                    request_id,
                    self._keys[request_id][index],
                    begin,
                    begin + num_external_tokens,
                    num_encoder_tokens,
                    self._pages_to_fill(blocks),
                    self._is_async,
                )
            )
        keys = self._keys[request_id]
        if self._kv_transfer_config.is_kv_producer and keys:
            num_tokens = len(keys) * TOKENS_PER_CHUNK
            if self._files.num_stored_tokens(keys[-1:]) == 0:
                self._saving[request_id] = _Saving(keys[-1], num_tokens, num_encoder_tokens)

    def _pages_to_fill(self, blocks: KVCacheBlocks) -> tuple[list[int], ...]:
        """Encoder output that was found in the cache is not written again: others read it."""
        return tuple(
            [
                0 if isinstance(spec, CrossAttentionSpec) and block.block_hash
                else block.block_id
                for block in group
            ]
            for spec, group in zip(self._specs, blocks.blocks)
        )  # fmt: skip

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ExampleConnectorMetadata:
        metadata, self._metadata = self._metadata, ExampleConnectorMetadata()
        for request_id in scheduler_output.preempted_req_ids | scheduler_output.finished_req_ids:
            saving = self._saving.get(request_id)
            if saving is not None and saving.has_begun:
                metadata.dropped.append(request_id)
                del self._saving[request_id]
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id in self._saving:
                self._saving[new.req_id].block_ids = tuple(list(ids) for ids in new.block_ids)
                self._add_save(metadata, scheduler_output, new.req_id, new.num_computed_tokens)
        known = scheduler_output.scheduled_cached_reqs
        for request_id, added, num_computed in zip(
            known.req_ids, known.new_block_ids, known.num_computed_tokens
        ):
            if request_id in self._saving:
                for ids, new_ids in zip(self._saving[request_id].block_ids, added or ()):
                    ids.extend(new_ids)
                self._add_save(metadata, scheduler_output, request_id, num_computed)
        return metadata

    def _add_save(
        self,
        metadata: ExampleConnectorMetadata,
        scheduler_output: SchedulerOutput,
        request_id: str,
        num_computed: int,
    ) -> None:
        saving = self._saving[request_id]
        end = num_computed + scheduler_output.num_scheduled_tokens[request_id]
        metadata.saves.append(
            SaveTokens(
                request_id,
                saving.key,
                # What was in the cache already is stored as well.
                num_computed if saving.has_begun else 0,
                min(end, saving.num_tokens),
                saving.num_tokens,
                saving.num_encoder_tokens,
                tuple(list(ids) for ids in saving.block_ids),
            )
        )
        saving.has_begun = True
        if end >= saving.num_tokens:
            del self._saving[request_id]

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        for known in (self._keys, self._num_stored, self._num_hits):
            known.pop(request_id, None)
        saving = self._saving.pop(request_id, None)
        if saving is not None and saving.has_begun:
            self._metadata.dropped.append(request_id)
        return False, None

    def reset_cache(self) -> bool | None:
        self._num_stored.clear()
        return self._files.remove_all()

    # --- The worker's half ---

    @property
    def uses_layer_hooks(self) -> bool:
        return self._kv_transfer_config.is_kv_producer

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register_kv_caches(kv_caches, self._vllm_config, self._kv_cache_config)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ExampleConnectorMetadata)
        self._worker.start_step(metadata)

    def handle_failed_requests(self, req_ids: set[str]) -> None:
        self._worker.drop_saves(req_ids)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: `start_load_kv` has loaded all layers."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        self._worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        self._worker.finish_saves()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._worker.take_loaded()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_errors()

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER:
            self._worker.shutdown()
