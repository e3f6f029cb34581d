# SPDX-License-Identifier: Apache-2.0
"""`triton` and `tl` where Triton is installed; else stand-ins, so that modules with kernels can be
imported. `HAS_TRITON` says which."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from vllm.utils.import_utils import module_exists

HAS_TRITON = module_exists("triton")


class _Missing:
    """Stands for a function of Triton's: as a decorator it leaves alone what it decorates; a kernel
    cannot be launched, as a function has no `[grid]`."""

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self


if TYPE_CHECKING or HAS_TRITON:
    import triton
    import triton.language as tl
else:
    triton = tl = _Missing()


@cache
def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the host, as TRITON_INTERPRET=1 asks for."""

    def probe() -> None:
        """Never run."""

    return HAS_TRITON and not isinstance(triton.jit(probe), triton.JITFunction)


__all__ = ["HAS_TRITON", "is_interpreted", "tl", "triton"]
