# SPDX-License-Identifier: Apache-2.0
"""Flags are the config dataclasses, no more and no less; what is wrong with one is said in a line."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from vllm.config import VllmConfig, get_attr_docs
from vllm.engine.arg_utils import _CONFIG_ARGS, AsyncEngineArgs, EngineArgs, _field_name
from vllm.engine.unsupported_args import UNSUPPORTED_ENGINE_FLAGS, UNSUPPORTED_SERVER_FLAGS
from vllm.utils.argparse_utils import FlexibleArgumentParser

# Fields that no user sets: found by the constructor, or put there by the engine and its hooks.
_NOT_FLAGS = {
    "ModelConfig": {"original_max_model_len", "download_dir", "multimodal_config"},
    "CacheConfig": {"sliding_window"},
    "SchedulerConfig": {"runner_type", "max_model_len", "is_encoder_decoder"},
    "ParallelConfig": {"data_parallel_rank", "rank"},
    "AttentionConfig": {"backend_per_kind"},  # a part of --attention-config
    "VllmConfig": {
        "model_config", "cache_config", "parallel_config", "scheduler_config", "device_config",
        "load_config", "observability_config", "instance_id",
    },
}  # fmt: skip


@pytest.fixture
def model_dir(tmp_path):
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 4096,
        "torch_dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def parse(*argv: str) -> AsyncEngineArgs:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm serve"))
    return AsyncEngineArgs.from_cli_args(parser.parse_args(list(argv)))


@pytest.mark.parametrize("config", _CONFIG_ARGS, ids=lambda c: c.__name__)
def test_every_field_has_a_flag(config):
    """A field added to a config must get a flag, or be named here as none."""
    fields = {f.name for f in dataclasses.fields(config) if f.init}
    exposed = {_field_name(arg) for arg in _CONFIG_ARGS[config]}
    assert fields - exposed == _NOT_FLAGS.get(config.__name__, set()) & fields
    assert exposed <= fields


@pytest.mark.parametrize("config", _CONFIG_ARGS, ids=lambda c: c.__name__)
def test_every_flag_is_documented(config):
    """A flag without words in its help is of no use."""
    docs = get_attr_docs(config)
    assert not [arg for arg in _CONFIG_ARGS[config] if not docs.get(_field_name(arg))]


def test_each_argument_makes_one_config():
    """An argument in two configs' lists would set both."""
    names = [name for args in _CONFIG_ARGS.values() for name in args]
    assert len(names) == len(set(names))
    known = {f.name for f in dataclasses.fields(EngineArgs)}
    assert set(names) | {"disable_log_stats"} == known


def test_unsupported_flags_do_not_exist():
    """A flag that was built must leave the list of those refused."""
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="x"))
    known = set(parser._option_string_actions)
    assert not known & (UNSUPPORTED_ENGINE_FLAGS | UNSUPPORTED_SERVER_FLAGS)


def test_no_flags_equal_the_python_defaults(model_dir):
    """The command line and `EngineArgs()` must not drift apart."""
    assert parse("--model", model_dir) == AsyncEngineArgs(model=model_dir)


def test_values_reach_the_configs(model_dir):
    """A flag that is parsed and then lost would be dropped silently."""
    config = parse(
        "--model", model_dir, "--max-model-len", "2k", "--block-size", "32", "--dtype", "float32",
        "--no-enable-prefix-caching", "--kv-cache-memory-bytes", "1G", "--max-num-seqs", "4",
        "--kv-cache-dtype", "float32", "--scheduling-policy", "priority", "--enforce-eager",
        "--served-model-name", "a", "b", "--attention-backend", "CPU_ATTN", "-tp", "1",
        "--num-gpu-blocks-override", "9", "--max-num-batched-tokens", "512", "--seed", "3",
        "--override-generation-config", '{"temperature": 0.5}', "--shutdown-timeout", "3",
        "--additional-config", '{"x": 1}',
    ).create_engine_config()  # fmt: skip
    assert isinstance(config, VllmConfig)
    model, cache, steps = config.model_config, config.cache_config, config.scheduler_config
    assert (model.max_model_len, model.dtype, model.seed) == (2000, "float32", 3)
    assert model.enforce_eager and model.served_model_name == ["a", "b"]
    assert model.override_generation_config == {"temperature": 0.5}
    assert (cache.block_size, cache.enable_prefix_caching) == (32, False)
    assert (cache.kv_cache_memory_bytes, cache.cache_dtype) == (2**30, "float32")
    assert cache.num_gpu_blocks_override == 9
    assert (steps.max_num_seqs, steps.max_num_batched_tokens) == (4, 512)
    assert steps.policy == "priority"
    assert config.attention_config.backend.name == "CPU_ATTN"
    assert (config.shutdown_timeout, config.additional_config) == (3, {"x": 1})


