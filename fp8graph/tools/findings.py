"""The findings of ``fp8graph lint`` and ``fp8graph.lint``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fp8graph.errors import printable

SEVERITIES: Final = ("error", "warning", "info")
_SHOWN: Final = 5  # findings of one rule


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong, or cannot be seen."""

    rule: str  #: its name
    severity: str  #: "error", "warning" or "info"
    where: str  #: the layer, or the tensor
    what: str  #: what is there
    why: str  #: the likely cause, or what follows from it
    todo: str  #: what to do

    def __str__(self) -> str:
        return printable(f"{self.severity}: {self.where}: {self.what}: {self.why} [{self.rule}]. {self.todo}")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Sort by severity, errors first."""
    return sorted(findings, key=lambda each: SEVERITIES.index(each.severity))


def counted(findings: Sequence[Finding]) -> str:
    """``2 errors, 1 warning``."""
    counts = {kind: sum(each.severity == kind for each in findings) for kind in SEVERITIES}
    shown = (f"{n} {kind}{'s' * (n > 1 and kind != 'info')}" for kind, n in counts.items() if n)
    return ", ".join(shown) or "nothing is wrong"


def lines(findings: Sequence[Finding]) -> list[str]:
    """Return a paragraph for each rule: its first layers, and what to do."""
    rules: dict[tuple[str, str, str], list[Finding]] = {}
    for each in in_order(findings):
        rules.setdefault((each.severity, each.rule, each.todo), []).append(each)
    shown: list[str] = []
    for (severity, rule, todo), of_rule in rules.items():
        shown += [
            f"{severity} [{rule}]",
            *(printable(f"  {each.where}: {each.what}: {each.why}") for each in of_rule[:_SHOWN]),
        ]
        shown += [f"  and {len(of_rule) - _SHOWN} more"] * (len(of_rule) > _SHOWN) + [f"  -> {todo}"]
    return shown
