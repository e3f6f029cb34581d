# SPDX-License-Identifier: Apache-2.0
"""A layer's place in its stack, read off its dotted name."""

from __future__ import annotations

from collections.abc import Iterable

# Components that name a stack of layers: the integer after the first of them is the layer's index.
_STACKS = frozenset({"layers", "layer", "blocks", "block", "h"})


def extract_layer_index(layer_name: str, num_attn_module: int = 1) -> int:
    """`model.layers.12.self_attn.attn` -> 12.

    Of several integers the one after the first component that names a stack (`layers`, `blocks`,
    `h`, ...) counts, else the first: `layers.3.self_attn.0` and `draft.0.layers.3.attn` are 3.

    Args:
        layer_name: the dotted name of a layer or a parameter.
        num_attn_module: attention modules in each layer. With more than one, the index counts
            modules: `model.layers.3.self_attn.1` is `3 * num_attn_module + 1`.

    Raises:
        ValueError: the name has no integer component, or its module number is too large.
    """
    parts = layer_name.split(".")
    place, module_place = _places(parts)
    if place is None:
        raise ValueError(f"layer name {layer_name!r} has no layer index: it holds no integer")
    index = int(parts[place])
    if num_attn_module == 1:
        return index
    module = 0 if module_place is None else int(parts[module_place])
    if module >= num_attn_module:
        raise ValueError(
            f"layer name {layer_name!r} is attention module {module} of its layer, "
            f"but each layer has {num_attn_module}"
        )
    return index * num_attn_module + module


def count_attention_modules(layer_names: Iterable[str]) -> int:
    """Attention modules in each layer of a model: 1, unless names differ only in the integer after
    the layer's index, as `model.layers.3.self_attn.0` and `model.layers.3.self_attn.1` do."""
    modules: dict[tuple[str, ...], set[int]] = {}
    for parts in (name.split(".") for name in layer_names):
        _, place = _places(parts)
        if place is not None:
            rest = (*parts[:place], "", *parts[place + 1 :])
            modules.setdefault(rest, set()).add(int(parts[place]))
    several = [numbers for numbers in modules.values() if len(numbers) > 1]
    return max((max(numbers) + 1 for numbers in several), default=1)


def _places(parts: list[str]) -> tuple[int | None, int | None]:
    """Where in a dotted name the layer's index stands, and the first integer after it."""
    places = [place for place, part in enumerate(parts) if part.isdecimal()]
    in_stack = (place for place in places if place > 0 and parts[place - 1] in _STACKS)
    index = next(in_stack, next(iter(places), None))
    return index, next((place for place in places if index is not None and place > index), None)
