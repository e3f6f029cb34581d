# SPDX-License-Identifier: Apache-2.0
"""Nemotron Parse put together from Transformers' parts: the oracle, and what is trained.

RADIO is Transformers' RadioModel, the decoder Transformers' mBART with its positions set to zero.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tests.models.nemotron_parse.names import from_checkpoint, to_checkpoint
from torch import nn
from transformers import MBartConfig, RadioConfig, RadioModel
from transformers.models.mbart.modeling_mbart import MBartDecoder

START_TOKEN_ID, PAD_TOKEN_ID = 2, 1
WEIGHTS, CONFIG = "model.safetensors", "config.json"


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; the encoder's and the decoder's are apart as in the real one."""

    image_size: tuple[int, int]
    vocab_size: int
    radio_width: int = 128
    radio_layers: int = 2
    radio_heads: int = 4
    radio_mlp_ratio: float = 2.0
    max_img_size: int = 256
    d_model: int = 128
    decoder_layers: int = 3
    decoder_heads: int = 4
    decoder_ffn_dim: int = 256
    max_length: int = 256

    @property
    def patches(self) -> tuple[int, int]:
        return self.image_size[0] // 16, self.image_size[1] // 16

    @property
    def num_encoder_tokens(self) -> int:
        rows, columns = self.patches
        return rows * (columns // 4) + 1

    def config_json(self) -> dict[str, Any]:
        """A config.json with the real one's structure."""
        return {
            "architectures": ["NemotronParseForConditionalGeneration"],
            "auto_map": {
                "AutoConfig": "hf_nemotron_parse_config.NemotronParseConfig",
                "AutoModel": "hf_nemotron_parse_modeling.NemotronParseForConditionalGeneration",
            },
            "model_type": "nemotron_parse",
            "is_encoder_decoder": True,
            "image_size": list(self.image_size),
            "encoder": {
                "patch_size": 16,
                "hidden_size": self.radio_width,
                "num_hidden_layers": self.radio_layers,
                "num_attention_heads": self.radio_heads,
                "mlp_ratio": self.radio_mlp_ratio,
                "args": {"model": "vit_small", "cpe_max_size": self.max_img_size},
            },
            "decoder": {
                "d_model": self.d_model,
                "decoder_layers": self.decoder_layers,
                "decoder_attention_heads": self.decoder_heads,
                "decoder_ffn_dim": self.decoder_ffn_dim,
                "encoder_ffn_dim": self.decoder_ffn_dim,
                "activation_function": "gelu",
                "scale_embedding": True,
                "vocab_size": self.vocab_size,
                "max_sequence_length": self.max_length,
            },
            "bos_token_id": 0,
            "pad_token_id": PAD_TOKEN_ID,
            "eos_token_id": 2,
            "decoder_start_token_id": START_TOKEN_ID,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }


class Encoder(nn.Module):
    """RADIO and the neck that shortens its rows to a quarter."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.patches = shape.patches
        width, d_model = shape.radio_width, shape.d_model
        self.model_encoder = RadioModel(
            RadioConfig(
                hidden_size=width,
                num_hidden_layers=shape.radio_layers,
                num_attention_heads=shape.radio_heads,
                mlp_ratio=shape.radio_mlp_ratio,
                max_img_size=shape.max_img_size,
                summary_idxs=[0, 1, 2],
            )
        )
        self.conv1 = nn.Conv1d(width, d_model, kernel_size=1)
        self.layer_norm1 = nn.LayerNorm(d_model, eps=1e-6)
        self.conv2 = nn.Conv2d(d_model, d_model, kernel_size=(1, 4), stride=(1, 4), bias=False)
        self.layer_norm2 = nn.LayerNorm(d_model, eps=1e-6)
        self.sum_proj = nn.Linear(3 * width, d_model)
        self.layer_norm3 = nn.LayerNorm(d_model, eps=1e-6)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """(n, 3, height, width) from 0 to 1 -> (n, encoder tokens, d_model)."""
        seen = self.model_encoder(pixels)
        features = self.layer_norm1(self.conv1(seen.features.transpose(1, 2)).transpose(1, 2))
        grid = features.transpose(1, 2).unflatten(2, self.patches)
        features = self.layer_norm2(self.conv2(grid).flatten(2).transpose(1, 2))
        summary = self.layer_norm3(self.sum_proj(seen.summary))
        return torch.cat([features, summary[:, None]], dim=1)


class ReferenceNemotronParse(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.encoder = Encoder(shape)
        self.decoder = MBartDecoder(
            MBartConfig(
                vocab_size=shape.vocab_size,
                d_model=shape.d_model,
                decoder_layers=shape.decoder_layers,
                decoder_attention_heads=shape.decoder_heads,
                decoder_ffn_dim=shape.decoder_ffn_dim,
                scale_embedding=True,
                max_position_embeddings=shape.max_length,
                dropout=0.0,
                init_std=0.02,
            )
        )
        positions = self.decoder.embed_positions.weight
        positions.data.zero_()
        positions.requires_grad_(False)
        self.lm_head = nn.Linear(shape.d_model, shape.vocab_size, bias=False)

    def forward(self, pixels: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Images and (n, num_tokens) ids -> (n, num_tokens, vocab_size)."""
        return self.decode(self.encoder(pixels), ids)

    def decode(self, encoded: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        decoded = self.decoder(input_ids=ids, encoder_hidden_states=encoded, use_cache=False)
        return self.lm_head(decoded.last_hidden_state)

    @torch.inference_mode()
    def generate(
        self,
        pixels: torch.Tensor,
        prompt: Sequence[int],
        max_new_tokens: int,
        end_token_id: int | None = None,
    ) -> list[int]:
        """Greedy tokens after the prompt, the whole worked out anew for each."""
        encoded = self.encoder(pixels[None])
        ids = list(prompt)
        for _ in range(max_new_tokens):
            ids.append(int(self.decode(encoded, torch.tensor([ids]))[0, -1].argmax()))
            if ids[-1] == end_token_id:
                break
        return ids[len(prompt) :]

    def save(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        """Write config.json and the weights under the real checkpoint's names."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(json.dumps(self.shape.config_json(), indent=2) + "\n")
        weights = to_checkpoint(self.state_dict())
        for name, tensor in weights.items():
            weights[name] = tensor.to(dtype if tensor.is_floating_point() else tensor.dtype)
        save_file(weights, folder / WEIGHTS)

    def load(self, folder: Path) -> ReferenceNemotronParse:
        """The weights that `save` wrote, widened to this model's dtype."""
        own = self.state_dict()
        own.update(from_checkpoint(load_file(folder / WEIGHTS)))
        self.load_state_dict(own)
        return self.eval()


def random_reference(shape: Shape, seed: int = 0, scale: float = 0.3) -> ReferenceNemotronParse:
    """Random weights, wide enough that a wrong one changes the answer; the same each time."""
    torch.manual_seed(seed)
    model = ReferenceNemotronParse(shape).eval()
    for name, parameter in model.named_parameters():
        if "embed_positions" in name or "layer_scale" in name:
            continue  # always zero, always one
        is_norm_weight = "norm" in name and name.endswith("weight")
        width = parameter[0].numel() if parameter.dim() > 1 else 1
        spread = 0.2 if parameter.dim() == 1 else 4 * scale / width**0.5
        nn.init.normal_(parameter, mean=1.0 if is_norm_weight else 0.0, std=spread)
    return model


def to_pixels(image: Image.Image) -> torch.Tensor:
    """An RGB image -> (3, height, width) from 0 to 1."""
    return torch.from_numpy(np.asarray(image, dtype=np.float32) / 255).permute(2, 0, 1)
