# SPDX-License-Identifier: Apache-2.0
"""Each value that a flag lists works, or is refused at start in a line that lists what does; a value
that it does not list is refused so too."""

from __future__ import annotations

import json
import re

import pytest

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.llm import LLM
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

PROMPTS = [[5, 6, 7], list(range(20, 60)), [9] * 17]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
# Flags whose values are listed in their help as {a,b} or in their documentation.
LISTED = {
    "--load-format": ["auto", "safetensors", "gguf", "dummy"],
    "--generation-config": ["auto", "vllm"],
    "--distributed-executor-backend": ["uni", "mp", "ray", "external_launcher"],
    "--attention-backend": ["CPU_ATTN", "TRITON_ATTN", "FLASH_ATTN", "ROCM_ATTN"],
    "--quantization": ["int8", "int4", "gguf", "fp8", "awq", "gptq"],
    "--block-size": ["1", "2", "8", "16", "32", "48", "128", "256"],
    "--tensor-parallel-size": ["1", "2"],
    "--max-num-seqs": ["1", "2"],
    "--max-num-batched-tokens": ["1", "7", "128"],
    "--max-model-len": ["auto", "-1", "64", "1k"],
}


def parser() -> FlexibleArgumentParser:
    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm serve"))


def _listed_values() -> dict[str, list[str]]:
    found = dict(LISTED)
    for action in parser()._actions:
        flag = next((o for o in action.option_strings if o.startswith("--")), None)
        named = re.fullmatch(r"\{(.*)\}", str(action.metavar or ""))
        if flag and action.choices:
            found[flag] = [str(value) for value in action.choices]
        elif flag and named:
            found[flag] = named[1].split(",")
    return found


VALUES = _listed_values()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    """A config alone; weights are random."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 512,
        "torch_dtype": "float32",
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("flags")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def start(model_dir: str, *flags: str) -> LLM:
    """An engine as these flags make it.

    Raises:
        ValueError: it is refused.
    """
    argv = [
        "--model", model_dir, "--load-format", "dummy", "--skip-tokenizer-init", "--dtype",
        "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", "4M", *flags,
    ]  # fmt: skip
    args = AsyncEngineArgs.from_cli_args(parser().parse_args(argv))
    args.disable_log_stats = True
    return LLM.from_engine_args(args)


def tokens(llm: LLM) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected(model_dir) -> list[list[int]]:
    return tokens(start(model_dir))


# What changes numbers, so that other tokens may follow.
_INEXACT = ("--kv-cache-dtype", "--dtype", "--model-impl", "--quantization")


@pytest.mark.parametrize(
    ("flag", "value"), [(flag, value) for flag, values in VALUES.items() for value in values]
)
def test_listed_values(model_dir, expected, flag, value):
    """Where it starts, it generates, and what does not change numbers changes no token."""
    try:
        llm = start(model_dir, flag, value)
    except (ValueError, NotImplementedError) as error:
        message = str(error)
        assert "\n" not in message.strip() and len(message) < 600, message
        said = flag.removeprefix("--").replace("-", "_")
        named = flag in message or said in message or said.replace("_", " ") in message
        assert named or value in message, message
        assert re.search(r"support|known|pass|must|needs|holds|lower|raise", message), message
        return
    got = tokens(llm)
    assert all(len(one) == 20 for one in got)
    if flag not in _INEXACT:
        assert got == expected


# (--tokenizer-mode is read with the tokenizer, which is left out here; tests/tokenizers.)
@pytest.mark.parametrize(
    "flag", [f for f in VALUES if not VALUES[f][0].isdigit() and f != "--tokenizer-mode"]
)
def test_unlisted_values(model_dir, flag, capsys):
    """One line, from the parser or from the config, that lists what is supported."""
    with pytest.raises((SystemExit, ValueError)) as caught:
        start(model_dir, flag, "bogus")
    message = capsys.readouterr().err if caught.type is SystemExit else str(caught.value)
    assert "bogus" in message.lower() and len(message.strip().splitlines()) == 1, message
