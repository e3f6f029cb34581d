# SPDX-License-Identifier: Apache-2.0
"""A batch's arrays against a plain loop over its requests."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.block_table import BlockTable, BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatchBuilder
from vllm.v1.worker.gpu.states import RequestState

requests = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 12), st.integers(0, 6)), min_size=1, max_size=6
)


@settings(max_examples=60, deadline=None)
@given(requests=requests, blocks_per_page=st.sampled_from([1, 2, 4]))
def test_batch_equals_a_loop_over_its_requests(requests, blocks_per_page):
    """Each request: (computed, scheduled, tokens left after). Guards against tokens, positions or
    slots of one request under another's, and against sampling after a prompt's middle."""
    page, max_len = 4, 64
    kernel_block = page // blocks_per_page
    states = RequestState(8, max_len)
    tables = BlockTables([page], 8, [max_len // page], [kernel_block])
    rng = np.random.default_rng(0)
    counts, pages = {}, {}
    for i, (computed, scheduled, left) in enumerate(requests):
        tokens = rng.integers(0, 1000, computed + scheduled + left).tolist()
        row = states.add_request(f"r{i}", len(tokens), tokens, computed)
        pages[f"r{i}"] = rng.integers(1, 99, max_len // page).tolist()
        tables.append_block_ids(row, (pages[f"r{i}"],), overwrite=True)
        counts[f"r{i}"] = scheduled
    step = SchedulerOutput.make_empty()
    step.num_scheduled_tokens, step.total_num_scheduled_tokens = counts, sum(counts.values())
    batch = InputBatchBuilder(8, 128, tables, torch.device("cpu")).build(step, states)

    assert sorted(batch.req_ids) == sorted(counts)
    for i, req_id in enumerate(batch.req_ids):
        computed, scheduled, left = requests[int(req_id[1:])]
        begin, end = batch.query_start_loc_np[i], batch.query_start_loc_np[i + 1]
        positions = list(range(computed, computed + scheduled))
        row = states.req_id_to_index[req_id]
        assert batch.positions[begin:end].tolist() == positions
        assert batch.input_ids[begin:end].tolist() == states.all_token_ids[row, positions].tolist()
        assert batch.seq_lens[i] == computed + scheduled
        slots = [pages[req_id][p // page] * page + p % page for p in positions]
        assert batch.slot_mappings[0][begin:end].tolist() == slots
        blocks = [
            pages[req_id][b // blocks_per_page] * blocks_per_page + b % blocks_per_page
            for b in range(-(-(computed + scheduled) // kernel_block))
        ]
        assert batch.block_tables[0][i, : len(blocks)].tolist() == blocks
        assert (i in batch.sampling) == (left == 0)


def test_a_page_of_32_tokens_in_kernel_blocks_of_16():
    """Page 5 is blocks 10 and 11; position 20 of a request that has page 5 first is slot 180."""
    table = BlockTable(block_size=32, kernel_block_size=16, max_num_reqs=1, max_num_pages=2)
    table.append(0, [5], overwrite=True)
    assert table.table[0, :2].tolist() == [10, 11]
    out = np.zeros(1, dtype=np.int64)
    table.slots(np.array([0]), np.array([20]), out)
    assert out[0] == 180


def test_pages_are_appended_after_those_a_row_has():
    table = BlockTable(4, 4, 2, 8)
    table.append(1, [7, 8], overwrite=True)
    table.append(1, [9], overwrite=False)
    assert table.table[1, :3].tolist() == [7, 8, 9]
    table.append(1, [3], overwrite=True)
    assert table.num_blocks[1] == 1 and table.table[1, 0] == 3


def test_states_refuse_a_second_row_for_a_request():
    states = RequestState(1, 8)
    states.add_request("a", 1, [5], 0)
    with pytest.raises(RuntimeError, match="request a"):
        states.add_request("a", 1, [5], 0)
    assert states.remove_request("a") == 0 and states.remove_request("a") is None


encoder_requests = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 25), st.booleans()), min_size=1, max_size=6
)


@settings(max_examples=60, deadline=None)
@given(requests=encoder_requests, blocks_per_page=st.sampled_from([1, 2]))
def test_groups_that_hold_the_encoders_tokens(requests, blocks_per_page):
    """Each request: (tokens, encoder tokens, encoded in this step). Slots of a cross-attention group
    are those of the encoder tokens of this step alone, request by request as the batch has them;
    its tables reach as far as the longest encoder output, however long the decoder's tokens are."""
    page = 4
    kernel_block = page // blocks_per_page
    states = RequestState(8, 64)
    sizes = [page, page], 8, [16, 8], [kernel_block, kernel_block]
    tables = BlockTables(*sizes, encoder_groups=frozenset({1}))
    rng = np.random.default_rng(0)
    step, pages = SchedulerOutput.make_empty(), {}
    for i, (num_tokens, encoder_len, is_encoded) in enumerate(requests):
        row = states.add_request(f"r{i}", num_tokens, [1] * num_tokens, 0, encoder_len)
        pages[f"r{i}"] = rng.integers(1, 99, -(-encoder_len // page)).tolist()
        tables.append_block_ids(row, ([7] * 16, pages[f"r{i}"]), overwrite=True)
        step.num_scheduled_tokens[f"r{i}"] = num_tokens
        if is_encoded:
            step.scheduled_encoder_inputs[f"r{i}"] = [0]
    step.total_num_scheduled_tokens = sum(step.num_scheduled_tokens.values())
    builder = InputBatchBuilder(8, 256, tables, torch.device("cpu"), max_num_encoder_tokens=256)
    batch = builder.build(step, states)

    lengths = {f"r{i}": encoder_len for i, (_, encoder_len, _) in enumerate(requests)}
    assert batch.encoded == [r for r in batch.req_ids if r in step.scheduled_encoder_inputs]
    assert batch.encoder_seq_lens.tolist() == [lengths[r] for r in batch.req_ids]
    slots = [pages[r][p // page] * page + p % page
             for r in batch.encoded for p in range(lengths[r])]  # fmt: skip
    assert batch.slot_mappings[1].tolist() == slots
    assert len(batch.slot_mappings[0]) == step.total_num_scheduled_tokens
    assert batch.block_tables[1].shape[1] == -(-max(lengths.values()) // kernel_block)
    for i, req_id in enumerate(batch.req_ids):
        blocks = [pages[req_id][b // blocks_per_page] * blocks_per_page + b % blocks_per_page
                  for b in range(-(-lengths[req_id] // kernel_block))]  # fmt: skip
        assert batch.block_tables[1][i, : len(blocks)].tolist() == blocks
