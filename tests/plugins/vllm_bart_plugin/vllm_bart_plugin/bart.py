# SPDX-License-Identifier: Apache-2.0
"""BART, written for vLLM's layers and nothing else of it."""

from collections.abc import Iterable

import torch
from torch import nn
from transformers import BartConfig
from vllm.config import CacheConfig, VllmConfig
from vllm.config.lora import LoRAConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.cross_attention import CrossAttention
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.interfaces import (
    MultiModalEmbeddings,
    SupportsMultiModal,
    SupportsQuant,
)
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    WeightsMapper,
    cast_overflow_tensors,
    maybe_prefix,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.sequence import IntermediateTensors
from vllm.v1.attention.backend import AttentionType

from .processor import BartDummyInputsBuilder, BartMultiModalProcessor, BartProcessingInfo

_STACKED = [(".qkv_proj", ".q_proj", "q"), (".qkv_proj", ".k_proj", "k"), (".qkv_proj", ".v_proj", "v")]


class BartPositions(VocabParallelEmbedding):
    offset = 2

    def __init__(self, num_positions: int, d_model: int) -> None:
        super().__init__(num_positions + self.offset, d_model)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return super().forward(positions + self.offset)


class BartAttention(nn.Module):
    """Self-attention of the encoder or the decoder, or attention from one to the other."""

    def __init__(
        self,
        config: BartConfig,
        num_heads: int,
        kind: str,
        cache_config: CacheConfig | None,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads // get_tensor_model_parallel_world_size()
        self.head_dim = config.d_model // num_heads
        self.size = self.num_heads * self.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.d_model,
            self.head_dim,
            num_heads,
            bias=True,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.out_proj = RowParallelLinear(
            config.d_model, config.d_model, bias=True, quant_config=quant_config,
            prefix=f"{prefix}.out_proj",
        )  # fmt: skip
        sizes = (self.num_heads, self.head_dim, self.head_dim**-0.5)
        cached = dict(
            num_kv_heads=self.num_heads, cache_config=cache_config, quant_config=quant_config,
            prefix=f"{prefix}.attn",
        )  # fmt: skip
        if kind == AttentionType.ENCODER:
            self.attn = MMEncoderAttention(*sizes, num_kv_heads=self.num_heads, prefix=f"{prefix}.attn")
        elif kind == AttentionType.ENCODER_DECODER:
            self.attn = CrossAttention(*sizes, attn_type=kind, **cached)
        else:
            self.attn = Attention(*sizes, **cached)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        output, _ = self.out_proj(self.attn(*qkv.split(self.size, dim=-1)))
        return output

    def cross(self, hidden_states: torch.Tensor, encoded: torch.Tensor | None) -> torch.Tensor:
        # Of the fused projection each side wants its own part.
        q, _, _ = self.qkv_proj(hidden_states)[0].split(self.size, dim=-1)
        k = v = None
        if encoded is not None:
            _, k, v = self.qkv_proj(encoded)[0].split(self.size, dim=-1)
        output, _ = self.out_proj(self.attn(q, k, v))
        return output


class BartLayer(nn.Module):
    def __init__(
        self, config: BartConfig, is_decoder: bool, cache_config, quant_config, prefix: str
    ) -> None:
        super().__init__()
        heads = config.decoder_attention_heads if is_decoder else config.encoder_attention_heads
        ffn_dim = config.decoder_ffn_dim if is_decoder else config.encoder_ffn_dim
        kind = AttentionType.DECODER if is_decoder else AttentionType.ENCODER
        shared = (cache_config, quant_config)
        self.self_attn = BartAttention(config, heads, kind, *shared, f"{prefix}.self_attn")
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.encoder_attn = None
        if is_decoder:
            kind = AttentionType.ENCODER_DECODER
            self.encoder_attn = BartAttention(config, heads, kind, *shared, f"{prefix}.encoder_attn")
            self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.fc1 = ColumnParallelLinear(config.d_model, ffn_dim, bias=True, prefix=f"{prefix}.fc1")
        self.fc2 = RowParallelLinear(ffn_dim, config.d_model, bias=True, prefix=f"{prefix}.fc2")
        self.activation_fn = get_act_fn(config.activation_function)
        self.final_layer_norm = nn.LayerNorm(config.d_model)

    def forward(self, x: torch.Tensor, encoded: torch.Tensor | None = None) -> torch.Tensor:
        x = self.self_attn_layer_norm(x + self.self_attn(x))
        if self.encoder_attn is not None:
            x = self.encoder_attn_layer_norm(x + self.encoder_attn.cross(x, encoded))
        inner, _ = self.fc1(x)
        outer, _ = self.fc2(self.activation_fn(inner))
        x = self.final_layer_norm(x + outer)
        if x.dtype == torch.float16 and (torch.isinf(x).any() or torch.isnan(x).any()):
            x = cast_overflow_tensors(x)
        return x


class BartStack(nn.Module):
    """The encoder or the decoder."""

    def __init__(
        self, vllm_config: VllmConfig, embed_tokens: nn.Module, is_decoder: bool, prefix: str
    ) -> None:
        super().__init__()
        config: BartConfig = vllm_config.model_config.hf_config
        self.embed_tokens = embed_tokens
        self.embed_scale = config.d_model**0.5 if config.scale_embedding else 1.0
        self.embed_positions = BartPositions(config.max_position_embeddings, config.d_model)
        self.layernorm_embedding = nn.LayerNorm(config.d_model)
        count = config.decoder_layers if is_decoder else config.encoder_layers
        self.layers = nn.ModuleList(
            BartLayer(
                config, is_decoder, vllm_config.cache_config, vllm_config.quant_config,
                f"{prefix}.layers.{i}",
            )
            for i in range(count)
        )  # fmt: skip

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, encoded: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.embed_tokens(ids) * self.embed_scale + self.embed_positions(positions)
        x = self.layernorm_embedding(x)
        for layer in self.layers:
            x = layer(x, encoded)
        return x


class BartModel(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: BartConfig = vllm_config.model_config.hf_config
        lora_config: LoRAConfig | None = vllm_config.lora_config
        assert lora_config is None
        self.shared = VocabParallelEmbedding(config.vocab_size, config.d_model)
        self.encoder = BartStack(vllm_config, self.shared, False, f"{prefix}.encoder")
        self.decoder = BartStack(vllm_config, self.shared, True, f"{prefix}.decoder")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        params = dict(self.named_parameters())
        loaded: set[str] = set()
        for name, weight in weights:
            shard_id = None
            for fused, part, shard in _STACKED:
                if part in name:
                    name, shard_id = name.replace(part, fused), shard
                    break
            param = params[name]
            loader = getattr(param, "weight_loader", default_weight_loader)
            if shard_id is None:
                loader(param, weight)
            else:
                loader(param, weight, shard_id)
            loaded.add(name)
        return loaded


@MULTIMODAL_REGISTRY.register_processor(
    BartMultiModalProcessor, info=BartProcessingInfo, dummy_inputs=BartDummyInputsBuilder
)
class BartForConditionalGeneration(nn.Module, SupportsMultiModal, SupportsQuant):
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "encoder.": "model.encoder.",
            "decoder.": "model.decoder.",
            "shared.": "model.shared.",
        }
    )
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: BartConfig = vllm_config.model_config.hf_config
        self.config = config
        self.model = BartModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            config.vocab_size, config.d_model, prefix=maybe_prefix(prefix, "lm_head")
        )
        self.lm_head = self.lm_head.tie_weights(self.model.shared)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        return None

    def get_language_model(self) -> nn.Module:
        return self.model.decoder

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: MultiModalEmbeddings | None = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.model.decoder.embed_tokens(input_ids)

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        texts: list[torch.Tensor] | torch.Tensor = kwargs["text_ids"]
        return [
            self.model.encoder(ids, torch.arange(len(ids), device=ids.device)) for ids in texts
        ]

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        *,
        encoder_outputs: list[torch.Tensor] | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        encoded = torch.cat(encoder_outputs) if encoder_outputs else None
        return self.model.decoder(input_ids, positions, encoded)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loader = AutoWeightsLoader(
            self,
            skip_prefixes=[
                "lm_head.", "final_logits_bias", "model.encoder.embed_tokens",
                "model.decoder.embed_tokens",
            ],
        )  # fmt: skip
        return loader.load_weights(weights, mapper=self.hf_to_vllm_mapper)
