# SPDX-License-Identifier: Apache-2.0
"""The built-in cuda platform without its device: the path of NVIDIA GPUs through the engine, its worker
and its kernels, on a CPU. For tests; nothing of it says how a device behaves."""

import os
from importlib.util import find_spec


def register() -> str | None:
    """The platform's dotted name where Triton's interpreter is asked for, else None."""
    interpreted = os.getenv("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
    return "vllm_emulated_cuda.platform.EmulatedCudaPlatform" if interpreted else None
