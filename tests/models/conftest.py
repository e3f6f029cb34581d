# SPDX-License-Identifier: Apache-2.0
"""The oracle's answers, made once a session."""

import pytest
from tests.models.smollm2 import NUM_NEW_TOKENS, make_prompts, model_path, transformers_greedy

from vllm.tokenizers import get_tokenizer


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    return make_prompts(get_tokenizer(model_path()))


@pytest.fixture(scope="session")
def expected(prompts) -> list[list[int]]:
    return transformers_greedy(prompts, NUM_NEW_TOKENS)
