# SPDX-License-Identifier: Apache-2.0
"""The static inputs of graphs: what padding may do, and that nothing on the host follows the batch. The
whole of it runs on the emulated CUDA platform."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.v1.attention.backends.torch_attn import TorchAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import CrossAttentionSpec, FullAttentionSpec
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cudagraph_utils import StaticInputs, reasons_against_graphs
from vllm.v1.worker.gpu.kv_connector import NoKVConnector
from vllm.v1.worker.utils import AttentionGroup

SHAPE = dict(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)


def decode_of(num_reqs: int, width: int) -> SimpleNamespace:
    """What the static inputs take of a batch whose numbers are all 7."""
    sevens = torch.full((num_reqs,), 7)
    return SimpleNamespace(
        num_reqs=num_reqs,
        input_ids=sevens,
        positions=sevens,
        seq_lens=sevens,
        slot_mappings=[sevens],
        block_tables=[torch.full((num_reqs, width), 7)],
    )


def test_padding_reads_and_writes_nothing():
    """Fault: a batch shrinks, and rows of the larger one before it write into pages that are others'
    by now, or read theirs."""
    inputs = StaticInputs(8, BlockTables([16], 8, [4], [16]), torch.device("cpu"))
    inputs.copy_in(decode_of(7, 4), 8)
    inputs.copy_in(decode_of(2, 1), 4)
    assert inputs.seq_lens[:4].tolist() == [7, 7, 0, 0]
    assert inputs.slots[0][:4].tolist() == [7, 7, -1, -1]
    assert inputs.query_start_loc.tolist() == list(range(9))


def test_a_recorded_batch_is_as_long_as_any():
    """Fault: launch sizes follow the requests at hand, and a longer one loses keys later."""
    inputs = StaticInputs(8, BlockTables([16], 8, [4], [16]), torch.device("cpu"))
    batch = inputs.batch(4, max_model_len=64)
    assert batch.num_reqs == batch.num_tokens == 4 and batch.seq_lens_np.tolist() == [64] * 4
    for mine, static in ((batch.seq_lens, inputs.seq_lens), (batch.input_ids, inputs.input_ids)):
        assert mine.data_ptr() == static.data_ptr()


@pytest.mark.parametrize(
    "backend, spec, words",
    [
        (TritonAttentionBackend, FullAttentionSpec(**SHAPE), []),
        (TritonAttentionBackend, CrossAttentionSpec(**SHAPE), ["TRITON_ATTN", "CrossAttentionSpec"]),
        (TorchAttentionBackend, FullAttentionSpec(**SHAPE), ["TORCH_ATTN", "layer0"]),
    ],
)
def test_backends_say_what_can_be_recorded(backend, spec, words):
    group = AttentionGroup(backend, ["layer0"], spec, 0)
    group.create_metadata_builders(None, torch.device("cpu"))
    reasons = reasons_against_graphs(None, [[group]], NoKVConnector())
    assert len(reasons) == bool(words) and all(word in reasons[0] for word in words)


def test_a_connector_inside_the_forward_pass_is_no_graphs():
    """Fault: its hooks run once, while the graph is recorded, and never again."""
    connector = SimpleNamespace(uses_layer_hooks=True)
    assert reasons_against_graphs(None, [], connector)


@pytest.mark.parametrize(
    "given, max_num_seqs, expected",
    [
        ({}, 20, [1, 2, 4, 8, 16, 20]),
        ({}, 3, [1, 2, 3]),
        ({"max_cudagraph_capture_size": 8}, 99, [1, 2, 4, 8]),
        ({"cudagraph_capture_sizes": [4, 1, 64, 4]}, 8, [1, 4]),
    ],
)
def test_sizes(given, max_num_seqs, expected):
    """Fault: a graph that no batch can have, or a largest batch that has none."""
    config = CompilationConfig(cudagraph_mode="full_decode_only", **given)
    assert config.cudagraph_mode is CUDAGraphMode.FULL_DECODE_ONLY
    config.set_cudagraph_sizes(max_num_seqs)
    config.set_cudagraph_sizes(max_num_seqs)
    assert config.cudagraph_capture_sizes == expected
    assert config.max_cudagraph_capture_size == expected[-1]


@pytest.mark.parametrize("sizes", [[], [0, 1], [9]])
def test_sizes_that_cannot_be(sizes):
    config = CompilationConfig(cudagraph_capture_sizes=sizes)
    with pytest.raises(ValueError, match=r"supported .* from 1 to --max-num-seqs \(8\)"):
        config.set_cudagraph_sizes(8)
