# SPDX-License-Identifier: Apache-2.0
"""What a model of Transformers asks of attention, found in a dry run, and whether it can be served.

The model runs on the meta device (shapes, no numbers) with an attention function that notes its
calls, and a mask function that works out which keys each query may see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from vllm.model_executor.layer_index import extract_layer_index
from vllm.model_executor.model_loader.weight_utils import describe_names
from vllm.model_executor.models.transformers.parts import ModelParts, UnsupportedModel

RECORDING = "vllm_record"
_NUM_TOKENS = 4

# Keywords that say nothing about the result (of an inference run) or are said in the record.
_KNOWN_KEYWORDS = frozenset(
    ("scaling", "sliding_window", "softcap", "position_ids", "cache_position", "is_causal")
)


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention. `module_name`: the module of Transformers that called. Values may have
    another head size than queries and keys. `sliding_window` in tokens, the query's own included;
    None: all."""

    module_name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    value_head_size: int
    scale: float
    sliding_window: int | None
    logits_soft_cap: float | None


@dataclass
class _Recorder:
    names: dict[nn.Module, str]
    max_model_len: int
    calls: list[AttentionCall]

    def note(self, module, query, key, value, attention_mask, scaling=None, **keywords) -> None:
        name = self.names[module]
        _check_keywords(name, module, keywords)
        self.calls.append(
            AttentionCall(
                module_name=name,
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_size=query.shape[3],
                value_head_size=value.shape[3],
                scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
                sliding_window=self._window(name, attention_mask, keywords.get("sliding_window")),
                logits_soft_cap=keywords.get("softcap"),
            )
        )

    def _window(self, name: str, mask: torch.Tensor | None, said: int | None) -> int | None:
        """The window that the mask has; what the call says must not contradict it."""
        if mask is not None and not (mask.dtype == torch.int64 and mask.numel() == 1):
            raise UnsupportedModel(f"{name} passes a mask of its own making to attention")
        window = 0 if mask is None else int(mask)
        said = 0 if said is None or said >= self.max_model_len else int(said)
        if said and said != window:
            raise UnsupportedModel(
                f"{name} asks for a window of {said} tokens under a mask of {window or 'none'}"
            )
        return window or None


_recorder: ContextVar[_Recorder] = ContextVar("recorder")


def _check_keywords(name: str, module: nn.Module, keywords: dict) -> None:
    for keyword, value in keywords.items():
        off = value is None or value is False or (isinstance(value, int | float) and value == 0)
        if keyword == "is_causal" and value is False:
            raise UnsupportedModel(f"{name} attends in both directions")
        if keyword not in _KNOWN_KEYWORDS and not off:
            raise UnsupportedModel(f"{name} passes {keyword}= to attention, which is not known here")
    if getattr(module, "is_causal", True) is False and keywords.get("is_causal") is not True:
        raise UnsupportedModel(f"{name} attends in both directions")


def _record(module, query, key, value, attention_mask, *args, **keywords):
    if args:
        raise UnsupportedModel(f"{type(module).__name__} passes attention more than is known here")
    _recorder.get().note(module, query, key, value, attention_mask, **keywords)
    batch, heads, tokens, _ = query.shape
    return query.new_zeros(batch, tokens, heads, value.shape[3]), None


def _describe_mask(*, mask_function: Callable, **_) -> torch.Tensor:
    """The window of a mask as a tensor (1, 1, 1, 1), which models hand on to attention; 0: none."""
    try:
        window = find_window(mask_function, _recorder.get().max_model_len)
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel("its mask depends on more than positions") from error
    return torch.full((1, 1, 1, 1), window or 0, dtype=torch.int64, device="cpu")


AttentionInterface.register(RECORDING, _record)
AttentionMaskInterface.register(RECORDING, _describe_mask)


def find_window(mask_function: Callable, max_model_len: int) -> int | None:
    """The sliding window of `mask_function(batch, head, query, key) -> bool`; None: plain causal.

    Judged within `max_model_len` positions. Raises UnsupportedModel for any other mask.
    """
    with torch.device("cpu"):
        keys, zero = torch.arange(max_model_len), torch.tensor(0)

        def seen(query: int) -> torch.Tensor:
            result = mask_function(zero, zero, torch.tensor(query), keys)
            return torch.as_tensor(result, dtype=torch.bool).expand(max_model_len)

        last = max_model_len - 1
        window = int(seen(last).sum())
        near = (window - 1, window, window + 1, 2 * window, 2 * window + 1)
        for query in {0, 1, last // 3, last // 2, *near, last}:
            if 0 <= query <= last:
                expected = (keys <= query) & (keys > query - window)
                if not torch.equal(seen(query), expected):
                    raise UnsupportedModel(
                        "its mask is neither causal nor causal with a sliding window"
                    )
    return window if window < max_model_len else None


@contextmanager
def _recording(recorder: _Recorder) -> Iterator[None]:
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


def record_attention_calls(
    model: PreTrainedModel, num_layers: int, max_model_len: int
) -> list[AttentionCall]:
    """The calls of a model on the meta device whose attention implementation is `RECORDING`.

    Raises UnsupportedModel naming what is in the way.
    """
    recorder = _Recorder({m: n for n, m in model.named_modules()}, max_model_len, [])
    parts = ModelParts(model)
    with _recording(recorder), torch.inference_mode(), torch.device("meta"):
        ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64)
        # With a mask of ones nothing is inferred from the positions' values, which are not there.
        hidden = parts.decode(input_ids=ids, position_ids=ids, attention_mask=ids.bool())
        parts.project(hidden)
    _check_layers(recorder.calls, num_layers)
    return recorder.calls


def _check_layers(calls: list[AttentionCall], num_layers: int) -> None:
    names = [call.module_name for call in calls]
    if not names:
        raise UnsupportedModel("no layer calls Transformers' attention interface")
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UnsupportedModel(
            f"{describe_names(twice)} attends more than once in a pass, over one cache"
        )
    missing = set(range(num_layers)) - {extract_layer_index(name) for name in names}
    if missing:
        raise UnsupportedModel(
            "these layers do not call Transformers' attention interface: "
            f"{describe_names(map(str, missing))}"
        )
