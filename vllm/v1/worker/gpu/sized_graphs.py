# SPDX-License-Identifier: Apache-2.0
"""Steps from one recording, on devices whose graphs serve every smaller batch: prompts, single tokens
and both together, without Python in the forward pass and without padding.

    batch: 3 requests, 40 tokens | input_ids, positions, slots: 40 | query starts: 4 | lengths, tables: 3
                                 v written to the head of
    static inputs                | as many as were recorded, what lies behind is not read
                                 v read by
    graph                        -> hidden states (40, hidden)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.platforms.static_graph import SizedGraph
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, report_no_graphs
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBatchBuilder
from vllm.v1.worker.gpu.logits_graph import LogitsGraph
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.utils import AttentionGroup

logger = init_logger(__name__)

# Tokens that are tried, the most first, behind as many as a step has, or `_MOST_TOKENS`. Small numbers:
# where only products of few rows can be recorded. Primes: a kernel whose rows are not tokens is noticed;
# 2 and 3 divide too much. A graph for one token is used for nothing else.
_TOKENS = (1021, 509, 251, 127, 61, 31, 17, 8, 7, 5, 1)
_MOST_TOKENS = 4093
# What divides by 8 is common, so that these are recorded if 7 can be; what a step has may be any number.
_WITNESSES = {8: 7}
_LARGE_WITNESS = _TOKENS[0]


def _sizes_up_to(most: int) -> list[int]:
    """The sizes that are tried where a step has up to `most` tokens."""
    whole = [min(most, _MOST_TOKENS)] if most > _LARGE_WITNESS else []
    return [*whole, *(size for size in _TOKENS if size <= most)]


def _sizes_about(most: int, limit: int) -> list[int]:
    """The sizes that are tried if up to `most` are wanted; none is larger than `limit`."""
    larger = [size for size in _TOKENS if most <= size <= limit]
    return [*larger[-1:], *(size for size in _TOKENS if size < most)]


def _record_largest(
    sizes: Sequence[int], record: Callable[[int], None]
) -> tuple[int, RuntimeError | None]:
    """The first of `sizes` that can be recorded, and why not one before; 0 if none can."""
    why: RuntimeError | None = None
    for size in sizes:
        try:
            if size in _WITNESSES or size > _LARGE_WITNESS:
                record(_WITNESSES.get(size, _LARGE_WITNESS))
            record(size)
        except RuntimeError as error:
            why = why or error
            continue
        return size, why
    return 0, why


class SizedGraphManager(CudaGraphManager):
    """One graph for all steps of up to so many tokens as it could be recorded for."""

    def __init__(
        self,
        graph_cls: type[SizedGraph],
        model_state: ModelState,
        kv_cache_config: KVCacheConfig,
        attn_groups: list[list[AttentionGroup]],
        batch_builder: InputBatchBuilder,
    ) -> None:
        self._graph_cls = graph_cls
        self._model_state = model_state
        self._kv_cache_config = kv_cache_config
        self._attn_groups = attn_groups
        self._batch_builder = batch_builder
        self._graph: SizedGraph | None = None
        self._logits: LogitsGraph | None = None
        self.max_num_tokens = self.max_num_reqs = 0

    def capture(self) -> int:
        """Records the graph, if the model can be recorded; else the log says why not."""
        limits = self._config.scheduler_config
        most_reqs = min(limits.max_num_seqs, self._largest_graph)
        num_tokens, why = _record_largest(
            _sizes_up_to(limits.max_num_batched_tokens),
            lambda size: self._record(size, min(size, most_reqs)),
        )
        if not num_tokens:
            report_no_graphs(self._config, [str(why)])
            return 0
        if why is not None:
            logger.info("Steps of more than %d tokens run without a graph: %s", num_tokens, why)
        num_rows, why = _record_largest(
            _sizes_about(most_reqs, limits.max_num_batched_tokens), self._record_logits
        )
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
        batch = self._batch_builder.in_place(num_tokens, num_reqs, num_reqs)
        metadata = self._model_state.prepare_attn(batch, self._attn_groups)
        slots = build_slot_mappings_by_layer(batch.slot_mappings, self._kv_cache_config)
        arguments = self._model_state.prepare_inputs(batch)
        with set_forward_context(metadata, self._config, num_tokens, slots):
            graph = self._graph_cls(
                lambda: self._model_state.model(**arguments), num_tokens, num_reqs
            )
        self._graph, self._logits = graph, None
        # The graph has their addresses; the model may be given others.
        model = self._model_state.model
        self._weights = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
        self.max_num_tokens, self.max_num_reqs = num_tokens, num_reqs

    def _record_logits(self, num_rows: int) -> None:
        places = self._batch_builder.in_place(1, 1, num_rows).logits_indices
        self._logits = LogitsGraph(
            self._graph_cls, self._model_state.model, self._graph.output, places
        )

    def compute_logits(self, hidden_states: torch.Tensor, batch: InputBatch) -> torch.Tensor:
        logits, num_rows = self._logits, len(batch.sampling)
        if logits is None or num_rows > logits.max_num_rows or not self._wrote(hidden_states):
            return super().compute_logits(hidden_states, batch)
        return logits.replay(num_rows)

    def _wrote(self, hidden_states: torch.Tensor) -> bool:
        """Whether they are the graph's."""
        return hidden_states.data_ptr() == self._graph.output.data_ptr()

    def has_graph_for(self, batch: InputBatch) -> bool:
        """Whether `batch` has no more tokens and requests than were recorded, and encodes nothing."""
        fits = batch.num_tokens <= self.max_num_tokens and batch.num_reqs <= self.max_num_reqs
        return fits and not batch.encoded

    def _replay(self, batch: InputBatch) -> torch.Tensor:
        return self._graph.replay(batch.num_tokens, batch.num_reqs)
