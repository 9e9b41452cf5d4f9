"""The result of a check: a verdict, a message, and a hint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from steelyard.core import secrets

Verdict = Literal["ok", "warn", "fail", "absent"]
WORST_FIRST: tuple[Verdict, ...] = ("fail", "warn", "ok", "absent")


@dataclass(frozen=True)
class Finding:
    """One line of the report. `absent` means missing and not needed here."""

    topic: str
    name: str
    verdict: Verdict
    words: str
    hint: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    """What `--fix` would do: link these sonames to these files."""
    unset: tuple[str, ...] = ()
    """Variables that `--fix` would unset."""

    @property
    def is_fixable(self) -> bool:
        """Whether `--fix` can repair it."""
        return bool(self.links or self.unset)

    def as_result(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "topic": self.topic,
            "name": self.name,
            "verdict": self.verdict,
            "words": secrets.scrub(self.words),
            "hint": secrets.scrub(self.hint),
            "fixable": self.is_fixable,
            "facts": dict(self.facts),
        }


def worst(findings: Iterable[Finding]) -> Verdict:
    """The worst verdict."""
    seen = {finding.verdict for finding in findings}
    return next((verdict for verdict in WORST_FIRST if verdict in seen and verdict != "absent"), "ok")


def as_text(findings: Iterable[Finding]) -> str:
    """The findings as text, by topic: verdict, name and message, then the hint."""
    lines: list[str] = []
    topic = ""
    for finding in findings:
        if finding.topic != topic:
            topic = finding.topic
            lines += ([""] if lines else []) + [topic]
        lines.append(f"  {finding.verdict:6}  {finding.name}: {finding.words}")
        if finding.hint:
            lines += [f"          {line}" for line in finding.hint.splitlines()]
    return secrets.scrub("\n".join(lines))
