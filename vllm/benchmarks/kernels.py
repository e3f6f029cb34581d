# SPDX-License-Identifier: Apache-2.0
"""`vllm bench kernels`: how long attention of one layer takes, and how much of the device's memory
bandwidth that is, beside torch's scaled_dot_product_attention over K and V without pages."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from vllm.benchmarks import report
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv

if TYPE_CHECKING:
    import torch

    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.attention.backend import AttentionBackend

logger = init_logger(__name__)

BRIEF_HELP = """\
  --batch-size N [N ...]      requests at once
  --context-len N [N ...]     keys of each request
  --query-len N               new tokens of each; 1: decode (default), 0: the whole context
  --num-heads, --num-kv-heads, --head-size, --block-size, --dtype
  --attention-backend NAME    left out: the platform's choice
  --bandwidth GB/S            the device's; left out: measured by a copy
  --num-iters, --num-iters-warmup
  --json, --output-json FILE  results as JSON"""
# As many caches are used by turns, as a model's layers are, that none stays in the processor's.
_WORKING_SET_BYTES = 512 << 20
_MOST_LAYERS = 32
_COPY_BYTES = 256 << 20
_COPIES = 10
_TOLERANCE = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2}


@dataclass(frozen=True)
class Shape:
    """Requests of equal lengths. context_len: keys of each, its `query_len` new tokens included."""

    batch_size: int
    context_len: int
    query_len: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: str

    def nbytes(self, itemsize: int) -> int:
        """Bytes that must be read and written at least: K, V, queries and output, once."""
        keys = self.context_len * self.num_kv_heads
        return 2 * self.batch_size * itemsize * self.head_size * (keys + self.query_len * self.num_heads)

    @property
    def flops(self) -> int:
        """Multiplications and additions of both matrix products, over the keys that are seen."""
        seen = self.query_len * self.context_len - self.query_len * (self.query_len - 1) // 2
        return 4 * self.batch_size * self.num_heads * self.head_size * seen

    def __str__(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_size}"
        return (
            f"{self.batch_size} x {self.query_len} new tokens over {self.context_len} keys, {heads}, "
            f"{self.dtype}, blocks of {self.block_size}"
        )


@dataclass(frozen=True)
class Timing:
    """Seconds of one layer, of each round."""

    name: str
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def add_cli_args(parser: FlexibleArgumentParser) -> None:
    """The flags of `vllm bench kernels`."""
    add = parser.add_argument
    add("--batch-size", type=int, nargs="+", default=[1, 8, 32], help="Requests at once.")
    add("--context-len", type=int, nargs="+", default=[1024], help="Keys of each request.")
    add("--query-len", type=int, default=1, help="New tokens of each; 0: the whole context.")
    add("--num-heads", type=int, default=32, help="Query heads.")
    add("--num-kv-heads", type=int, default=8, help="KV heads.")
    add("--head-size", type=int, default=128, help="Elements of a head.")
    add("--block-size", type=int, default=16, help="Tokens in a block of the KV cache.")
    add("--dtype", choices=tuple(_TOLERANCE), help="Left out: the platform's preferred one.")
    add("--attention-backend", help="A backend by name; left out: the platform's choice.")
    add("--bandwidth", type=float, help="The device's, in GB/s; left out: measured by a copy.")
    add("--num-iters", type=int, default=20, help="Rounds to measure.")
    add("--num-iters-warmup", type=int, default=3, help="Rounds before.")
    add("--seed", type=int, default=0, help="Seed of the numbers.")
    add("--json", action="store_true", help="Print the results as JSON alone.")
    add("--output-json", metavar="FILE", help="Write the results to FILE as JSON.")


def validate(args: argparse.Namespace) -> None:
    """Checks the flags.

    Raises:
        ValueError: one line that says what to change.
    """
    for name in ("num_heads", "num_kv_heads", "head_size", "block_size", "num_iters"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    if min(args.batch_size) < 1 or min(args.context_len) < 1:
        raise ValueError("--batch-size and --context-len must be at least 1")
    if args.num_heads % args.num_kv_heads:
        raise ValueError(
            f"--num-heads {args.num_heads} is no multiple of --num-kv-heads {args.num_kv_heads}"
        )
    if not 0 <= args.query_len <= min(args.context_len):
        raise ValueError("--query-len must be between 0 and --context-len")
    if args.num_iters_warmup < 0 or (args.bandwidth is not None and args.bandwidth <= 0):
        raise ValueError("--num-iters-warmup must be at least 0 and --bandwidth more than 0")


def main(args: argparse.Namespace) -> None:
    """Measures and prints."""
    import torch

    from vllm.platforms import current_platform

    device = current_platform.get_torch_device(0)
    current_platform.set_device(device)
    dtype = args.dtype or current_platform.supported_dtype_names[0]
    bandwidth = args.bandwidth * 1e9 if args.bandwidth else _measure_bandwidth(device)
    source = "given" if args.bandwidth else "of a copy"
    lines = [
        f"{current_platform.get_device_name()}, {torch.get_num_threads()} threads of the host; "
        f"{bandwidth / 1e9:.1f} GB/s ({source}) is 100%"
    ]
    results = []
    for context_len in args.context_len:
        for batch_size in args.batch_size:
            shape = Shape(
                batch_size, context_len, args.query_len or context_len, args.num_heads,
                args.num_kv_heads, args.head_size, args.block_size, dtype,
            )  # fmt: skip
            timings = _measure(args, shape, device)
            lines += [str(shape), *(_timing_line(timing, shape, bandwidth) for timing in timings)]
            results.append(_as_json(shape, timings, bandwidth))
    report.emit("\n".join(lines), results, args.json, args.output_json)


def _itemsize(shape: Shape) -> int:
    from vllm.utils.torch_utils import get_dtype_size

    return get_dtype_size(shape.dtype)


def _timing_line(timing: Timing, shape: Shape, bandwidth: float) -> str:
    rate = shape.nbytes(_itemsize(shape)) / timing.median
    return (
        f"  {timing.name:<12} {timing.median * 1e6:10.1f} us  {rate / 1e9:8.1f} GB/s  "
        f"{100 * rate / bandwidth:5.1f}%  {shape.flops / timing.median / 1e9:10.1f} GFLOP/s  "
        f"[{min(timing.seconds) * 1e6:.1f} to {max(timing.seconds) * 1e6:.1f} us]"
    )


def _as_json(shape: Shape, timings: list[Timing], bandwidth: float) -> dict[str, Any]:
    return {
        "benchmark": "kernels",
        **asdict(shape),
        "nbytes": shape.nbytes(_itemsize(shape)),
        "flops": shape.flops,
        "bandwidth_bytes_per_second": bandwidth,
        "kernels": [{**asdict(timing), "median_seconds": timing.median} for timing in timings],
    }


def _measure_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy of a large tensor reads and writes, the best of several."""
    import torch

    source = torch.ones(_COPY_BYTES, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return max(2 * _COPY_BYTES / _seconds(lambda: target.copy_(source)) for _ in range(_COPIES))


def _seconds(run: Callable[[], object]) -> float:
    from vllm.platforms import current_platform

    current_platform.synchronize()
    begin = time.perf_counter()
    run()
    current_platform.synchronize()
    return time.perf_counter() - begin


def _measure(args: argparse.Namespace, shape: Shape, device: torch.device) -> list[Timing]:
    """Our backend and torch, in turn."""
    import torch

    from vllm.benchmarks.kernel_inputs import PagedLayers, SdpaLayers, make_inputs

    torch.manual_seed(args.seed)
    kv_bytes = shape.nbytes(_itemsize(shape))
    num_layers = min(_MOST_LAYERS, cdiv(_WORKING_SET_BYTES, kv_bytes))
    backend = _backend(args, shape)
    with torch.inference_mode():
        inputs = make_inputs(shape, device)
        ours = PagedLayers(shape, backend, inputs, num_layers)
        peer = SdpaLayers(shape, inputs, num_layers)
        _check_same(shape, backend, ours.run_layer(0), peer.run_layer(0))
        seconds: tuple[list[float], list[float]] = ([], [])
        for round_ in range(-args.num_iters_warmup, args.num_iters):
            for measured, layers in zip(seconds, (ours, peer)):
                taken = _seconds(lambda: [layers.run_layer(i) for i in range(num_layers)])
                if round_ >= 0:
                    measured.append(taken / num_layers)
    names = backend.get_name(), "torch SDPA"
    return [Timing(name, tuple(measured)) for name, measured in zip(names, seconds)]


def _backend(args: argparse.Namespace, shape: Shape) -> type[AttentionBackend]:
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.utils.torch_utils import str_dtype_to_torch_dtype
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    name = args.attention_backend
    config = AttentionSelectorConfig(
        shape.head_size, str_dtype_to_torch_dtype(shape.dtype), "auto", shape.block_size
    )
    path = current_platform.get_attn_backend_cls(
        AttentionBackendEnum[name.upper()] if name else None, config, shape.num_heads
    )
    return resolve_obj_by_qualname(path)


def _check_same(
    shape: Shape, backend: type[AttentionBackend], ours: torch.Tensor, peer: torch.Tensor
) -> None:
    difference = (ours.float() - peer.float()).abs().max().item()
    if not difference < _TOLERANCE[shape.dtype] or math.isnan(difference):
        raise ValueError(
            f"{backend.get_name()} and torch differ by {difference:.2g} for {shape}: nothing is "
            "measured"
        )
