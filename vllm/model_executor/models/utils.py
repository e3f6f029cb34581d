# SPDX-License-Identifier: Apache-2.0
"""Building and loading models."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from vllm.distributed import get_pp_group
from vllm.logger import init_logger
from vllm.model_executor.layer_index import extract_layer_index as extract_layer_index
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.sequence import IntermediateTensors

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = init_logger(__name__)

Weights = Iterable[tuple[str, torch.Tensor]]


@dataclass
class WeightsMapper:
    """Renames a checkpoint's weights. Rules apply in the fields' order; a rule to None drops the
    weight."""

    orig_to_new_regex: Mapping[re.Pattern, str | None] = field(default_factory=dict)
    orig_to_new_substr: Mapping[str, str | None] = field(default_factory=dict)
    orig_to_new_prefix: Mapping[str, str | None] = field(default_factory=dict)
    orig_to_new_suffix: Mapping[str, str | None] = field(default_factory=dict)

    def __or__(self, other: WeightsMapper) -> WeightsMapper:
        """Both sets of rules, `other`'s in place of equal ones."""
        return WeightsMapper(
            {**self.orig_to_new_regex, **other.orig_to_new_regex},
            {**self.orig_to_new_substr, **other.orig_to_new_substr},
            {**self.orig_to_new_prefix, **other.orig_to_new_prefix},
            {**self.orig_to_new_suffix, **other.orig_to_new_suffix},
        )

    def _map_name(self, name: str) -> str | None:
        for pattern, new in self.orig_to_new_regex.items():
            if pattern.search(name):
                if new is None:
                    return None
                name = pattern.sub(new, name)
        for old, new in self.orig_to_new_substr.items():
            if old in name:
                if new is None:
                    return None
                name = name.replace(old, new, 1)
        for old, new in self.orig_to_new_prefix.items():
            if name.startswith(old):
                if new is None:
                    return None
                name = new + name[len(old) :]
        for old, new in self.orig_to_new_suffix.items():
            if name.endswith(old):
                if new is None:
                    return None
                name = name[: len(name) - len(old)] + new
        return name

    def apply(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under their new names."""
        for name, tensor in weights:
            if (new := self._map_name(name)) is not None:
                yield new, tensor

    def apply_list(self, values: list[str]) -> list[str]:
        return [new for name in values if (new := self._map_name(name)) is not None]

    def apply_dict(self, values: dict[str, Any]) -> dict[str, Any]:
        return {
            new: value
            for name, value in values.items()
            if (new := self._map_name(name)) is not None
        }


# What checkpoints carry besides weights: tables that are worked out here.
_NOT_WEIGHTS = (
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
    "rotary_pos_emb.inv_freq",
)


class AutoWeightsLoader:
    """Loads weights into a module by name.

    A child module with a `load_weights` of its own gets its weights (without its prefix); every
    other weight goes through its parameter's `weight_loader`. Raises ValueError naming a weight
    that has no place, unless an option says that it may be skipped.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        skip_prefixes: list[str] | None = None,
        skip_substrs: list[str] | None = None,
        ignore_unexpected_prefixes: list[str] | None = None,
        ignore_unexpected_suffixes: list[str] | None = None,
    ) -> None:
        self.module = module
        self.skip_prefixes = tuple(skip_prefixes or ())
        self.skip_substrs = (*(skip_substrs or ()), *_NOT_WEIGHTS)
        self.ignore_unexpected_prefixes = tuple(ignore_unexpected_prefixes or ())
        self.ignore_unexpected_suffixes = tuple(ignore_unexpected_suffixes or ())

    def load_weights(self, weights: Weights, *, mapper: WeightsMapper | None = None) -> set[str]:
        """Load all; returns the names of the parameters that were loaded."""
        weights = mapper.apply(weights) if mapper is not None else weights
        wanted = ((name, tensor) for name, tensor in weights if not self._skips(name))
        return set(self._load_module("", self.module, wanted))

    def _skips(self, name: str) -> bool:
        return name.startswith(self.skip_prefixes) or any(
            part in name for part in self.skip_substrs
        )

    def _may_be_unexpected(self, name: str) -> bool:
        return name.startswith(self.ignore_unexpected_prefixes) or name.endswith(
            self.ignore_unexpected_suffixes
        )

    def _load_module(self, prefix: str, module: nn.Module, weights: Weights) -> Iterator[str]:
        own_loader = getattr(module, "load_weights", None)
        if module is not self.module and callable(own_loader):
            yield from self._delegate(prefix, own_loader, weights)
            return
        children = dict(module.named_children())
        tensors = dict(module.named_parameters(recurse=False)) | dict(
            module.named_buffers(recurse=False)
        )
        for key, group in itertools.groupby(weights, lambda item: item[0].partition(".")[0]):
            inner = ((name.partition(".")[2], tensor) for name, tensor in group)
            name = f"{prefix}.{key}" if prefix else key
            if key in children:
                yield from self._load_module(name, children[key], inner)
            elif key in tensors:
                yield from self._load_tensors(name, tensors[key], inner)
            else:
                self._refuse(name, module, inner)

    def _delegate(
        self, prefix: str, load: Callable[[Weights], Iterable[str]], weights: Weights
    ) -> Iterator[str]:
        for name in load(weights) or ():
            yield f"{prefix}.{name}"

    def _load_tensors(self, name: str, target: torch.Tensor, weights: Weights) -> Iterator[str]:
        for rest, tensor in weights:
            if rest:
                self._refuse(f"{name}.{rest}", self.module, ())
                continue
            load_weight(name, target, tensor)
            yield name

    def _refuse(self, name: str, module: nn.Module, weights: Weights) -> None:
        names = [f"{name}.{rest}" if rest else name for rest, _ in weights] or [name]
        unexpected = [name for name in names if not self._may_be_unexpected(name)]
        if unexpected:
            raise ValueError(
                f"the checkpoint has a weight {unexpected[0]} for which {type(module).__name__} "
                "has no place"
            )


