# SPDX-License-Identifier: Apache-2.0
"""Tiny models in an engine on the platform, against Transformers."""

import pytest
from vllm_platform_kit.engine_jobs import Job
from vllm_platform_kit.findings import Finding
from vllm_platform_kit.outcomes import ended, require, wrong_tokens
from vllm_platform_kit.tiny_models import ARCHITECTURES

pytestmark = pytest.mark.vllm_kit_engine
# What a platform may refuse, if it does so clearly.
MAY_BE_REFUSED = ("encoder-decoder",)


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_tokens(kit, kit_engines, model):
    """Greedy, float32, token for token; prompts in chunks, pages used by several requests."""
    result = kit_engines.run(Job(model))
    if result.status == "skipped":
        pytest.skip(result.error)
    if result.is_refusal and model in MAY_BE_REFUSED:
        pytest.skip(f"refused: {result.error}")
    if not result.tokens:
        kit.report(ended(result, f"{model} model"))
    kit.report(wrong_tokens(result, f"{model} model"))


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_caches(kit, kit_engines, model):
    """Each layer has its own cache, laid out as declared and used so; none harms another."""
    result = kit_engines.run(Job(model))
    require(result, "the model does not run")
    kit.note(*result.notes)
    kit.draw(result.drawing)
    kit.report(ended(result, f"{model} model"))
    kit.report(Finding(*one) for one in result.findings if one[0] != "STALE_BYTES")


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_stale_bytes(kit, kit_engines, model):
    """NaN and Inf in free pages change no token."""
    result = kit_engines.run(Job(model))
    require(result, "the model does not run")
    if result.status != "ran":
        pytest.skip("not looked at: the check of its caches says why")
    if any(one[0].startswith(("BINDING", "LAYOUT_S", "ALIGNMENT")) for one in result.findings):
        pytest.skip("not looked at: the caches themselves are wrong")
    kit.report(Finding(*one) for one in result.findings if one[0] == "STALE_BYTES")
