# SPDX-License-Identifier: Apache-2.0
"""`vllm bench kv-transfer`: how fast pages of one process come into another's, for each pair of
geometries, beside one plain NIXL READ of as many bytes in the same run. Where pages do not follow
one another there are many runs, each of which takes its time: a READ of these is measured too."""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import statistics
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from vllm.benchmarks import report
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_geometry import KVCacheGeometry, fused_fields, split_fields

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.agent import Memory, NixlAgent
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.page_map import Runs
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.peer import GroupPair
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.staging import StagingBuffer
    from vllm.utils.argparse_utils import FlexibleArgumentParser

BRIEF_HELP = """\
  --mbytes N                  MiB a transfer (16)
  --num-kv-heads, --head-size, --dtype
  --layouts NAME [NAME ...]   kv-first, blocks-first, blocks-first-hnd, fused, fused-hnd
  --block-sizes N [N ...]     tokens of a page (16 32)
  --pages ORDER               of the page ids: consecutive (default) or shuffled
  --num-iters N               transfers of each pair; the median counts (7)
  --json, --output-json FILE  results as JSON"""

_SPLIT, _FUSED = ("block", "kv", "token", "head", "content"), ("block", "head", "token", "content")
# name -> (roles, order in memory)
LAYOUTS = {
    "kv-first": (("kv", "block", "token", "head", "content"), (0, 1, 2, 3, 4)),
    "blocks-first": (_SPLIT, (0, 1, 2, 3, 4)),
    "blocks-first-hnd": (_SPLIT, (0, 1, 3, 2, 4)),
    "fused": (_FUSED, (0, 2, 1, 3)),
    "fused-hnd": (_FUSED, (0, 1, 2, 3)),
}


@dataclass(frozen=True)
class Cache:
    """One layer's. tokens: of all pages that are read."""

    layout: str
    block_size: int
    tokens: int
    num_kv_heads: int
    head_size: int
    dtype: str

    @property
    def num_pages(self) -> int:
        """Page 0 is never handed out."""
        return cdiv(self.tokens, self.block_size) + 1

    def geometry(self) -> KVCacheGeometry:
        """From byte 0 on."""
        roles, order = LAYOUTS[self.layout]
        is_fused = "kv" not in roles
        make_fields = fused_fields if is_fused else split_fields
        sizes = {
            "kv": 2,
            "block": self.num_pages,
            "token": self.block_size,
            "head": self.num_kv_heads,
            "content": self.head_size * (2 if is_fused else 1),
        }
        return KVCacheGeometry.plan(
            roles,
            [sizes[role] for role in roles],
            order,
            self.dtype,
            self.num_pages,
            fields=make_fields(self.head_size, self.dtype),
        )

    def __str__(self) -> str:
        return f"{self.layout}/{self.block_size}"


@dataclass(frozen=True)
class Result:
    """Medians. of_raw: this GB/s by that of the plain READ that was measured in turn with it.
    of_same_runs: the same by a READ of the same runs, found before the clock starts."""

    here: str
    there: str
    gb_per_s: float
    raw_gb_per_s: float
    of_raw: float
    of_same_runs: float
    num_descriptors: int
    how: str


@dataclass(frozen=True)
class _Holder:
    """The other process, as what reads a request sees a peer."""

    groups: list[GroupPair]
    agent_name: str
    memory: Memory

    def check_pages(self, remote: Any) -> None:
        """The pages are the benchmark's own."""


def add_cli_args(parser: FlexibleArgumentParser) -> None:
    parser.add_argument("--mbytes", type=int, default=16)
    parser.add_argument("--num-kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--block-sizes", nargs="+", type=int, default=[16, 32])
    parser.add_argument("--pages", choices=("shuffled", "consecutive"), default="consecutive")
    parser.add_argument("--num-iters", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="Print the results as JSON alone.")
    parser.add_argument("--output-json", metavar="FILE", help="Write the results to FILE as JSON.")


def validate(args: argparse.Namespace) -> None:
    """Raises:
    ValueError: a number is not positive.
    """
    for name in ("mbytes", "num_kv_heads", "head_size", "num_iters"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    if min(args.block_sizes) < 1:
        raise ValueError("--block-sizes must be at least 1")


def main(args: argparse.Namespace) -> None:
    """Measures each pair and prints a line for it."""
    from vllm.utils.torch_utils import get_dtype_size

    token_bytes = 2 * args.num_kv_heads * args.head_size * get_dtype_size(args.dtype)
    tokens = (args.mbytes << 20) // token_bytes
    caches = [
        Cache(layout, size, tokens, args.num_kv_heads, args.head_size, args.dtype)
        for layout in args.layouts
        for size in args.block_sizes
    ]
    nbytes = max(cache.geometry().end for cache in caches)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_hold, args=(theirs, nbytes), daemon=True)
    process.start()
    try:
        bench = _Bench(ours, nbytes, args.num_iters, args.pages)
        results = [bench.measure(*pair) for pair in itertools.product(caches, caches)]
    finally:
        ours.send(None)
        process.join(10)
        process.kill()
    as_dicts = [asdict(result) for result in results]
    report.emit(_table(results), as_dicts, args.json, args.output_json)


