# SPDX-License-Identifier: Apache-2.0
"""Steps from one recording, on devices whose graphs serve every smaller batch: prompts, single tokens
and both together, without Python in the forward pass and without padding.

    batch: 3 requests, 40 tokens | input_ids, positions, slots: 40 | query starts: 4 | lengths, tables: 3
                                 v copied to the head of
    static inputs                | as many as were recorded, what lies behind is not read
                                 v read by
    graph                        -> hidden states (40, hidden)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.platforms.static_graph import SizedGraph
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, report_no_graphs
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.logits_graph import LogitsGraph
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.utils import AttentionGroup

logger = init_logger(__name__)

# Tokens that are tried, the most first. In steps of more Python's part is small. Small numbers: where
# only products of few rows can be recorded. Primes: a kernel whose rows are not tokens is noticed; 2 and
# 3 divide too much. A graph for one token is used for nothing else.
_TOKENS = (1021, 509, 251, 127, 61, 31, 17, 8, 7, 5, 1)
# What divides by 8 is common, so that these are recorded if 7 can be.
_WITNESSES = {8: 7}


def _sizes_about(most: int) -> list[int]:
    """The sizes that are tried if up to `most` are wanted."""
    larger = [size for size in _TOKENS if size >= most]
    return [*larger[-1:], *(size for size in _TOKENS if size < most)]


def _record_largest(
    sizes: Sequence[int], record: Callable[[int], None]
) -> tuple[int, RuntimeError | None]:
    """The first of `sizes` that can be recorded, and why not one before; 0 if none can."""
    why: RuntimeError | None = None
    for size in sizes:
        try:
            if size in _WITNESSES:
                record(_WITNESSES[size])
            record(size)
        except RuntimeError as error:
            why = why or error
            continue
        return size, why
    return 0, why


class SizedInputs:
    """Inputs in place, for batches of up to `max_num_tokens` tokens of up to `max_num_reqs` requests;
    shapes and dtypes as in `InputBatch`."""

    def __init__(
        self, max_num_tokens: int, max_num_reqs: int, block_tables: BlockTables, device: torch.device
    ) -> None:
        ints, longs = dict(dtype=torch.int32, device=device), dict(dtype=torch.int64, device=device)
        self.input_ids = torch.zeros(max_num_tokens, **ints)
        self.positions = torch.zeros(max_num_tokens, **longs)
        self.query_start_loc = torch.zeros(max_num_reqs + 1, **ints)
        self.seq_lens = torch.zeros(max_num_reqs, **ints)
        self.encoder_seq_lens = torch.zeros(max_num_reqs, **ints)
        tables = block_tables.tables
        self.slots = [torch.full((max_num_tokens,), -1, **longs) for _ in tables]
        self.blocks = [torch.zeros(max_num_reqs, table.max_num_blocks, **ints) for table in tables]

    def copy_in(self, batch: InputBatch) -> None:
        tokens, reqs = batch.num_tokens, batch.num_reqs
        self.input_ids[:tokens].copy_(batch.input_ids)
        self.positions[:tokens].copy_(batch.positions)
        self.query_start_loc[: reqs + 1].copy_(batch.query_start_loc)
        self.seq_lens[:reqs].copy_(batch.seq_lens)
        self.encoder_seq_lens[:reqs].copy_(batch.encoder_seq_lens)
        for group, (slots, blocks) in enumerate(zip(batch.slot_mappings, batch.block_tables)):
            self.slots[group][: len(slots)].copy_(slots)  # none of an encoder
            self.blocks[group][:reqs, : blocks.shape[1]].copy_(blocks)

    def batch(self) -> InputBatch:
        """All of it as a batch, whose numbers on the host are nobody's."""
        num_tokens, num_reqs = len(self.input_ids), len(self.seq_lens)
        ones, nothing = np.ones(num_reqs, np.int32), np.zeros(num_reqs, np.int32)
        starts = np.arange(num_reqs + 1, dtype=np.int32)
        return InputBatch(
            req_ids=[""] * num_reqs,
            rows=nothing,
            num_scheduled_tokens=ones,
            num_computed_tokens=nothing,
            query_start_loc_np=starts,
            seq_lens_np=ones,
            sampling=nothing,
            num_tokens=num_tokens,
            input_ids=self.input_ids,
            positions=self.positions,
            query_start_loc=self.query_start_loc,
            query_start_loc_cpu=torch.from_numpy(starts),
            seq_lens=self.seq_lens,
            block_tables=self.blocks,
            slot_mappings=self.slots,
            encoded=[],
            encoder_seq_lens_np=nothing,
            encoder_seq_lens=self.encoder_seq_lens,
        )


