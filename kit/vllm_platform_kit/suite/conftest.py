# SPDX-License-Identifier: Apache-2.0
"""Parameters that are known only once the platform is."""

from __future__ import annotations

import itertools

import pytest
from vllm_platform_kit.backends import LAYOUTS, selectable_backends


def pytest_generate_tests(metafunc) -> None:
    run = metafunc.config.pluginmanager.get_plugin("vllm-platform-kit-run")
    wanted = {"backend", "pair"} & set(metafunc.fixturenames)
    if run is None or not wanted:
        return
    backends = selectable_backends(run.target)[0]
    if "backend" in wanted:
        found = [pytest.param(one, id=one.name) for one in backends]
        metafunc.parametrize("backend", found or _none("there is no backend to look at"))
    else:
        pairs = itertools.combinations(backends, 2)
        found = [pytest.param(pair, id="+".join(one.name for one in pair)) for pair in pairs]
        metafunc.parametrize("pair", found or _none("the platform selects fewer than two backends"))
    if "layout" in metafunc.fixturenames:
        metafunc.parametrize("layout", LAYOUTS)


def _none(reason: str) -> list:
    """One check that says why there are none."""
    return [pytest.param(None, id="none", marks=pytest.mark.skip(reason=reason))]
