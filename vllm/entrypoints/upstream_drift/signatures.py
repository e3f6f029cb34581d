# SPDX-License-Identifier: Apache-2.0
"""Whether who calls a name as it is here can call it there."""

from __future__ import annotations

Parameters = list[tuple[str, str, bool]]
"""(name, kind as `inspect` calls it, whether it may be left out)."""

_POSITIONAL = ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD")


def compare_signatures(mine: Parameters | None, theirs: Parameters | None) -> tuple[str, str]:
    """Status, and what differs. Added parameters may come here or there, if they may be left out; here
    they must come last. None: it has no signature, which nothing is said of."""
    if mine is None or theirs is None or mine == theirs:
        return "same", ""
    names, others = [p[0] for p in mine], [p[0] for p in theirs]
    added = [p for p in mine if p[0] not in others]
    more = [p for p in theirs if p[0] not in names]
    changed = _changed_kinds(mine, theirs)
    if _common(mine, others) != _common(theirs, names):
        changed.append("order of parameters")
    is_alike = not changed
    if is_alike and all(p[2] for p in (*added, *more)):
        if not more and _come_last(added, mine):
            return ("extended" if added else "same"), ", ".join(p[0] for p in added)
        if not added:
            return "wider", _wider(more, theirs)
    words = [
        f"new there: {', '.join(_names(more))}" if more else "",
        f"not there: {', '.join(_names(added))}" if added else "",
        *changed,
    ]
    return "changed", "; ".join(w for w in words if w)


def _common(parameters: Parameters, names: list[str]) -> list[str]:
    return [name for name, _, _ in parameters if name in names]


def _come_last(added: Parameters, parameters: Parameters) -> bool:
    positional = [p for p in parameters if p[1] in _POSITIONAL]
    count = len([p for p in positional if p in added])
    return all(p in added for p in positional[len(positional) - count :])


def _wider(more: Parameters, theirs: Parameters) -> str:
    names = ", ".join(_names(more))
    return names if _come_last(more, theirs) else f"{names}; positions differ"


def _names(parameters: Parameters) -> list[str]:
    """With a star where one that is called must give it."""
    return [name if optional else f"{name}*" for name, _, optional in parameters]


def _changed_kinds(mine: Parameters, theirs: Parameters) -> list[str]:
    kinds = {name: (kind, optional) for name, kind, optional in theirs}
    words = []
    for name, kind, optional in mine:
        if name not in kinds:
            continue
        their_kind, their_optional = kinds[name]
        if kind != their_kind:
            words.append(f"{name}: {_word(kind)} here, {_word(their_kind)} there")
        elif optional and not their_optional:
            words.append(f"{name}: has no default there")
    return words


def _word(kind: str) -> str:
    return kind.lower().replace("_", " ")
