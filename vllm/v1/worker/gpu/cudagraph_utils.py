# SPDX-License-Identifier: Apache-2.0
"""Decode steps from graphs: the model's forward pass, recorded once for each of some batch sizes and
replayed without Python.

    batch of 5       | input_ids | positions | seq_lens | slots | block tables |
                     v copied to the head of
    static inputs    | 5 rows, 3 rows of padding: no tokens, no slots | rows that graph 8 does not read |
                     v read by
    graph of 8       -> hidden states (8, hidden), of which 5 rows count

A recording holds addresses, launch sizes and numbers of the host, so that these must not depend on the
step: the inputs lie in place, and a request counts as `max_model_len` long wherever the host must know.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch

from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.platforms.static_graph import SizedGraph, StaticGraph
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.utils.mem_utils import GiB
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBatchBuilder
from vllm.v1.worker.gpu.kv_connector import NoKVConnector
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.utils import AttentionGroup

logger = init_logger(__name__)


def reasons_against_graphs(
    vllm_config: VllmConfig,
    attn_groups: Sequence[Sequence[AttentionGroup]],
    kv_connector: NoKVConnector,
) -> list[str]:
    """Why no decode step of this model can be recorded; empty if all can."""
    reasons = []
    for group in (group for groups in attn_groups for group in groups):
        builder = type(group.get_metadata_builder())
        support = builder.get_cudagraph_support(vllm_config, group.kv_cache_spec)
        if support is AttentionCGSupport.NEVER:
            reasons.append(
                f"{group.backend.get_name()} cannot be recorded with a "
                f"{type(group.kv_cache_spec).__name__}, as {group.layer_names[0]} has"
            )
    if kv_connector.uses_layer_hooks:
        reasons.append("the KV connector works inside the forward pass, layer by layer")
    return reasons


def report_no_graphs(vllm_config: VllmConfig, reasons: list[str]) -> None:
    """A warning where the user asked for graphs; where a platform tries by itself it is no fault."""
    by_default = vllm_config.compilation_config.cudagraph_mode_is_default
    level = logging.INFO if by_default else logging.WARNING
    logger.log(level, "No graphs are recorded: %s", "; ".join(reasons))


def _graph_class() -> type[StaticGraph] | type[SizedGraph]:
    return resolve_obj_by_qualname(current_platform.get_static_graph_wrapper_cls())


class StaticInputs:
    """Inputs in place, for batches of up to `max_num_reqs` requests with one token each.

    On the device: input_ids, seq_lens (max_num_reqs,) int32, positions (max_num_reqs,) int64,
    query_start_loc (max_num_reqs + 1,) int32, which never changes; of each KV cache group slots
    (max_num_reqs,) int64 and blocks (max_num_reqs, most blocks of a request) int32.
    """

    def __init__(self, max_num_reqs: int, block_tables: BlockTables, device: torch.device) -> None:
        ints = dict(dtype=torch.int32, device=device)
        longs = dict(dtype=torch.int64, device=device)
        self.input_ids = torch.zeros(max_num_reqs, **ints)
        self.positions = torch.zeros(max_num_reqs, **longs)
        self.seq_lens = torch.zeros(max_num_reqs, **ints)
        self.query_start_loc = torch.arange(max_num_reqs + 1, **ints)
        tables = block_tables.tables
        self.slots = [torch.full((max_num_reqs,), -1, **longs) for _ in tables]
        self.blocks = [torch.zeros(max_num_reqs, table.max_num_blocks, **ints) for table in tables]

    def copy_in(self, batch: InputBatch, size: int) -> None:
        """Takes over `batch`, padded to `size` requests: those more have no tokens, so that they read
        nothing, and no slots, so that they write nothing."""
        n = batch.num_reqs
        self.input_ids[:n].copy_(batch.input_ids)
        self.positions[:n].copy_(batch.positions)
        self.seq_lens[:n].copy_(batch.seq_lens)
        self.seq_lens[n:size].zero_()
        for group, (slots, blocks) in enumerate(zip(batch.slot_mappings, batch.block_tables)):
            self.slots[group][:n].copy_(slots)
            self.slots[group][n:size].fill_(-1)
            self.blocks[group][:n, : blocks.shape[1]].copy_(blocks)

    def batch(self, size: int, max_model_len: int) -> InputBatch:
        """The first `size` rows as a batch, each request as long as any can be."""
        starts, ones = np.arange(size + 1, dtype=np.int32), np.ones(size, dtype=np.int32)
        nothing = np.zeros(size, dtype=np.int32)
        return InputBatch(
            req_ids=[""] * size,
            rows=nothing,
            num_scheduled_tokens=ones,
            num_computed_tokens=ones * (max_model_len - 1),
            query_start_loc_np=starts,
            seq_lens_np=ones * max_model_len,
            sampling=nothing,
            num_tokens=size,
            input_ids=self.input_ids[:size],
            positions=self.positions[:size],
            query_start_loc=self.query_start_loc[: size + 1],
            query_start_loc_cpu=torch.from_numpy(starts),
            seq_lens=self.seq_lens[:size],
            logits_indices=self.query_start_loc[:size],
            block_tables=[blocks[:size] for blocks in self.blocks],
            slot_mappings=[slots[:size] for slots in self.slots],
            encoded=[],
            encoder_seq_lens_np=nothing,
            encoder_seq_lens=torch.zeros_like(self.seq_lens[:size]),
        )


class CudaGraphManager:
    """Graphs of decode steps, one for each of `cudagraph_capture_sizes`, on any device that has
    them."""

    def __init__(
        self,
        model_state: ModelState,
        kv_cache_config: KVCacheConfig,
        attn_groups: list[list[AttentionGroup]],
        batch_builder: InputBatchBuilder,
    ) -> None:
        self._model_state = model_state
        self._vllm_config = model_state.vllm_config
        self._kv_cache_config = kv_cache_config
        self._attn_groups = attn_groups
        self._sizes = self._vllm_config.compilation_config.cudagraph_capture_sizes
        self.inputs = StaticInputs(
            self._sizes[-1], batch_builder.block_tables, model_state.device
        )
        self._graph_cls = _graph_class()
        self._graphs: dict[int, StaticGraph] = {}

    def capture(self) -> int:
        """Records all graphs, with rows of padding alone: nothing is written to the KV cache. Returns
        the bytes of the device that they take.

        Raises:
            RuntimeError: the model did what cannot be recorded, or memory does not suffice.
        """
        device = self._model_state.device
        free_before, _ = current_platform.mem_get_info(device)
        # The largest first: the others fit into its memory.
        for size in reversed(self._sizes):
            try:
                self._graphs[size] = self._capture(size)
            except RuntimeError as error:
                raise RuntimeError(
                    f"a step of {size} requests cannot be recorded as a graph ({error}); leave "
                    "cudagraph_mode out of --compilation-config, or lower "
                    "--gpu-memory-utilization if it is for want of memory"
                ) from error
        current_platform.synchronize(device)
        taken = max(free_before - current_platform.mem_get_info(device)[0], 0)
        logger.info("Graphs for %s requests, in %.2f GiB", self._sizes, taken / GiB)
        return taken

    def _capture(self, size: int) -> StaticGraph:
        """The graph of a batch of `size` requests."""
        config = self._vllm_config
        batch = self.inputs.batch(size, config.model_config.max_model_len)
        metadata = self._model_state.prepare_attn(batch, self._attn_groups)
        slots = build_slot_mappings_by_layer(batch.slot_mappings, self._kv_cache_config)
        arguments = self._model_state.prepare_inputs(batch)
        with set_forward_context(metadata, config, size, slots):
            return self._graph_cls(lambda: self._model_state.model(**arguments))

    def has_graph_for(self, batch: InputBatch) -> bool:
        """Whether `batch` has one token a request, and not too many of them."""
        return batch.num_tokens == batch.num_reqs <= self._sizes[-1]

    def replay(self, batch: InputBatch) -> torch.Tensor:
        """The model's hidden states of `batch`, which `has_graph_for`: (num_tokens, hidden). They hold
        until the next replay."""
        return self._replay(batch)

    def compute_logits(self, hidden_states: torch.Tensor, batch: InputBatch) -> torch.Tensor:
        """The model's logits (n, vocab) after the tokens of `batch` that are sampled after, from all
        its hidden_states (num_tokens, hidden). They hold until the next replay."""
        rows = hidden_states.index_select(0, batch.logits_indices)
        return self._model_state.model.compute_logits(rows)

    def _replay(self, batch: InputBatch) -> torch.Tensor:
        size = self._sizes[bisect_left(self._sizes, batch.num_reqs)]
        self.inputs.copy_in(batch, size)
        return self._graphs[size].replay()[: batch.num_reqs]


def make_graph_manager(
    model_state: ModelState,
    kv_cache_config: KVCacheConfig,
    attn_groups: list[list[AttentionGroup]],
    batch_builder: InputBatchBuilder,
) -> CudaGraphManager:
    """The manager of the platform's kind of graphs."""
    from vllm.v1.worker.gpu.sized_graphs import SizedGraphManager

    graph_cls = _graph_class()
    arguments = model_state, kv_cache_config, attn_groups, batch_builder
    if issubclass(graph_cls, SizedGraph):
        return SizedGraphManager(graph_cls, *arguments)
    return CudaGraphManager(*arguments)
