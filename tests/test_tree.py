# SPDX-License-Identifier: Apache-2.0
"""Rules that every file keeps. Each guards against a fault that no other test would see coming."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.import_graph import ROOT, Import, all_imports, module_name, source_files

SPDX = "# SPDX-License-Identifier: Apache-2.0"
MAX_FUNCTION_LINES = 80
MAX_FILE_LINES = 520
MAX_LINE_CHARACTERS = 120

# From the top down: a module imports from its own layer and from those below.
LAYERS = (
    ("vllm.entrypoints", "vllm.benchmarks"),
    ("vllm.engine",),
    ("vllm.v1.engine",),
    ("vllm.v1.core", "vllm.v1.executor"),
    ("vllm.v1.worker", "vllm.v1.metrics"),
    ("vllm.model_executor", "vllm.v1.attention", "vllm.distributed", "vllm.forward_context"),
    ("vllm.platforms", "vllm.config"),
    ("vllm",),
)
# Types that go from one storey to another; anybody may name them.
BOUNDARY = (
    "vllm.model_executor.layers.quantization.base_config",
    "vllm.v1.core.sched.output",
    "vllm.v1.engine",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.metrics.stats",
    "vllm.v1.outputs",
    "vllm.v1.request",
    "vllm.v1.serial_utils",
)
# Imports inside a function that find a class by its name, at the one place that does.
LATE_BOUND = {
    ("vllm.config.attention", "vllm.v1.attention.backends.registry"),
    ("vllm.config.model", "vllm.model_executor.layers.quantization"),
    ("vllm.config.model", "vllm.model_executor.models.config"),
    ("vllm.config.model", "vllm.model_executor.models.registry"),
    ("vllm.config.vllm", "vllm.model_executor.layers.quantization"),
    ("vllm.config.vllm", "vllm.model_executor.models.config"),
    ("vllm.config.scheduler", "vllm.v1.core.sched.scheduler"),
    ("vllm.multimodal.registry", "vllm.model_executor.models.registry"),
    ("vllm.platforms.attention_choice", "vllm.v1.attention.backends.registry"),
    ("vllm.platforms.attention_choice", "vllm.v1.attention.backend"),
    ("vllm.platforms.rocm", "vllm.v1.attention.backend"),
}
# Imported by the command line or the scheduler, which must start without torch.
TORCH_FREE = (
    "vllm.config",
    "vllm.engine.arg_utils",
    "vllm.entrypoints.cli",
    "vllm.inputs",
    "vllm.v1.core",
    "vllm.v1.kv_cache_geometry",
)


@cache
def tracked_files() -> tuple[Path, ...]:
    """Files of the project; where there is no git, what lies in its folders."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if listing.returncode == 0:
        files = [ROOT / name for name in listing.stdout.splitlines()]  # some may be deleted
    else:
        folders = ("vllm", "tests", "docs", "examples", ".buildkite", ".ci")
        files = [*ROOT.glob("*.*"), ROOT / "Makefile"]
        files += [path for folder in folders for path in (ROOT / folder).rglob("*")]
    return tuple(path for path in files if path.is_file() and "__pycache__" not in path.parts)


def python_files() -> list[Path]:
    return [path for path in tracked_files() if path.suffix == ".py"]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def test_every_python_file_names_its_licence():
    files = [path for path in python_files() if not path.read_text().startswith(SPDX + "\n")]
    assert not [relative(path) for path in files]


def test_no_file_names_a_workplace():
    """The project speaks of itself alone: no path of some machine, no registry's host."""
    words = re.compile(
        r"/wor[k]/|/tmp/[w]/|/opt/pyp[i]|\bissues? sho[w]\b|pypi\.or[g]|pythonhosted\.or[g]|"
        r"download\.pytorch\.or[g]|registry\.npmj[s]|deb\.debian\.or[g]|proxy\.golang\.or[g]"
    )
    found = []
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{relative(path)}: {match[0]}" for match in words.finditer(text)]
    assert not found


def test_strides_are_read_in_one_place():
    """Where a KV cache's bytes are is known to its geometry and the kernel launchers alone."""
    folders = ("vllm/v1/worker/", "vllm/v1/core/", "vllm/distributed/")
    pattern = re.compile(r"\.stride\(|as_strided|storage_offset")
    assert not matches(pattern, lambda name: name.startswith(folders))


def test_only_platforms_and_backends_ask_for_the_device():
    """Shared code asks the platform for what it needs, never which one it is; streams and events
    are reached through it."""
    pattern = re.compile(
        r"\bis_(cpu|cuda|rocm|xpu|tpu|cuda_alike)\(|device_type *(==|!=|\bin\b)|"
        r"\btorch\.(cuda|xpu|mps|hip)\.|\btorch\.version\.(cuda|hip)\b"
    )
    may_ask = ("vllm/platforms/", "vllm/v1/attention/backends/")
    assert not matches(pattern, lambda name: not name.startswith(may_ask))


