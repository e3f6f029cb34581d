# SPDX-License-Identifier: Apache-2.0
"""Block sizes: right tokens or a clear refusal."""

import pytest
from vllm_platform_kit.engine_jobs import Job
from vllm_platform_kit.outcomes import of_block_size, of_declared_sizes, refuses_block_size, require

SIZES = (8, 16, 24, 64)


def test_declared(kit, backend):
    """The backend has a shape for each size that it lists."""
    kit.report(of_declared_sizes(backend.backend))


@pytest.mark.vllm_kit_engine
@pytest.mark.parametrize("size", SIZES)
def test_block_size(kit, kit_engines, size):
    require(kit_engines.run(Job("decoder")), "the decoder model does not start at all")
    result = kit_engines.run(Job("decoder", {"block_size": size}, with_probes=False))
    if refuses_block_size(result):
        kit.note(f"refused: {result.error}")
    kit.report(of_block_size(result, size))
