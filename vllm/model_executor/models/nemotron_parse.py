# SPDX-License-Identifier: Apache-2.0
"""Nemotron Parse: RADIO over a page's image, a neck that shortens what it sees, and mBART's decoder
without positions.

https://huggingface.co/nvidia/NVIDIA-Nemotron-Parse-v1.1
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.bart import STACKED_WEIGHTS, BartScaledWordEmbedding
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.model_executor.models.mbart import MBartDecoder
from vllm.model_executor.models.nemotron_parse_processor import (
    PIXEL_VALUES,
    NemotronParseDummyInputsBuilder,
    NemotronParseMultiModalProcessor,
    NemotronParseProcessingInfo,
)
from vllm.model_executor.models.radio import RadioEncoder
from vllm.model_executor.models.utils import AutoWeightsLoader, load_stacked_weights, maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.transformers_utils.nemotron_parse import PATCHES_PER_TOKEN

logger = init_logger(__name__)

_NECK_EPS = 1e-6
# The decoder has no positions; further heads would guess several tokens at once.
_NOT_USED = ("decoder.embed_positions.", "decoder.extra_heads.", "decoder.extra_proj.")

Weights = Iterable[tuple[str, torch.Tensor]]


class NemotronParseEncoder(nn.Module):
    """Images to what the decoder attends to: a vector for every four patches of a row, row by row,
    and one for the whole."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, d_model = config.radio["hidden_size"], config.d_model
        num_summaries = len(config.radio["summary_idxs"])
        step = (1, PATCHES_PER_TOKEN)
        self.model_encoder = RadioEncoder(config.radio)
        self.patch_size = config.radio["patch_size"]
        self.conv1 = nn.Conv1d(width, d_model, kernel_size=1)
        self.layer_norm1 = LayerNorm(d_model, eps=_NECK_EPS)
        self.conv2 = nn.Conv2d(d_model, d_model, kernel_size=step, stride=step, bias=False)
        self.layer_norm2 = LayerNorm(d_model, eps=_NECK_EPS)
        self.sum_proj = nn.Linear(num_summaries * width, d_model)
        self.layer_norm3 = LayerNorm(d_model, eps=_NECK_EPS)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(images, 3, height, width), bytes or numbers from 0 to 1 -> (images, encoder tokens,
        d_model)."""
        rows = pixel_values.shape[-2] // self.patch_size
        summary, features = self.model_encoder(pixel_values)
        features = F.linear(features, self.conv1.weight.squeeze(-1), self.conv1.bias)
        features = self._join_columns(self.layer_norm1(features).unflatten(1, (rows, -1)))
        summary = self.layer_norm3(self.sum_proj(summary))
        return torch.cat([self.layer_norm2(features), summary.unsqueeze(1)], dim=1)

    def _join_columns(self, grid: torch.Tensor) -> torch.Tensor:
        """(images, rows, columns, d_model) -> (images, rows * (columns // 4), d_model).

        conv2's windows do not overlap: it is one matrix product over four columns side by side.
        Columns that are left over at the right are dropped.
        """
        columns = grid.shape[2] // PATCHES_PER_TOKEN
        windows = grid[:, :, : columns * PATCHES_PER_TOKEN].unflatten(2, (columns, -1)).flatten(3)
        weight = self.conv2.weight.squeeze(2).transpose(1, 2).flatten(1)
        return F.linear(windows, weight).flatten(1, 2)


@MULTIMODAL_REGISTRY.register_processor(
    NemotronParseMultiModalProcessor,
    info=NemotronParseProcessingInfo,
    dummy_inputs=NemotronParseDummyInputsBuilder,
)
class NemotronParseForConditionalGeneration(nn.Module, SupportsMultiModal):
    """Encoder, decoder, and an output projection of its own."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config = config
        self.encoder = NemotronParseEncoder(config)
        decoder_prefix = maybe_prefix(prefix, "decoder")
        embedding = BartScaledWordEmbedding(config, vllm_config, f"{decoder_prefix}.embed_tokens")
        self.decoder = MBartDecoder(
            config, vllm_config, embedding, prefix=decoder_prefix, has_positions=False
        )
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.d_model,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        if modality == "image":
            return None
        raise ValueError(f"{cls.__name__} reads images, not {modality}")

    def get_language_model(self) -> nn.Module:
        return self

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: object = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The decoder's tokens (num_tokens,) -> (num_tokens, d_model)."""
        return self.decoder.embed_tokens(input_ids)

    def embed_multimodal(self, **kwargs: object) -> list[torch.Tensor]:
        """Runs the encoder over `pixel_values`, (images, 3, height, width) or a list of them without
        the first dimension, bytes or numbers from 0 to 1; returns (encoder tokens, d_model) of
        each."""
        images = kwargs[PIXEL_VALUES]
        if not isinstance(images, torch.Tensor):
            images = torch.stack(list(images))
        return list(self.encoder(images))

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: torch.Tensor | None = None,
        *,
        encoder_outputs: list[torch.Tensor] | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """input_ids, positions (num_tokens,) of the decoder -> (num_tokens, d_model).
        `encoder_outputs`: (encoder tokens, d_model) of each image encoded in this step."""
        encoded = torch.cat(encoder_outputs) if encoder_outputs else None
        return self.decoder(input_ids, positions, encoded, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """(num_tokens, d_model) -> (num_tokens, vocab_size)."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Weights) -> set[str]:
        """Load weights by the published checkpoint's names."""
        encoder_weights: dict[str, torch.Tensor] = {}
        decoder_weights = self._decoder_weights(weights, encoder_weights)
        loaded = load_stacked_weights(self, decoder_weights, STACKED_WEIGHTS)
        names = AutoWeightsLoader(self.encoder).load_weights(encoder_weights.items())
        return loaded | {f"encoder.{name}" for name in names}

    def _decoder_weights(
        self, weights: Weights, encoder_weights: dict[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Hands on what is not the encoder's, which it puts aside."""
        for name, tensor in weights:
            if name.startswith("encoder."):
                encoder_weights[name.removeprefix("encoder.")] = tensor
            elif name.startswith(_NOT_USED):
                logger.info("the checkpoint's %s is not used", name)
            else:
                yield name, tensor