def matches(pattern: re.Pattern[str], where) -> list[str]:
    """`file:line` of each line of code, comments left out, that the pattern is in."""
    found = []
    for path in source_files():
        if not where(relative(path)):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if pattern.search(line.split("#")[0]):
                found.append(f"{relative(path)}:{number}: {line.strip()}")
    return found


def layer_of(module: str) -> int:
    """Index into `LAYERS` of the longest package that holds the module."""
    held = [
        (len(package), index)
        for index, packages in enumerate(LAYERS)
        for package in packages
        if is_within(module, package)
    ]
    return max(held)[1]


def climbs(found: Import) -> bool:
    """Whether an import goes up the house."""
    if not is_within(found.imported, "vllm") or found.imported in BOUNDARY:
        return False
    if found.importer == "vllm":  # the package's names are those of every storey
        return False
    if found.lazy and (found.importer, found.imported) in LATE_BOUND:
        return False
    return layer_of(found.imported) < layer_of(found.importer)


def test_imports_go_down():
    """entrypoints -> engine -> v1.engine -> v1.core, v1.executor -> v1.worker -> model_executor,
    v1.attention -> platforms, config -> the rest."""
    assert not [str(found) for found in all_imports() if climbs(found)]


def test_late_bound_imports_are_there():
    """Guards against exceptions that outlive what they were made for."""
    lazy = {(found.importer, found.imported) for found in all_imports() if found.lazy}
    assert LATE_BOUND <= lazy


def test_core_and_worker_do_not_know_each_other():
    """The scheduler runs without torch, worker or platform; the worker without the scheduler."""
    forbidden = {
        "vllm.v1.core": (
            "torch",
            "transformers",
            "vllm.platforms",
            "vllm.v1.executor",
            "vllm.v1.worker",
        ),
        "vllm.v1.executor": ("vllm.v1.core",),
        "vllm.v1.worker": ("vllm.v1.core",),
    }
    found = [
        str(one)
        for one in all_imports()
        for package, others in forbidden.items()
        if is_within(one.importer, package) and one.imported not in BOUNDARY
        for other in others
        if is_within(one.imported, other)
    ]
    assert not found


def test_graph_sees_what_it_should():
    """Guards against rules above that pass because nothing was read."""
    pairs = {(one.importer, one.imported) for one in all_imports()}
    assert ("vllm.config.model", "vllm.config.parallel") not in pairs, (
        "TYPE_CHECKING is no run time"
    )
    assert ("vllm.config.model", "vllm.logger") in pairs
    assert ("vllm.config.model", "vllm.platforms") in pairs, "imports inside functions are not seen"
    assert climbs(Import("vllm.config.model", "vllm.v1.worker.gpu", 1, False))
    assert climbs(Import("vllm.v1.worker.gpu", "vllm.v1.core.block_pool", 1, True))
    assert not climbs(Import("vllm.engine.arg_utils", "vllm.config", 1, False))


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def torch_free_modules() -> list[str]:
    names = [module_name(path) for path in source_files()]
    return [name for name in names if any(is_within(name, package) for package in TORCH_FREE)]


def test_torch_free_modules():
    """Imports each in turn and names the first that brings torch or transformers along."""
    code = (
        "import importlib, sys\n"
        f"for name in {torch_free_modules()!r}:\n"
        "    importlib.import_module(name)\n"
        "    for heavy in ('torch', 'transformers'):\n"
        "        if heavy in sys.modules:\n"
        "            sys.exit(f'{name} imports {heavy}')\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments", [["--help"], ["serve", "--help"], ["serve", "--help=all"], ["--version"]]
)
def test_help_without_torch(arguments):
    """Guards against a help text that takes seconds."""
    code = (
        "import sys\n"
        f"sys.argv = ['vllm', *{arguments!r}]\n"
        "from vllm.entrypoints.cli.main import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as end:\n"
        "    heavy = {'torch', 'transformers', 'numba'} & set(sys.modules)\n"
        "    sys.exit(f'imported {heavy}' if heavy else end.code)\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def own_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without those of functions inside it, which count for themselves."""
    lines = function.end_lineno - function.lineno + 1
    nodes = [node for node in ast.walk(function) if node is not function]
    inner = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    outermost = [a for a in inner if not any(a is not b and a in ast.walk(b) for b in inner)]
    return lines - sum(node.end_lineno - node.lineno + 1 for node in outermost)


def test_functions_fit_on_a_screen():
    long = []
    for path in source_files():
        for node in ast.walk(ast.parse(path.read_text())):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and own_lines(node) > MAX_FUNCTION_LINES:
                long.append(f"{relative(path)}:{node.lineno} {node.name}: {own_lines(node)} lines")
    assert not long


def test_files_have_one_subject():
    """As far as a number can tell."""
    sizes = {relative(path): len(path.read_text().splitlines()) for path in source_files()}
    assert not {name: size for name, size in sizes.items() if size > MAX_FILE_LINES}


def test_lines_fit_beside_each_other():
    wide = [
        f"{relative(path)}:{number}: {len(line)} characters"
        for path in python_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > MAX_LINE_CHARACTERS
    ]
    assert not wide
