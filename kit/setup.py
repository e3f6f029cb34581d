# SPDX-License-Identifier: Apache-2.0
"""Builds the package with the KV geometry and its drawings in it: the same source that `vllm` here
is built from.

`vllm_platform_kit/kv_cache_geometry/` is made from `../vllm`, into the build folder or the source
archive; in an unpacked archive it is there already.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
ENGINE = HERE.parent / "vllm"
CORE = "vllm_platform_kit/kv_cache_geometry"
# Where the engine's modules are, as seen from within that folder.
MOVED = {
    "from vllm.utils.": "from .",
    "from vllm.v1.kv_cache_geometry import": "from . import",
    "from vllm.v1.worker.": "from .",
}


def write_core(root: str) -> None:
    """The geometry, its drawings, and the few functions that they take from elsewhere."""
    target = Path(root) / CORE
    sources = sorted((HERE / CORE).glob("*.py"))
    if not sources:
        sources = [
            *sorted((ENGINE / "v1" / "kv_cache_geometry").glob("*.py")),
            ENGINE / "v1" / "worker" / "kv_cache_places.py",
            ENGINE / "v1" / "worker" / "kv_cache_drawing.py",
            ENGINE / "utils" / "math_utils.py",
            ENGINE / "utils" / "torch_utils.py",
        ]
    target.mkdir(parents=True, exist_ok=True)
    for source in sources:
        text = source.read_text()
        for old, new in MOVED.items():
            text = text.replace(old, new)
        (target / source.name).write_text(text)


class BuildWithCore(build_py):
    def run(self):
        super().run()
        write_core(self.build_lib)


class SdistWithCore(sdist):
    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        write_core(base_dir)


setup(cmdclass={"build_py": BuildWithCore, "sdist": SdistWithCore})
