# SPDX-License-Identifier: Apache-2.0
"""Parameters that are known only once the platform is."""

from __future__ import annotations

import itertools

from vllm_platform_kit.backends import LAYOUTS, selectable_backends


def pytest_generate_tests(metafunc) -> None:
    run = metafunc.config.pluginmanager.get_plugin("vllm-platform-kit-run")
    wanted = {"backend", "pair"} & set(metafunc.fixturenames)
    if run is None or not wanted:
        return
    backends = selectable_backends(run.target)[0]
    if "backend" in wanted:
        metafunc.parametrize("backend", backends, ids=[one.name for one in backends])
    else:
        pairs = list(itertools.combinations(backends, 2)) or [None]
        ids = ["none" if pair is None else "+".join(one.name for one in pair) for pair in pairs]
        metafunc.parametrize("pair", pairs, ids=ids)
    if "layout" in metafunc.fixturenames:
        metafunc.parametrize("layout", LAYOUTS)
