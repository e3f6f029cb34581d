# SPDX-License-Identifier: Apache-2.0
"""RADIO, the vision transformer that is Nemotron Parse's encoder.

The layers are Transformers' RadioModel. Here are the names under which checkpoints keep their
weights, and normalisation in float32 whatever the model's dtype. Paper:
https://arxiv.org/abs/2312.06709
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, RadioConfig
from transformers.initialization import no_init_weights

from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

# Patches of the images that go through the layers together: more make nothing faster.
_MAX_PATCHES_PER_PASS = 16384
_PATCHES = "radio_model.model.patch_generator."
_CLS_TOKENS = "model.embeddings.cls_register_token"
_POSITIONS = "model.embeddings.position_embedding"
_CHECKPOINT_NAMES = WeightsMapper(
    orig_to_new_regex={
        re.compile(r"^radio_model\.model\.blocks\.(\d+)\.attn\.proj\."): (
            r"model.encoder.layer.\1.attention.o_proj."
        ),
        re.compile(r"^radio_model\.model\.blocks\."): "model.encoder.layer.",
        re.compile(r"\.attn\.qkv\."): ".attention.qkv.",
    },
    orig_to_new_prefix={
        f"{_PATCHES}embedder.": "model.embeddings.patch_projection.",
        f"{_PATCHES}pos_embed": _POSITIONS,
        f"{_PATCHES}cls_token.token": _CLS_TOKENS,
        "radio_model.input_conditioner.": "input_conditioner.",
        "radio_model.summary_idxs": "model.summary_idxs",
    },
)
_LAYER_SCALE = re.compile(r"\.(ls|layer_scale)[12]\.")

Weights = Iterable[tuple[str, torch.Tensor]]


class RadioEncoder(nn.Module):
    """Images to a summary of each and a vector for each patch.

    Args:
        fields: arguments of Transformers' RadioConfig. The numbers of prefix tokens and of
            positions are the checkpoint's, where it has others.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__()
        config = RadioConfig(**fields)
        with no_init_weights():
            self.model = AutoModel.from_config(
                config, attn_implementation="sdpa", dtype=torch.get_default_dtype()
            )
        for layer in self.model.encoder.layer:  # all ones in RADIO
            layer.layer_scale1 = layer.layer_scale2 = nn.Identity()
        self.input_conditioner = self.model.make_preprocessor_external().float()
        self.input_conditioner.norm_mean[:, 0, 0] = torch.tensor(config.norm_mean)
        self.input_conditioner.norm_std[:, 0, 0] = torch.tensor(config.norm_std)

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(images, 3, height, width), bytes or numbers from 0 to 1 -> (images, summaries * width)
        and (images, patches, width), patches row by row."""
        patches = pixel_values[0, 0].numel() // self.model.config.patch_size**2
        images_per_pass = max(1, _MAX_PATCHES_PER_PASS // patches)
        passes = [self._encode(images) for images in pixel_values.split(images_per_pass)]
        summaries, features = zip(*passes, strict=True)
        return torch.cat(summaries), torch.cat(features)

    def _encode(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = images.float() if images.is_floating_point() else images.float() / 255
        dtype = self.model.embeddings.patch_projection.weight.dtype
        output = self.model(self.input_conditioner(pixels).to(dtype))
        return output.summary, output.features

    def load_weights(self, weights: Weights) -> set[str]:
        """Load a checkpoint's `radio_model.*`."""
        renamed = _CHECKPOINT_NAMES.apply(weights)
        return AutoWeightsLoader(self).load_weights(self._as_here(renamed))

    def _as_here(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if _LAYER_SCALE.search(name):
                _check_identity(name, tensor)
            elif ".attention.qkv." in name:
                for part, third in zip("qkv", tensor.chunk(3), strict=True):
                    yield name.replace(".qkv.", f".{part}_proj."), third
            else:
                self._make_room(name, tensor)
                yield name, tensor

    def _make_room(self, name: str, tensor: torch.Tensor) -> None:
        """What no published config says, the shapes of two weights do."""
        embeddings, config = self.model.embeddings, self.model.config
        if name == _CLS_TOKENS and len(tensor) >= config.num_cls_tokens:
            config.num_registers = len(tensor) - config.num_cls_tokens
            _resize(embeddings.cls_register_token, tensor.shape)
        elif name == _POSITIONS and tensor.dim() == 3:
            side = round(tensor.shape[1] ** 0.5)
            if side * side == tensor.shape[1]:
                embeddings.max_rows = embeddings.max_cols = side
                _resize(embeddings.position_embedding, tensor.shape)


def _resize(parameter: nn.Parameter, shape: torch.Size) -> None:
    if parameter.shape != shape and parameter.shape[-1] == shape[-1]:
        parameter.data = parameter.data.new_empty(shape)


def _check_identity(name: str, tensor: torch.Tensor) -> None:
    if not torch.all(tensor == 1):
        raise ValueError(
            f"the checkpoint's {name} scales a layer, which is not supported; supported: RADIO "
            "without layer scales"
        )
