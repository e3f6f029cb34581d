# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a KV cache are: the one place that knows. Everything else is derived from it.

A *page* is the block manager's block, a *block* the kernel's; a page is `kernel_blocks_per_page`
blocks. Shapes are logical, strides in bytes. With NB pages, `half` bytes of K in each:

    K/V-first (kv, block, ...)        K0 K1 K2 ... V0 V1 V2 ...   page 1: two runs, NB * half apart
    blocks-first (block, kv, ...)     K0 V0 K1 V1 K2 V2 ...       page 1: one run
    fused (block, head, token, 2*D)   as blocks-first, K and V of a token beside each other

Pure integers, importable without torch, which is imported by what makes or reads tensors.
"""

from .alignment import KVLayoutError, LayerLayout, align
from .allocation import Allocation, KVCacheConflict, LayerPlace
from .dims import ROLES, Dim
from .fields import Field, Part, fused_fields, latent_fields, split_fields, state_fields
from .geometry import KVCacheGeometry
from .overlap import Ownership
from .permutation import PermutedCache
from .roles import probe_roles
from .tensors import shape_and_stride, storage_bytes

__all__ = [
    "ROLES",
    "Allocation",
    "Dim",
    "Field",
    "KVCacheConflict",
    "KVCacheGeometry",
    "KVLayoutError",
    "LayerLayout",
    "LayerPlace",
    "Ownership",
    "Part",
    "PermutedCache",
    "align",
    "fused_fields",
    "latent_fields",
    "probe_roles",
    "shape_and_stride",
    "split_fields",
    "state_fields",
    "storage_bytes",
]
