# SPDX-License-Identifier: Apache-2.0
"""CTranslate2: `Generator` for language models, `Translator` for BART."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vllm.benchmarks.engine import EngineInfo, Run
from vllm.benchmarks.peers import PeerOptions
from vllm.benchmarks.peers.model_files import cached, hf_folder
from vllm.benchmarks.workload import Workload
from vllm.logger import init_logger
from vllm.platforms.cpu_threads import plan_threads

logger = init_logger(__name__)

# Of the types that this CPU has, all are tried and the fastest is measured. BART is compared in
# any precision.
_TYPES = {"bf16": ("bfloat16", "float32"), "int8": ("int8_bfloat16", "int8")}
_TRIAL_TOKENS = 8


@dataclass(frozen=True)
class CTranslate2Spec:
    options: PeerOptions
    name: str = "ctranslate2"
    is_peer: bool = True

    def build(self) -> CTranslate2Engine:
        return CTranslate2Engine(self.options)


class _Model(Protocol):
    """A model in one compute type."""

    @property
    def compute_type(self) -> str: ...

    def generate(self, prompts: list[list[str]], output_len: int) -> list[Sequence[int]]: ...


class _LanguageModel:
    def __init__(self, path: str, **options: Any) -> None:
        import ctranslate2

        self._generator = ctranslate2.Generator(path, **options)
        self.compute_type: str = self._generator.compute_type

    def generate(self, prompts: list[list[str]], output_len: int) -> list[Sequence[int]]:
        results = self._generator.generate_batch(
            prompts,
            max_length=output_len,
            min_length=output_len,
            sampling_topk=1,
            include_prompt_in_result=False,
            end_token=[],
        )
        return [result.sequences_ids[0] for result in results]


class _Bart:
    def __init__(self, path: str, token_to_id: dict[str, int], **options: Any) -> None:
        import ctranslate2

        self._translator = ctranslate2.Translator(path, **options)
        self._token_to_id = token_to_id
        self.compute_type: str = self._translator.compute_type

    def generate(self, prompts: list[list[str]], output_len: int) -> list[Sequence[int]]:
        results = self._translator.translate_batch(
            prompts,
            beam_size=1,
            max_input_length=0,
            max_decoding_length=output_len,
            min_decoding_length=output_len,
        )
        return [[self._token_to_id[t] for t in result.hypotheses[0]] for result in results]


def _convert(folder: Path, path: Path) -> None:
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(folder)).convert(str(path), quantization="float32")


class CTranslate2Engine:
    """All prompts in one batch, in the compute type that is the fastest for the workload."""

    name = "ctranslate2"

    def __init__(self, options: PeerOptions) -> None:
        import ctranslate2
        from tokenizers import Tokenizer

        folder = hf_folder(options.model, options.dtype)
        path = str(cached(options.model, "ctranslate2", lambda path: _convert(folder, path)))
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._id_to_token = tokenizer.id_to_token
        self._version = ctranslate2.__version__
        self._num_threads = plan_threads().num_threads
        threads = {"intra_threads": self._num_threads, "inter_threads": 1}
        supported = ctranslate2.get_supported_compute_types("cpu")
        has_encoder = options.is_encoder_decoder
        wanted = (*_TYPES["bf16"], *_TYPES["int8"]) if has_encoder else _TYPES[options.precision]
        words = tokenizer.get_vocab() if has_encoder else {}
        self._models: list[_Model] = [
            _Bart(path, words, compute_type=kind, **threads)
            if has_encoder
            else _LanguageModel(path, compute_type=kind, **threads)
            for kind in wanted
            if kind in supported
        ]
        self._model = self._models[0]

    def prepare(self, workload: Workload) -> None:
        trial = Workload(workload.prompts, min(_TRIAL_TOKENS, workload.output_len))
        seconds = {}
        for model in self._models:
            seconds[model] = min(self._run(model, trial).seconds for _ in range(2))
            logger.info("ctranslate2 in %s: a trial of %.2f s", model.compute_type, seconds[model])
        self._model = min(seconds, key=seconds.__getitem__)

    def run(self, workload: Workload) -> Run:
        return self._run(self._model, workload)

    def _run(self, model: _Model, workload: Workload) -> Run:
        prompts = [[self._id_to_token(token) for token in ids] for ids in workload.prompts]
        began = time.perf_counter()
        results = model.generate(prompts, workload.output_len)
        seconds = time.perf_counter() - began
        return Run(seconds, tuple(map(tuple, results)))

    def info(self) -> EngineInfo:
        kind = self._model.compute_type
        cache = "bfloat16" if "bfloat16" in kind else "float32"
        tried = ", ".join(model.compute_type for model in self._models)
        settings = f"KV {cache}, one batch; the fastest of {tried}"
        return EngineInfo(self.name, self._version, kind, self._num_threads, settings)
