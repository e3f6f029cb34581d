# SPDX-License-Identifier: Apache-2.0
"""What the backends declare of their caches, and the views that the engine's runner makes of it."""

import pytest
from vllm_platform_kit.backends import declared, selectable_backends
from vllm_platform_kit.findings import Finding
from vllm_platform_kit.outcomes import look_at
from vllm_platform_kit.views import Unavailable, layout_set


def test_selection(kit):
    """Each choice leads to a backend or is refused."""
    backends, findings, notes = selectable_backends(kit.target)
    kit.note(*(one.line for one in backends), *notes)
    if not backends and not findings:
        what = "; ".join(notes)
        findings = [Finding("BACKEND", kit.target.name, f"it has no attention backend: {what}")]
    kit.report(findings)


def test_declared(kit, backend, layout):
    """Shape, stride order and block dimension agree."""
    try:
        with layout_set(layout):
            says = declared(backend.backend)
    except Unavailable as error:
        pytest.skip(str(error))
    except Exception as error:
        what = f"{layout}: {type(error).__name__}: {error}"
        kit.report([Finding("LAYOUT_DECLARED", backend.name, what)])
    kit.note(f"in memory by {', '.join(says.memory_roles)}")


def test_views(kit, backend, layout):
    """The runner's views are as declared."""
    look_at(kit, backend.backend, backend.backend, layout, "no case could be laid out")
