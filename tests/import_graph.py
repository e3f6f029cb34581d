# SPDX-License-Identifier: Apache-2.0
"""What imports what, read from the source: no module is imported to find out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vllm"


@dataclass(frozen=True)
class Import:
    """`importer`, a module of ours, imports `imported`. `lazy`: inside a function."""

    importer: str
    imported: str
    line: int
    lazy: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def module_name(path: Path) -> str:
    """`vllm/v1/core/__init__.py` -> `vllm.v1.core`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def source_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """Imports that happen at run time: those under TYPE_CHECKING do not."""
    return tuple(_visit(ast.parse(path.read_text()), path, lazy=False))


def all_imports() -> list[Import]:
    return [found for path in source_files() for found in imports_of(path)]


def _visit(node: ast.AST, path: Path, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from _visit(ast.Module([other], []), path, lazy)
        elif isinstance(child, ast.Import | ast.ImportFrom):
            for name in _names(child, path):
                yield Import(module_name(path), name, child.lineno, lazy)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _visit(child, path, lazy or inside)


def _names(node: ast.Import | ast.ImportFrom, path: Path) -> list[str]:
    """Dotted modules; `from package import module` counts as the module where that is one."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        package = module_name(path).split(".")
        keep = len(package) - node.level + (path.name == "__init__.py")
        base = ".".join(package[:keep] + ([base] if base else []))
    return sorted({_submodule(base, alias.name) or base for alias in node.names})


def _submodule(base: str, name: str) -> str | None:
    folder = ROOT.joinpath(*base.split("."))
    is_module = (folder / f"{name}.py").exists() or (folder / name / "__init__.py").exists()
    return f"{base}.{name}" if base.split(".")[0] == "vllm" and is_module else None
