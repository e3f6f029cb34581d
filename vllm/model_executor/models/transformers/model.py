# SPDX-License-Identifier: Apache-2.0
"""A causal language model of Transformers, its attention replaced by this engine's.

Everything else (embeddings, norms, projections, experts, the output projection with its scales and
caps) is Transformers' own code. It sees the flat batch as one long sequence with given positions,
so a model is served only if nothing but attention looks at other tokens: checked once with numbers
when the weights are there (`check_after_loading`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.model_loader.weight_utils import describe_names
from vllm.model_executor.models.transformers.attention import PAGED, PLAIN, FallbackAttention
from vllm.model_executor.models.transformers.calls import (
    RECORDING,
    record_attention_calls,
)
from vllm.model_executor.models.transformers.parts import ModelParts
from vllm.model_executor.models.transformers.unsupported import UnsupportedModel

_Calls = TypeVar("_Calls")
# Lengths of the two sequences of the check: the second must not notice the first.
CHECK_LENGTHS = (9, 6)
# Largest relative difference of a token's logits from Transformers' own, the median over tokens.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
# Rope scalings whose frequencies depend on the longest text of a batch, beyond the original length.
_LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")


class TransformersModel(nn.Module):
    """What is the same with and without an encoder.

    Raises ValueError, naming the model and the reason, for one that would not be served right.
    """

    auto_class: type
    parts_class: type

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.model_config = vllm_config.model_config
        self.config = self.model_config.make_transformers_config()
        self.name = "/".join(self.model_config.architectures)
        try:
            _check_config(self.config, self.model_config)
            self.attention = nn.ModuleList(self._make_layers(vllm_config, prefix))
        except UnsupportedModel as error:
            raise self._refusal(error) from None
        with no_init_weights():
            self._adopt(self._make(PAGED, torch.get_default_dtype()))

    def _make(self, attn_implementation: str, dtype: torch.dtype) -> PreTrainedModel:
        return self.auto_class.from_config(
            self.config,
            attn_implementation=attn_implementation,
            dtype=dtype,
            trust_remote_code=self.model_config.trust_remote_code,
        ).eval()

    def _make_layers(self, vllm_config: VllmConfig, prefix: str) -> list[nn.Module]:
        """The layers behind the model's calls of attention."""
        raise NotImplementedError

    def _dry_run(self, record: Callable[[PreTrainedModel], _Calls]) -> _Calls:
        """`record` of the model on the meta device, or UnsupportedModel."""
        try:
            with torch.device("meta"), no_init_weights():
                # The one dtype that every operation has a form for on the meta device.
                model = self._make(RECORDING, torch.bfloat16)
            if not model._can_set_attn_implementation():
                raise UnsupportedModel("its layers do not call Transformers' attention interface")
            return record(model)
        except UnsupportedModel:
            raise
        except KeyError as error:
            if RECORDING not in error.args:
                raise
            # Its layers are looked up in a table of their own.
            raise UnsupportedModel(
                "its layers do not call Transformers' attention interface"
            ) from error
        except Exception as error:  # whatever its code does with inputs it does not expect
            raise UnsupportedModel(f"it fails in a dry run: {_one_line(error)}") from error

    def _adopt(self, model: PreTrainedModel) -> None:
        self.model = model
        self.parts = self.parts_class(model)
        for layer in self.attention:
            layer.attach(model)

    def _refusal(self, reason: object) -> ValueError:
        return ValueError(f"{self.name} cannot be served with Transformers' code: {reason}")

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """(num_tokens, hidden_size) -> (num_tokens, vocab_size)."""
        return self.parts.project(hidden_states[None])[0]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load weights as Transformers does, which renames and fuses some of them.

        Raises ValueError naming weights that are missing, not expected or of another shape.
        """
        model, info = type(self.model).from_pretrained(
            None,
            config=self.config,
            state_dict=dict(weights),
            dtype=self.model.dtype,
            attn_implementation=PAGED,
            ignore_mismatched_sizes=True,  # told below, by name
            output_loading_info=True,
        )
        for kind, names in (
            ("lacks weights", info["missing_keys"]),
            ("has weights for which there is no place", info["unexpected_keys"]),
            ("has weights of another shape", [key for key, *_ in info["mismatched_keys"]]),
        ):
            if names:
                raise ValueError(f"the checkpoint of {self.name} {kind}: {describe_names(names)}")
        self._adopt(model.eval())
        return {name for name, _ in self.named_parameters()}

    @torch.inference_mode()
    def check_after_loading(self) -> None:
        """Compares two short sequences in one flat batch with Transformers' own run of each."""
        try:
            error = self._median_error()
        except Exception as cause:
            raise self._refusal(f"it fails in a first run: {_one_line(cause)}") from cause
        if not error <= _TOLERANCE[self.model.dtype]:
            raise self._refusal(
                "something in it besides attention looks at other tokens (its logits in a batch "
                f"differ from Transformers' by {100 * error:.2g}%)"
            )

    def _median_error(self) -> float:
        """The relative difference of a token's logits from Transformers' own."""
        raise NotImplementedError


