# SPDX-License-Identifier: Apache-2.0
"""`--config FILE`: a flag in the file is the flag on the command line, which counts more."""

from __future__ import annotations

import pytest

from vllm.entrypoints.cli.config_file import apply_config_file
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser


@pytest.fixture
def parse(tmp_path):
    """Parses `argv` beside a file of this content."""

    def run(content: str, *argv: str):
        path = tmp_path / "config.yaml"
        path.write_text(content)
        parser = FlexibleArgumentParser(prog="vllm")
        serve = ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
        argv = ("serve", *argv, "--config", str(path))
        apply_config_file(serve, argv)
        return parser.parse_args(list(argv))

    return run


FILE = """
model: ./some-model
port: 9000
max-model-len: 8K
enable_prefix_caching: false
disable-uvicorn-access-log: true
disable-log-stats: false
served-model-name: [a, b]
api-key: [x, y]
hf-overrides: {rope_theta: 1.5}
allowed-origins: ["https://a.example"]
kv-cache-memory-bytes: 1G
"""


def test_every_kind_of_value(parse):
    args = parse(FILE)
    assert (args.model_tag, args.port, args.max_model_len) == ("./some-model", 9000, 8192)
    assert args.enable_prefix_caching is False and args.disable_uvicorn_access_log is True
    assert args.disable_log_stats is False and args.served_model_name == ["a", "b"]
    assert args.api_key == ["x", "y"] and args.hf_overrides == {"rope_theta": 1.5}
    assert args.allowed_origins == ["https://a.example"]
    assert args.kv_cache_memory_bytes == 2**30
    assert args.host is None and args.seed == 0


def test_the_command_line_counts_more(parse):
    args = parse(FILE, "other", "--port", "1", "--enable-prefix-caching", "--served-model-name", "c")
    assert (args.model_tag, args.port, args.served_model_name) == ("other", 1, ["c"])
    assert args.enable_prefix_caching is True and args.max_model_len == 8192
    args = parse(FILE, "--model", "third")
    assert (args.model_tag, args.model) == (None, "third")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("prot: 1", "did you mean port"),
        ("enable-lora: true", "enable-lora is not supported"),
        ("config: x", "no flag --config"),
        ("- port", "flags and their values"),
        ("a: [", "not valid YAML"),
    ],
)
def test_bad_files(parse, content, words):
    with pytest.raises(ValueError, match=words):
        parse(content)


@pytest.mark.parametrize("content", ["port: x", "load-format: [1]\nblock-size: -x", "dtype: [a"])
def test_bad_values(parse, content, capsys):
    """One line, as on the command line."""
    with pytest.raises((SystemExit, ValueError)):
        parse(content)
    assert len(capsys.readouterr().err.splitlines()) <= 1


def test_no_such_file():
    parser = FlexibleArgumentParser(prog="vllm")
    serve = ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    with pytest.raises(ValueError, match="'/nowhere' cannot be read"):
        apply_config_file(serve, ["serve", "--config=/nowhere"])
    apply_config_file(serve, ["serve", "model"])


def test_an_empty_file_is_none(parse):
    assert parse("").port == 8000