def load_weight(name: str, param: torch.Tensor, tensor: torch.Tensor, shard_id: Any = None) -> None:
    """Load one weight through its parameter's loader. Raises ValueError with the weight's name."""
    loader = getattr(param, "weight_loader", default_weight_loader)
    try:
        if shard_id is None:
            loader(param, tensor)
        else:
            loader(param, tensor, shard_id)
    except (ValueError, RuntimeError, IndexError) as error:
        raise ValueError(f"weight {name} cannot be loaded: {error}") from error


# Part of a checkpoint's name -> (the fused layer's, the shard it becomes).
StackedNames = Mapping[str, tuple[str, str | int | None]]
_STACKED: StackedNames = {
    ".q_proj": (".qkv_proj", "q"),
    ".k_proj": (".qkv_proj", "k"),
    ".v_proj": (".qkv_proj", "v"),
    ".gate_proj": (".gate_up_proj", 0),
    ".up_proj": (".gate_up_proj", 1),
}


def load_stacked_weights(
    module: nn.Module, weights: Weights, stacked: StackedNames = _STACKED
) -> set[str]:
    """Load weights whose projections a checkpoint keeps apart into layers that fuse them.

    `stacked`: the first of its names that is part of a weight's counts. Returns the names of the
    parameters that got something. Raises ValueError for a weight that has no place.
    """
    parameters = dict(module.named_parameters())
    loaded = set()
    for name, tensor in weights:
        target, shard_id = _stacked_name(name, stacked)
        if target not in parameters:
            raise ValueError(
                f"the checkpoint has a weight {name} for which {type(module).__name__} has no place"
            )
        load_weight(name, parameters[target], tensor, shard_id)
        loaded.add(target)
    return loaded


def _stacked_name(name: str, stacked: StackedNames) -> tuple[str, str | int | None]:
    """Name of the parameter that a checkpoint's weight goes into, and the shard of it."""
    for part, (fused, shard_id) in stacked.items():
        if part in name:
            return name.replace(part, fused), shard_id
    return name, None


def layer_sliding_window(config: PretrainedConfig, prefix: str) -> int | None:
    """The window in tokens of the layer that `prefix` names; None: it attends to all.

    `layer_types` says which layers have the config's window; without it all do. Raises ValueError
    for a kind of layer that is neither.
    """
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return window
    layer_type = layer_types[extract_layer_index(prefix)]
    if layer_type not in ("full_attention", "sliding_attention"):
        raise ValueError(
            f"layer {prefix} is of type {layer_type!r}; supported: full_attention, "
            "sliding_attention"
        )
    return window if layer_type == "sliding_attention" else None


class LayerFn(Protocol):
    """Makes one layer."""

    def __call__(self, prefix: str) -> nn.Module: ...


class PPMissingLayer(nn.Identity):
    """Stands for a layer that is on another pipeline stage."""


def make_layers(
    num_hidden_layers: int, layer_fn: LayerFn, prefix: str
) -> tuple[int, int, nn.ModuleList]:
    """(first layer here, first layer behind, all layers): layers of other stages are
    PPMissingLayer."""
    group = get_pp_group()
    start = num_hidden_layers * group.rank_in_group // group.world_size
    end = num_hidden_layers * (group.rank_in_group + 1) // group.world_size
    layers = nn.ModuleList(
        layer_fn(prefix=f"{prefix}.{index}") if start <= index < end else PPMissingLayer()
        for index in range(num_hidden_layers)
    )
    return start, end, layers


def make_empty_intermediate_tensors_factory(
    keys: list[str], hidden_size: int
) -> Callable[[int, torch.dtype, torch.device], IntermediateTensors]:
    """Makes what one pipeline stage hands to the next, filled with zeros."""

    def make(batch_size: int, dtype: torch.dtype, device: torch.device) -> IntermediateTensors:
        return IntermediateTensors(
            {
                key: torch.zeros((batch_size, hidden_size), dtype=dtype, device=device)
                for key in keys
            }
        )

    return make


def maybe_prefix(prefix: str, name: str) -> str:
    """`name` under `prefix`, or alone where that is empty."""
    return f"{prefix}.{name}" if prefix else name


def cast_overflow_tensors(tensors: torch.Tensor, offset: float = 1000) -> torch.Tensor:
    """Clamp what has overflowed to `offset` within the finite range of its dtype."""
    if tensors.isinf().any() or tensors.isnan().any():
        limit = torch.finfo(tensors.dtype).max - offset
        tensors = torch.clamp(tensors, min=-limit, max=limit)
    return tensors
