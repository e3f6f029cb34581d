# SPDX-License-Identifier: Apache-2.0
"""One step's batch: requests one after the other, a token after the other, ragged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.buffers import Field, PackedBuffer
from vllm.v1.worker.gpu.states import RequestState


@dataclass
class InputBatch:
    """A batch of `num_reqs` requests and `num_tokens` tokens.

    On the host:
        rows: (num_reqs,) int32, each request's row in the states
        num_scheduled_tokens, seq_lens_np: (num_reqs,) int32
        query_start_loc_np: (num_reqs + 1,) int32
        sampling: indices into the batch of the requests that get a token in this step, those whose
            tokens are all computed by its end
        encoded: those of `req_ids` whose encoder inputs are encoded in this step, in their order
        encoder_seq_lens_np: (num_reqs,) int32, tokens of each request's encoder output
    On the device:
        logits_indices: (len(sampling),) int32, tokens of the batch that those are sampled after
        input_ids (num_tokens,) int32, positions (num_tokens,) int64, query_start_loc
        (num_reqs + 1,) int32, seq_lens (num_reqs,) int32; for each KV cache group a block table
        (num_reqs, max_blocks) int32, with gaps between its rows, and slots (num_tokens,) int64, in
        groups of cross-attention (encoder tokens of this step,); encoder_seq_lens likewise
    """

    req_ids: list[str]
    rows: np.ndarray
    num_scheduled_tokens: np.ndarray
    num_computed_tokens: np.ndarray
    query_start_loc_np: np.ndarray
    seq_lens_np: np.ndarray
    sampling: np.ndarray
    num_tokens: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    logits_indices: torch.Tensor
    block_tables: list[torch.Tensor]
    slot_mappings: list[torch.Tensor]
    encoded: list[str]
    encoder_seq_lens_np: np.ndarray
    encoder_seq_lens: torch.Tensor

    @property
    def num_reqs(self) -> int:
        """Requests in the batch."""
        return len(self.req_ids)


class _Kept(NamedTuple):
    """Tokens whose K and V a step writes, (n,) each: the row of their request and their position;
    and the most positions that a request of the batch looks at."""

    rows: np.ndarray
    positions: np.ndarray
    max_seq_len: int


class InputBatchBuilder:
    """Writes a step's inputs into one buffer, by indexing into the request states.

    `max_num_encoder_tokens`: the most that are encoded in one step.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_num_tokens: int,
        block_tables: BlockTables,
        device: torch.device,
        pin_memory: bool = False,
        max_num_encoder_tokens: int = 0,
    ) -> None:
        fields = [
            Field("input_ids", "int32", (max_num_tokens,)),
            Field("positions", "int64", (max_num_tokens,)),
            Field("query_start_loc", "int32", (max_num_reqs + 1,)),
            Field("seq_lens", "int32", (max_num_reqs,)),
            Field("encoder_seq_lens", "int32", (max_num_reqs,)),
            # A graph may be recorded for more of them than there are requests.
            Field("logits_indices", "int32", (max(max_num_tokens, max_num_reqs),)),
        ]
        for group, table in enumerate(block_tables.tables):
            num_slots = max_num_encoder_tokens if table.holds_encoder else max_num_tokens
            fields.append(Field(f"slots_{group}", "int64", (num_slots,)))
            fields.append(Field(f"blocks_{group}", "int32", (max_num_reqs, table.max_num_blocks)))
        self._buffer = PackedBuffer(fields, device, pin_memory)
        self._starts_cpu = torch.from_numpy(self._buffer.host["query_start_loc"])
        self._count = np.arange(max_num_reqs + 1, dtype=np.int32)
        self.block_tables = block_tables
        self._has_encoder = any(table.holds_encoder for table in block_tables.tables)

    def build(self, scheduler_output: SchedulerOutput, states: RequestState) -> InputBatch:
        """The batch that `scheduler_output` asks for; requests with one token come first."""
        counts = scheduler_output.num_scheduled_tokens
        req_ids = sorted(counts, key=counts.__getitem__)
        num_reqs, num_tokens = len(req_ids), scheduler_output.total_num_scheduled_tokens
        index_of = states.req_id_to_index
        rows = np.array([index_of[req_id] for req_id in req_ids], np.int32)
        scheduled = np.array([counts[req_id] for req_id in req_ids], np.int32)
        computed = states.num_computed_tokens[rows]

        self._buffer.begin_step()
        host = self._buffer.host
        starts = host["query_start_loc"]
        seq_lens = np.add(computed, scheduled, out=host["seq_lens"][:num_reqs])
        encoder_lens = host["encoder_seq_lens"][:num_reqs]
        if self._has_encoder:
            encoder_lens[:] = states.encoder_len[rows]
        positions = host["positions"][:num_tokens]
        if num_tokens == num_reqs:
            starts[: num_reqs + 1] = self._count[: num_reqs + 1]
            token_rows, positions[:] = rows, computed
        else:
            starts[0] = 0
            np.cumsum(scheduled, out=starts[1 : num_reqs + 1])
            token_rows = np.repeat(rows, scheduled)
            positions[:] = _count_up(scheduled) + np.repeat(computed, scheduled)
        host["input_ids"][:num_tokens] = states.all_token_ids[token_rows, positions]
        sampling = np.flatnonzero(seq_lens == states.total_len[rows])
        np.subtract(starts[1:][sampling], 1, out=host["logits_indices"][: len(sampling)])

        encoded = [r for r in req_ids if r in scheduler_output.scheduled_encoder_inputs]
        own = _Kept(token_rows, positions, int(seq_lens.max()))
        encoders = _encoder_tokens(encoded, encoder_lens, states) if self._has_encoder else own
        sizes = [
            self._write_group(group, rows, encoders if table.holds_encoder else own)
            for group, table in enumerate(self.block_tables.tables)
        ]
        self._buffer.copy_to_device()

        device = self._buffer.device
        return InputBatch(
            req_ids=req_ids,
            rows=rows,
            num_scheduled_tokens=scheduled,
            num_computed_tokens=computed,
            query_start_loc_np=starts[: num_reqs + 1],
            seq_lens_np=seq_lens,
            sampling=sampling,
            num_tokens=num_tokens,
            input_ids=device("input_ids", num_tokens),
            positions=device("positions", num_tokens),
            query_start_loc=device("query_start_loc", num_reqs + 1),
            query_start_loc_cpu=self._starts_cpu[: num_reqs + 1],
            seq_lens=device("seq_lens", num_reqs),
            logits_indices=device("logits_indices", len(sampling)),
            block_tables=[
                device(f"blocks_{group}", num_reqs, width)
                for group, (_, width) in enumerate(sizes)
            ],
            slot_mappings=[
                device(f"slots_{group}", num_slots) for group, (num_slots, _) in enumerate(sizes)
            ],
            encoded=encoded,
            encoder_seq_lens_np=encoder_lens,
            encoder_seq_lens=device("encoder_seq_lens", num_reqs),
        )

    def in_place(self, num_tokens: int, num_reqs: int, num_sampled: int) -> InputBatch:
        """A batch of so many tokens and requests where every batch is written, with block tables as
        wide as any. Its numbers on the host are nobody's."""
        ones, nothing = np.ones(num_reqs, np.int32), np.zeros(num_reqs, np.int32)
        starts, device = np.arange(num_reqs + 1, dtype=np.int32), self._buffer.device
        return InputBatch(
            req_ids=[""] * num_reqs,
            rows=nothing,
            num_scheduled_tokens=ones,
            num_computed_tokens=nothing,
            query_start_loc_np=starts,
            seq_lens_np=ones,
            sampling=nothing,
            num_tokens=num_tokens,
            input_ids=device("input_ids", num_tokens),
            positions=device("positions", num_tokens),
            query_start_loc=device("query_start_loc", num_reqs + 1),
            query_start_loc_cpu=torch.from_numpy(starts),
            seq_lens=device("seq_lens", num_reqs),
            logits_indices=device("logits_indices", num_sampled),
            block_tables=[
                device(f"blocks_{group}", num_reqs, table.max_num_blocks)
                for group, table in enumerate(self.block_tables.tables)
            ],
            # None of an encoder: what is encoded is written by other steps.
            slot_mappings=[
                device(f"slots_{group}", 0 if table.holds_encoder else num_tokens)
                for group, table in enumerate(self.block_tables.tables)
            ],
            encoded=[],
            encoder_seq_lens_np=nothing,
            encoder_seq_lens=device("encoder_seq_lens", num_reqs),
        )

    def _write_group(self, group: int, rows: np.ndarray, kept: _Kept) -> tuple[int, int]:
        """Writes a group's slots and block table; returns the number of slots, and the width."""
        table, host = self.block_tables.tables[group], self._buffer.host
        table.slots(kept.rows, kept.positions, host[f"slots_{group}"])
        return len(kept.positions), table.gather(rows, kept.max_seq_len, host[f"blocks_{group}"])


def _count_up(counts: np.ndarray) -> np.ndarray:
    """0 ... n - 1 for each n of `counts`, one behind the other."""
    ends = np.cumsum(counts)
    return np.arange(counts.sum()) - np.repeat(ends - counts, counts)


def _encoder_tokens(encoded: list[str], encoder_lens: np.ndarray, states: RequestState) -> _Kept:
    """The encoder tokens of the requests `encoded`."""
    index_of = states.req_id_to_index
    rows = np.fromiter((index_of[req_id] for req_id in encoded), np.int32, len(encoded))
    lengths = states.encoder_len[rows]
    return _Kept(np.repeat(rows, lengths), _count_up(lengths), int(encoder_lens.max()))
