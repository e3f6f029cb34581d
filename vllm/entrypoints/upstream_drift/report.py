# SPDX-License-Identifier: Apache-2.0
"""From a release to findings, and from findings to text."""

from __future__ import annotations

import pkgutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import vllm
from vllm.entrypoints.upstream_drift.compare import STATUSES, Finding, compare, losses
from vllm.entrypoints.upstream_drift.releases import Release, list_interface, resolve

_SHOWN_NAMES = 6


def find_drift(against: str, prefixes: list[str], base: str | None = None) -> list[Finding]:
    """The findings for all modules here that begin with one of `prefixes`; with `base`, another
    release, what became of that one's names since.

    Raises:
        ValueError: no module does, or a release cannot be had or asked.
    """
    modules = [m for m in _own_modules() if any(_is_under(m, prefix) for prefix in prefixes)]
    if not modules:
        raise ValueError(f"no module here begins with {' or '.join(prefixes)}")
    root = str(Path(vllm.__file__).parents[1])
    here = list_interface(Release(sys.executable, root), modules)
    there = list_interface(resolve(against), modules)
    if base is None:
        return compare(here, there)
    return losses(here, list_interface(resolve(base), modules), there)


def _is_under(module: str, prefix: str) -> bool:
    return f"{module}.".startswith(f"{prefix.rstrip('.')}.")


def _own_modules() -> list[str]:
    """Every module of this package, found by name; programs are left out."""
    found = ["vllm"]
    for folder in _folders("vllm", vllm.__path__[0]):
        found += folder
    return [name for name in found if not name.endswith(".__main__")]


def _folders(package: str, path: str) -> list[list[str]]:
    """The modules of a package, a list for it and each package inside it. Nothing is imported."""
    names, folders = [], []
    for module in pkgutil.iter_modules([path], f"{package}."):
        names.append(module.name)
        if module.ispkg:
            inner = str(Path(path) / module.name.rpartition(".")[2])
            folders += _folders(module.name, inner)
    return [names, *folders]


def as_text(
    findings: list[Finding], shown: list[Finding], against: str, base: str | None = None
) -> str:
    """A line for each of `shown`, by module; then how many names there are of each status."""
    lines, module = [], None
    for finding in _in_short(shown):
        if finding.module != module:
            module = finding.module
            lines.append(module)
        detail = f"  ({_shortened(finding.detail)})" if finding.detail else ""
        lines.append(f"  {finding.status:9}  {finding.name}{detail}")
    counts = Counter(finding.status for finding in findings)
    whose = f"here and in {base}" if base else "here"
    lines.append(f"\n{len(findings)} public names {whose}, against {against}:")
    lines += [f"  {counts[s]:5}  {s:9}  {meaning}" for s, meaning in STATUSES.items() if counts[s]]
    return "\n".join(lines) + "\n"


def _in_short(findings: list[Finding]) -> Iterator[Finding]:
    """One for all names of a module that could not be imported."""
    seen = set()
    for finding in findings:
        if finding.status != "unknown":
            yield finding
        elif finding.module not in seen:
            seen.add(finding.module)
            yield replace(finding, name="all of it")


def _shortened(detail: str) -> str:
    """No more names than a reader takes in; `--format json` has all."""
    names = detail.split(", ")
    if len(names) <= _SHOWN_NAMES + 1:
        return detail
    return f"{', '.join(names[:_SHOWN_NAMES])}, and {len(names) - _SHOWN_NAMES} more"
