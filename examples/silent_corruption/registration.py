# SPDX-License-Identifier: Apache-2.0
"""Upstream 0.25 to 0.28: views that are right, for which the NIXL connector sends other pages' bytes.

Takes the two backends; the connector's worker is the release's own, with a NIXL that writes down.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / ".ci" / "matrix"))
from caches import NUM_PAGES, Case, lay_out  # noqa: E402
from connector import transfers  # noqa: E402
from judge import find_harm, find_wrong_transfer  # noqa: E402
from probe import make_config, start_groups  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402

case = Case((sys.argv[1], sys.argv[2]), heads=2, layout="NHD", ratio=1)
with tempfile.TemporaryDirectory() as folder:
    config = make_config(case.heads, folder)
    with set_current_vllm_config(config):
        start_groups(folder)
        config.cache_config.block_size = case.specs()[0].block_size
        caches = lay_out(case, config)
        print("views:", find_harm(caches.layers, NUM_PAGES) or "right")
        regions, runs = transfers(caches, config)
        print("sent:", find_wrong_transfer(caches.layers, NUM_PAGES, regions, runs) or "right")
