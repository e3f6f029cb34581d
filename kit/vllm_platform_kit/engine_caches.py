# SPDX-License-Identifier: Apache-2.0
"""The caches of an engine that runs: whose they are, where their bytes are, which bytes are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from vllm_platform_kit.alignment import draw, examine
from vllm_platform_kit.backends import backend_name
from vllm_platform_kit.findings import Finding
from vllm_platform_kit.tiny_models import Request, TinyModel
from vllm_platform_kit.views import Layer, observe

# Of a page that nobody wrote to; no K or V is it by chance.
MARK = 1234.5
NUM_PROBED_TOKENS = 5
# What a former request may have left in a page.
STALE = {"a large number": 1e4, "NaN": float("nan"), "Inf": float("inf")}
Generate = Callable[[list[Request], int], list[list[int]]]
# Group -> the pages that new requests were handed.
Pages = dict[int, list[int]]


@dataclass
class Observed:
    """layers: with a cache that could be looked at; findings: about the others and about whose is
    whose."""

    layers: list[Layer]
    findings: list[Finding]
    notes: list[str]

    @classmethod
    def of(cls, llm, configs: list) -> Observed:
        """The caches of the first worker."""
        if not configs:
            return cls([], [], ["the engine's executor keeps its KV cache config to itself"])
        executor = llm.llm_engine.engine_core.engine_core.model_executor
        worker = executor.driver_worker
        worker = getattr(worker, "worker", worker)
        layers = worker.vllm_config.compilation_config.static_forward_context
        found = cls([], [], [])
        for group, group_spec in enumerate(configs[0].kv_cache_groups):
            for name in group_spec.layer_names:
                found._add(name, group, group_spec.kv_cache_spec, layers.get(name), configs[0])
        found.findings += _strangers(found.layers, configs[0])
        return found

    def _add(self, name: str, group: int, spec: object, layer: object, config: object) -> None:
        cache = getattr(layer, "kv_cache", None)
        while isinstance(cache, list | tuple) and len(cache) == 1:
            cache = cache[0]
        if not isinstance(cache, torch.Tensor) or not cache.numel():
            self.findings.append(Finding("BINDING_CACHE", f"layer {name}", "no cache is bound to it"))
            return
        inner = getattr(spec, "kv_cache_specs", None)
        spec = inner[name] if isinstance(inner, dict) else spec
        backend = getattr(layer, "attn_backend", None) or layer.get_attn_backend()
        kind = type(spec).__name__
        try:
            self.layers.append(
                observe(name, group, kind, backend, spec, cache, config.num_blocks)
            )
        except ValueError as error:
            subject = f"{backend_name(backend)} (layer {name})"
            self.findings.append(Finding("LAYOUT_SHAPE", subject, str(error)))

    def drawing(self, title: str) -> str:
        """An SVG; empty without layers."""
        backends = sorted({backend_name(layer.backend) for layer in self.layers})
        return draw(self.layers, f"{title}: {', '.join(backends)}") if self.layers else ""


def _strangers(layers: list[Layer], config: object) -> Iterator[Finding]:
    """Layers of one group over the very same pages, and layers outside the memory that is theirs."""
    seen: dict[tuple, str] = {}
    for layer in layers:
        key = (_pointer(layer), layer.group, layer.geometry.ownership())
        if key in seen:
            yield Finding(
                "BINDING_CACHE",
                f"layer {layer.name}",
                f"it is bound to the cache of layer {seen[key]}",
            )
        seen.setdefault(key, layer.name)
    by_name = {layer.name: layer for layer in layers}
    for tensor in config.kv_cache_tensors:
        names = [name for name in tensor.shared_by if name in by_name]
        for name in names[1:]:
            if _pointer(by_name[name]) != _pointer(by_name[names[0]]):
                yield Finding(
                    "BINDING_CACHE",
                    f"layer {name}",
                    f"the config puts it into one allocation with {names[0]}; it is bound to another",
                )


def _pointer(layer: Layer) -> int:
    return layer.tensor.untyped_storage().data_ptr()


def probe(
    observed: Observed, generate: Generate, model: TinyModel, handed_out: Pages
) -> tuple[list[Finding], list[str]]:
    """All that can be found of caches that are in use; the engine is idle. handed_out: kept up to date
    while it runs."""
    findings = list(observed.findings)
    if not any(one.code == "BINDING_CACHE" for one in findings):
        findings += examine(observed.layers, "the model's caches")
    if not findings:
        findings += check_bytes(observed, generate, model, handed_out)
        findings += check_stale(observed.layers, generate, model)
    return findings, observed.notes


def _pages_but_the_first(layer: Layer) -> torch.Tensor:
    """Page 0 is never handed out, and padding is written there."""
    block, per_page = layer.geometry.roles.index("block"), layer.geometry.kernel_blocks_per_page
    return layer.tensor.narrow(block, per_page, layer.tensor.shape[block] - per_page)


def _fill(layers: list[Layer], value: float) -> None:
    for layer in layers:
        if layer.tensor.is_floating_point():
            _pages_but_the_first(layer).fill_(value)


def check_bytes(
    observed: Observed, generate: Generate, model: TinyModel, handed_out: Pages
) -> Iterator[Finding]:
    """Which elements a request of a few tokens writes: in the page that it was handed, and there those
    of its tokens, of all heads."""
    layers = observed.layers
    count = min(NUM_PROBED_TOKENS, *(layer.geometry.tokens_per_page - 1 for layer in layers))
    if count < 1:
        return
    _fill(layers, MARK)
    handed_out.clear()
    generate([model.probe(count)], 1)
    seen: set[type] = set()
    for layer in layers:
        what = _misused(layer, count, handed_out)
        if not what or layer.backend in seen:
            continue
        seen.add(layer.backend)
        if _order_is_its_own(layer, count, handed_out):
            observed.notes.append(
                f"{backend_name(layer.backend)} has an order of its own within each head's part of a "
                "block: whoever moves its pages must move whole ones, of the same size"
            )
        else:
            subject = f"{backend_name(layer.backend)} (layer {layer.name})"
            yield Finding("LAYOUT_BYTES", subject, what)


def _misused(layer: Layer, count: int, handed_out: Pages) -> str:
    """What is odd about the elements that were written, by their place in the declared layout. Pages of
    other groups may be other layers' over the same memory."""
    mine, *more = handed_out[layer.group]
    others = _of_others(layer, handed_out)
    some, whole = _written(layer)
    pages = set(some.any(1).nonzero().flatten().tolist())
    expected = list(range(count))
    tokens = some[mine].nonzero().flatten().tolist()
    if more:
        return f"{count} tokens were handed {1 + len(more)} pages"
    if tokens != expected:
        return (
            f"a request of {count} tokens wrote to tokens {_short(tokens)} of its page by the declared "
            f"layout ({', '.join(layer.geometry.memory_roles)} in memory), not to {_short(expected)}"
        )
    if strange := pages - others - {mine}:
        return f"a request that has page {mine} wrote to page {_short(sorted(strange))} as well"
    if not whole[mine, :count].all():
        return f"of a request's {count} tokens some heads or elements were not written"
    return ""


