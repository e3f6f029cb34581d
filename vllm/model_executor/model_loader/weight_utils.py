# SPDX-License-Identifier: Apache-2.0
"""Weights from files, and into parameters."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Generator, Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.parameter import QuantizedParameter

logger = init_logger(__name__)

SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
LoaderFunction = Callable[[torch.Tensor, torch.Tensor], None]


def default_weight_loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """Copy a whole weight, converting its dtype. Raises ValueError on another shape."""
    if param.numel() == 1 and loaded_weight.numel() == 1:
        param.data.fill_(loaded_weight.item())  # scalars are stored with and without a dimension
        return
    if param.shape != loaded_weight.shape:
        raise ValueError(
            f"its shape in the checkpoint is {tuple(loaded_weight.shape)}, the model's is "
            f"{tuple(param.shape)}"
        )
    param.data.copy_(loaded_weight)


def row_parallel_weight_loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """Copy this device's part along the first dimension (a vector) or along the first of
    several."""
    sharded_weight_loader(0)(param, loaded_weight)


def sharded_weight_loader(shard_axis: int) -> LoaderFunction:
    """A loader that copies this device's part along `shard_axis`."""

    def load(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        size = param.shape[shard_axis]
        start = get_tensor_model_parallel_rank() * size
        default_weight_loader(param, loaded_weight.narrow(shard_axis, start, size))

    return load


def composed_weight_loader(
    loader: LoaderFunction, fn: Callable[[torch.Tensor], torch.Tensor]
) -> LoaderFunction:
    """A loader that loads and then replaces the parameter by `fn` of it."""

    def load(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        loader(param, loaded_weight)
        param.data.copy_(fn(param))

    return load


def filter_duplicate_safetensors_files(
    hf_weights_files: list[str], hf_folder: str, index_file: str = SAFE_WEIGHTS_INDEX_NAME
) -> list[str]:
    """The files that the index names; all of them where there is no index.

    Some directories hold the weights twice, in shards and as one file. Raises ValueError naming the
    shards that the index lists and the directory lacks.
    """
    index = Path(hf_folder) / index_file
    if not index.is_file():
        return hf_weights_files
    try:
        listed = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (json.JSONDecodeError, KeyError, AttributeError, TypeError):
        raise ValueError(
            f"{index} is not a valid index of weights; it must hold an object 'weight_map'"
        ) from None
    missing = sorted(listed - {Path(file).name for file in hf_weights_files})
    if missing:
        raise ValueError(
            f"{hf_folder} lacks weight files that its index lists: {', '.join(missing[:8])}"
        )
    return [file for file in hf_weights_files if Path(file).name in listed]


def safetensors_weights_iterator(
    hf_weights_files: list[str], use_tqdm_on_load: bool
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """(name, tensor) of every weight, file by file; a tensor is mapped, not read, until it is
    copied.

    Raises ValueError naming a file that is not valid.
    """
    for file in tqdm(
        hf_weights_files, desc="Loading safetensors", unit="file", disable=not use_tqdm_on_load
    ):
        try:
            with safe_open(file, framework="pt") as tensors:
                names = list(tensors.keys())
                for name in names:
                    yield name, tensors.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{file} is not a valid safetensors file: {error}") from None


def initialize_dummy_weights(
    model: torch.nn.Module,
    model_config: object,
    low: float = -1e-3,
    high: float = 1e-3,
    seed: int = 1234,
) -> None:
    """Fill every weight with uniform random values that depend on its name and `seed` alone.

    Small values, so that nothing overflows however deep the model is.
    """
    for name, parameter in model.named_parameters():
        is_quantized = isinstance(parameter, QuantizedParameter)
        target = parameter.stage(parameter.plain_dtype) if is_quantized else parameter
        initialize_single_dummy_weight(target, low, high, _seed_of(name, seed))
        if is_quantized:
            parameter.finish()


def _seed_of(name: str, seed: int) -> int:
    # torch's CPU generator takes 32 bits of a seed.
    return zlib.crc32(name.encode(), seed & 0xFFFFFFFF)


@torch.no_grad()
def initialize_single_dummy_weight(
    param: torch.Tensor, low: float = -1e-3, high: float = 1e-3, seed: int = 1234
) -> None:
    """Fill one floating-point weight; the values do not depend on its dtype or device but for
    rounding."""
    if not torch.is_floating_point(param):
        return
    generator = torch.Generator(device="cpu").manual_seed(seed)
    values = torch.empty(param.shape, dtype=torch.float32, device="cpu")
    param.copy_(values.uniform_(low, high, generator=generator))


def describe_names(names: Iterable[str], limit: int = 8) -> str:
    """The first few of many names, and how many there are besides."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more
