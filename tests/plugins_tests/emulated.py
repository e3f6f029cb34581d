# SPDX-License-Identifier: Apache-2.0
"""Runs engines on one platform, one after the other in this process. Reads JSON jobs from standard
input, writes JSON results to standard output, each on a line of its own that begins with RESULT."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from unittest import mock


@dataclass(frozen=True)
class Job:
    """An engine and its requests, of an encoder-decoder model with `texts`, the encoder's tokens of
    each. Without `align` layers keep the layout of their backend; without
    `check` nobody looks whether they collide. kernel_blocks: tokens in a kernel block of a backend.
    stagger: each request makes so many tokens fewer than the one before. With `graphs` decode steps are
    replayed; `not_copied` names the static input that stays as it was."""

    model: str
    prompts: list[list[int]]
    num_new_tokens: int
    engine_args: dict = field(default_factory=dict)
    backend_per_kind: dict[str, str] = field(default_factory=dict)
    layout: str = "NHD"
    kernel_blocks: dict[str, int] = field(default_factory=dict)
    align: bool = True
    check: bool = True
    texts: list[list[int]] = field(default_factory=list)
    stagger: int = 0
    graphs: bool = False
    not_copied: str = ""


@dataclass(frozen=True)
class Result:
    """Tokens of each request and the backend of each layer; or what the engine said at start. replays:
    requests in the batch of each graph that was replayed."""

    device: str
    tokens: list[list[int]] = field(default_factory=list)
    backends: dict[str, str] = field(default_factory=dict)
    strides: dict[str, list[int]] = field(default_factory=dict)
    worker: str = ""
    error: str = ""
    replays: list[int] = field(default_factory=list)


def run(job: Job) -> Result:
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.backends.utils import set_kv_cache_layout
    from vllm.v1.kv_cache_geometry import Allocation
    from vllm.v1.worker.gpu import attn_utils

    set_kv_cache_layout(job.layout)
    with ExitStack() as patches:
        if not job.align:
            name = "_align_mixed_attention_kv_cache_views"
            patches.enter_context(mock.patch.object(attn_utils, name))
        if not job.check:
            patches.enter_context(mock.patch.object(Allocation, "check"))
        for name, tokens in job.kernel_blocks.items():
            backend = AttentionBackendEnum[name].get_class()
            sizes = staticmethod(lambda tokens=tokens: [tokens])
            patches.enter_context(
                mock.patch.object(backend, "get_supported_kernel_block_sizes", sizes)
            )
        replays: list[int] = []
        if job.graphs:
            _watch_graphs(job, patches, replays)
        try:
            return replace(_generate(job, current_platform.device_name), replays=replays)
        except ValueError as error:
            return Result(current_platform.device_name, error=str(error))


def _watch_graphs(job: Job, patches: ExitStack, replays: list[int]) -> None:
    """Notes replays, spoils what the job says, and lets layers run as on the device: in torch and
    Triton, which is what a graph records, not in the host's own kernels."""
    from vllm.model_executor.custom_op import CustomOp
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, StaticInputs

    replay, copy_in = CudaGraphManager.replay, StaticInputs.copy_in

    def noting(manager, batch):
        replays.append(batch.num_reqs)
        return replay(manager, batch)

    def spoiled(inputs, batch, size):
        value = getattr(inputs, job.not_copied)
        kept = value if isinstance(value, list) else [value]
        before = [tensor.clone() for tensor in kept]
        copy_in(inputs, batch, size)
        for tensor, old in zip(kept, before):
            tensor.copy_(old)

    on_device = lambda layer: layer.forward_cuda  # noqa: E731
    patches.enter_context(mock.patch.object(CustomOp, "_by_device_type", on_device))
    patches.enter_context(mock.patch.object(CudaGraphManager, "replay", noting))
    if job.not_copied:
        patches.enter_context(mock.patch.object(StaticInputs, "copy_in", spoiled))


def _generate(job: Job, device: str) -> Result:
    from tests.models.tiny_encoder_decoder import enc_dec_prompts
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job.model,
        skip_tokenizer_init=True,
        generation_config="vllm",
        attention_config={"backend_per_kind": job.backend_per_kind},
        **job.engine_args,
    )
    sampling = [
        SamplingParams(
            temperature=0,
            max_tokens=job.num_new_tokens - i * job.stagger,
            ignore_eos=True,
            detokenize=False,
        )
        for i in range(len(job.prompts))
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in job.prompts]
    if job.texts:
        prompts = enc_dec_prompts(job.texts, job.prompts)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    (backends, strides) = llm.apply_model(_layers)[0]
    (worker,) = llm.collective_rpc(lambda worker: type(worker).__module__)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return Result(device, tokens, backends, strides, worker)


def _layers(model) -> tuple[dict[str, str], dict[str, list[int]]]:
    layers = {n: m for n, m in model.named_modules() if hasattr(m, "attn_backend")}
    return (
        {name: layer.attn_backend.get_name() for name, layer in layers.items()},
        {name: list(layer.kv_cache.stride()) for name, layer in layers.items()},
    )


if __name__ == "__main__":
    for line in sys.stdin:
        print("RESULT", json.dumps(asdict(run(Job(**json.loads(line))))), flush=True)
