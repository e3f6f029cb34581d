# SPDX-License-Identifier: Apache-2.0
"""The child of `engine_jobs`: reads jobs from standard input, does each, prints its result on a line of
its own."""

from __future__ import annotations

import gc
import json
import os
import sys
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from unittest import mock

from vllm_platform_kit.engine_jobs import GENERATING, LOOKING, RESULT, Job, Result
from vllm_platform_kit.tiny_models import (
    ARCHITECTURES,
    MAX_MODEL_LEN,
    NUM_NEW_TOKENS,
    Request,
    TinyModel,
    make_model,
)
from vllm_platform_kit.views import where

# Few enough that pages of one request become another's.
NUM_PAGES = 16
# The kit looks into the engine, which has to be in this process, whatever a user has set.
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
ENGINE_ARGS = dict(
    dtype="float32",
    max_model_len=MAX_MODEL_LEN,
    max_num_seqs=4,
    num_gpu_blocks_override=NUM_PAGES,
    enable_prefix_caching=False,
    enforce_eager=True,
    skip_tokenizer_init=True,
    generation_config="vllm",
    distributed_executor_backend="uni",
    kv_cache_memory_bytes=64 << 20,
)


def do(job: Job, folder: Path) -> Result:
    """One job, from the checkpoint to the findings."""
    from vllm import ModelRegistry

    if ARCHITECTURES[job.model] not in ModelRegistry.get_supported_archs():
        return Result("skipped", f"this engine has no {ARCHITECTURES[job.model]}")
    model = make_model(job.model, folder)
    result = Result("ran", expected=model.expected)
    with recording_configs() as configs, recording_connector(job) as connector:
        try:
            llm = start(job, model)
        except Exception as error:
            return _ended(result, "refused", "", error)
        try:
            result = replace(result, tokens=generate(llm, model.requests))
        except Exception as error:
            return _ended(result, "failed", GENERATING, error)
        else:
            return _looked(result, job, model, llm, configs, connector)
        finally:
            stop(llm)


def _looked(result: Result, job: Job, model: TinyModel, llm, configs, connector) -> Result:
    """The result with what is found in the engine, which is idle."""
    from vllm_platform_kit.engine_caches import Observed, probe

    if not (job.with_connector or job.with_probes):
        return result
    try:
        observed = Observed.of(llm, configs)
        if job.with_connector:
            found, notes = connector.check(observed.layers)
            return replace(result, findings=_as_lists(found), notes=notes)
        with recording_pages(llm) as pages:
            found, notes = probe(observed, partial(generate, llm), model, pages)
        drawing = observed.drawing(f"{job.model} model")
        return replace(result, findings=_as_lists(found), notes=notes, drawing=drawing)
    except Exception as error:
        return _ended(result, "failed", LOOKING, error)


def _ended(result: Result, status: str, stage: str, error: BaseException) -> Result:
    """By an error. The cause is what a wrapper is about."""
    while type(error).__name__ in ("RuntimeError", "EngineDeadError") and error.__cause__:
        error = error.__cause__
    place = where(error) if status == "failed" else ""
    what = " ".join(str(error).split())[:2000]
    return replace(
        result, status=status, error=what, error_type=type(error).__name__, stage=stage, place=place
    )


def _as_lists(findings) -> list[list[str]]:
    return [[one.code, one.subject, one.what] for one in findings]


def start(job: Job, model: TinyModel):
    """The engine, in this process."""
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    args = {**ENGINE_ARGS, **job.engine_args}
    if job.model == "encoder-decoder":
        args["max_num_batched_tokens"] = 2 * MAX_MODEL_LEN
    else:
        args.setdefault("max_num_batched_tokens", 32)
    if job.with_connector:
        args["kv_transfer_config"] = _transfer_config()
    known = {field.name for field in fields(EngineArgs)}
    return LLM(model=str(model.folder), **{k: v for k, v in args.items() if k in known})


def _transfer_config():
    from vllm.config import KVTransferConfig
    from vllm.platforms import current_platform

    return KVTransferConfig(
        kv_connector="NixlConnector",
        kv_role="kv_both",
        kv_buffer_device=current_platform.device_type,
    )


def stop(llm) -> None:
    """Gives back what the engine holds, so that another can start here."""
    core = getattr(llm.llm_engine, "engine_core", None)
    shutdown = getattr(core, "shutdown", None)
    if shutdown is not None:
        shutdown()
    try:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    except ImportError:
        pass
    else:
        cleanup_dist_env_and_memory()
    gc.collect()


def generate(llm, requests: list[Request], num_new_tokens: int = NUM_NEW_TOKENS) -> list[list[int]]:
    """Greedily, all requests at once."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=num_new_tokens, ignore_eos=True, detokenize=False
    )
    prompts = [_prompt(request) for request in requests]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _prompt(request: Request) -> dict:
    if request.text is None:
        return {"prompt_token_ids": request.prompt}
    text = {"prompt_token_ids": [], "multi_modal_data": {"text": request.text}}
    return {"encoder_prompt": text, "decoder_prompt": {"prompt_token_ids": request.prompt}}


@contextmanager
def recording_configs():
    """The KV cache configs that workers are given, as the engine hands them out."""
    from vllm.v1.executor.abstract import Executor

    configs: list = []
    original = Executor.initialize_from_config

    def recording(executor, kv_cache_configs, *args, **kwargs):
        configs[:] = kv_cache_configs
        return original(executor, kv_cache_configs, *args, **kwargs)

    with mock.patch.object(Executor, "initialize_from_config", recording):
        yield configs


@contextmanager
def recording_pages(llm):
    """Group -> the pages that new requests are handed while they are scheduled."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    pages: dict[int, list[int]] = {}
    execute = executor.execute_model

    def recording(scheduler_output, *args, **kwargs):
        for request in scheduler_output.scheduled_new_reqs:
            for group, page_ids in enumerate(request.block_ids):
                pages.setdefault(group, []).extend(page_ids)
        return execute(scheduler_output, *args, **kwargs)

    with mock.patch.object(executor, "execute_model", recording):
        yield pages


@contextmanager
def recording_connector(job: Job):
    """What the connector of the job registers, if it has one."""
    if not job.with_connector:
        yield None
        return
    from vllm_platform_kit.registration import recording

    with recording() as recorder:
        yield recorder


def main() -> None:
    """Until standard input ends. Others may write to standard output: results begin a line."""
    os.environ.update(IN_PROCESS)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for line in sys.stdin:
        result = do(Job(**json.loads(line)), Path(sys.argv[1]))
        print("\n" + RESULT + json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    main()
