# SPDX-License-Identifier: Apache-2.0
"""A wrong command line ends in one line that says what to change, never in a traceback or a guess."""

from __future__ import annotations

import argparse

import pytest

from vllm.utils.argparse_utils import (
    FlexibleArgumentParser,
    human_readable_int,
    human_readable_int_or_auto,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("8192", 8192), ("-1", -1), ("8k", 8000), ("8K", 8192), ("1.5k", 1500),
     ("1.5K", 1536), ("1G", 2**30), ("2g", 2 * 10**9), ("1T", 2**40), ("4GiB", 4 * 2**30)],
)  # fmt: skip
def test_numbers_as_people_write_them(text, value):
    """Small letters are powers of 1000, capitals of 1024: mixing them up sizes caches wrongly."""
    assert human_readable_int(text) == value


@pytest.mark.parametrize("text", ["", "k", "8kk", "1.5", "0x10", "1e3", "8 000", "nan"])
def test_what_is_no_number_is_refused(text):
    """A fraction of one token must not be rounded silently, nor a typo be read as its first digits."""
    with pytest.raises(argparse.ArgumentTypeError):
        human_readable_int(text)


def test_auto_is_minus_one():
    """`--max-model-len auto` is upstream's -1."""
    assert human_readable_int_or_auto("auto") == human_readable_int_or_auto("-1") == -1


@pytest.fixture
def parser():
    made = FlexibleArgumentParser(prog="tool", refused_flags={"--enable-lora"})
    commands = made.add_subparsers(dest="command")
    run = commands.add_parser("run", refused_flags={"--enable-lora"}, brief_help="brief words")
    group = run.add_argument_group("SizeConfig", "How large.")
    group.add_argument("--max-model-len", type=human_readable_int_or_auto, default=7, help="length")
    group.add_argument("--max-num-seqs", type=human_readable_int, help="requests")
    run.add_argument("--name", help="a name")
    return made


def _fails(parser, capsys, *argv) -> str:
    with pytest.raises(SystemExit) as exit_info:
        parser.parse_args(argv)
    assert exit_info.value.code == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1, text
    return text


def test_underscores_in_flags_but_not_in_values(parser):
    """`--max_model_len` is upstream's spelling too; a value such as a file name is left alone."""
    args = parser.parse_args(["run", "--max_model_len", "8k", "--name=a_b"])
    assert (args.max_model_len, args.name) == (8000, "a_b")
    assert parser.parse_args(["run", "--name", "a_b"]).name == "a_b"


def test_unknown_flag_suggests(parser, capsys):
    """The subcommand's own parser answers: the one above knows none of its flags."""
    assert "did you mean --max-model-len?" in _fails(parser, capsys, "run", "--max-model-length", "1")
    assert "see `tool run --help=all`" in _fails(parser, capsys, "run", "--zzz")


def test_no_abbreviations(parser, capsys):
    """`--max-n 3` must not set whatever flag happens to begin so."""
    assert "--max-num-seqs" in _fails(parser, capsys, "run", "--max-num", "3")


@pytest.mark.parametrize("flag", ["--enable-lora", "--enable_lora", "--no-enable-lora"])
def test_flag_of_another_build(parser, capsys, flag):
    """A flag that exists upstream is not called a typo."""
    assert "not supported by this build" in _fails(parser, capsys, "run", flag)


def test_stray_argument(parser, capsys):
    """A second model name must not be dropped."""
    assert "unexpected argument 'x'" in _fails(parser, capsys, "run", "x")


@pytest.mark.parametrize(
    ("what", "shown", "hidden"),
    [("--help", "brief words", "--max-num-seqs"), ("--help=all", "--name", "brief words"),
     ("--help=SizeConfig", "--max-num-seqs", "--name"), ("--help=size", "How large", "--name"),
     ("--help=num_seqs", "--max-num-seqs", "--max-model-len"),
     ("--help=listgroup", "SizeConfig", "--max-num-seqs")],
)  # fmt: skip
def test_help_by_part(parser, capsys, what, shown, hidden):
    """`--help=PART` finds a group or a flag and shows only that."""
    with pytest.raises(SystemExit) as exit_info:
        parser.parse_args(["run", what])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    usage = parser._subparsers._group_actions[0].choices["run"].format_usage().strip()
    assert shown in text and hidden not in text.replace(usage, "")


def test_help_for_nothing(parser, capsys):
    """A part that matches nothing is an error, not an empty page."""
    assert "no flag or group matches 'zzz'" in _fails(parser, capsys, "run", "--help=zzz")
