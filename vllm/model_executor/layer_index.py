# SPDX-License-Identifier: Apache-2.0
"""A layer's place in its stack, read off its dotted name."""

from __future__ import annotations

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
    places = [place for place, part in enumerate(parts) if part.isdecimal()]
    if not places:
        raise ValueError(f"layer name {layer_name!r} has no layer index: it holds no integer")
    in_stack = (place for place in places if place > 0 and parts[place - 1] in _STACKS)
    place = next(in_stack, places[0])
    index = int(parts[place])
    if num_attn_module == 1:
        return index
    module = next((int(parts[p]) for p in places if p > place), 0)
    if module >= num_attn_module:
        raise ValueError(
            f"layer name {layer_name!r} is attention module {module} of its layer, "
            f"but each layer has {num_attn_module}"
        )
    return index * num_attn_module + module
