# SPDX-License-Identifier: Apache-2.0
"""Pairs of engines, each of a geometry, in two processes: prefill in one and decode in the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from tests.distributed.kv_transfer.nixl.engine_host import (
    Answers,
    EngineHost,
    Made,
    Request,
    Setup,
)
from tests.plugins_tests.conftest import PluginSite

# The layouts that engines have: K/V-first; blocks-first, NHD and HND; fused, HND and NHD.
LAYOUTS = ("ROCM_ATTN", "TRITON_ATTN", "TRITON_ATTN HND", "CPU_ATTN", "TORCH_ATTN")
# Sums of the same numbers in another order.
MAX_LOGPROB_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class Geometry:
    """An engine's: layout by kind of attention, tokens of a page and of a kernel block."""

    layouts: tuple[tuple[str, str], ...]
    page: int = 16
    blocks: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, page: int = 16, block: int = 0, **layouts: str) -> Geometry:
        """Every kind's kernel blocks have `block` tokens (0: a page is one)."""
        backends = {layout.split()[0] for layout in layouts.values()}
        sizes = tuple((backend, block) for backend in sorted(backends)) if block else ()
        return cls(tuple(sorted(layouts.items())), page, sizes)

    def block(self, kind: str) -> int:
        """Tokens of a kernel block of the kind."""
        backend = dict(self.layouts)[kind].split()[0]
        return dict(self.blocks).get(backend, self.page)

    def setup(self, setup: Setup) -> Setup:
        """`setup` with this geometry."""
        layouts = dict(self.layouts)
        blocks = {"ROCM_ATTN": self.page, **dict(self.blocks)}  # Else it has TRITON_ATTN's.
        return replace(
            setup,
            engine_args={**setup.engine_args, "block_size": self.page},
            backend_per_kind={kind: layout.split()[0] for kind, layout in layouts.items()},
            layout="HND" if any("HND" in layout for layout in layouts.values()) else "NHD",
            kernel_blocks=blocks,
        )

    def __str__(self) -> str:
        names = "+".join(dict.fromkeys(layout for _, layout in self.layouts)).replace(" ", "-")
        blocks = "".join(f"-{tokens}" for tokens in sorted({t for _, t in self.blocks}))
        return f"{names}-{self.page}{blocks}"


@dataclass(frozen=True)
class Span:
    """Tokens that a request needs of a group: [start, stop) from its first page's first on."""

    stop: int
    start: int = 0


def bytes_owned(
    kind: str, token_bytes: int, here: Geometry, there: Geometry, spans: Sequence[Span]
) -> int:
    """Of tokens of all layers of a kind: the last piece that lies in one kernel block on both ends
    is whole, and nothing else is there that is not needed."""
    piece = math.gcd(here.block(kind), there.block(kind))
    return token_bytes * sum(-(-span.stop // piece) * piece - span.start for span in spans)


class Pair:
    """The processes, and engines in them, made when asked for."""

    def __init__(self, site: PluginSite, in_torch: bool = True, **env: str) -> None:
        self._prefill_args, self._env = (site, "prefill.log", in_torch), env
        self.prefill = EngineHost(*self._prefill_args, **env)
        self.decode = EngineHost(site, "decode.log", in_torch, **env)
        self._made: dict[tuple[EngineHost, str], Made] = {}

    def made(self, host: EngineHost, setup: Setup, geometry: Geometry) -> tuple[str, Made]:
        """The engine's name and what it registered."""
        options = sorted(setup.engine_args.items()), setup.policy, sorted(setup.options.items())
        name = f"{Path(setup.model).name} {geometry} {options}"
        if (host, name) not in self._made:
            self._made[host, name] = host.make(name, geometry.setup(setup))
        return name, self._made[host, name]

    def transfer(
        self,
        setup: Setup,
        here: Geometry,
        there: Geometry,
        requests: Sequence[Request],
        num_new_tokens: int,
        num_rounds: int = 2,
    ) -> list[Answers]:
        """All requests at once, with nothing in decode's prefix cache; then, of each further round,
        with what it kept of the round before. Afterwards no engine has pages of a request."""
        prefill, _ = self.made(self.prefill, setup, there)
        decode, _ = self.made(self.decode, setup, here)
        self.decode.reset_prefix_cache(decode)
        rounds = []
        for _ in range(num_rounds):
            first = self.prefill.run(prefill, list(requests), 1, keep=True)
            told = zip(requests, first.kv_transfer_params, strict=True)
            asked = [replace(request, kv_transfer_params=params) for request, params in told]
            rounds.append(self.decode.run(decode, asked, num_new_tokens))
        for host, name in ((self.prefill, prefill), (self.decode, decode)):
            rest = host.settle(name)
            assert not rest["receives"] and not rest["staging_in_use"]
        return rounds

    def restart_prefill(self) -> None:
        """Prefill's process is killed, and another takes its place."""
        self.prefill.process.kill()
        self.prefill.close()
        self._made = {key: made for key, made in self._made.items() if key[0] is self.decode}
        self.prefill = EngineHost(*self._prefill_args, **self._env)

    def close(self) -> None:
        """Ends the processes."""
        self.prefill.close()
        self.decode.close()


@contextmanager
def make_pair(
    folder: Path, package: str | None = "vllm_emulated_rocm", **kwargs
) -> Iterator[Pair]:
    """Processes on the emulated ROCm platform, which has every layout; on the CPU's with None."""
    folder.mkdir()
    site = PluginSite(folder)
    if package:
        site.install(package)
    pair = Pair(site, **kwargs)
    try:
        yield pair
    finally:
        pair.close()


def same_answers(got: Answers, expected: Answers) -> None:
    """Token for token, and with the same certainty: a wrong element of a cache changes that, even
    where the most likely token stays."""
    assert got.tokens == expected.tokens
    for mine, theirs in zip(got.logprobs, expected.logprobs, strict=True):
        differences = [abs(a - b) for a, b in zip(mine, theirs, strict=True)]
        assert max(differences) < MAX_LOGPROB_DIFFERENCE
