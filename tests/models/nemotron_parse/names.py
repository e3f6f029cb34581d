# SPDX-License-Identifier: Apache-2.0
"""Names of weights: the published checkpoints' and those of Transformers' parts."""

from __future__ import annotations

import re

import torch

_RADIO = "encoder.model_encoder."
# Transformers' name behind `_RADIO` -> the checkpoints'.
_RENAMED = (
    (r"^embeddings\.patch_projection\.", "radio_model.model.patch_generator.embedder."),
    (r"^embeddings\.position_embedding$", "radio_model.model.patch_generator.pos_embed"),
    (r"^embeddings\.cls_register_token$", "radio_model.model.patch_generator.cls_token.token"),
    (r"^encoder\.layer\.(\d+)\.attention\.o_proj\.", r"radio_model.model.blocks.\1.attn.proj."),
    (r"^encoder\.layer\.", "radio_model.model.blocks."),
    (r"^input_conditioner\.", "radio_model.input_conditioner."),
    (r"^summary_idxs$", "radio_model.summary_idxs"),
)
_QKV = re.compile(r"\.attention\.([qkv])_proj\.")
# Zero, and one: no checkpoint needs to hold them.
_CONSTANT = ("decoder.embed_positions.", "layer_scale")

Weights = dict[str, torch.Tensor]


def to_checkpoint(weights: Weights) -> Weights:
    """Transformers' parts -> a checkpoint's names, q, k and v in one."""
    renamed: Weights = {}
    thirds: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in weights.items():
        if any(part in name for part in _CONSTANT):
            continue
        new_name = _checkpoint_name(name)
        part = _QKV.search(new_name)
        if part is None:
            renamed[new_name] = tensor.contiguous()
        else:
            thirds.setdefault(_QKV.sub(".attn.qkv.", new_name), {})[part[1]] = tensor
    for name, parts in thirds.items():
        renamed[name] = torch.cat([parts[letter] for letter in "qkv"])
    return renamed


def from_checkpoint(stored: Weights) -> Weights:
    """The same back again; constants are left out."""
    weights: Weights = {}
    for name, tensor in stored.items():
        if ".attn.qkv." not in name:
            weights[_own_name(name)] = tensor
            continue
        for letter, third in zip("qkv", tensor.chunk(3), strict=True):
            weights[_own_name(name.replace(".attn.qkv.", f".attention.{letter}_proj."))] = third
    return weights


def _checkpoint_name(name: str) -> str:
    if not name.startswith(_RADIO):
        return name
    rest = name[len(_RADIO) :]
    for pattern, new in _RENAMED:
        if re.search(pattern, rest):
            return _RADIO + re.sub(pattern, new, rest)
    raise ValueError(f"{name} has no name in checkpoints")


def _own_name(name: str) -> str:
    if not name.startswith(_RADIO):
        return name
    rest = name[len(_RADIO) :]
    for pattern, new in _RENAMED:
        stem = new.replace(r"\1", "")
        if "(" not in pattern and rest.startswith(stem):
            own = pattern.strip("^$").replace("\\", "")
            return _RADIO + (own + rest[len(stem) :]).replace(".attn.proj.", ".attention.o_proj.")
    raise ValueError(f"{name} has no place in Transformers' parts")
