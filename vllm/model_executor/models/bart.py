# SPDX-License-Identifier: Apache-2.0
"""BART: an encoder over text, and a decoder that attends to what it made.

Paper: https://arxiv.org/abs/1910.13461. Norms follow their blocks (post-norm); mBART, in mbart.py,
puts them in front. The encoder runs over several texts at once, flat and without padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.layers.attention import Attention, CrossAttention, MMEncoderAttention
from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.layers.learned_positions import LearnedPositions
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.interfaces import SupportsMultiModal, SupportsQuant
from vllm.model_executor.models.utils import (
    cast_overflow_tensors,
    load_stacked_weights,
    load_weight,
    maybe_prefix,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing.encoder_text import (
    TextDummyInputsBuilder,
    TextEncDecProcessor,
    TextProcessingInfo,
)
from vllm.v1.attention.backend import AttentionType

if TYPE_CHECKING:
    from transformers import BartConfig, MBartConfig

    Config = BartConfig | MBartConfig

LAYER_NORM_EPS = 1e-5
# Positions are learned with two rows in front that no token has.
_POSITION_OFFSET = 2

# Part of a checkpoint's name -> (the fused layer's, the shard it becomes). First match counts.
STACKED_WEIGHTS = {
    ".encoder_attn.q_proj": (".encoder_attn.q_proj", None),
    ".encoder_attn.k_proj": (".encoder_attn.kv_proj", "k"),
    ".encoder_attn.v_proj": (".encoder_attn.kv_proj", "v"),
    ".q_proj": (".qkv_proj", "q"),
    ".k_proj": (".qkv_proj", "k"),
    ".v_proj": (".qkv_proj", "v"),
}
_SHARED = "model.shared.weight"
# The same table where embeddings are tied; checkpoints hold it under one or more of these.
_SHARED_TOO = (
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "lm_head.weight",
)


class BartScaledWordEmbedding(VocabParallelEmbedding):
    """Token embeddings times a constant."""

    def __init__(self, config: Config, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(
            config.vocab_size,
            config.d_model,
            quant_config=vllm_config.quant_config,
            prefix=prefix,
        )
        self.embed_scale = config.d_model**0.5 if config.scale_embedding else 1.0

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        embeddings = super().forward(input_)
        return embeddings if self.embed_scale == 1.0 else embeddings * self.embed_scale


def _learned_positions(config: Config) -> LearnedPositions:
    return LearnedPositions(config.max_position_embeddings, config.d_model, _POSITION_OFFSET)


class BartSelfAttention(nn.Module):
    """Fused projections, an attention that a subclass makes, and the output projection."""

    def __init__(self, num_heads: int, config: Config, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.head_dim = config.d_model // num_heads
        self.qkv_proj = QKVParallelLinear(
            config.d_model,
            self.head_dim,
            num_heads,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.out_proj = RowParallelLinear(
            config.d_model,
            config.d_model,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.out_proj",
        )


class BartEncoderAttention(BartSelfAttention):
    """Every token of a text attends to all of it."""

    def __init__(self, config: Config, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(config.encoder_attention_heads, config, vllm_config, prefix)
        self.attn = MMEncoderAttention(
            self.qkv_proj.num_heads, self.head_dim, self.head_dim**-0.5, prefix=f"{prefix}.attn"
        )

    def forward(
        self, hidden_states: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: torch.Tensor
    ) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        output, _ = self.out_proj(self.attn(*qkv.chunk(3, dim=-1), cu_seqlens, max_seqlen))
        return output


class BartDecoderAttention(BartSelfAttention):
    """Causal, over the KV cache."""

    def __init__(self, config: Config, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(config.decoder_attention_heads, config, vllm_config, prefix)
        self.attn = Attention(
            self.qkv_proj.num_heads,
            self.head_dim,
            self.head_dim**-0.5,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.attn",
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        output, _ = self.out_proj(self.attn(*qkv.chunk(3, dim=-1)))
        return output


class BartCrossAttention(nn.Module):
    """The decoder's tokens attend to the encoder's output, whose keys and values are made and
    cached in the step that encodes it."""

    def __init__(self, config: Config, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        d_model, num_heads = config.d_model, config.decoder_attention_heads
        head_dim, quant_config = d_model // num_heads, vllm_config.quant_config
        self.q_proj = ColumnParallelLinear(
            d_model, d_model, quant_config=quant_config, prefix=f"{prefix}.q_proj"
        )
        self.kv_proj = QKVParallelLinear(
            d_model, head_dim, 0, num_heads, quant_config=quant_config, prefix=f"{prefix}.kv_proj"
        )
        self.out_proj = RowParallelLinear(
            d_model, d_model, quant_config=quant_config, prefix=f"{prefix}.out_proj"
        )
        self.attn = CrossAttention(
            self.kv_proj.num_kv_heads,
            head_dim,
            head_dim**-0.5,
            num_kv_heads=self.kv_proj.num_kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.attn",
            attn_type=AttentionType.ENCODER_DECODER,
        )

    def forward(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None
    ) -> torch.Tensor:
        query, _ = self.q_proj(hidden_states)
        key = value = None
        if encoder_hidden_states is not None:
            key_value, _ = self.kv_proj(encoder_hidden_states)
            key, value = key_value.chunk(2, dim=-1)
        output, _ = self.out_proj(self.attn(query, key, value))
        return output


class BartFeedForward(nn.Module):
    """Base of the layers: `fc1`, the activation and `fc2` are theirs, not a module's of their own,
    in checkpoints too."""

    def __init__(self, ffn_dim: int, config: Config, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        quant_config = vllm_config.quant_config
        self.fc1 = ColumnParallelLinear(
            config.d_model, ffn_dim, quant_config=quant_config, prefix=f"{prefix}.fc1"
        )
        self.fc2 = RowParallelLinear(
            ffn_dim, config.d_model, quant_config=quant_config, prefix=f"{prefix}.fc2"
        )
        self.activation_fn = get_act_fn(config.activation_function)
        self.final_layer_norm = LayerNorm(config.d_model, eps=LAYER_NORM_EPS)

    def feed_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states, _ = self.fc1(hidden_states)
        hidden_states, _ = self.fc2(self.activation_fn(hidden_states))
        return hidden_states


class BartEncoderLayer(BartFeedForward):
    """Hidden states may be overwritten: sums are made in place."""

    def __init__(self, config: Config, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(config.encoder_ffn_dim, config, vllm_config, prefix)
        self.self_attn = BartEncoderAttention(config, vllm_config, prefix=f"{prefix}.self_attn")
        self.self_attn_layer_norm = LayerNorm(config.d_model, eps=LAYER_NORM_EPS)

    def forward(
        self, hidden_states: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: torch.Tensor
    ) -> torch.Tensor:
        attended = self.self_attn(hidden_states, cu_seqlens, max_seqlen)
        hidden_states, _ = self.self_attn_layer_norm(attended, hidden_states)
        hidden_states, _ = self.final_layer_norm(self.feed_forward(hidden_states), hidden_states)
        return finite_half(hidden_states)


class BartDecoderLayer(BartFeedForward):
    """Hidden states may be overwritten: sums are made in place."""

    def __init__(self, config: Config, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(config.decoder_ffn_dim, config, vllm_config, prefix)
        self.self_attn = BartDecoderAttention(config, vllm_config, prefix=f"{prefix}.self_attn")
        self.self_attn_layer_norm = LayerNorm(config.d_model, eps=LAYER_NORM_EPS)
        self.encoder_attn = BartCrossAttention(config, vllm_config, prefix=f"{prefix}.encoder_attn")
        self.encoder_attn_layer_norm = LayerNorm(config.d_model, eps=LAYER_NORM_EPS)

    def forward(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None
    ) -> torch.Tensor:
        hidden_states, _ = self.self_attn_layer_norm(self.self_attn(hidden_states), hidden_states)
        attended = self.encoder_attn(hidden_states, encoder_hidden_states)
        hidden_states, _ = self.encoder_attn_layer_norm(attended, hidden_states)
        hidden_states, _ = self.final_layer_norm(self.feed_forward(hidden_states), hidden_states)
        return hidden_states


def finite_half(hidden_states: torch.Tensor) -> torch.Tensor:
    """float16 activations within its finite range; others as they are."""
    if hidden_states.dtype != torch.float16:
        return hidden_states
    return cast_overflow_tensors(hidden_states)


class BartEncoder(nn.Module):
    """Texts, flat one behind the other, to hidden states."""

    layer_cls: type[BartEncoderLayer] = BartEncoderLayer

    def __init__(
        self,
        config: Config,
        vllm_config: VllmConfig,
        embed_tokens: BartScaledWordEmbedding,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.embed_positions = _learned_positions(config)
        self.layernorm_embedding = LayerNorm(config.d_model, eps=LAYER_NORM_EPS)
        self.layers = nn.ModuleList(
            self.layer_cls(config, vllm_config, prefix=f"{prefix}.layers.{index}")
            for index in range(config.encoder_layers)
        )

    def forward(self, texts: list[torch.Tensor]) -> torch.Tensor:
        """Ids (n_i,) of several texts -> (sum of n_i, d_model)."""
        lengths = [len(text) for text in texts]
        input_ids, device = torch.cat(texts), texts[0].device
        cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])
        hidden_states = self.embed_positions(self.embed_tokens(input_ids), positions)
        hidden_states = self.layernorm_embedding(hidden_states)
        max_seqlen = torch.tensor(max(lengths))
        for layer in self.layers:
            hidden_states = layer(hidden_states, cu_seqlens, max_seqlen)
        return hidden_states


class BartDecoder(nn.Module):
    """Tokens of all requests, flat, to hidden states.

    `has_positions=False`: nothing but attention's causality tells one position from another.
    """

    layer_cls: type[BartDecoderLayer] = BartDecoderLayer

    def __init__(
        self,
        config: Config,
        vllm_config: VllmConfig,
        embed_tokens: BartScaledWordEmbedding,
        prefix: str = "",
        has_positions: bool = True,
    ) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.embed_positions = _learned_positions(config) if has_positions else None
        self.layernorm_embedding = LayerNorm(config.d_model, eps=LAYER_NORM_EPS)
        self.layers = nn.ModuleList(
            self.layer_cls(config, vllm_config, prefix=f"{prefix}.layers.{index}")
            for index in range(config.decoder_layers)
        )

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """input_ids, positions (num_tokens,); encoder_hidden_states (num_encoder_tokens, d_model)
        of what was encoded in this step -> (num_tokens, d_model)."""
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.embed_positions is not None:
            hidden_states = self.embed_positions(hidden_states, positions)
        hidden_states = self.layernorm_embedding(hidden_states)
        return self.run_layers(hidden_states, encoder_hidden_states)

    def run_layers(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None
    ) -> torch.Tensor:
        """All layers, (num_tokens, d_model) in and out."""
        for layer in self.layers:
            hidden_states = layer(hidden_states, encoder_hidden_states)
        return hidden_states


class BartModel(nn.Module):
    """Encoder and decoder, with one table of embeddings where the config ties them."""

    encoder_cls: type[BartEncoder] = BartEncoder
    decoder_cls: type[BartDecoder] = BartDecoder

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: Config = vllm_config.model_config.hf_config

        def embedding(name: str) -> BartScaledWordEmbedding:
            return BartScaledWordEmbedding(config, vllm_config, maybe_prefix(prefix, name))

        if config.tie_word_embeddings:
            self.shared = encoder_table = decoder_table = embedding("shared")
        else:
            encoder_table = embedding("encoder.embed_tokens")
            decoder_table = embedding("decoder.embed_tokens")
        self.encoder = self.encoder_cls(
            config, vllm_config, encoder_table, prefix=maybe_prefix(prefix, "encoder")
        )
        self.decoder = self.decoder_cls(
            config, vllm_config, decoder_table, prefix=maybe_prefix(prefix, "decoder")
        )


@MULTIMODAL_REGISTRY.register_processor(
    TextEncDecProcessor, info=TextProcessingInfo, dummy_inputs=TextDummyInputsBuilder
)
class BartForConditionalGeneration(nn.Module, SupportsMultiModal, SupportsQuant):
    """The model with its output projection and the bias of its logits."""

    packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "kv_proj": ["k_proj", "v_proj"],
    }
    supports_ragged_encoder_inputs = True
    model_cls: type[BartModel] = BartModel

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: Config = vllm_config.model_config.hf_config
        self.config = config
        self.model = self.model_cls(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        # Tied, the head is made without memory of its own.
        tied = config.tie_word_embeddings
        with torch.device("meta" if tied else torch.get_default_device()):
            self.lm_head = ParallelLMHead(
                config.vocab_size,
                config.d_model,
                quant_config=vllm_config.quant_config,
                prefix=maybe_prefix(prefix, "lm_head"),
            )
        if tied:
            self.lm_head = self.lm_head.tie_weights(self.model.shared)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.register_buffer("final_logits_bias", torch.zeros(1, config.vocab_size))
        # This device's part, where it is not zero.
        self.register_buffer("_projection_bias", None, persistent=False)

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
        return self.model.decoder.embed_tokens(input_ids)

    def embed_multimodal(self, **kwargs: object) -> list[torch.Tensor]:
        """Runs the encoder over `encoder_input_ids`, (texts, n) or a list of (n_i,); returns the
        output of each, (n_i, d_model)."""
        texts = [torch.as_tensor(text).flatten() for text in kwargs["encoder_input_ids"]]
        hidden_states = self.model.encoder(texts)
        return list(hidden_states.split([len(text) for text in texts]))

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
        encoder_hidden_states = None
        if encoder_outputs:
            encoder_hidden_states = (
                encoder_outputs[0] if len(encoder_outputs) == 1 else torch.cat(encoder_outputs)
            )
        return self.model.decoder(input_ids, positions, encoder_hidden_states, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """(num_tokens, d_model) -> (num_tokens, vocab_size)."""
        return self.logits_processor(self.lm_head, hidden_states, self._projection_bias)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load weights by Hugging Face's names, with or without the leading `model.`."""
        weights = _with_our_names(weights)
        if self.config.tie_word_embeddings:
            weights = _shared_once(weights)
        else:  # then nothing reads the shared table
            weights = (item for item in weights if item[0] != _SHARED)
        loaded = load_stacked_weights(self, self._without_bias(weights), STACKED_WEIGHTS)
        self._projection_bias = self._own_bias() if self.final_logits_bias.any() else None
        return loaded

    def _own_bias(self) -> torch.Tensor:
        """The bias of this device's rows of the output projection, zeros where these are padding."""
        head, bias = self.lm_head, self.final_logits_bias.flatten()
        padded = bias.new_zeros(head.num_embeddings_padded)
        padded[: len(bias)] = bias
        return padded[head.vocab_start_index : head.vocab_end_index].clone()

    def _without_bias(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Takes the bias, which not every checkpoint has, and hands on the rest."""
        for name, tensor in weights:
            if name == "final_logits_bias":
                load_weight(name, self.final_logits_bias, tensor)
            else:
                yield name, tensor


def _with_our_names(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        if name.startswith(("encoder.", "decoder.", "shared.")):
            name = f"model.{name}"
        if not name.endswith("coder.version"):  # a marker of fairseq's, no weight
            yield name, tensor


def _shared_once(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tied table under one name, whichever of its names the checkpoint has."""
    other, found = None, False
    for name, tensor in weights:
        if name in _SHARED_TOO:
            other = tensor
            continue
        found = found or name == _SHARED
        yield name, tensor
    if other is not None and not found:
        yield _SHARED, other
