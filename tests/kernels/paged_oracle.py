# SPDX-License-Identifier: Apache-2.0
"""Random paged batches, and plain attention over them in float64."""

from __future__ import annotations

import numpy as np
import torch

from vllm.triton_utils import is_interpreted
from vllm.v1.attention.ops.paged_batch import PagedBatch

NAN = float("nan")


def kernel_device() -> torch.device:
    """The host where kernels are interpreted, else the accelerator."""
    if is_interpreted():
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_accelerator())


def make_key_value(
    layout: str, num_blocks: int, block_size: int, heads: int, head_size: int,
    dtype: torch.dtype, fill: float, device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """K and V as views (NB, BS, H, D) of one cache, every slot of which holds `fill`."""
    nb, bs, h, d = num_blocks, block_size, heads, head_size
    shapes = {
        "blocks_first_nhd": ((nb, 2, bs, h, d), (0, 1, 2, 3, 4)),
        "blocks_first_hnd": ((nb, 2, h, bs, d), (0, 1, 3, 2, 4)),
        "kv_first": ((2, nb, bs, h, d), (1, 0, 2, 3, 4)),
        "fused_nhd": ((nb, bs, h, 2, d), (0, 3, 1, 2, 4)),
        "fused_hnd": ((nb, h, bs, 2, d), (0, 3, 2, 1, 4)),
    }
    shape, order = shapes[layout]
    raw = torch.full(shape, fill, dtype=torch.float32, device=device).to(dtype)
    key, value = raw.permute(order).unbind(1)
    return key, value


class Requests:
    """Requests of (query length, number of keys) each. Keys lie in random blocks; the rest of the
    block table points nowhere."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        heads: int = 2,
        group: int = 2,
        head_size: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        causal: bool = True,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths, self.group, self.block_size, self.causal = lengths, group, block_size, causal
        pages = [-(-keys // block_size) for _, keys in lengths]
        self.num_blocks = sum(pages) + 3
        order = torch.randperm(self.num_blocks, generator=generator).int()
        table = torch.full((len(lengths), max(pages + [1])), 10**9, dtype=torch.int32)
        random = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
        self.query = random(sum(n for n, _ in lengths), heads * group, head_size)
        self.keys, self.values, slots = [], [], []
        for row, (_, num_keys) in enumerate(lengths):
            table[row, : pages[row]], order = order[: pages[row]], order[pages[row] :]
            place = torch.arange(num_keys)
            block = table[row, place // block_size].long()
            slots.append(block * block_size + place % block_size)
            self.keys.append(random(num_keys, heads, head_size))
            self.values.append(random(num_keys, heads, head_size))
        self.key, self.value = torch.cat(self.keys), torch.cat(self.values)
        self.slots, self.table = torch.cat(slots), table

    @property
    def starts(self) -> list[int]:
        return np.cumsum([0] + [n for n, _ in self.lengths]).tolist()

    def batch(self, device: torch.device) -> PagedBatch:
        starts = torch.tensor(self.starts, dtype=torch.int32)
        seq_lens = torch.tensor([keys for _, keys in self.lengths], dtype=torch.int32)
        longest = max(keys for _, keys in self.lengths)
        return PagedBatch(
            starts.to(device), starts, seq_lens.to(device), self.table.to(device), longest, self.causal
        )

    def expected(
        self,
        sliding_window: int = 0,
        logits_soft_cap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Plain attention in float64, a request at a time."""
        out = np.zeros(self.query.shape)
        for row, (n, num_keys) in enumerate(self.lengths):
            rows = slice(self.starts[row], self.starts[row] + n)
            q = self.query[rows].double().numpy()
            k, v = (
                np.repeat(x[row].double().numpy(), self.group, axis=1)
                for x in (self.keys, self.values)
            )
            x = np.einsum("nhd,shd->hns", q, k) * self.query.shape[2] ** -0.5
            behind = (num_keys - n + np.arange(n))[:, None] - np.arange(num_keys)
            if logits_soft_cap:
                x = logits_soft_cap * np.tanh(x / logits_soft_cap)
            if alibi_slopes is not None:
                x = x - alibi_slopes.double().cpu().numpy()[:, None, None] * behind
            hidden = (behind < 0) & self.causal
            if sliding_window:
                hidden |= behind >= sliding_window
            x[:, hidden] = -np.inf
            sink = np.full(q.shape[1], -np.inf) if sinks is None else sinks.double().cpu().numpy()
            peak = np.maximum(x.max(-1, initial=-np.inf), sink[:, None])
            peak[~np.isfinite(peak)] = 0
            e = np.exp(x - peak[..., None])
            total = e.sum(-1) + np.exp(sink[:, None] - peak)
            weights = e / np.where(total == 0, 1, total)[..., None]
            out[rows] = np.einsum("hns,shd->nhd", weights, v)
        return torch.from_numpy(out)
