# SPDX-License-Identifier: Apache-2.0
"""Other engines as `BenchEngineSpec`s for `vllm bench compare`: which there are, what each needs.

An adapter imports its engine only in the process that runs it.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from vllm.benchmarks.engine import BenchEngineSpec
from vllm.benchmarks.transformers_peer import PeerCache, TransformersSpec

Precision = str
PRECISIONS = ("bf16", "int8", "int4")


@dataclass(frozen=True)
class PeerOptions:
    """What the peers are made from. `model`: a folder or a .gguf file; `dtype`: ours;
    `upstream_python`: the interpreter of an environment with upstream's vllm; `exporter_python`: of
    one where optimum-intel works, if not this; `openvino_model`: a folder that it exported."""

    model: str
    dtype: str
    precision: Precision = "bf16"
    max_model_len: int = 2048
    upstream_python: str | None = None
    openvino_model: str | None = None
    exporter_python: str | None = None
    is_encoder_decoder: bool = False
    transformers_cache: PeerCache | None = None


PEERS = ("transformers", "openvino-genai", "ctranslate2", "llama-cpp", "upstream")
_MODULES = {
    "openvino-genai": "openvino_genai",
    "ctranslate2": "ctranslate2",
    "llama-cpp": "llama_cpp",
}
_HAS_PRECISIONS = {
    "transformers": ("bf16",),
    "openvino-genai": ("bf16", "int8"),
    "ctranslate2": ("bf16", "int8"),
    "llama-cpp": PRECISIONS,
    "upstream": ("bf16",),
}
_NO_ENCODER = ("llama-cpp", "upstream")


def missing_reason(name: str, options: PeerOptions) -> str | None:
    """Why the peer cannot be measured here; None: it can."""
    if options.is_encoder_decoder and name in _NO_ENCODER:
        return "has no BART"
    if options.precision not in _HAS_PRECISIONS[name]:
        return f"has no {options.precision} of the kind (it has {', '.join(_HAS_PRECISIONS[name])})"
    if name == "upstream" and options.upstream_python is None:
        return "needs --upstream-python, the interpreter of its own environment"
    module = _MODULES.get(name)
    if module is not None and importlib.util.find_spec(module) is None:
        return "not installed (pip install '.[peers]')"
    is_gguf = options.model.endswith(".gguf")
    if name == "transformers" and is_gguf and importlib.util.find_spec("accelerate") is None:
        return "needs accelerate to load a GGUF file (pip install accelerate)"
    if name == "llama-cpp" and not is_gguf:
        return "reads GGUF files only, and the model is a folder"
    return None


def make_peers(name: str, options: PeerOptions) -> list[BenchEngineSpec]:
    """The specs of a peer in `PEERS`: one, or one for each form of its weights in this precision.

    Raises:
        ValueError: there is none of that name.
    """
    if name == "transformers":
        cache, has_encoder = options.transformers_cache, options.is_encoder_decoder
        return [
            TransformersSpec(options.model, options.dtype, cache, is_encoder_decoder=has_encoder)
        ]
    if name == "openvino-genai":
        from vllm.benchmarks.peers.openvino_bart import OpenVINOBartSpec
        from vllm.benchmarks.peers.openvino_genai import OpenVINOSpec

        return [OpenVINOBartSpec(options) if options.is_encoder_decoder else OpenVINOSpec(options)]
    if name == "ctranslate2":
        from vllm.benchmarks.peers.ctranslate2 import CTranslate2Spec

        return [CTranslate2Spec(options)]
    if name == "llama-cpp":
        from vllm.benchmarks.peers.llama_cpp import llama_cpp_specs

        return llama_cpp_specs(options)
    if name == "upstream":
        from vllm.benchmarks.peers.upstream import UpstreamSpec

        return [UpstreamSpec(options)]
    raise ValueError(f"no peer {name!r}; there are: {', '.join(PEERS)}")


def common_prefix_len(prompts: tuple[tuple[int, ...], ...]) -> int:
    """How many tokens all prompts begin with; 0 for a single prompt."""
    if len(prompts) < 2:
        return 0
    shortest, longest = min(prompts), max(prompts)
    same = (a == b for a, b in zip(shortest, longest))
    return next((i for i, equal in enumerate(same) if not equal), min(len(shortest), len(longest)))
