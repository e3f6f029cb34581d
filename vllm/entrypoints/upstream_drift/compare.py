# SPDX-License-Identifier: Apache-2.0
"""Compares two listings of public names. Pure: what `probe.py` printed goes in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Parameters = list[tuple[str, str, bool]]
"""(name, kind as `inspect` calls it, whether it may be left out)."""

STATUSES = {
    "same": "there, with the same parameters",
    "extended": "there; here with more parameters, which come last and may be left out",
    "changed": "there, with other parameters",
    "moved": "in another module there",
    "absent": "its module is there without it",
    "only here": "its module is not there either",
    "unknown": "its module could not be imported there",
}
DRIFTED = ("changed", "moved", "absent")


@dataclass(frozen=True, slots=True)
class Finding:
    """One public name. `detail`: what differs, where it went, or why it is not known."""

    module: str
    name: str
    status: str
    detail: str = ""


def compare(here: dict[str, Any], there: dict[str, Any]) -> list[Finding]:
    """A finding for each public name here, in order; methods of a class come after it."""
    findings = []
    for module, listing in sorted(here["modules"].items()):
        other = there["modules"].get(module, {"missing": True})
        for name, described in sorted(listing.get("names", {}).items()):
            findings += _compare_name(module, name, described, other, there["elsewhere"])
    return findings


def _compare_name(
    module: str, name: str, mine: dict, other: dict[str, Any], elsewhere: dict[str, list[str]]
) -> Iterator[Finding]:
    if "error" in other:
        yield Finding(module, name, "unknown", other["error"])
        return
    theirs = other.get("names", {}).get(name)
    if theirs is None:
        places = [place for place in elsewhere.get(name, []) if place != module]
        absent = "only here" if other.get("missing") else "absent"
        yield Finding(module, name, "moved" if places else absent, ", ".join(places[:3]))
        return
    yield Finding(module, name, *_compare_signatures(mine["signature"], theirs["signature"]))
    for member, described in sorted(mine.get("members", {}).items()):
        known = theirs.get("members", {}).get(member)
        full = f"{name}.{member}"
        if known is None:
            yield Finding(module, full, "only here")
        else:
            same = _compare_signatures(described["signature"], known["signature"])
            yield Finding(module, full, *same)


def _compare_signatures(
    mine: Parameters | None, theirs: Parameters | None
) -> tuple[str, str]:
    """Status, and both signatures if they differ. What upstream has and is left out here shows as a
    difference; what is added here must come last and may be left out."""
    if mine is None or theirs is None or mine == theirs:
        return "same", ""
    names, others = [p[0] for p in mine], [p[0] for p in theirs]
    added = [p for p in mine if p[0] not in others]
    if [n for n in names if n in others] == others and all(p[2] for p in added):
        kept = [p[:2] for p in mine if p[0] in others] == [p[:2] for p in theirs]
        positional = [p for p in mine if p[1] == "POSITIONAL_OR_KEYWORD"]
        last = positional[len(positional) - len([p for p in positional if p in added]) :]
        if kept and all(p in added for p in last):
            return "extended" if added else "same", ", ".join(p[0] for p in added)
    missing = [n for n in others if n not in names]
    wanted = [n for n in names if n not in others]
    words = [
        f"only there: {', '.join(missing)}" if missing else "",
        f"only here: {', '.join(wanted)}" if wanted else "",
    ]
    return "changed", "; ".join(w for w in words if w) or "order or kind of parameters"