class TransformersForCausalLM(TransformersModel):
    """Token ids in, logits out."""

    auto_class = AutoModelForCausalLM
    parts_class = ModelParts

    def _make_layers(self, vllm_config: VllmConfig, prefix: str) -> list[nn.Module]:
        num_layers = self.config.get_text_config().num_hidden_layers
        max_model_len = self.model_config.max_model_len
        calls = self._dry_run(
            lambda model: record_attention_calls(model, num_layers, max_model_len)
        )
        return [FallbackAttention(vllm_config, call, prefix) for call in calls]

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(num_tokens,) -> (num_tokens, hidden_size)."""
        return self.model.get_input_embeddings()(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(num_tokens,) ids or (num_tokens, hidden_size) embeddings -> (num_tokens,
        hidden_size)."""
        inputs = (
            {"input_ids": input_ids[None].long()}
            if inputs_embeds is None
            else {"inputs_embeds": inputs_embeds[None]}
        )
        return self.parts.decode(position_ids=positions[None], **inputs)[0]

    def _median_error(self) -> float:
        device, vocab_size = self.model.device, self.config.get_text_config().vocab_size
        ids = torch.arange(sum(CHECK_LENGTHS), device=device) * 7 % vocab_size
        positions = torch.cat([torch.arange(n, device=device) for n in CHECK_LENGTHS])
        for layer in self.attention:
            layer.sequence_lengths = list(CHECK_LENGTHS)
        with attention_of(self.model, PLAIN):
            ours = self.compute_logits(self(ids, positions)).float()
        with attention_of(self.model, "eager"):
            theirs = torch.cat(
                [
                    self.model(input_ids=part[None], use_cache=False).logits[0].float()
                    for part in ids.split(CHECK_LENGTHS)
                ]
            )
        return median_error(ours, theirs)


def median_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The relative difference of a token's logits (num_tokens, vocab_size), the median over tokens:
    in a mixture of experts, rounding alone may send a single token elsewhere."""
    errors = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(1e-30)
    return errors.median().item()


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _check_config(config: PretrainedConfig, model_config: ModelConfig) -> None:
    text = config.get_text_config()
    for parameters in _rope_parameters(text):
        kind = parameters.get("rope_type")
        if kind not in _LENGTH_DEPENDENT_ROPES:
            continue
        limit = parameters.get("original_max_position_embeddings") or text.max_position_embeddings
        if model_config.max_model_len > limit:
            raise UnsupportedModel(
                f"its {kind} rope changes with the length of a text beyond {limit} tokens; pass "
                f"--max-model-len {limit} or less"
            )


def _rope_parameters(text_config: PretrainedConfig) -> list[dict]:
    """The rope parameters of a config: one dict, or one for each kind of layer."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


@contextmanager
def attention_of(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Run a model with another attention implementation for a while."""
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(PAGED)
