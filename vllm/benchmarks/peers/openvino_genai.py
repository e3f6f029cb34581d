# SPDX-License-Identifier: Apache-2.0
"""OpenVINO GenAI's continuous batching on the CPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm.benchmarks.engine import EngineInfo, Run
from vllm.benchmarks.peers import PeerOptions
from vllm.benchmarks.peers.model_files import cached, gguf_file, hf_folder
from vllm.benchmarks.workload import Workload
from vllm.platforms.cpu_threads import plan_threads

_CACHE_GIB = 4


@dataclass(frozen=True)
class OpenVINOSpec:
    options: PeerOptions
    name: str = "openvino-genai"
    is_peer: bool = True

    def build(self) -> OpenVINOEngine:
        return OpenVINOEngine(self.options)


def _model_files(options: PeerOptions) -> tuple[Path, str]:
    """What the pipeline reads and where it came from: an exported folder where optimum-intel is
    there, else a GGUF file of float16 or 8-bit weights, the kinds that it reads."""
    if options.openvino_model is not None:
        return Path(options.openvino_model), "exported by optimum-intel"
    if importlib.util.find_spec("optimum") and importlib.util.find_spec("optimum.intel"):
        try:
            folder = cached(options.model, f"openvino-{options.precision}",
                            lambda path: _export(options, path))  # fmt: skip
            return folder, "exported by optimum-intel"
        except (ImportError, RuntimeError) as error:
            if not options.model.endswith(".gguf"):
                raise RuntimeError(f"optimum-intel cannot export the model: {error}") from error
    if not options.model.endswith(".gguf"):
        raise RuntimeError("needs optimum-intel to convert a folder (pip install optimum-intel)")
    kind = "F16" if options.precision == "bf16" else "Q8_0"
    return gguf_file(options.model, kind), f"weights read from a {kind} GGUF"


def _export(options: PeerOptions, path: Path) -> None:
    from optimum.intel import OVModelForCausalLM

    folder = hf_folder(options.model, options.dtype)
    model = OVModelForCausalLM.from_pretrained(
        folder, export=True, compile=False, load_in_8bit=options.precision == "int8"
    )
    model.save_pretrained(path)
    _add_tokenizer(folder, path)


def _add_tokenizer(folder: Path, path: Path) -> None:
    """The pipeline wants a tokenizer beside the model, even for token ids."""
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoTokenizer

    made = convert_tokenizer(AutoTokenizer.from_pretrained(folder), with_detokenizer=True)
    for name, model in zip(("openvino_tokenizer", "openvino_detokenizer"), made, strict=True):
        openvino.save_model(model, path / f"{name}.xml")


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
