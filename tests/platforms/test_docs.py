# SPDX-License-Identifier: Apache-2.0
"""docs/platforms.md says every hook, and says truly which of them the core calls."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from vllm.platforms import Platform
from vllm.v1.worker.worker_base import WorkerBase

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs" / "platforms.md"
HOOK_SECTIONS = (
    "Attributes",
    "Hooks that the core calls",
    "Device access and facts",
    "Which platform is this?",
)


def section(heading: str) -> str:
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", DOCS.read_text(), re.M | re.S)
    assert found, heading
    return found[1]


def first_column(text: str) -> list[str]:
    return re.findall(r"^\| `(\w+)` \|", text, re.M)


def test_every_hook_has_one_row():
    """A hook without a row is unknown to authors; a row without a hook sends them astray."""
    documented = [name for heading in HOOK_SECTIONS for name in first_column(section(heading))]
    members = {*vars(Platform), *Platform.__annotations__}
    public = {name for name in members if not name.startswith("_")} | {"_enum"}
    assert sorted(documented) == sorted(public)


def test_hooks_said_to_be_called_are_called():
    """A hook that nothing calls is a promise to plugin authors that is not kept."""
    used: set[str] = set()
    for path in (REPOSITORY / "vllm").rglob("*.py"):
        if "platforms" not in path.parts:
            nodes = ast.walk(ast.parse(path.read_text()))
            used |= {
                node.attr
                for node in nodes
                if isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "current_platform"
            }
    said = set(first_column(section("Hooks that the core calls")))
    # Read through `supported_dtype_names`, whose default derives from it.
    assert said - used - {"supported_dtypes"} == set()


def test_required_worker_methods_are_those_without_a_default():
    """The list that the minimal platform is written by."""
    without_default = set()
    for node in ast.walk(ast.parse(Path(WorkerBase.__init__.__code__.co_filename).read_text())):
        if isinstance(node, ast.FunctionDef) and isinstance(node.body[-1], ast.Raise):
            without_default.add(node.name)
    # Needed by `apply_model` alone, which a caller asks for.
    without_default -= {"get_model", "make_worker"}
    assert set(first_column(section("The worker"))) == without_default


def test_defaults_of_attributes():
    """Those that the table calls required have none."""
    for name in ("_enum", "device_name", "device_type"):
        assert not hasattr(Platform, name), name
    assert Platform.dispatch_key == "CPU" and Platform.dist_backend == ""
    assert Platform.supported_quantization == []
