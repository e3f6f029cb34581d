# SPDX-License-Identifier: Apache-2.0
"""Caches of vLLM 0.29 and later, `[L, B, H, N, C]` in one of six orders, as the guard observes them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.usefixtures("guard_path")
LAYERS, PAGES, HEADS, TOKENS, CONTENT = 3, 4, 2, 8, 16
LETTERS = dict(zip("LBHNC", (LAYERS, PAGES, HEADS, TOKENS, CONTENT)))


def views(order: str, heads: int = HEADS, raw: torch.Tensor | None = None) -> list[torch.Tensor]:
    """One (blocks, heads, tokens, content) for each layer; of the same bytes for any `heads`."""
    sizes = LETTERS | {"H": heads, "C": CONTENT * HEADS // heads}
    count = LAYERS * PAGES * HEADS * TOKENS * CONTENT
    raw = torch.zeros(count) if raw is None else raw
    memory = raw.view([sizes[letter] for letter in order])
    return list(memory.permute([order.index(letter) for letter in "LBHNC"]).unbind(0))


def backend(*layouts: str):
    return SimpleNamespace(
        get_name=lambda: "LATER",
        supported_kv_cache_layouts=lambda: [SimpleNamespace(name=x) for x in layouts] or None,
    )


def examine(groups: list[list[torch.Tensor]], layout: str | None, kind):
    from vllm_kv_guard.findings import examine as look

    spec = SimpleNamespace(num_kv_heads=HEADS)
    layers, specs = {}, []
    for number, caches in enumerate(groups):
        names = [f"{number}.{i}" for i in range(len(caches))]
        specs.append(SimpleNamespace(layer_names=names, kv_cache_spec=spec))
        layers |= {n: SimpleNamespace(kv_cache=c, attn_backend=kind) for n, c in zip(names, caches)}
    compilation = SimpleNamespace(static_forward_context=layers)
    worker = SimpleNamespace(vllm_config=SimpleNamespace(compilation_config=compilation))
    config = SimpleNamespace(num_blocks=PAGES, kv_cache_groups=specs, kv_cache_layout=layout)
    return look(worker, config)


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_each_order_is_known_and_right(order):
    """Two groups over the same bytes in one order are sound; the line names the order."""
    raw = torch.zeros(LAYERS * PAGES * HEADS * TOKENS * CONTENT)
    groups = [views(order, raw=raw), views(order, raw=raw)]
    report = examine(groups, order, backend())
    assert report.is_sound and f"6 {order}" in report.line(), report.line()


def test_the_order_has_to_be_the_configs_and_one_that_the_backend_reads():
    """Heads where tokens are read: every number is finite and every answer is wrong."""
    wrong = examine([views("LBNHC")], "LBHNC", backend())
    assert len(wrong.conflicts) == LAYERS and "reads it by block, head, token" in wrong.conflicts[0]
    other = examine([views("LBNHC")], "LBNHC", backend("LBHNC", "LHBNC"))
    assert "reads it by block, head, token, content or head, block" in other.conflicts[0]
    assert examine([views("LBNHC")], None, backend("LBHNC", "LBNHC")).is_sound
    assert examine([views("LBNHC")], None, backend("LBHNC")).conflicts


def test_heads_first_with_unlike_heads_collides():
    """LHBNC over one allocation: a page of the group with one head is not where it is for two."""
    raw = torch.zeros(LAYERS * PAGES * HEADS * TOKENS * CONTENT)
    mixed = examine([views("LHBNC", raw=raw), views("LHBNC", heads=1, raw=raw)], "LHBNC", backend())
    assert "page 0 of layer" in mixed.line() and "share bytes" in mixed.line()
    alike = examine([views("LBHNC", raw=raw), views("LBHNC", heads=1, raw=raw)], "LBHNC", backend())
    assert alike.is_sound, alike.line()


def test_a_latent_cache_and_what_is_no_cache():
    latent = examine([[torch.zeros(PAGES, TOKENS, CONTENT)]], "LBNHC", backend())
    assert latent.is_sound, latent.line()
    assert "is no (blocks, heads, tokens, content)" in (
        examine([[torch.zeros(PAGES, 2, 2, 2, 2)]], "LBNHC", backend()).line()
    )
