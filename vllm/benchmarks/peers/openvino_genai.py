# SPDX-License-Identifier: Apache-2.0
"""OpenVINO GenAI's continuous batching on the CPU."""

from __future__ import annotations

import importlib.metadata
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm.benchmarks.engine import EngineInfo, Run
from vllm.benchmarks.peers import PeerOptions
from vllm.benchmarks.peers.model_files import gguf_file
from vllm.benchmarks.peers.openvino_export import exported
from vllm.benchmarks.workload import Workload
from vllm.logger import init_logger
from vllm.platforms.cpu_threads import plan_threads

logger = init_logger(__name__)
_CACHE_GIB = 4


@dataclass(frozen=True)
class OpenVINOSpec:
    options: PeerOptions
    name: str = "openvino-genai"
    is_peer: bool = True

    def build(self) -> OpenVINOEngine:
        return OpenVINOEngine(self.options)


def _model_files(options: PeerOptions) -> tuple[Path, str]:
    """What the pipeline reads and where it came from: an exported folder if there can be one, else
    a GGUF file of float16 or 8-bit weights, the kinds that it reads."""
    try:
        return exported(options), "exported by optimum-intel"
    except RuntimeError as error:
        if not options.model.endswith(".gguf"):
            raise
        logger.info("%s; OpenVINO reads a GGUF file", error)
    kind = "F16" if options.precision == "bf16" else "Q8_0"
    return gguf_file(options.model, kind), f"weights read from a {kind} GGUF"


class OpenVINOEngine:
    """`ContinuousBatchingPipeline`, products in bfloat16, its KV cache as it chooses (8-bit)."""

    name = "openvino-genai"

    def __init__(self, options: PeerOptions) -> None:
        import openvino_genai

        self._lib = openvino_genai
        self._options = options
        self._num_threads = plan_threads().num_threads
        model, self._source = _model_files(options)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = _CACHE_GIB
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = 256
        properties = {
            "INFERENCE_PRECISION_HINT": "bf16",
            "INFERENCE_NUM_THREADS": self._num_threads,
            "PERFORMANCE_HINT": "LATENCY",
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(model), scheduler, "CPU", properties
        )

    def prepare(self, workload: Workload) -> None:
        self.run(Workload(workload.prompts, min(4, workload.output_len)))

    def run(self, workload: Workload) -> Run:
        import openvino

        config = self._lib.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = workload.output_len
        config.ignore_eos = True
        config.do_sample = False
        prompts = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in workload.prompts]
        began = time.perf_counter()
        results = self._pipeline.generate(prompts, [config] * len(prompts))
        seconds = time.perf_counter() - began
        return Run(seconds, tuple(tuple(result.m_generation_ids[0]) for result in results))

    def info(self) -> EngineInfo:
        version = importlib.metadata.version("openvino-genai")
        settings = f"KV 8-bit, continuous batching, {self._source}"
        return EngineInfo(self.name, version, self._options.precision, self._num_threads, settings)