class SizedGraphManager(CudaGraphManager):
    """One graph for all steps of up to so many tokens as it could be recorded for."""

    def __init__(
        self,
        graph_cls: type[SizedGraph],
        model_state: ModelState,
        kv_cache_config: KVCacheConfig,
        attn_groups: list[list[AttentionGroup]],
        block_tables: BlockTables,
    ) -> None:
        self._graph_cls = graph_cls
        self._model_state = model_state
        self._kv_cache_config = kv_cache_config
        self._attn_groups = attn_groups
        self._block_tables = block_tables
        self._graph: SizedGraph | None = None
        self._logits: LogitsGraph | None = None
        self.max_num_tokens = self.max_num_reqs = 0

    def capture(self) -> int:
        """Records the graph, if the model can be recorded; else the log says why not."""
        limits = self._config.scheduler_config
        most_reqs = min(limits.max_num_seqs, self._largest_graph)
        num_tokens, why = _record_largest(
            [size for size in _TOKENS if size <= limits.max_num_batched_tokens],
            lambda size: self._record(size, min(size, most_reqs)),
        )
        if not num_tokens:
            report_no_graphs(self._config, [str(why)])
            return 0
        if why is not None:
            logger.info("Steps of more than %d tokens run without a graph: %s", num_tokens, why)
        num_rows, why = _record_largest(_sizes_about(most_reqs), self._record_logits)
        logger.debug(
            "A graph for up to %d tokens, one of the logits of %d: %s", num_tokens, num_rows, why
        )
        return 0

    @property
    def _config(self) -> VllmConfig:
        return self._model_state.vllm_config

    @property
    def _largest_graph(self) -> int:
        return self._config.compilation_config.cudagraph_capture_sizes[-1]

    def _record(self, num_tokens: int, num_reqs: int) -> None:
        inputs = SizedInputs(num_tokens, num_reqs, self._block_tables, self._model_state.device)
        batch = inputs.batch()
        metadata = self._model_state.prepare_attn(batch, self._attn_groups)
        slots = build_slot_mappings_by_layer(batch.slot_mappings, self._kv_cache_config)
        arguments = self._model_state.prepare_inputs(batch)

        def run() -> torch.Tensor:
            hidden_states = self._model_state.model(**arguments)
            self._row_size, self._row_dtype = hidden_states.shape[-1], hidden_states.dtype
            return hidden_states

        with set_forward_context(metadata, self._config, num_tokens, slots):
            graph = self._graph_cls(run, num_tokens, num_reqs)
        self.inputs, self._graph, self._logits = inputs, graph, None
        # The graph has their addresses; the model may be given others.
        model = self._model_state.model
        self._weights = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
        self.max_num_tokens, self.max_num_reqs = num_tokens, num_reqs

    def _record_logits(self, num_rows: int) -> None:
        state = self._model_state
        self._logits = LogitsGraph(
            self._graph_cls, state.model, num_rows, self._row_size, self._row_dtype, state.device
        )

    def compute_logits(self, hidden_states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        if self._logits is None or len(places) > self._logits.max_num_rows:
            return super().compute_logits(hidden_states, places)
        return self._logits.replay(hidden_states, places)

    def has_graph_for(self, batch: InputBatch) -> bool:
        """Whether `batch` has no more tokens and requests than were recorded, and encodes nothing."""
        fits = batch.num_tokens <= self.max_num_tokens and batch.num_reqs <= self.max_num_reqs
        return fits and not batch.encoded

    def _replay(self, batch: InputBatch) -> torch.Tensor:
        self.inputs.copy_in(batch)
        # Graphs share memory, and another engine's may run before these are sampled from.
        return self._graph.replay(batch.num_tokens, batch.num_reqs).clone()
