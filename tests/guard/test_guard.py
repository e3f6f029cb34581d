# SPDX-License-Identifier: Apache-2.0
"""The guard for stock vLLM, installed alone as its users do: what it says of caches, and how it
hooks in. Its cases run on this tree; `guard/README.md` has what they gave on releases of upstream."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guard.conftest import ROOT

RIGHT = (
    "blocks-first beside blocks-first",
    "blocks-first beside K/V-first",
    "HND blocks-first beside K/V-first",
    "fused of 1 head beside K/V-first",
    "fused of 2 heads beside K/V-first",
)


def run(installed: Path, *command: str, **environment: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(installed), str(ROOT)])
    return subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"PYTHONPATH": path} | environment,
        cwd=installed,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_what_it_says_of_this_trees_caches(installed):
    """All that is aligned is right, and the one pair that nothing aligned is found, by name. A guard
    that finds nothing, or always something, is worth nothing."""
    done = run(installed, str(ROOT / "guard" / "tests" / "cases.py"))
    line = next(x for x in done.stdout.splitlines() if x.startswith("CASES "))
    said = json.loads(line.removeprefix("CASES "))
    assert {case: said.pop(case) for case in RIGHT} == dict.fromkeys(RIGHT, "right")
    (wrong,) = said.values()
    assert "page 0 of layer layers.0.attn and page 2 of layer layers.1.attn share bytes" in wrong
    assert "backends: BlocksFirst, KVFirst" in wrong


_FAKE = """
import logging, sys, types
class Wrapper:
    worker, global_rank = "worker", 0
    def initialize_from_config(self, kv_cache_configs):
        print("ORIGINAL", kv_cache_configs)
        return "result"
def module(name, **names):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(names)
module("vllm", __version__="{version}", __path__=[])
module("vllm.v1", __path__=[]); module("vllm.v1.worker", __path__=[])
module("vllm.logger", init_logger=logging.getLogger)
module("vllm.v1.worker.worker_base", **({{"WorkerWrapperBase": Wrapper}} if {has_hook} else {{}}))
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
import vllm_kv_guard, vllm_kv_guard.findings as findings
findings.examine = lambda *a: findings.Report(conflicts={conflicts})
vllm_kv_guard.register(); vllm_kv_guard.register()
print("RESULT", Wrapper().initialize_from_config(["config"]))
"""


def start(installed: Path, mode: str, conflicts=(), version="0.28.0", has_hook=True):
    program = _FAKE.format(conflicts=list(conflicts), version=version, has_hook=has_hook)
    return run(installed, "-c", program, VLLM_KV_GUARD=mode)


def test_modes(installed):
    """Hooked once, however often it is registered; the worker's own result comes through."""
    for mode, level in (("log", "INFO"), ("warn", "WARNING")):
        said = start(installed, mode, ["a and b collide"]).stdout
        assert said.count("ORIGINAL ['config']") == 1 and "RESULT result" in said
        assert said.count("KV guard:") == 1 and f"{level} KV guard:" in said
        assert "a and b collide" in said
    refused = start(installed, "refuse", ["a and b collide"])
    assert refused.returncode and "a and b collide" in refused.stderr
    assert "INFO KV guard:" in start(installed, "refuse").stdout
    assert "KV guard" not in start(installed, "off", ["a and b collide"]).stdout
    wrong = start(installed, "loud")
    assert "VLLM_KV_GUARD=loud: one of log, warn, refuse, off" in wrong.stderr


_ODD = {
    "slots": """
class Base:
    __slots__ = ()
class Odd(Base):
    __slots__ = ()
    def register_kv_caches(self, kv_caches): pass
module("vllm.distributed.kv_transfer.kv_connector.v1.base", KVConnectorBase_V1=Base)
transfer = types.SimpleNamespace(kv_transfer_config="any")
Wrapper.worker = types.SimpleNamespace(vllm_config=transfer)
def initialize_from_config(self, kv_cache_configs):
    Odd().register_kv_caches({})
    return "result"
Wrapper.initialize_from_config = initialize_from_config
findings.layer_caches = lambda *a: []
CONFIGS = [types.SimpleNamespace(num_blocks=1)]
""",
    "configs": "CONFIGS = {'rank 0': 'config'}\n",
    "ranks": "Wrapper.global_rank = 3; CONFIGS = ['config']\n",
    "worker": "del Wrapper.worker; CONFIGS = ['config']\n",
}
_ODD_WORDS = {
    "slots": "what connector Odd is handed (TypeError",
    "configs": "KeyError: 0",
    "ranks": "IndexError",
    "worker": "no attribute 'worker'",
}


@pytest.mark.parametrize("mode", ["log", "warn", "refuse"])
@pytest.mark.parametrize("odd", _ODD)
def test_what_it_cannot_look_at_does_not_end_the_start(installed, odd, mode):
    """Guards against a guard that takes down what it guards: a connector that takes no attributes,
    configs that are indexed otherwise. Said in one line, and never taken for soundness."""
    head, _, _ = _FAKE.format(conflicts=[], version="0.28.0", has_hook=True).partition("findings.exam")
    tail = 'vllm_kv_guard.register()\nprint("RESULT", Wrapper().initialize_from_config(CONFIGS))\n'
    done = run(installed, "-c", head + _ODD[odd] + tail, VLLM_KV_GUARD=mode)
    assert "RESULT result" in done.stdout, done.stderr
    (line,) = [one for one in done.stdout.splitlines() if "KV guard:" in one]
    assert "not looked at: " in line and _ODD_WORDS[odd] in line
    assert line.startswith("INFO" if mode == "log" else "WARNING")


def test_a_vllm_that_it_does_not_know(installed):
    """Said in one line; the start goes on."""
    assert "not known to this guard" in start(installed, "warn", version="0.99.1").stdout
    assert "not known" not in start(installed, "warn", version="0.26.1").stdout
    said = start(installed, "refuse", has_hook=False)
    assert "this vLLM has no vllm.v1.worker.worker_base" in said.stdout and "RESULT" in said.stdout


def test_its_geometry_is_the_engines(installed):
    """One source: what is built differs from it in nothing but where it imports from, and nothing of it
    is kept in the guard's own folder, where it would go stale."""
    built = installed / "vllm_kv_guard" / "kv_cache_geometry"
    sources = [
        *(ROOT / "vllm/v1/kv_cache_geometry").glob("*.py"),
        ROOT / "vllm/utils/math_utils.py",
        ROOT / "vllm/utils/torch_utils.py",
    ]
    assert {path.name for path in built.glob("*.py")} == {path.name for path in sources}
    for source in sources:
        text = source.read_text().replace("from vllm.utils.", "from .")
        assert (built / source.name).read_text() == text
    assert not list((ROOT / "guard").glob("vllm_kv_guard/kv_cache_geometry/*.py"))
    program = "import sys, vllm_kv_guard.kv_cache_geometry; print('vllm' in sys.modules)"
    assert run(installed, "-c", program).stdout.strip() == "False"
