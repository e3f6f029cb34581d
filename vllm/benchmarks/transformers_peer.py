# SPDX-License-Identifier: Apache-2.0
"""The peer: Hugging Face Transformers' `generate` on one batch, with its best settings.

Its best settings depend on the batch and the machine, so they are measured: a growing cache, a
static one, and a static one with the decoding step compiled by torch.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from vllm.benchmarks.engine import EngineInfo, Run
from vllm.benchmarks.workload import Workload

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

PeerCache = Literal["dynamic", "static", "compiled"]
PEER_CACHES: tuple[PeerCache, ...] = get_args(PeerCache)
# Runs of each candidate before the fastest is chosen, the first being its warm-up; so many tokens.
_TRIALS, _TRIAL_TOKENS = 3, 24


@dataclass(frozen=True)
class TransformersSpec:
    """Transformers with the model of `model_path`, a folder or a .gguf file.

    `cache` None: whichever of `PEER_CACHES` is fastest for the workload. `has_random_weights`: the
    folder has a config alone; `--load-format dummy` of ours.
    """

    model_path: str
    dtype: str
    cache: PeerCache | None = None
    name: str = "transformers"
    is_peer: bool = True
    is_encoder_decoder: bool = False
    has_random_weights: bool = False

    def build(self) -> TransformersEngine:
        make = random_model if self.has_random_weights else load_model
        model = make(self.model_path, self.dtype, self.is_encoder_decoder)
        return TransformersEngine(model, self.dtype, self.cache)


class TransformersEngine:
    """`generate` as a `BenchEngine`. An encoder-decoder model's decoder begins with its start token
    and, where it has one, its forced BOS, as ours does: both are given as many new tokens to make.
    """

    name = "transformers"

    def __init__(self, model: PreTrainedModel, dtype: str, cache: PeerCache | None) -> None:
        from vllm.platforms import current_platform

        self._model = model.to(current_platform.device_type)
        self._dtype = dtype
        self._wanted = cache
        self._cache: PeerCache = cache or "dynamic"

    def prepare(self, workload: Workload) -> None:
        import torch

        torch.compiler.reset()  # code compiled for another shape would be kept, and generalised
        if self._wanted is None:
            trial = _shortened(workload)
            seconds = {cache: self._try(cache, trial) for cache in PEER_CACHES}
            self._cache = min(seconds, key=seconds.__getitem__)
            if seconds[self._cache] == float("inf"):
                raise RuntimeError(f"Transformers' generate failed with every cache: {PEER_CACHES}")
        # Compiled code is of one length of the cache: that of the whole workload.
        is_compiled = self._cache == "compiled"
        self.run(workload if is_compiled else _shortened(workload))

    def run(self, workload: Workload) -> Run:
        return self._run(workload, self._cache)

    def info(self) -> EngineInfo:
        import torch
        import transformers

        attention = self._model.config._attn_implementation
        cache = {
            "dynamic": "growing cache",
            "static": "static cache",
            "compiled": "static cache, decoding compiled",
        }[self._cache]
        return EngineInfo(
            self.name,
            transformers.__version__,
            self._dtype,
            torch.get_num_threads(),
            f"generate, {attention} attention, {cache}",
        )

    def _try(self, cache: PeerCache, workload: Workload) -> float:
        """Seconds of the fastest of a few runs; infinity where this cache does not work here."""
        try:
            self._run(workload, cache)
            return min(self._run(workload, cache).seconds for _ in range(_TRIALS - 1))
        except Exception as error:  # torch.compile without a C++ compiler raises many kinds
            cause = str(error).split("\n")[0]
            logger.warning("Transformers with a %s cache is left out: %s", cache, cause)
            return float("inf")

    def _run(self, workload: Workload, cache: PeerCache) -> Run:
        import torch

        began = time.perf_counter()
        inputs = self._inputs(workload)
        with torch.inference_mode():
            output = self._model.generate(
                **{name: tensor.to(self._model.device) for name, tensor in inputs.items()},
                **_exact_length(workload.output_len),
                **_cache_options(cache),
            )
        begin = inputs.get("decoder_input_ids", inputs["input_ids"]).shape[1]
        new_ids = output[:, begin:].tolist()  # on a device this also waits for it
        seconds = time.perf_counter() - began
        return Run(seconds, tuple(map(tuple, new_ids)))

    def _inputs(self, workload: Workload) -> dict[str, torch.Tensor]:
        """The prompts as arguments of `generate`, padded where attention is masked."""
        import torch

        if not self._model.config.is_encoder_decoder:
            ids, mask = left_padded(workload.prompts)
            return {"input_ids": ids, "attention_mask": mask}
        ids, mask = (tensor.flip(1) for tensor in left_padded([p[::-1] for p in workload.prompts]))
        config = self._model.generation_config
        begin = [config.decoder_start_token_id, config.forced_bos_token_id]
        begin = torch.tensor([[token for token in begin if token is not None]])
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "decoder_input_ids": begin.expand(len(ids), -1),
        }


def _shortened(workload: Workload) -> Workload:
    return Workload(workload.prompts, min(workload.output_len, _TRIAL_TOKENS))


def load_model(
    model_path: str, dtype: str, is_encoder_decoder: bool = False
) -> PreTrainedModel:
    """The model of a folder or a .gguf file, in plain `dtype` weights.

    Raises:
        ImportError: it is a GGUF file and accelerate, which Transformers needs then, is not
            installed.
    """
    import torch

    path = Path(model_path)
    source: dict[str, Any] = {}
    if path.is_file():
        from transformers import GgufConfig

        if importlib.util.find_spec("accelerate") is None:
            raise ImportError("to load a GGUF file Transformers needs accelerate")
        source = {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
        path = path.parent
    return _auto_class(is_encoder_decoder).from_pretrained(
        path, dtype=getattr(torch, dtype), local_files_only=True, **source
    ).eval()


def random_model(
    model_path: str, dtype: str, is_encoder_decoder: bool = False
) -> PreTrainedModel:
    """A model of the folder's config with random weights, and its generation config if it has
    one."""
    import torch
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(model_path, local_files_only=True)
    torch.manual_seed(0)
    model = _auto_class(is_encoder_decoder).from_config(config, dtype=getattr(torch, dtype))
    if (Path(model_path) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(model_path)
    return model.eval()


def _auto_class(is_encoder_decoder: bool) -> type:
    import transformers

    if is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForCausalLM


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, both int64 (prompts, longest prompt), padded with id 0 on the left."""
    import torch

    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


def _exact_length(output_len: int) -> dict[str, Any]:
    """Greedy, and no end-of-sequence id that could end a row early."""
    return {
        "do_sample": False,
        "max_new_tokens": output_len,
        "min_new_tokens": output_len,
        "eos_token_id": None,
        "forced_eos_token_id": None,
        "num_beams": 1,
        "pad_token_id": 0,
    }


def _cache_options(cache: PeerCache) -> dict[str, Any]:
    if cache == "dynamic":
        return {}
    if cache == "static":
        return {"cache_implementation": "static", "disable_compile": True}
    from transformers import CompileConfig

    compile_config = CompileConfig(fullgraph=False, dynamic=False, mode=None)
    # Transformers compiles on GPUs alone unless it is told to compile everywhere.
    compile_config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": compile_config}
