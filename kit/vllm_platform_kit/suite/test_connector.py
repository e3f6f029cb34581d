# SPDX-License-Identifier: Apache-2.0
"""What NixlConnector registers of the platform's caches."""

import pytest
from vllm_platform_kit.engine_jobs import Job
from vllm_platform_kit.findings import Finding
from vllm_platform_kit.outcomes import ended, require, wrong_tokens
from vllm_platform_kit.registration import why_not


@pytest.mark.vllm_kit_engine
def test_registration(kit, kit_engines):
    """Every page lies in a registered region, and what is named for transfers is exactly pages."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    require(kit_engines.run(Job("hybrid")), "the model does not run without a connector")
    result = kit_engines.run(Job("hybrid", with_connector=True))
    subject = "NixlConnector, hybrid model"
    kit.report(ended(result, subject, "CONNECTOR_START"))
    kit.note(*result.notes)
    kit.report([*(Finding(*one) for one in result.findings), *wrong_tokens(result, subject)])