def _of_others(layer: Layer, handed_out: Pages) -> set[int]:
    return {page for group, pages in handed_out.items() if group != layer.group for page in pages}


def _order_is_its_own(layer: Layer, count: int, handed_out: Pages) -> bool:
    """Whether each head's part of a block, one stretch of memory, holds as many elements as its tokens
    have, and no other page has any: then the order within is the kernel's own affair."""
    geometry = layer.geometry
    if geometry.memory_roles.index("head") > geometry.memory_roles.index("token"):
        return False
    some, _ = _written(layer)
    pages = set(some.any(1).nonzero().flatten().tolist())
    if not pages <= {*handed_out[layer.group], *_of_others(layer, handed_out)}:
        return False
    inner = [geometry.roles.index(role) for role in ("token", "content")]
    outer = geometry.roles.index("block")
    per_token = geometry.dim("content").size
    per_block, per_page = geometry.dim("token").size, geometry.kernel_blocks_per_page
    parts = (layer.tensor != MARK).movedim((outer, *inner), (0, -2, -1)).flatten(-2).sum(-1)
    first = handed_out[layer.group][0] * per_page
    here = [min(max(count - number * per_block, 0), per_block) for number in range(per_page)]
    pairs = zip(parts[first : first + per_page], here)
    return all(bool((part == tokens * per_token).all()) for part, tokens in pairs)


def _written(layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """Two bools for each page and token in it, but for page 0: whether something of it was written, and
    whether all was."""
    geometry = layer.geometry
    block, token = geometry.roles.index("block"), geometry.roles.index("token")
    written = (layer.tensor != MARK).movedim((block, token), (0, 1)).flatten(2)
    written[: geometry.kernel_blocks_per_page] = False
    shape = (geometry.num_pages, geometry.tokens_per_page)
    return written.any(-1).reshape(shape), written.all(-1).reshape(shape)


def _short(numbers: list[int]) -> str:
    if not numbers:
        return "none"
    if numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def check_stale(layers: list[Layer], generate: Generate, model: TinyModel) -> Iterator[Finding]:
    """Whether what former requests left in pages reaches the tokens of later ones."""
    _fill(layers, 0.0)
    clean = generate(model.requests, len(model.expected[0]))
    names = ", ".join(sorted({backend_name(layer.backend) for layer in layers}))
    for word, value in STALE.items():
        _fill(layers, value)
        said = generate(model.requests, len(model.expected[0]))
        for number, (mine, theirs) in enumerate(zip(said, clean)):
            if mine != theirs:
                what = (
                    f"{word} in free pages changes request {number} from token "
                    f"{first_difference(mine, theirs)} on"
                )
                yield Finding("STALE_BYTES", names, what)
                break
    _fill(layers, 0.0)


def first_difference(one: list[int], other: list[int]) -> int:
    """The place of the first token that differs; the shorter length if one is the other's start."""
    pairs = enumerate(zip(one, other))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
