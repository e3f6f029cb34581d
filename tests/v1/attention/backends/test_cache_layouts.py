# SPDX-License-Identifier: Apache-2.0
"""What the built-in backends say of their caches, against what their kernels then find there."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.paged_oracle import Requests
from vllm.platforms.interface import DeviceCapability
from vllm.triton_utils import HAS_TRITON
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata, probe_backend_roles
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.utils import (
    get_kv_cache_layout,
    key_value_views,
    set_kv_cache_layout,
)
from vllm.v1.attention.kv_cache_plan import plan_layer
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

NAMES = ["CPU_ATTN", "TORCH_ATTN", "TRITON_ATTN", "ROCM_ATTN"]
PLAIN_AND_SCALED = [("auto", KVQuantMode.NONE), ("int8_per_token_head", KVQuantMode.INT8_PER_TOKEN_HEAD)]
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")


@pytest.fixture(params=["NHD", "HND"])
def layout(request):
    set_kv_cache_layout(request.param)
    yield request.param
    set_kv_cache_layout(None)


@pytest.mark.parametrize("name", NAMES)
def test_declared_roles_are_those_that_probing_finds(name):
    """A backend that says something else of itself than its shapes do would be aligned wrongly."""
    backend = AttentionBackendEnum[name].get_class()
    assert backend.get_name() == name
    assert backend.get_kv_cache_roles() == probe_backend_roles(backend)
    block_dim = backend.get_kv_cache_block_dim(16, 2, 64)
    assert backend.get_kv_cache_roles()[block_dim] == "block"


@pytest.mark.parametrize("cache_dtype, mode", PLAIN_AND_SCALED)
@pytest.mark.parametrize("name", ["TRITON_ATTN", "ROCM_ATTN"])
def test_a_page_has_the_bytes_that_its_spec_says(name, layout, cache_dtype, mode):
    """Scales lie inside the page: K and V of a token and head take 2 * (D + 4) bytes of int8."""
    backend = AttentionBackendEnum[name].get_class()
    dtype = torch.float16 if cache_dtype == "auto" else torch.int8
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=256, dtype=dtype, kv_quant_mode=mode
    )
    per_token_head = spec.page_size_bytes // 32
    assert per_token_head == (1024 if cache_dtype == "auto" else 520)
    planned = plan_layer(backend, spec, cache_dtype, 16, 5 * spec.page_size_bytes)
    assert planned.payload == spec.page_size_bytes and planned.num_pages == 5
    views = key_value_views(
        planned.view(torch.zeros(5 * spec.page_size_bytes, dtype=torch.int8)),
        planned.roles, 256, cache_dtype,
    )  # fmt: skip
    assert views.key.shape == views.value.shape == (5, 16, 2, 256)
    assert (views.key_scale is None) == (cache_dtype == "auto")
    if views.key_scale is not None:
        assert views.key_scale.shape == (5, 16, 2) and views.key_scale.dtype is torch.float32


def test_token_by_token_or_head_by_head(layout):
    """VLLM_KV_CACHE_LAYOUT turns the tail of TRITON_ATTN's blocks, and nothing of ROCM_ATTN's."""
    triton, rocm = (AttentionBackendEnum[n].get_class() for n in ("TRITON_ATTN", "ROCM_ATTN"))
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
    shape = triton.get_kv_cache_shape(3, 16, 2, 8)
    order = triton.get_kv_cache_stride_order()
    assert sorted(triton.get_kv_cache_stride_order(True)) == list(range(len(shape) + 1))
    tail = plan_layer(triton, spec, "auto", 16, 3 * spec.page_size_bytes).dims[2:4]
    by_token = tail[0].stride > tail[1].stride
    assert (order == (0, 1, 2, 3, 4)) == by_token == (layout == "NHD")
    assert rocm.get_kv_cache_stride_order() == (0, 1, 2, 3, 4)
    with pytest.raises(NotImplementedError):
        rocm.get_kv_cache_stride_order(include_num_layers_dimension=True)


def test_an_unknown_layout_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "DHN")
    with pytest.raises(ValueError, match="VLLM_KV_CACHE_LAYOUT='DHN'.*NHD or HND"):
        get_kv_cache_layout()
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    assert get_kv_cache_layout() == "HND"


@pytest.mark.parametrize("name", ["TORCH_ATTN", "TRITON_ATTN"])
def test_which_layers_they_serve(name):
    """ROCM_ATTN leaves cross-attention to others; fp8 needs hardware that has it."""
    backend, rocm = (AttentionBackendEnum[n].get_class() for n in (name, "ROCM_ATTN"))
    layer = (64, torch.float16, "auto", 16)
    cross = AttentionType.ENCODER_DECODER
    assert backend.validate_configuration(*layer, attn_type=cross, has_sink=True) == []
    assert rocm.validate_configuration(*layer, attn_type=cross) != []
    assert rocm.validate_configuration(*layer, use_kv_connector=True) == []


def test_what_quantised_caches_need():
    triton = AttentionBackendEnum.TRITON_ATTN.get_class()
    ask = lambda size, dtype, capability: triton.validate_configuration(  # noqa: E731
        size, torch.float16, dtype, 16, device_capability=DeviceCapability(*capability)
    )
    assert ask(64, "fp8", (9, 0)) == [] and ask(64, "int8_per_token_head", (8, 0)) == []
    assert ask(64, "fp8", (8, 0)) == ["KV cache dtype fp8 needs compute capability 8.9, not 8.0"]
    assert "multiples of 4" in ask(66, "int8_per_token_head", (9, 0))[0]


@needs_triton
@pytest.mark.parametrize("name", ["TORCH_ATTN", "TRITON_ATTN"])
def test_cross_attention_writes_once_and_reads_again(name):
    """K and V come in the step that runs the encoder, with as many tokens as it has; later steps
    bring none and find them."""
    backend = AttentionBackendEnum[name].get_class()
    requests = Requests([(1, 20), (1, 7)], head_size=16, causal=False)
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype=torch.float32)
    planned = plan_layer(backend, spec, "auto", 16, requests.num_blocks * spec.page_size_bytes)
    kv_cache = planned.view(
        torch.full((requests.num_blocks * spec.page_size_bytes,), 0x7F, dtype=torch.int8)
    )
    impl = backend.get_impl_cls()(4, 16, 0.25, 2, attn_type=AttentionType.ENCODER_DECODER)
    builder = backend.get_builder_cls()(spec, ["layer"], None, torch.device("cpu"))
    batch = requests.batch(torch.device("cpu"))
    for first in (True, False):
        common = CommonAttentionMetadata(
            batch.query_start_loc, batch.query_start_loc_cpu, batch.seq_lens, 2, 2, 1, 20,
            batch.block_table, requests.slots if first else requests.slots[:0], causal=False,
        )  # fmt: skip
        out = torch.full((3, 4, 16), 7.0)
        query = torch.cat((requests.query, torch.zeros(1, 4, 16)))
        kv = (requests.key, requests.value) if first else (None, None)
        impl.forward(None, query, *kv, kv_cache, builder.build(0, common), out)
        assert (out[:2].double() - requests.expected()).abs().max() < 4e-6
        assert (out[2] == 7.0).all()


@needs_triton
@pytest.mark.parametrize("name", ["TORCH_ATTN", "ROCM_ATTN"])
def test_layers_that_a_backend_does_not_do(name):
    impl = AttentionBackendEnum[name].get_class().get_impl_cls()
    with pytest.raises(ValueError, match=f"{name} does not do encoder_only attention"):
        impl(4, 16, 0.25, attn_type=AttentionType.ENCODER_ONLY)
    with pytest.raises(ValueError, match="3 attention sinks for 4 query heads"):
        impl(4, 16, 0.25, sinks=torch.zeros(3))
