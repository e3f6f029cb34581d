# SPDX-License-Identifier: Apache-2.0
"""A model of Transformers with a text encoder, its decoder's attention replaced by this engine's.

The encoder runs over texts of one length at a time, without padding. The decoder sees the flat
batch as one long sequence at given positions, and as the encoder's output that of all texts encoded
in this step, of which its own projections make the keys and values that are cached.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.model_executor.models.transformers.attention import PLAIN, FallbackAttention
from vllm.model_executor.models.transformers.encoder_decoder_attention import (
    FallbackCrossAttention,
    FallbackEncoderAttention,
    Step,
)
from vllm.model_executor.models.transformers.encoder_decoder_calls import (
    record_encoder_decoder_calls,
)
from vllm.model_executor.models.transformers.model import (
    CHECK_LENGTHS,
    TransformersModel,
    attention_of,
    median_error,
)
from vllm.model_executor.models.transformers.parts import EncoderDecoderParts
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing.encoder_text import (
    TextDummyInputsBuilder,
    TextEncDecProcessor,
    TextProcessingInfo,
)

# Lengths of the check's two texts, one for each of its sequences.
_CHECK_ENCODER_LENGTHS = (7, 12)


@MULTIMODAL_REGISTRY.register_processor(
    TextEncDecProcessor, info=TextProcessingInfo, dummy_inputs=TextDummyInputsBuilder
)
class TransformersForSeq2SeqLM(TransformersModel, SupportsMultiModal):
    """Texts into the encoder, token ids into the decoder, logits out."""

    auto_class = AutoModelForSeq2SeqLM
    parts_class = EncoderDecoderParts

    def _make_layers(self, vllm_config: VllmConfig, prefix: str) -> list[nn.Module]:
        max_model_len = self.model_config.max_model_len

        def record(model: PreTrainedModel):
            num_layers = len(model.get_decoder().layers)
            return record_encoder_decoder_calls(model, num_layers, max_model_len)

        calls = self._dry_run(record)
        self.step = Step()
        return [
            *(FallbackEncoderAttention(call, prefix) for call in calls.encoder),
            *(FallbackAttention(vllm_config, call, prefix) for call in calls.decoder),
            *(FallbackCrossAttention(vllm_config, call, self.step, prefix) for call in calls.cross),
        ]

    def _refusal(self, reason: object) -> ValueError:
        return ValueError(
            f"{super()._refusal(reason)}; its encoder-decoder models that are supported: Marian, "
            "Pegasus, M2M100, NLLB, Blenderbot, PLBart"
        )

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        if modality == "text":
            return None
        raise ValueError(f"{cls.__name__} encodes text, not {modality}")

    def get_language_model(self) -> nn.Module:
        return self

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: object = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The decoder's tokens (num_tokens,) -> (num_tokens, d_model), without positions."""
        return self.model.get_decoder().get_input_embeddings()(input_ids)

    def embed_multimodal(self, **kwargs: object) -> list[torch.Tensor]:
        """Runs the encoder over `encoder_input_ids`, (texts, n) or a list of (n,); returns the
        output of each, (n, d_model)."""
        texts = [torch.as_tensor(text).flatten() for text in kwargs["encoder_input_ids"]]
        return list(self.parts.encode(torch.stack(texts).long()))

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
        `encoder_outputs`: (n_i, d_model) of each input encoded in this step."""
        inputs = (
            {"input_ids": input_ids[None].long()}
            if inputs_embeds is None
            else {"inputs_embeds": inputs_embeds[None]}
        )
        self.step.encodes = bool(encoder_outputs)
        # Without it a decoder leaves cross-attention out.
        encoded = torch.cat(encoder_outputs) if encoder_outputs else self._no_output()
        return self.parts.decode(positions, encoded[None], **inputs)[0]

    def _no_output(self) -> torch.Tensor:
        return self.model.get_output_embeddings().weight.new_zeros(1, self.config.hidden_size)

    def _median_error(self) -> float:
        texts = self._check_ids(_CHECK_ENCODER_LENGTHS, 11)
        decoder_ids = self._check_ids(CHECK_LENGTHS, 7)
        positions = torch.cat([torch.arange(n, device=self.model.device) for n in CHECK_LENGTHS])
        for layer in self.attention:
            if isinstance(layer, FallbackAttention):
                layer.sequence_lengths = list(CHECK_LENGTHS)
        self.step.decoder_lengths = list(CHECK_LENGTHS)
        self.step.encoder_lengths = list(_CHECK_ENCODER_LENGTHS)
        with attention_of(self.model, PLAIN):
            encoded = [self.embed_multimodal(encoder_input_ids=text[None])[0] for text in texts]
            hidden = self(torch.cat(decoder_ids), positions, encoder_outputs=encoded)
            ours = self.compute_logits(hidden).float()
        with attention_of(self.model, "eager"):
            theirs = [
                self.model(
                    input_ids=text[None], decoder_input_ids=ids[None], use_cache=False
                ).logits[0]
                for text, ids in zip(texts, decoder_ids, strict=True)
            ]
        return median_error(ours, torch.cat(theirs).float())

    def _check_ids(self, lengths: tuple[int, ...], stride: int) -> list[torch.Tensor]:
        """Sequences of token ids, none of them padding, which has no position in some models."""
        ids = torch.arange(sum(lengths), device=self.model.device) * stride
        ids = ids % self.config.vocab_size
        padding, other = self.config.pad_token_id, (self.config.pad_token_id or 0) + 1
        if padding is not None:
            ids = ids.where(ids != padding, other % self.config.vocab_size)
        return list(ids.split(lengths))