def test_what_was_left_out_fits_what_was_given(model_dir):
    """`--max-num-batched-tokens 64` alone must not clash with a default of more requests than that."""
    few = EngineArgs(model=model_dir, max_num_batched_tokens=64).create_engine_config()
    assert few.scheduler_config.max_num_seqs == 64
    many = EngineArgs(model=model_dir, max_num_seqs=3000).create_engine_config()
    assert many.scheduler_config.max_num_batched_tokens == 3000
    whole = EngineArgs(model=model_dir, enable_chunked_prefill=False).create_engine_config()
    assert whole.scheduler_config.max_num_batched_tokens == 4096


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--block-size", "-3"], ["--block-size", "greater than 0", "-3"]),
        (["--gpu-memory-utilization", "7"], ["--gpu-memory-utilization", "1", "7.0"]),
        (["--dtype", "float64"], ["dtype float64", "supported: ", "float32"]),
        (["--max-model-len", "1M"], ["--max-model-len 4096 or less"]),
        (["--max-model-len", "-7"], ["--max-model-len", "-7"]),
        (["--attention-backend", "FOO"], ["--attention-backend", "FOO", "CPU_ATTN"]),
        (["--tensor-parallel-size", "2"], ["tensor_parallel_size=2", "supported: 1"]),
        (["--watermark", "3"], ["--watermark", "less than 1"]),
        (["--max-num-seqs", "0"], ["--max-num-seqs", "1", "0"]),
        (["--shutdown-timeout", "-1"], ["--shutdown-timeout", "0", "-1"]),
        (["--model", "/nowhere"], ["'/nowhere' does not exist"]),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "32"], ["max_num_batched_tokens (32)"]),
        (["--attention-config", '{"bakend": 1}'], ["bakend"]),
        (["-cc", '{"cudagraph_mode": "PIECEWISE"}'], ["'PIECEWISE'", "NONE, FULL_DECODE_ONLY"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else None,
)
def test_wrong_values_are_one_line(model_dir, argv, words):
    """The line names the flag, the value and what is supported; pydantic's own report has many."""
    args = parse(*(["--model", model_dir] if "--model" not in argv else []), *argv)
    with pytest.raises(ValueError) as caught:
        args.create_engine_config()
    message = str(caught.value)
    assert "\n" not in message and "pydantic" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--kv-cache-dtype", "int4"], ["--kv-cache-dtype", "int4", "bfloat16"]),
        (["--scheduling-policy", "sjf"], ["sjf", "fcfs", "priority"]),
        (["--max-model-len", "long"], ["--max-model-len", "'long'", "8k"]),
        (["--hf-overrides", "[1]"], ["--hf-overrides", "JSON object"]),
        (["--hf-overrides", "{"], ["--hf-overrides", "not JSON"]),
        (["--gpu-memory-utilization", "x"], ["--gpu-memory-utilization", "not a number"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_unreadable_values_are_one_line(capsys, argv, words):
    """As above, where the parser itself refuses."""
    with pytest.raises(SystemExit) as exit_info:
        parse(*argv)
    assert exit_info.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and all(word in message for word in words), message


def test_options_without_effect_warn(model_dir, caplog):
    """An option that changes nothing must say so."""
    import logging

    logging.getLogger("vllm").addHandler(caplog.handler)
    try:
        EngineArgs(
            model=model_dir, hf_token="x", gpu_memory_utilization=0.5, enforce_eager=True,
            compilation_config={"cudagraph_mode": "NONE"},
        ).create_engine_config()
    finally:
        logging.getLogger("vllm").removeHandler(caplog.handler)
    assert "--hf-token has no effect" in caplog.text
    assert "--enforce-eager has no effect" in caplog.text
    assert "--gpu-memory-utilization 0.5 has no effect" in caplog.text


def test_decode_steps_are_recorded_unless_told_otherwise(model_dir):
    """On a CPU, where recording costs next to nothing, it is the default."""
    modes = {
        given: EngineArgs(model=model_dir, **options).create_engine_config()
        .compilation_config.cudagraph_mode.name
        for given, options in {
            "nothing": {},
            "eager": {"enforce_eager": True},
            "none": {"compilation_config": {"cudagraph_mode": "NONE"}},
        }.items()
    }
    assert modes == {"nothing": "FULL_DECODE_ONLY", "eager": "NONE", "none": "NONE"}


def test_config_without_torch(model_dir):
    """The API server's process must not pay for torch: 2 s and 300 MB."""
    code = (
        "import sys; from vllm.engine.arg_utils import EngineArgs;"
        f"EngineArgs(model={model_dir!r}).create_engine_config();"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_options_of_encoders_warn_where_there_is_none(caplog):
    """Fault: a limit on images is taken without a word by a model that reads none."""
    args = EngineArgs(
        allowed_media_domains=["a.test"], limit_mm_per_prompt={"image": 1}, mm_processor_kwargs={}
    )
    with caplog.at_level("WARNING", logger="vllm"):
        config = args.create_engine_config().model_config
    assert "--allowed-media-domains has no effect" in caplog.text
    assert "--limit-mm-per-prompt has no effect" in caplog.text
    assert "--mm-processor-kwargs" not in caplog.text
    assert config.multimodal_config.get_limit_per_prompt("image") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"limit_mm_per_prompt": {"image": -1}}, "greater than or equal to 0"),
        ({"limit_mm_per_prompt": {"image": "x"}}, "image: must be a count or an object"),
        ({"limit_mm_per_prompt": {"image": {"heigth": 3}}}, "heigth"),
        ({"allowed_media_domains": ["http://a.test"]}, "takes host names"),
    ],
)
def test_wrong_options_of_encoders(args, message):
    with pytest.raises(ValueError, match=message):
        EngineArgs(**args).create_engine_config()
