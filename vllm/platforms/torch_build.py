# SPDX-License-Identifier: Apache-2.0
"""What the installed torch was built for, found without importing it (an import costs a second)."""

from __future__ import annotations

import ast
import importlib.util
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class TorchBuild:
    """Versions of the device toolkits that torch was built with; None where it was not."""

    version: str | None
    cuda: str | None = None
    hip: str | None = None
    xpu: str | None = None


@cache
def torch_build() -> TorchBuild:
    """Reads `torch/version.py`, which every build of torch writes; no torch at all gives Nones."""
    if "torch" in sys.modules:
        return _ask_torch()
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return TorchBuild(version=None)
    try:
        return parse_version_file(Path(spec.origin).with_name("version.py").read_text())
    except (OSError, SyntaxError):
        return _ask_torch()


def parse_version_file(text: str) -> TorchBuild:
    """The literal assignments of a `torch/version.py`."""
    found: dict[str, str | None] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign):
            target, value = node.target, node.value
        else:
            continue
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
            found[target.id] = value.value
    return TorchBuild(
        version=found.get("__version__"),
        cuda=found.get("cuda"),
        hip=found.get("hip"),
        xpu=found.get("xpu"),
    )


def _ask_torch() -> TorchBuild:
    import torch

    return TorchBuild(
        version=torch.__version__,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        xpu=getattr(torch.version, "xpu", None),  # absent before torch 2.5
    )
