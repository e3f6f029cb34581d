# SPDX-License-Identifier: Apache-2.0
"""Caches of two layers over one allocation, laid out by the code of whichever vLLM is installed.

Layer 0 is self-attention with one backend, layer 1 cross-attention with another: two groups, of one
page size, which share a pool. There are two eras: views that backends shape (to 0.28), and one layout
that the engine picks for all (later).
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from judge import Layer
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import CrossAttentionSpec, FullAttentionSpec
from vllm.v1.worker import utils as worker_utils
from vllm.v1.worker.gpu import attn_utils

NUM_PAGES, HEAD_SIZE, DTYPE = 3, 128, torch.bfloat16
# Those of K and V per head; latent and sparse ones are another matter.
BACKENDS = (
    "ROCM_ATTN",
    "TRITON_ATTN",
    "FLASH_ATTN",
    "FLASHINFER",
    "FLEX_ATTENTION",
    "CPU_ATTN",
    "TORCH_ATTN",
    "HPC_ATTN",
    "ROCM_AITER_FA",
    "ROCM_AITER_UNIFIED_ATTN",
)
# Whose kernels run on one device. Layers of one model have backends of one of these lines.
DEVICES = (
    {"ROCM_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "TORCH_ATTN"}
    | {"ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN"},  # ROCm
    {"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "TORCH_ATTN", "HPC_ATTN"},  # CUDA
    {"CPU_ATTN", "TORCH_ATTN"},
)
KERNEL_BLOCK_SIZES = (16, 32, 64)
NAMES = ("model.layers.0.self_attn.attn", "model.layers.1.encoder_attn.attn")
# A number of blocks that no other dimension has.
PROBE_BLOCKS = 1009


class BoundLayer(AttentionLayerBase):
    """An attention layer as far as the runner's start and connectors go."""

    def __init__(self, backend: type, spec: Any) -> None:
        self.backend, self.spec = backend, spec
        self.kv_cache: torch.Tensor | None = None

    def get_attn_backend(self) -> type:
        return self.backend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return self.spec


@dataclass(frozen=True)
class Case:
    """A cell. `ratio`: kernel blocks in a page."""

    backends: tuple[str, str]
    heads: int
    layout: str
    ratio: int

    def classes(self) -> list[type]:
        """The backends; with several kernel blocks a page, their kernels take no other size."""
        found = [AttentionBackendEnum[name].get_class() for name in self.backends]
        return found if self.ratio == 1 else [limited(c, self.kernel_block_size) for c in found]

    @property
    def kernel_block_size(self) -> int | None:
        """Tokens in a block that both kernels take, None if there is no such number among those
        tried."""
        classes = [AttentionBackendEnum[name].get_class() for name in self.backends]
        return next((n for n in KERNEL_BLOCK_SIZES if all(takes(c, n) for c in classes)), None)

    def specs(self) -> list[Any]:
        tokens = self.kernel_block_size * self.ratio
        what = {"num_kv_heads": self.heads, "head_size": HEAD_SIZE, "dtype": DTYPE}
        return [kind(block_size=tokens, **what) for kind in (FullAttentionSpec, CrossAttentionSpec)]


def limited(backend: type, tokens: int) -> type:
    """The backend, its kernels for blocks of `tokens` tokens alone; else the release's own."""
    sizes = staticmethod(lambda *args: [tokens])
    return type(backend.__name__, (backend,), {"get_supported_kernel_block_sizes": sizes})


@dataclass(frozen=True)
class Caches:
    """What layers were bound (`layers`) and connectors are handed (`tensors`)."""

    config: Any
    layers: list[Layer]
    tensors: dict[str, torch.Tensor]


def importable() -> tuple[list[str], dict[str, str]]:
    """The backends that this vLLM has and this machine imports; why the others cannot be."""
    usable, missing = [], {}
    for name in BACKENDS:
        if name not in AttentionBackendEnum.__members__:
            continue
        try:
            AttentionBackendEnum[name].get_class()
        except Exception as error:  # Whatever an import brings up.
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            usable.append(name)
    return usable, missing


def share_a_device(pair: tuple[str, str]) -> bool:
    """Whether kernels of both run on one device."""
    return any(device.issuperset(pair) for device in DEVICES)


