# SPDX-License-Identifier: Apache-2.0
"""What a session found, as lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vllm_platform_kit import plugin
from vllm_platform_kit.findings import Finding
from vllm_platform_kit.hooks import Hook, list_hooks, own_additions
from vllm_platform_kit.target import Target

WORDS = {"passed": "right", "failed": "WRONG", "skipped": "skipped"}


@dataclass(frozen=True)
class Check:
    """One check. outcome: as pytest has it; reason: why it was skipped, or an error in the check."""

    name: str
    outcome: str
    reason: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    drawings: tuple[str, ...]


class Report:
    """The checks of a session, in their order."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.checks: list[Check] = []

    def add(self, report) -> None:
        """A check has ended."""
        values: dict[str, list] = {plugin.FINDING: [], plugin.NOTE: [], plugin.DRAWING: []}
        for name, value in report.user_properties:
            if name in values:
                values[name].append(value)
        findings = tuple(Finding(*value) for value in values[plugin.FINDING])
        self.checks.append(
            Check(
                _name(report.nodeid),
                report.outcome,
                "" if findings else _reason(report),
                findings,
                tuple(values[plugin.NOTE]),
                tuple(values[plugin.DRAWING]),
            )
        )

    @property
    def findings(self) -> list[Finding]:
        """All of them, each once."""
        return list(dict.fromkeys(one for check in self.checks for one in check.findings))

    @property
    def hooks(self) -> list[Hook]:
        """Every hook of the engine and whose it is here."""
        return list_hooks(self.target)

    @property
    def additions(self) -> list[str]:
        """Methods of the platform that this engine does not know."""
        return own_additions(self.target)

    def verdict(self) -> str:
        """How many of each outcome."""
        counts = {
            word: sum(check.outcome == outcome for check in self.checks)
            for outcome, word in WORDS.items()
        }
        told = ", ".join(f"{count} {word.lower()}" for word, count in counts.items())
        number = len(self.findings)
        return f"{told}; {number} finding{'' if number == 1 else 's'}"

    def lines(self) -> Iterator[str]:
        """For a terminal."""
        yield f"with {self.target.engine}"
        hooks = self.hooks
        mine = [hook for hook in hooks if not hook.is_default]
        yield f"hooks: {len(mine)} overridden, {len(hooks) - len(mine)} at their default"
        for hook in sorted(hooks, key=lambda one: one.is_default):
            yield f"  {hook.line}"
        if self.additions:
            yield f"  no hooks of this engine: {', '.join(self.additions)}"
        yield "checks:"
        for check in self.checks:
            reason = f": {check.reason}" if check.reason else ""
            yield f"  {WORDS[check.outcome]:8}{check.name}{reason}"
            for note in check.notes:
                yield f"            {note}"
        if self.findings:
            yield "findings:"
            for finding in self.findings:
                yield f"  {finding.line}"
        yield self.verdict()


def _name(nodeid: str) -> str:
    """`suite/test_models.py::test_tokens[decoder]` as `models: tokens [decoder]`."""
    file, _, name = nodeid.partition("::")
    area = file.rpartition("/")[2].removeprefix("test_").removesuffix(".py")
    name, bracket, parameters = name.removeprefix("test_").partition("[")
    words = f"{area}: {name}".replace("_", " ")
    return f"{words} [{parameters}" if bracket else words


def _reason(report) -> str:
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):  # a skip: file, line, reason
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return f"the check itself failed: {crash.message if crash else report.longrepr}".splitlines()[0]
