# SPDX-License-Identifier: Apache-2.0
"""BART as a model plugin for vLLM >= 0.24.

It knows vLLM's public interfaces only, those of releases that have no BART of their own: it may be
installed beside any of them, and takes the place of a BART that is built in.
"""

ARCHITECTURE = "BartForConditionalGeneration"


def register() -> None:
    """The entry point; vLLM calls it in each of its processes, perhaps more than once."""
    import vllm.config.vllm as vllm_config
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from .config import BartConfigHook

    ModelRegistry.register_model(ARCHITECTURE, f"{__name__}.bart:{ARCHITECTURE}")
    MODELS_CONFIG_MAP[ARCHITECTURE] = BartConfigHook
    vllm_config.DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES = (
        vllm_config.DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES | {ARCHITECTURE}
    )
