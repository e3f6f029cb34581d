# SPDX-License-Identifier: Apache-2.0
"""What a model of Transformers asks of attention, found in a dry run, and whether it can be served.

The model runs on the meta device (shapes, no numbers) with an attention function that notes its
calls, and a mask function that works out which keys each query may see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from vllm.model_executor.layer_index import extract_layer_index
from vllm.model_executor.model_loader.weight_utils import describe_names
from vllm.model_executor.models.transformers.parts import ModelParts
from vllm.model_executor.models.transformers.unsupported import UnsupportedModel

RECORDING = "vllm_record"
NUM_TOKENS = 4

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
class Recorder:
    """Notes the calls of a run; raises UnsupportedModel for one that cannot be served."""

    names: dict[nn.Module, str]
    max_model_len: int
    calls: list[AttentionCall] = field(default_factory=list)

    def note(self, module, query, key, value, attention_mask, scaling=None, **keywords) -> None:
        name = self.names[module]
        check_keywords(name, keywords)
        _check_causal(name, module, keywords)
        window = self._window(name, attention_mask, keywords.get("sliding_window"))
        self.calls.append(self.describe(name, (query, key, value), scaling, keywords, window))

    def describe_mask(self, mask_function: Callable) -> int:
        """The number by which a mask goes through the model: its window, 0 for none."""
        return find_window(mask_function, self.max_model_len) or 0

    @staticmethod
    def describe(
        name: str, inputs: tuple[torch.Tensor, ...], scaling, keywords: dict, window: int | None
    ) -> AttentionCall:
        query, key, value = inputs
        return AttentionCall(
            module_name=name,
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_size=query.shape[3],
            value_head_size=value.shape[3],
            scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
            sliding_window=window,
            logits_soft_cap=keywords.get("softcap"),
        )

    def _window(self, name: str, mask: torch.Tensor | None, said: int | None) -> int | None:
        """The window that the mask has; what the call says must not contradict it."""
        window = described_mask(name, mask)
        said = 0 if said is None or said >= self.max_model_len else int(said)
        if said and said != window:
            raise UnsupportedModel(
                f"{name} asks for a window of {said} tokens under a mask of {window or 'none'}"
            )
        return window or None


_recorder: ContextVar[Recorder] = ContextVar("recorder")


def described_mask(name: str, mask: torch.Tensor | None) -> int:
    """What `Recorder.describe_mask` said of the mask that came with a call; 0 without one."""
    if mask is not None and not (mask.dtype == torch.int64 and mask.numel() == 1):
        raise UnsupportedModel(f"{name} passes a mask of its own making to attention")
    return 0 if mask is None else int(mask)


def check_keywords(name: str, keywords: dict) -> None:
    """Raises UnsupportedModel for one that changes the result in a way not known here."""
    for keyword, value in keywords.items():
        off = value is None or value is False or (isinstance(value, int | float) and value == 0)
        if keyword not in _KNOWN_KEYWORDS and not off:
            raise UnsupportedModel(f"{name} passes {keyword}= to attention, which is not known here")


def _check_causal(name: str, module: nn.Module, keywords: dict) -> None:
    said = keywords.get("is_causal")
    if said is False or (getattr(module, "is_causal", True) is False and said is not True):
        raise UnsupportedModel(f"{name} attends in both directions")


def _record(module, query, key, value, attention_mask, *args, **keywords):
    if args:
        raise UnsupportedModel(f"{type(module).__name__} passes attention more than is known here")
    _recorder.get().note(module, query, key, value, attention_mask, **keywords)
    batch, heads, tokens, _ = query.shape
    return query.new_zeros(batch, tokens, heads, value.shape[3]), None


def _describe_mask(*, mask_function: Callable, **_) -> torch.Tensor:
    """What a mask is, as a tensor (1, 1, 1, 1), which models hand on to attention."""
    try:
        described = _recorder.get().describe_mask(mask_function)
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel("its mask depends on more than positions") from error
    return torch.full((1, 1, 1, 1), described, dtype=torch.int64, device="cpu")


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
def recording(recorder: Recorder) -> Iterator[None]:
    """A dry run: modules are on the meta device, calls and masks go to `recorder`."""
    token = _recorder.set(recorder)
    try:
        with torch.inference_mode(), torch.device("meta"):
            yield
    finally:
        _recorder.reset(token)


def record_attention_calls(
    model: PreTrainedModel, num_layers: int, max_model_len: int
) -> list[AttentionCall]:
    """The calls of a model on the meta device whose attention implementation is `RECORDING`.

    Raises UnsupportedModel naming what is in the way.
    """
    recorder = Recorder({m: n for n, m in model.named_modules()}, max_model_len)
    parts = ModelParts(model)
    with recording(recorder):
        ids = torch.zeros(1, NUM_TOKENS, dtype=torch.int64)
        # With a mask of ones nothing is inferred from the positions' values, which are not there.
        hidden = parts.decode(input_ids=ids, position_ids=ids, attention_mask=ids.bool())
        parts.project(hidden)
    check_layers(recorder.calls, num_layers)
    return recorder.calls


def check_layers(calls: list[AttentionCall], num_layers: int) -> None:
    """Raises UnsupportedModel unless each of so many layers made one of these calls."""
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
