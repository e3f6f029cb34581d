# SPDX-License-Identifier: Apache-2.0
"""`vllm upstream-drift`: a maintainer learns which names moved before bringing a change over."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm.entrypoints.upstream_drift.compare import Finding, compare, losses

MODULE = "vllm.utils.math_utils"


def parameters(*names: str, kind: str = "POSITIONAL_OR_KEYWORD"):
    """`x` is required, `x=` may be left out."""
    return [[name.rstrip("="), kind, name.endswith("=")] for name in names]


def listing(signature, elsewhere=None, **modules):
    function = {"kind": "function", "signature": signature}
    return {"modules": {"m": {"names": {"f": function}}, **modules}, "elsewhere": elsewhere or {}}


@pytest.mark.parametrize(
    ("mine", "theirs", "status"),
    [
        (parameters("a", "b="), parameters("a", "b="), "same"),
        (parameters("a", "b="), parameters("a"), "extended"),
        (parameters("b=", "a"), parameters("a"), "changed"),
        (parameters("a", "b"), parameters("a"), "changed"),
        (parameters("a"), parameters("a", "b="), "wider"),
        (parameters("a", "b="), parameters("x=", "a", "b="), "wider"),
        (parameters("a"), parameters("a", "b"), "changed"),
        (parameters("a", "b="), parameters("a", "c="), "changed"),
        (parameters("a="), parameters("a"), "changed"),
        (parameters("a"), parameters("a="), "same"),
        (parameters("a", "b"), parameters("b", "a"), "changed"),
        (parameters("a"), parameters("a", kind="KEYWORD_ONLY"), "changed"),
        (None, parameters("a"), "same"),
    ],
)
def test_signatures(mine, theirs, status):
    """What may be called here may be called there: parameters added on either side need a default,
    and come last if they are ours. All else breaks a caller."""
    (finding,) = compare(listing(mine), listing(theirs))
    assert finding.status == status


def test_where_a_name_is():
    """Moved, absent, its module absent, not known: four different things to do about it."""
    here = listing(parameters("a"))
    found = {
        "moved": {"modules": {"m": {"names": {}}}, "elsewhere": {"f": ["m", "n"]}},
        "absent": {"modules": {"m": {"names": {}}}, "elsewhere": {"f": ["m"]}},
        "only here": {"modules": {"m": {"missing": True}}, "elsewhere": {}},
        "unknown": {"modules": {"m": {"error": "ImportError: no device"}}, "elsewhere": {}},
    }
    for status, there in found.items():
        (finding,) = compare(here, there)
        assert finding.status == status
    assert compare(here, found["moved"])[0].detail == "n"
    assert compare(here, found["unknown"])[0].detail == "ImportError: no device"


def test_a_name_that_several_modules_have_went_nowhere():
    """Every program has a `main`: nobody can say which became which."""
    main = {"names": {"main": {"kind": "function", "signature": []}}}
    here = {"modules": {"a": main, "b": main}, "elsewhere": {}}
    there = {"modules": {"a": {"names": {}}, "b": {"missing": True}}, "elsewhere": {"main": ["c"]}}
    assert [f.status for f in compare(here, there)] == ["absent", "only here"]


def test_a_name_that_is_passed_on_is_said_once():
    """Where it is defined; in the package that passes it on only if that no longer does."""
    a, b = parameters("a"), parameters("a", "b")

    def listing(signature, *modules):
        described = {"kind": "function", "signature": signature, "home": "p.m"}
        modules = {m: {"names": {"f": described} if m in modules else {}} for m in ("p", "p.m")}
        return {"modules": modules, "elsewhere": {}}

    here = listing(a, "p", "p.m")
    assert [f.module for f in compare(here, listing(b, "p", "p.m"))] == ["p.m"]
    both = [(f.module, f.status) for f in compare(here, listing(a, "p.m"))]
    assert both == [("p", "absent"), ("p.m", "same")]


def test_a_name_that_a_module_there_imports_is_there():
    """A star import leaves it in the module, and those who import it from there need not care."""
    there = {"modules": {"m": {"names": {}, "others": {"f": {"signature": parameters("a")}}}}}
    (finding,) = compare(listing(parameters("a")), there | {"elsewhere": {"f": ["n"]}})
    assert finding.status == "same"


def test_methods_count_as_well():
    def with_methods(**methods):
        members = {n: {"kind": "method", "signature": s} for n, s in methods.items()}
        cls = {"kind": "class", "signature": None, "members": members}
        return {"modules": {"m": {"names": {"C": cls}}}, "elsewhere": {}}

    here = with_methods(run=parameters("self", "a"), own=parameters("self"))
    findings = compare(here, with_methods(run=parameters("self", "b")))
    assert findings == [
        Finding("m", "C", "same"),
        Finding("m", "C.own", "only here"),
        Finding("m", "C.run", "changed", "new there: b*; not there: a*"),
    ]


def test_what_became_of_another_releases_names():
    """Only that is for a pipeline to stop at: not what was left out or added here, but every method
    and module that is gone since, and each parameter that a caller must now give."""
    method = {"kind": "method", "signature": parameters("self", "x")}

    def release(signature, **members):
        cls = {"kind": "class", "signature": signature, "members": members, "home": "m"}
        return {"modules": {"m": {"names": {"C": cls}}}, "elsewhere": {}}

    here = release(parameters("a"), run=method, stop=method, own=method)
    base = release(parameters("a", "z"), run=method, stop=method, theirs=method)
    assert {f.status for f in losses(here, base, base)} == {"same"}
    later = release(parameters("a", "z", "new"), run=method)
    assert [(f.name, f.status, f.detail) for f in losses(here, base, later)] == [
        ("C", "changed", "new there: new*"),
        ("C.run", "same", ""),
        ("C.stop", "absent", ""),
    ]
    without = release(parameters("a"), run=method, stop=method)
    optional = release(parameters("a", "z="), run=method, stop=method)
    assert losses(here, optional, without)[0].detail == "not there: z"
    gone = {"modules": {"m": {"missing": True}}, "elsewhere": {}}
    assert [f.status for f in losses(here, base, gone)] == ["absent"]
    assert losses(here, gone, later) == []
    broken = {"modules": {"m": {"error": "ImportError: no device"}}, "elsewhere": {}}
    (unknown,) = losses(here, broken, later)
    assert (unknown.status, unknown.detail) == ("unknown", "in the base: ImportError: no device")


class Release:
    """An environment with a vllm of our making: one module, `vllm/utils/math_utils.py`."""

    def __init__(self, folder: Path, source: str) -> None:
        package = folder / "site" / "vllm" / "utils"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").touch()
        (package / "__init__.py").touch()
        (package / "math_utils.py").write_text(source)
        self.folder = folder
        python = folder / "bin" / "python"
        python.parent.mkdir()
        python.write_text(f'#!/bin/sh\nPYTHONPATH={folder}/site exec {sys.executable} "$@"\n')
        python.chmod(0o755)


def drift(*arguments: str):
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "upstream-drift", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


SAME = (
    "def cdiv(a, b): ...\n"
    "def round_up(x, multiple): ...\n"
    "def exact_div(a, b): ...\n"
)


def test_the_command_on_a_release(tmp_path):
    """Both sides are really imported; the exit status is for pipelines, the text for people."""
    release = Release(tmp_path / "same", SAME)
    done = drift("--against", str(release.folder), "--module", MODULE)
    assert done.returncode == 0 and "3 public names here" in done.stdout, done.stderr
    changed = SAME.replace("a, b", "a, b, c", 1).replace("round_up", "round_to")
    other = Release(tmp_path / "changed", changed)
    done = drift("--against", str(other.folder), "--module", MODULE, "--format", "json")
    assert done.returncode == 1
    assert [(f["name"], f["status"]) for f in json.loads(done.stdout)] == [
        ("cdiv", "changed"), ("round_up", "absent"),
    ]  # fmt: skip
    based = ["--base", str(other.folder), "--module", MODULE]
    # A folder with the package is one as well.
    assert drift("--against", str(other.folder / "site"), *based).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--against", "/nowhere"], "neither a release such as 0.28.0, nor a Python"),
        (["--against", sys.executable, "--module", "vllm.none"], "no module here begins with"),
    ],
)
def test_what_cannot_be_compared(arguments, said):
    done = drift(*arguments)
    assert done.returncode == 2 and said in done.stderr
    assert "Traceback" not in done.stderr
