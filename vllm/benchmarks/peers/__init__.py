# SPDX-License-Identifier: Apache-2.0
"""Other engines as `BenchEngineSpec`s for `vllm bench compare`: which there are, what each needs.

An adapter imports its engine only in the process that runs it.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from vllm.benchmarks.engine import BenchEngineSpec
from vllm.benchmarks.transformers_peer import TransformersSpec

Precision = str
PRECISIONS = ("bf16", "int8", "int4")


@dataclass(frozen=True)
class PeerOptions:
    """What the peers are made from. `model`: a folder or a .gguf file; `dtype`: ours;
    `upstream_python`: the interpreter of an environment with upstream's vllm; `openvino_model`: a
    folder that optimum-intel exported."""

    model: str
    dtype: str
    precision: Precision = "bf16"
    max_model_len: int = 2048
    upstream_python: str | None = None
    openvino_model: str | None = None


PEERS = ("transformers", "openvino-genai", "ctranslate2", "llama-cpp", "upstream")
_MODULES = {
    "openvino-genai": "openvino_genai",
    "ctranslate2": "ctranslate2",
    "llama-cpp": "llama_cpp",
}


def missing_reason(name: str, options: PeerOptions) -> str | None:
    """Why the peer cannot be measured here; None: it can."""
    if name == "upstream":
        if options.upstream_python is None:
            return "needs --upstream-python, the interpreter of its own environment"
        return _precision_reason(name, options, ("bf16",))
    module = _MODULES.get(name)
    if module is not None and importlib.util.find_spec(module) is None:
        return "not installed (pip install '.[peers]')"
    if name == "transformers":
        if options.model.endswith(".gguf") and importlib.util.find_spec("accelerate") is None:
            return "needs accelerate to load a GGUF file (pip install accelerate)"
        return _precision_reason(name, options, ("bf16",))
    if name == "llama-cpp":
        if not options.model.endswith(".gguf"):
            return "reads GGUF files only, and the model is a folder"
        return None
    if name == "ctranslate2":
        return _precision_reason(name, options, ("bf16", "int8"))
    return _precision_reason(name, options, ("bf16", "int8"))


def _precision_reason(name: str, options: PeerOptions, has: tuple[str, ...]) -> str | None:
    if options.precision in has:
        return None
    return f"has no {options.precision} of the kind (it has {', '.join(has)})"


def make_peer(name: str, options: PeerOptions) -> BenchEngineSpec:
    """The spec of a peer in `PEERS`.

    Raises:
        ValueError: there is none of that name.
    """
    if name == "transformers":
        return TransformersSpec(options.model, options.dtype)
    if name == "openvino-genai":
        from vllm.benchmarks.peers.openvino_genai import OpenVINOSpec

        return OpenVINOSpec(options)
    if name == "ctranslate2":
        from vllm.benchmarks.peers.ctranslate2 import CTranslate2Spec

        return CTranslate2Spec(options)
    if name == "llama-cpp":
        from vllm.benchmarks.peers.llama_cpp import LlamaCppSpec

        return LlamaCppSpec(options)
    if name == "upstream":
        from vllm.benchmarks.peers.upstream import UpstreamSpec

        return UpstreamSpec(options)
    raise ValueError(f"no peer {name!r}; there are: {', '.join(PEERS)}")


def common_prefix_len(prompts: tuple[tuple[int, ...], ...]) -> int:
    """How many tokens all prompts begin with; 0 for a single prompt."""
    if len(prompts) < 2:
        return 0
    shortest, longest = min(prompts), max(prompts)
    same = (a == b for a, b in zip(shortest, longest))
    return next((i for i, equal in enumerate(same) if not equal), min(len(shortest), len(longest)))
