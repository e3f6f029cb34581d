# SPDX-License-Identifier: Apache-2.0
"""Only platforms and attention backends may ask which device this is: others ask hooks."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "vllm"
ALLOWED = (PACKAGE / "platforms", PACKAGE / "v1" / "attention" / "backends")
DEVICES = {"cuda", "hip", "xpu", "mps", "npu"}
QUESTIONS = {"is_cuda", "is_rocm", "is_cuda_alike", "is_xpu", "is_tpu", "is_cpu"}


def questions(tree: ast.AST) -> list[str]:
    """Places that reach for one device by name: `torch.cuda`, `.is_cpu()`, `device_type ==`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
            of_platform = isinstance(node.value, ast.Name) and node.value.id == "current_platform"
            asks = of_torch and node.attr in DEVICES or of_platform and node.attr in QUESTIONS
        elif isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
            asks = any(isinstance(n, ast.Attribute) and n.attr == "device_type" for n in asked)
        else:
            continue
        if asks:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_shared_code_asks_no_device():
    """A list of devices in shared code is wrong for the next one, and for every out-of-tree one."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        if not any(path.is_relative_to(folder) for folder in ALLOWED):
            if asked := questions(ast.parse(path.read_text())):
                found[str(path.relative_to(PACKAGE))] = asked
    assert found == {}


def test_the_check_sees_what_it_must():
    """The fault itself, in each of its forms."""
    for code in (
        "torch.cuda.synchronize()",
        "if current_platform.is_rocm(): pass",
        "x = platform.device_type == 'cpu'",
    ):
        assert len(questions(ast.parse(code))) == 1, code
    assert questions(ast.parse("current_platform.is_out_of_tree()")) == []
