# SPDX-License-Identifier: Apache-2.0
"""Compares two listings of public names. Pure: what `probe.py` printed goes in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from vllm.entrypoints.upstream_drift.signatures import compare_signatures

STATUSES = {
    "same": "there, with the same parameters",
    "extended": "there; here with more parameters, which come last and may be left out",
    "wider": "there, with more parameters, all of which may be left out",
    "changed": "there, with other parameters",
    "moved": "in another module there",
    "absent": "its module is there without it",
    "only here": "its module is not there either",
    "unknown": "its module could not be imported there",
}
DRIFTED = ("changed", "moved", "absent")
_MOST_PLACES = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One public name. `detail`: what differs, where it went, or why it is not known."""

    module: str
    name: str
    status: str
    detail: str = ""


def compare(here: dict[str, Any], there: dict[str, Any]) -> list[Finding]:
    """A finding for each public name here, in order; methods of a class come after it. A name that a
    module passes on is left out where there is nothing else to say of it than in its own module."""
    homes = _homes(here)
    findings: list[Finding] = []
    for module, listing in sorted(here["modules"].items()):
        other = there["modules"].get(module, {"missing": True})
        for name, described in sorted(listing.get("names", {}).items()):
            places = _places(name, module, homes, there["elsewhere"])
            findings += _compare_name(module, name, described, other, places)
    return _without_repeats(findings, here)


def losses(here: dict[str, Any], base: dict[str, Any], there: dict[str, Any]) -> list[Finding]:
    """A finding for each public name here that `base` has as well: what became of base's there. What is
    no longer there is `absent`, with its module or without."""
    findings = compare(_shared(here, base), there)
    unknown = [
        Finding(module, name, "unknown", f"in the base: {other['error']}")
        for module, other in sorted(base["modules"].items())
        if "error" in other
        for name in sorted(here["modules"].get(module, {}).get("names", {}))
    ]
    return unknown + [_as_loss(finding) for finding in findings]


def _as_loss(finding: Finding) -> Finding:
    """What upstream took away, of a name or of its parameters, is nothing that is only here."""
    if finding.status == "only here":
        return replace(finding, status="absent", detail="")
    if finding.status == "extended":
        return replace(finding, status="changed", detail=f"not there: {finding.detail}")
    return finding


def _shared(here: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Of `base`, the names and members that are public here."""
    modules = {}
    for module, listing in here["modules"].items():
        other = base["modules"].get(module, {})
        known = other.get("others", {}) | other.get("names", {})
        names = {
            name: _with_members_of(known[name], mine)
            for name, mine in listing.get("names", {}).items()
            if name in known
        }
        modules[module] = {"names": names}
    return {"modules": modules}


def _with_members_of(theirs: dict, mine: dict) -> dict:
    public = mine.get("members", {})
    members = {n: m for n, m in theirs.get("members", {}).items() if n in public}
    return theirs | {"members": members}


def _homes(here: dict[str, Any]) -> dict[str, set[str]]:
    """Name -> modules here that define it."""
    homes: dict[str, set[str]] = {}
    for module, listing in here["modules"].items():
        for name, described in listing.get("names", {}).items():
            homes.setdefault(name, set()).add(described.get("home") or module)
    return homes


def _places(
    name: str, module: str, homes: dict[str, set[str]], elsewhere: dict[str, list[str]]
) -> list[str]:
    """Where it may have gone; nowhere if several modules on one side have something of that name, as
    `main`, of which nobody can say which became which."""
    places = [place for place in elsewhere.get(name, []) if place != module]
    if len(homes.get(name, ())) > 1 or len(places) > _MOST_PLACES:
        return []
    return [place for place in places if place not in homes.get(name, ())]


def _compare_name(
    module: str, name: str, mine: dict, other: dict[str, Any], places: list[str]
) -> Iterator[Finding]:
    if "error" in other:
        yield Finding(module, name, "unknown", other["error"])
        return
    theirs = other.get("names", {}).get(name) or other.get("others", {}).get(name)
    if theirs is None:
        absent = "only here" if other.get("missing") else "absent"
        yield Finding(module, name, "moved" if places else absent, ", ".join(places))
        return
    yield Finding(module, name, *compare_signatures(mine["signature"], theirs["signature"]))
    for member, described in sorted(mine.get("members", {}).items()):
        known = theirs.get("members", {}).get(member)
        full = f"{name}.{member}"
        if known is None:
            yield Finding(module, full, "only here")
        else:
            same = compare_signatures(described["signature"], known["signature"])
            yield Finding(module, full, *same)


def _without_repeats(findings: list[Finding], here: dict[str, Any]) -> list[Finding]:
    said = {(f.module, f.name): f for f in findings}

    def is_repeat(finding: Finding) -> bool:
        owner = finding.name.partition(".")[0]
        home = here["modules"][finding.module]["names"][owner].get("home")
        first = said.get((home, finding.name)) if home != finding.module else None
        return first is not None and (first.status, first.detail) == (finding.status, finding.detail)

    return [finding for finding in findings if not is_repeat(finding)]