def _table(results: list[Result]) -> str:
    lines = [
        f"{'here':>20} {'there':>20} {'GB/s':>7} {'READ':>7} {'of it':>6} {'same runs':>9} "
        f"{'descs':>7}  how"
    ]
    for one in results:
        lines.append(
            f"{one.here:>20} {one.there:>20} {one.gb_per_s:7.2f} {one.raw_gb_per_s:7.2f} "
            f"{one.of_raw:6.2f} {one.of_same_runs:9.2f} {one.num_descriptors:7}  {one.how}"
        )
    return "\n".join(lines)


def _hold(connection: Connection, nbytes: int) -> None:
    """The other process: memory that is registered, until told to end."""
    import torch

    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.agent import Memory, NixlAgent
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.regions import Region

    raw = torch.randint(0, 127, (nbytes,), dtype=torch.int8)
    agent = NixlAgent("bench-there", Memory())
    agent.register([Region(raw.data_ptr(), nbytes)])
    connection.send((agent.metadata(), raw.data_ptr()))
    while not connection.poll(0.001):
        agent.progress()


class _Bench:
    """This process: memory of its own, and transfers into it."""

    def __init__(self, connection: Connection, nbytes: int, num_iters: int, order: str) -> None:
        import torch

        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.agent import Memory, NixlAgent
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.regions import Region
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.staging import StagingBuffer

        self.num_iters, self.order = num_iters, order
        self.raw = torch.zeros(nbytes, dtype=torch.int8)
        staging = torch.zeros(64 << 20, dtype=torch.int8)
        self.agent: NixlAgent = NixlAgent("bench-here", Memory())
        self.agent.register([Region(t.data_ptr(), t.numel()) for t in (self.raw, staging)])
        self.staging: StagingBuffer = StagingBuffer(staging)
        metadata, self.remote_address = connection.recv()
        self.peer = self.agent.add_peer(metadata)

    def measure(self, here: Cache, there: Cache) -> Result:
        """Transfers of the pair, plain READs and READs of the same runs in turn, each as often
        before the others as after them; one of each first, unmeasured."""
        pair = self._pair(here, there)
        runs = self._runs_of(pair, here, there)
        first = self._read_pages(pair, here, there)
        measured = {
            "pages": lambda: self._read_pages(pair, here, there).seconds,
            "raw": lambda: self._read_runs(self._one_run(first.nbytes)),
            "runs": lambda: self._read_runs(runs),
        }
        seconds: dict[str, list[float]] = {name: [] for name in measured}
        for number in range(-1, self.num_iters):
            for name in sorted(measured, reverse=bool(number % 2)):
                taken = measured[name]()
                if number >= 0:
                    seconds[name].append(taken)
        medians = {name: statistics.median(some) for name, some in seconds.items()}
        return Result(
            str(here),
            str(there),
            round(first.nbytes / medians["pages"] / 1e9, 3),
            round(first.nbytes / medians["raw"] / 1e9, 3),
            round(medians["raw"] / medians["pages"], 3),
            round(medians["runs"] / medians["pages"], 3),
            first.num_descriptors,
            "staged and converted" if pair.layers[0].is_staged else "run by run",
        )

    def _pair(self, here: Cache, there: Cache) -> GroupPair:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.peer import GroupPair, LayerPair
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.regions import RegisteredLayer

        ours = RegisteredLayer("layer", 0, here.layout, self.raw.data_ptr(), here.geometry())
        theirs = RegisteredLayer("layer", 0, there.layout, self.remote_address, there.geometry())
        return GroupPair(0, (LayerPair(ours, theirs, self.raw),))

    def _read_pages(self, pair: GroupPair, here: Cache, there: Cache) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.agent import Memory
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import RemoteMeta, ReqMeta
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.receive import Receive

        remote = RemoteMeta((self._pages(there, 1),), "", 0, "", "")
        receive = Receive("bench", ReqMeta((self._pages(here, 2),), (here.tokens,), remote))
        holder = _Holder([pair], self.peer, Memory())
        receive.start(self.agent, holder, lambda: self.staging, 60.0)
        while not receive.advance(self.agent, holder, lambda: self.staging):
            pass
        return receive

    def _pages(self, cache: Cache, seed: int) -> list[int]:
        pages = list(range(1, cache.num_pages))
        if self.order == "shuffled":
            random.Random(seed).shuffle(pages)
        return pages

    def _runs_of(self, pair: GroupPair, here: Cache, there: Cache) -> Runs:
        """What a transfer of the pair reads, sorted and merged."""
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.page_map import Runs, match_pages
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.staging import split

        [bundle] = pair.bundles
        layer = bundle.layers[0]
        pages = self._pages(here, 2), self._pages(there, 1)
        pieces, _ = match_pages(*pages, *layer.pagings, here.tokens)
        if not layer.is_staged:
            return Runs.concatenate([bundle.runs(pieces)])
        parts = split(layer, pieces, self.staging.nbytes // 2)
        return Runs.concatenate([part.reads(self.staging.address) for part in parts])

    def _one_run(self, nbytes: int) -> Runs:
        import numpy as np

        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.page_map import Runs

        addresses = (self.raw.data_ptr(), self.remote_address, nbytes)
        return Runs(*(np.array([value], dtype=np.int64) for value in addresses))

    def _read_runs(self, runs: Runs) -> float:
        """Seconds of one READ."""
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.agent import Memory

        begin = time.perf_counter()
        transfer = self.agent.read(self.peer, runs, Memory())
        while not transfer.is_done():
            pass
        transfer.release()
        return time.perf_counter() - begin
