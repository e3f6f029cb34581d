# SPDX-License-Identifier: Apache-2.0
"""What a model makes a machine read and multiply, and how fast a run can be at best for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.benchmarks.bounds import Bounds
from vllm.benchmarks.peers import common_prefix_len
from vllm.benchmarks.workload import Workload

if TYPE_CHECKING:
    from torch import nn

    from vllm import LLM


@dataclass(frozen=True)
class ModelSize:
    """`weight_bytes`: of all parameters, in the form in which they are multiplied; shared ones
    once. `layer_weights`, `output_weights`: numbers that a token is multiplied with in the layers
    and in the output projection. `kv_bytes_per_token`: of all layers."""

    weight_bytes: int
    layer_weights: int
    output_weights: int
    kv_bytes_per_token: int


def measure_model(llm: LLM) -> ModelSize:
    """Of a language model that was loaded into this process.

    Raises:
        TypeError, ValueError: the engine core runs in a process of its own.
    """
    config = llm.model_config
    specs = llm.llm_engine.collective_rpc("get_kv_cache_spec")[0]
    kv_bytes = sum(spec.page_size_bytes // spec.block_size for spec in specs.values())
    weight_bytes, count = llm.apply_model(weights_of)[0]
    output = config.get_vocab_size() * config.get_hidden_size()
    return ModelSize(weight_bytes, max(count - output, 0), output, kv_bytes)


def weights_of(model: nn.Module) -> tuple[int, int]:
    """Bytes and number of the weights; of quantised ones in the form in which they are kept."""
    parameters = list(model.parameters())
    return sum(p.nbytes for p in parameters), sum(map(_num_weights, parameters))


def _num_weights(parameter: nn.Parameter) -> int:
    from vllm.model_executor.layers.cpu_ops.quant_format import GROUP
    from vllm.model_executor.layers.quantization.parameter import QuantizedParameter

    if isinstance(parameter, QuantizedParameter) and parameter.format is not None:
        return parameter.nbytes // parameter.format.block_bytes * GROUP
    return parameter.numel()


def bound_seconds(workload: Workload, size: ModelSize, bounds: Bounds) -> float:
    """The least time of a run: prompts are multiplied at the rate of the largest product, what they
    share once; each decoding step takes what reading weights and cached tokens takes, or what its
    products take, whichever is more. The attention's own products are left out."""
    shared = common_prefix_len(workload.prompts)
    prompt_tokens = workload.num_input_tokens - shared * (workload.num_prompts - 1)
    rows, fastest = workload.num_prompts, max(rate for _, rate in bounds.gemm_flops_per_s)
    prompts = 2 * (prompt_tokens * size.layer_weights + rows * size.output_weights) / fastest
    products = 2 * rows * (size.layer_weights + size.output_weights) / _rate(bounds, rows)
    steps = workload.output_len - 1  # the first token comes with the prompt
    cached = workload.num_input_tokens + rows * workload.output_len / 2
    read = (size.weight_bytes + cached * size.kv_bytes_per_token) / bounds.read_bytes_per_s
    return max(prompts, size.weight_bytes / bounds.read_bytes_per_s) + steps * max(read, products)


def _rate(bounds: Bounds, rows: int) -> float:
    """FLOP/s of products with so many rows, between those measured."""
    measured = bounds.gemm_flops_per_s
    if rows <= measured[0][0]:
        return measured[0][1]  # few rows wait for memory, which is counted
    for (low, slow), (high, fast) in zip(measured, measured[1:]):
        if rows <= high:
            return slow + (fast - slow) * math.log(rows / low) / math.log(high / low)
    return measured[-1][1]
