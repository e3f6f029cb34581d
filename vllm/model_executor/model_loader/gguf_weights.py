# SPDX-License-Identifier: Apache-2.0
"""The weights of a GGUF file under Hugging Face's names and in Hugging Face's order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from tqdm import tqdm

from vllm.model_executor.layers.cpu_ops.quant_format import INT8
from vllm.model_executor.model_loader.gguf_dequant import dequantize, quantization_type, raw_rows
from vllm.transformers_utils.gguf_config import ROPE_FACTORS_TENSOR, gguf_architecture
from vllm.transformers_utils.gguf_reader import GGUFFile, GGUFTensorInfo

# Threads that unpack beside the one that copies; more do not help where memory is the bound.
_NUM_THREADS = 2
# Tensors unpacked ahead: enough to keep the threads busy, few enough to bound memory.
_TENSORS_AHEAD = 4

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Where an architecture's modules are called otherwise.
_GEMMA3_LAYER_NAMES = {
    **_LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT2_TOP_NAMES = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT2_LAYER_NAMES = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
# GPT-2's checkpoints keep these transposed, llama.cpp does not.
_GPT2_TRANSPOSED = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")
# Types that layers keep, and the tensors that are layers' weights.
_KEPT_TYPES = (GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1)
_KEPT_NAMES = tuple(
    f"{name}.weight"
    for name in (
        "token_embd output attn_q attn_k attn_v attn_qkv attn_output ffn_gate ffn_up ffn_down"
    ).split()
)
# Tensors that hold no weights: rope tables are worked out from the config.
_NOT_WEIGHTS = (ROPE_FACTORS_TENSOR, ".attn_rot_embd.weight")


def hf_weight_name(gguf_name: str, architecture: str = "llama") -> str | None:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None where the name is
    not known. `architecture`: llama.cpp's name."""
    top_names, layer_names, layers = _TOP_NAMES, _LAYER_NAMES, "model.layers"
    if architecture == "gemma3":
        layer_names = _GEMMA3_LAYER_NAMES
    elif architecture == "gpt2":
        top_names, layer_names, layers = _GPT2_TOP_NAMES, _GPT2_LAYER_NAMES, "transformer.h"
    module, _, kind = gguf_name.rpartition(".")
    if module in top_names:
        return f"{top_names[module]}.{kind}"
    parts = module.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in layer_names:
        return f"{layers}.{parts[1]}.{layer_names[parts[2]]}.{kind}"
    return None


def _as_in_checkpoints(
    gguf_name: str, weight: torch.Tensor, architecture: str
) -> torch.Tensor:
    """Undo what llama.cpp's converter does to weights besides the order of q and k."""
    if architecture == "gemma3" and gguf_name.endswith("norm.weight"):
        return weight - 1  # stored as the factor itself
    if architecture == "gpt2" and gguf_name.endswith(_GPT2_TRANSPOSED):
        return weight.t()
    return weight


@dataclass(frozen=True)
class _HeadCounts:
    """Heads of the projections that llama.cpp stores in another order; 0 where it does not."""

    q: int
    k: int

    def of(self, gguf_name: str) -> int:
        if ".attn_q." in gguf_name:
            return self.q
        return self.k if ".attn_k." in gguf_name else 0


def _head_counts(file: GGUFFile) -> _HeadCounts:
    if not gguf_architecture(file).permutes_qk:
        return _HeadCounts(0, 0)
    heads = file.get(f"{file.architecture}.attention.head_count")
    return _HeadCounts(heads, file.get(f"{file.architecture}.attention.head_count_kv", heads))


def _unpermute_rows(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's order of a head's rows: it puts the two of each rotated pair side by side.

    Rows are quantised one by one, so their bytes can be moved before they are unpacked.
    """
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _layer_blocks(kind: GGMLQuantizationType, rows: np.ndarray) -> torch.Tensor:
    """Raw rows as layers keep them: GGUF's blocks, but the signed codes of Q8_0 counted from -128."""
    kept = np.array(rows)
    if kind is GGMLQuantizationType.Q8_0:
        kept.reshape(-1, INT8.block_bytes)[:, INT8.header_bytes :] ^= 0x80
    return torch.from_numpy(kept)


def _load(
    file: GGUFFile, info: GGUFTensorInfo, num_heads: int, dtype: torch.dtype, keep_blocks: bool
) -> torch.Tensor:
    kind, rows = quantization_type(file, info), raw_rows(file, info)
    if keep_blocks and kind in _KEPT_TYPES and info.name.endswith(_KEPT_NAMES):
        return _layer_blocks(kind, _unpermute_rows(rows, num_heads) if num_heads else rows)
    if not num_heads:
        return dequantize(kind, rows, info.shape, dtype)
    if len(info.shape) == 1:  # a bias: its elements are the rows
        vector = dequantize(kind, rows, info.shape, dtype)
        return vector.view(num_heads, -1, 2).transpose(1, 2).reshape(info.shape)
    return dequantize(kind, _unpermute_rows(rows, num_heads), info.shape, dtype)


def gguf_weights_iterator(
    file: GGUFFile, dtype: torch.dtype, use_tqdm_on_load: bool = True, keep_blocks: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, weight of `dtype`) of every tensor, in the file's order.

    With `keep_blocks`, weights of layers that are of type Q8_0, Q4_0 or Q4_1 come as they are: uint8
    rows of blocks.

    Names that are not known come as they are, so that the model refuses them by name. Raises
    GGUFError before the first tensor when one is of a type that is not supported.
    """
    heads = _head_counts(file)
    infos = [info for name, info in file.tensors.items() if not name.endswith(_NOT_WEIGHTS)]
    for info in infos:
        quantization_type(file, info)
    progress = tqdm(infos, desc="Loading GGUF weights", unit="tensor", disable=not use_tqdm_on_load)
    ahead: deque[tuple[str, Future[torch.Tensor]]] = deque()
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="gguf") as pool:
        for info in progress:
            loading = pool.submit(_load, file, info, heads.of(info.name), dtype, keep_blocks)
            ahead.append((info.name, loading))
            if len(ahead) > _TENSORS_AHEAD:
                yield _named(*ahead.popleft(), file.architecture)
        while ahead:
            yield _named(*ahead.popleft(), file.architecture)


def _named(
    gguf_name: str, weight: Future[torch.Tensor], architecture: str
) -> tuple[str, torch.Tensor]:
    name = hf_weight_name(gguf_name, architecture) or gguf_name
    return name, _as_in_checkpoints(gguf_name, weight.result(), architecture)