def takes(backend: type, tokens: int) -> bool:
    """Whether the kernels take blocks of so many tokens, of heads as large as here."""
    sizes = backend.get_supported_kernel_block_sizes()
    heads = getattr(backend, "get_supported_head_sizes", list)()
    if heads and HEAD_SIZE not in heads:
        return False
    return not sizes or any(tokens % getattr(n, "base", n) == 0 for n in sizes if _fits(n, tokens))


def _fits(size: Any, tokens: int) -> bool:
    return hasattr(size, "base") or size == tokens


def lay_out(case: Case, vllm_config: Any) -> Caches:
    """Grouped, allocated, shaped, aligned and bound as a start does it.

    Raises:
        Exception: whatever this vLLM raises.
    """
    specs = dict(zip(NAMES, case.specs(), strict=True))
    backends = dict(zip(NAMES, case.classes(), strict=True))
    context = vllm_config.compilation_config.static_forward_context
    context.clear()
    context.update({name: BoundLayer(backends[name], spec) for name, spec in specs.items()})
    if hasattr(vllm_config.cache_config, "kv_cache_layout"):
        _resolve_layout(case.layout, backends, specs, vllm_config)
    groups = kv_cache_utils.get_kv_cache_groups(vllm_config, specs)
    config = kv_cache_utils.get_kv_cache_config_from_groups(vllm_config, groups, 1 << 30)
    tensors = _init_kv_cache(specs, backends, config, vllm_config, case.ratio)
    rows = NUM_PAGES * case.ratio
    layers = [
        Layer(
            name,
            group,
            context[name].kv_cache,
            _block_dim(backends[name], spec, case.kernel_block_size, rows, context[name].kv_cache),
            case.ratio,
            spec.page_size_bytes,
        )
        for group, (name, spec) in enumerate(specs.items())
    ]
    return Caches(config, layers, tensors)


def _resolve_layout(
    wanted: str, backends: dict[str, type], specs: dict[str, Any], vllm_config: Any
) -> None:
    """From 0.29 on: the engine resolves one layout for all layers, or refuses."""
    from vllm.v1.attention.backends import utils

    vllm_config.cache_config.kv_cache_layout = {"NHD": "LBNHC", "HND": "LBHNC"}[wanted]
    supported = utils.get_supported_kv_cache_layouts(list(backends.values()))
    names = [layout.name for layout in supported]
    utils.resolve_kv_cache_layout(vllm_config, [names], list(specs.values()))


def _init_kv_cache(
    specs: dict[str, Any], backends: dict[str, type], config: Any, vllm_config: Any, ratio: int
) -> dict[str, torch.Tensor]:
    """The runner's own; its parameters differ from release to release."""
    groups = [
        worker_utils.AttentionGroup(backends[name], [name], spec, group)
        for group, (name, spec) in enumerate(specs.items())
    ]
    nested = [[group] for group in groups]
    sizes = worker_utils.prepare_kernel_block_sizes(config, nested)
    if sizes != [spec.block_size // ratio for spec in specs.values()]:
        raise RuntimeError(f"kernels were given blocks of {sizes} tokens")
    for group, size in zip(groups, sizes, strict=True):
        if "kernel_block_size" in vars(group):
            group.kernel_block_size = size
    parameters = inspect.signature(attn_utils.init_kv_cache).parameters
    flat = "attn_groups" in parameters and parameters["attn_groups"].kind.name == "KEYWORD_ONLY"
    arguments = {
        "runner_kv_caches": [],
        "forward_context": vllm_config.compilation_config.static_forward_context,
        "kv_cache_config": config,
        "attn_groups": groups if flat else nested,
        "device": torch.device("cpu"),
        "cache_dtype": "auto",
        "kernel_block_sizes": sizes,
        "vllm_config": vllm_config,
    }
    wanted = {name: value for name, value in arguments.items() if name in parameters}
    return attn_utils.init_kv_cache(**wanted)


def _block_dim(backend: type, spec: Any, tokens: int, rows: int, cache: torch.Tensor) -> int:
    """By the backend's word where it shapes caches (to 0.28); later ones begin with blocks."""
    if hasattr(backend, "get_kv_cache_shape"):
        shape = backend.get_kv_cache_shape(PROBE_BLOCKS, tokens, spec.num_kv_heads, HEAD_SIZE)
        return tuple(shape).index(PROBE_BLOCKS)
    if cache.shape[0] != rows:
        raise RuntimeError(f"no {rows} blocks in a cache of {tuple(cache.shape)}")
    return 0
